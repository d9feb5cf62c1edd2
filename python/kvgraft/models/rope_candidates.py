"""The rotations that a model's modules hold: candidates, which the probe verifies."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx

from kvgraft.errors import GeometryError
from kvgraft.models.rope import NO_ROPE, RopeSpec

__all__ = ["RopeCandidate", "rope_candidates"]


@dataclass(frozen=True)
class RopeCandidate:
    """A rotation found in a model, not yet verified to be used.

    Attributes:
        spec: The rotation.
        origin: Class of the module that it was read from.
        counts_heads: ``spec.max_position`` counts heads into the length:
            internlm3 takes its length from the head axis.
    """

    spec: RopeSpec
    origin: str
    counts_heads: bool = False

    def for_heads(self, n_kv_heads: int) -> RopeSpec:
        """The rotation for a cache of ``n_kv_heads`` heads."""
        if not self.counts_heads or self.spec.max_position is None:
            return self.spec
        return replace(self.spec, max_position=max(1, self.spec.max_position - n_kv_heads + 1))


def rope_candidates(model: Any) -> list[RopeCandidate]:
    """Collect the rotations of all RoPE modules in a model, each once.

    Reads the attributes that the modules' own ``__call__`` uses. Whether and
    where a rotation is used is not decided here.
    """
    found: dict[tuple[RopeSpec, bool], RopeCandidate] = {}
    for module in model.modules():
        candidate = _candidate(module)
        if candidate is not None:
            found.setdefault((candidate.spec, candidate.counts_heads), candidate)
    found.setdefault((NO_ROPE, False), RopeCandidate(NO_ROPE, "none"))
    return list(found.values())


def _candidate(module: Any) -> RopeCandidate | None:
    """Read one module's rotation; ``None`` if it has none.

    Classes are recognised by what they hold, so that a model file's own copy of
    a known class is read too. A wrong guess does no harm: the probe refutes it.
    """
    name = type(module).__name__
    try:
        negated = getattr(module, "_rope_freqs", None)
        if isinstance(negated, mx.array) and negated.ndim == 1:
            # nanochat and talkie call the primitive themselves.
            return RopeCandidate(RopeSpec(2 * negated.size, freqs=_floats(negated)), name)
        dims = getattr(module, "dims", getattr(module, "dim", None))
        if not isinstance(dims, int) or isinstance(dims, bool) or dims <= 0:
            return None
        traditional = bool(getattr(module, "traditional", False))
        freqs = getattr(module, "_freqs", None)
        if isinstance(freqs, mx.array):
            # YarnRoPE calls its factor mscale, SuScaledRoPE _scale.
            magnitude = getattr(module, "mscale", getattr(module, "_scale", 1.0))
            spec = RopeSpec(dims, traditional, freqs=_floats(freqs), magnitude=float(magnitude))
            return RopeCandidate(spec, name)
        limit = getattr(module, "max_position_embeddings", None)
        if hasattr(module, "original_base"):  # internlm3's dynamic NTK
            spec = RopeSpec(
                dims,
                traditional,
                base=float(module.original_base),
                scale=float(module.scale),
                max_position=int(module.max_position_embeddings),
            )
            return RopeCandidate(spec, name, counts_heads=True)
        if not hasattr(module, "base"):
            return None
        if hasattr(module, "factor") and limit is not None:  # dynamic NTK of rope_utils
            # The class's own expression at the length where it starts to move,
            # so that the base agrees to the last bit.
            limit, factor = int(limit), module.factor
            base = module.base * ((factor * limit / limit) - (factor - 1)) ** (dims / (dims - 2))
            spec = RopeSpec(dims, traditional, base=float(base), max_position=limit)
            return RopeCandidate(spec, name)
        scale = float(getattr(module, "scale", 1.0))
        return RopeCandidate(
            RopeSpec(dims, traditional, base=float(module.base), scale=scale), name
        )
    except (GeometryError, TypeError, ValueError, ZeroDivisionError):
        return None  # not a rotation after all, for example a vision tower's


def _floats(x: mx.array) -> tuple[float, ...]:
    values: Any = x.astype(mx.float32).tolist()
    return tuple(float(v) for v in values)
