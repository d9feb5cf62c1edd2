"""Settings of an evaluation, and what it measures."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from kvgraft.errors import EvaluationError
from kvgraft.evaluate.arms import PLAIN
from kvgraft.evaluate.metrics import TokenScores
from kvgraft.option_names import named
from kvgraft.text.heldout import HeldoutText

__all__ = ["STORED_KEYS", "DocumentResult", "EvalConfig", "Measurements", "NeedleResult"]

STORED_KEYS = {"native_starts": "heads", "native_ends": "tails"}
"""Keys of settings in eval.json, where they are not the field's name."""


@dataclass(frozen=True)
class EvalConfig:
    """Settings of an evaluation.

    Attributes:
        documents: Documents to score.
        prefix: Tokens before the scored part; the cache of all but the last is mapped.
        scored: Tokens scored per document.
        native_starts: Native tokens at the start to try.
        native_ends: Native tokens at the end to try, with the last token, which is always native.
        needle_lengths: Tokens of the contexts that needles are hidden in; empty
            for none.
        needle_depths: Where they are hidden, 0 (start) to 1 (end).
        needle_samples: Needles per length and depth.
        speed_lengths: Tokens at which mapping and prefill are timed; empty for
            none.
        repeats: Timed runs; the median is reported.
        seed: Of needles, random map and bootstrap.
        dtype: Run the models in this dtype; default float32 without a GPU, as
            stored with one.
    """

    documents: int = 16
    prefix: int = 768
    scored: int = 256
    native_starts: tuple[int, ...] = (0, 4, 32)
    native_ends: tuple[int, ...] = (1, 32, 128)
    needle_lengths: tuple[int, ...] = (512, 1024)
    needle_depths: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)
    needle_samples: int = 2
    speed_lengths: tuple[int, ...] = (256, 512, 1024, 2048)
    repeats: int = 3
    seed: int = 0
    dtype: str | None = None

    def __post_init__(self) -> None:
        if self.documents < 2 or self.prefix < 2 or self.scored < 1:
            raise EvaluationError(
                f"{named('documents')} and {named('prefix')} must be at least 2, "
                f"{named('scored')} at least 1; got {self.documents}, {self.prefix} and "
                f"{self.scored}."
            )
        if min((*self.native_starts, 0)) < 0 or min((*self.native_ends, 1)) < 1:
            raise EvaluationError(
                f"{named('native_starts')} must be at least 0 and {named('native_ends')} at least "
                "1: the last token of a prefix is always read by the target."
            )
        if self.repeats < 1 or self.needle_samples < 1:
            raise EvaluationError(
                f"{named('repeats')} and {named('needle_samples')} must be at least 1."
            )
        start, end = (max(x) for x in zip(*self.ends))
        if start + end >= self.prefix:
            raise EvaluationError(
                f"A native start of {start} and a native end of {end} tokens leave nothing to map "
                f"of a prefix of {self.prefix}. Use a longer {named('prefix')}."
            )
        if any(not 0 <= d <= 1 for d in self.needle_depths):
            raise EvaluationError(f"{named('needle_depths')} must lie between 0 and 1.")
        if self.speed_lengths and min(self.speed_lengths) < 2:
            raise EvaluationError(f"{named('speed_lengths')} must be at least 2.")

    @property
    def ends(self) -> list[tuple[int, int]]:
        """Pairs (native start, native end) to try; always with the plain hand-off."""
        return sorted(
            {PLAIN} | {(start, end) for start in self.native_starts for end in self.native_ends}
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, with the keys of eval.json."""
        stored = {STORED_KEYS.get(name, name): value for name, value in asdict(self).items()}
        return json.loads(json.dumps(stored))  # type: ignore[no-any-return]


@dataclass(frozen=True)
class DocumentResult:
    """One document under every arm.

    Attributes:
        arms: Scores by arm.
        cosines: ``[layer][head]`` attention-output cosines; empty if the model's
            attention cannot be instrumented.
        finite: Whether the mapped cache has no NaN and no infinity.
        seconds: ``map``, ``prefill`` (the target's own), ``source prefill``,
            ``head N`` and ``tail N``.
        keys: Sums of :class:`Variance` per layer.
        values: The same for values.
    """

    arms: dict[str, TokenScores]
    cosines: list[list[float]]
    finite: bool
    seconds: dict[str, float]
    keys: list[list[list[float]]]
    values: list[list[list[float]]]

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; :meth:`from_dict` reads it back."""
        return {**self.__dict__, "arms": {k: v.to_dict() for k, v in self.arms.items()}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> DocumentResult:
        """Inverse of :meth:`to_dict`."""
        return cls(
            **{**data, "arms": {k: TokenScores.from_dict(v) for k, v in data["arms"].items()}}
        )


@dataclass(frozen=True)
class NeedleResult:
    """One needle.

    Attributes:
        length: Tokens of the context.
        depth: Requested position of the needle, 0 (start) to 1 (end).
        mapped_at_mid: Whether it was in the mapped part at a switch in the middle.
        right: By arm, whether the reply has the answer.
        replies: By arm, the reply.
        answer: The expected answer.
        kind: Kind of fact.
    """

    length: int
    depth: float
    mapped_at_mid: bool
    right: dict[str, bool]
    replies: dict[str, str]
    answer: str
    kind: str


@dataclass(frozen=True)
class Measurements:
    """Everything that was measured, before it is summarised.

    Attributes:
        config: The settings.
        text: The held-out text.
        documents: One entry per document.
        needles: One entry per task.
        speed: One row per length; see :func:`kvgraft.evaluate.timing.time_length`.
        policy: Candidates and choice; see :mod:`kvgraft.evaluate.native_ends`.
        importance: ``{"keys" | "values": [target layer][source layer]}`` share of
            each source layer in the map.
        models: Identities of the two models as they ran.
        notes: What to report whatever the verdict.
    """

    config: EvalConfig
    text: HeldoutText
    documents: list[DocumentResult]
    needles: list[NeedleResult]
    speed: list[dict[str, Any]]
    policy: dict[str, Any]
    importance: dict[str, list[list[float]]]
    models: dict[str, dict[str, Any]]
    notes: list[str]
