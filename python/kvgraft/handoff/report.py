"""What a hand-off did and cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvgraft.handoff.memory import MemoryPlan

__all__ = ["SwitchReport"]


@dataclass(frozen=True)
class SwitchReport:
    """What one hand-off did and cost.

    Attributes:
        source: Name of the model that the conversation came from.
        target: Name of the model that continues it.
        n_tokens: Tokens of the conversation.
        native_start: First tokens, read by the target itself.
        mapped: Tokens after them whose rows were mapped instead of read.
        native_end: Last tokens, read by the target on top; at least one, the one
            that generation continues from. All of them after a re-prefill.
        reused: Tokens that the target still had in a cache of its own: part of the
            native start, or of what a re-prefill had to read.
        reason: Why nothing was mapped and the conversation is re-prefilled;
            ``None`` if rows were mapped.
        warnings: What else the user should know.
        seconds: Wall time by part: ``release``, ``load``, ``native_start``, ``map``,
            ``native_end``; ``prefill`` where the conversation is re-prefilled.
        plan: Memory as counted beforehand.
        peak_bytes: MLX's peak during the hand-off, as its allocator measured it.
        active_bytes: Bytes of MLX's arrays in use afterwards.
        over_limit: Whether the measured peak exceeds the memory limit.
    """

    source: str
    target: str
    n_tokens: int
    native_start: int = 0
    mapped: int = 0
    native_end: int = 0
    reused: int = 0
    reason: str | None = None
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)
    plan: MemoryPlan | None = None
    peak_bytes: int = 0
    active_bytes: int = 0
    over_limit: bool = False

    @property
    def total_seconds(self) -> float:
        """Wall time of the hand-off, loading included."""
        return sum(self.seconds.values())

    def describe(self) -> str:
        """A few lines for people."""
        if self.reason is None:
            how = f"{self.mapped} mapped, native end {self.native_end}"
            if self.native_start:
                reused = f" ({self.reused} of it reused)" if self.reused else ""
                how = f"native start {self.native_start}{reused}, {how}"
        else:
            how = f"re-prefill: {self.reason}"
        parts = ", ".join(f"{name} {s:.2f} s" for name, s in self.seconds.items())
        lines = [
            f"{self.source} -> {self.target}: {self.n_tokens} tokens, {how}",
            f"{self.total_seconds:.2f} s ({parts}); peak {self.peak_bytes / 1e6:.0f} MB, "
            f"then {self.active_bytes / 1e6:.0f} MB",
        ]
        if self.over_limit:
            lines.append("The memory limit was exceeded.")
        return "\n".join([*lines, *self.warnings])
