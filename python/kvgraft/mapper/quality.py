"""What was measured of a mapper, read from its stored record in one place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvgraft.errors import FormatError, QualityWarning

__all__ = ["DO_NOT_SHIP", "LEVELS", "SHIP", "WARN", "Quality", "warn_if_doubtful"]

SHIP, WARN, DO_NOT_SHIP = "ship", "ship with warning", "do not ship"

LEVELS = (DO_NOT_SHIP, WARN, SHIP)
"""From worst to best."""


@dataclass(frozen=True)
class Quality:
    """The result of a mapper's evaluation, as its artifact stores it.

    Attributes:
        verdict: One of :data:`LEVELS`, or what another version wrote; ``None`` if
            the mapper was never evaluated.
        reasons: Why it is not (or not without warning) recommended.
        native_start: Tokens at the start that the target should read itself.
        native_end: Tokens at the end that the target should read itself, the one
            that generation continues from included: at least 1.
        record: All that is stored, as :func:`from_record` got it; empty if
            nothing is. This is what is written to ``mapper_config.json``.
    """

    verdict: str | None = None
    reasons: tuple[str, ...] = ()
    native_start: int = 0
    native_end: int = 1
    record: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_record(cls, record: Mapping[str, Any], where: str = "The quality record") -> Quality:
        """Read a stored record: ``verdict``, ``reasons``, ``policy.head``, ``policy.tail``.

        Args:
            record: ``quality`` of ``mapper_config.json``.
            where: What to call it in messages.

        Raises:
            FormatError: If one of these entries is of another type, or a token
                count is negative.
        """
        verdict, reasons = record.get("verdict"), record.get("reasons")
        if not (verdict is None or isinstance(verdict, str)):
            raise FormatError(f"{where}: the verdict {verdict!r} is not text.")
        if not (reasons is None or isinstance(reasons, (list, tuple))):
            raise FormatError(f"{where}: the reasons {reasons!r} are not a list.")
        policy = record.get("policy")
        if policy is None:
            policy = {}
        if not isinstance(policy, Mapping):
            raise FormatError(f"{where}: the policy {policy!r} is not a mapping.")
        return cls(
            verdict,
            tuple(str(reason) for reason in reasons or ()),
            _tokens(policy, "head", 0, where),
            max(1, _tokens(policy, "tail", 1, where)),
            record,
        )

    def native_ends(self, start: int | None = None, end: int | None = None) -> tuple[int, int]:
        """Native start and end as given, and as recommended where they are ``None``."""
        return (
            self.native_start if start is None else start,
            self.native_end if end is None else end,
        )

    @property
    def evaluated(self) -> bool:
        """Whether there is a verdict."""
        return self.verdict is not None

    def refusal(self) -> str | None:
        """Why the mapper should not be used; ``None`` unless the verdict is "do not ship"."""
        if self.verdict != DO_NOT_SHIP:
            return None
        return f"its evaluation says {DO_NOT_SHIP!r}: {self._why() or 'no reason recorded.'}"

    def warnings(self) -> list[str]:
        """What a user should know before using the mapper; empty if it is recommended."""
        if self.verdict == SHIP:
            return []
        if not self.evaluated:
            return ["the mapper was never evaluated; run `kvgraft eval`"]
        return [f"the mapper's verdict is {self.verdict!r}. {self._why()}".rstrip()]

    def _why(self) -> str:
        return " ".join(self.reasons)


def _tokens(policy: Mapping[str, Any], name: str, default: int, where: str) -> int:
    value = policy.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise FormatError(f"{where}: the policy's {name} is {value!r}, not a number of tokens.")
    return value


_warned: set[str] = set()


def warn_if_doubtful(quality: Quality, name: str, key: str, *, stacklevel: int = 2) -> None:
    """Warn once per artifact if it was never evaluated, or is not recommended.

    Args:
        quality: ``Mapper.quality``.
        name: The mapper, for the message.
        key: What tells this artifact from others.
        stacklevel: Whom the warning points at, as for :func:`warnings.warn`.
    """
    if quality.verdict == SHIP or key in _warned:
        return
    _warned.add(key)
    if quality.verdict not in LEVELS:
        message = (
            f"{name} was never evaluated: how much of the context its caches keep is unknown. Run "
            "`kvgraft eval`."
        )
    else:
        message = f"{name}: {quality.verdict}. {' '.join(quality.reasons)}".rstrip()
    warnings.warn(message, QualityWarning, stacklevel=stacklevel)
