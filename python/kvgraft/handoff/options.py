"""Options of :func:`~kvgraft.handoff.switch` and :class:`~kvgraft.handoff.Session`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvgraft.errors import ArgumentError
from kvgraft.handoff.memory import MemoryLimit
from kvgraft.handoff.policy import Policy
from kvgraft.handoff.repair import check_chunk
from kvgraft.handoff.state import LogitsProcessor, Sampler
from kvgraft.option_names import named

__all__ = ["SessionOptions", "SwitchOptions"]


@dataclass(frozen=True, kw_only=True)
class SwitchOptions:
    """How to hand a conversation over.

    Attributes:
        native_start: Tokens at the start that the target reads itself, for quality;
            exact by causality. Default: what the mapper's evaluation recommends,
            else 0.
        native_end: Tokens at the end that it reads on top of the mapped rows, the
            one that generation continues from included. Default likewise, else 1.
        max_mapped: How often a row may be mapped, over all hand-offs: rows that
            were mapped so often, and all before them, are read by the target
            instead. This bounds how errors add up. ``None`` for no limit.
        force: Map even if the mapper's verdict is "do not ship".
        memory_limit: Limit that the hand-off must stay within.
        keep_source: Leave the source in memory, and its cache as it is.
        keep_cache: Unload the source but leave its cache as it is, to come back to.
        prefill_step: Tokens per forward pass of a prefill.

    Raises:
        ArgumentError: If a number of tokens is out of range.
    """

    native_start: int | None = None
    native_end: int | None = None
    max_mapped: int | None = 1
    force: bool = False
    memory_limit: MemoryLimit | None = None
    keep_source: bool = False
    keep_cache: bool = False
    prefill_step: int = 2048

    def __post_init__(self) -> None:
        for name, value, least in (
            ("native_start", self.native_start, 0),
            ("native_end", self.native_end, 1),
            ("max_mapped", self.max_mapped, 1),
            ("prefill_step", self.prefill_step, 1),
        ):
            if value is not None and value < least:
                raise ArgumentError(f"{named(name)} must be at least {least}, not {value}.")

    @property
    def source_cache_stays(self) -> bool:
        """Whether the source's cache is left as it is."""
        return self.keep_source or self.keep_cache


@dataclass(frozen=True, kw_only=True)
class SessionOptions(SwitchOptions):
    """How a session generates and when it switches; its switches take the other options.

    ``keep_cache`` keeps the cache of a model that was switched away from, so that
    coming back maps only what is new. The kept caches are dropped when more than
    half of the memory limit is in use.

    Attributes:
        start: Name of the first model; default the first one given.
        system: System message.
        chat_template: Render messages with the model's chat template. Without it,
            or without a template, the model continues the plain text.
        sampler: As for ``mlx_lm.generate``; ``None`` for greedy decoding.
        logits_processors: As for ``mlx_lm.generate``.
        policy: Called after each token; a name that it returns is switched to at
            once. See :func:`~kvgraft.handoff.memory_policy`.
        repair: Tokens to prefill natively per generated token after a hand-off,
            until the mapped cache is replaced; 0 for no repair.
    """

    start: str | None = None
    system: str | None = None
    chat_template: bool = True
    sampler: Sampler | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    policy: Policy | None = None
    repair: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.repair:
            check_chunk(self.repair)
