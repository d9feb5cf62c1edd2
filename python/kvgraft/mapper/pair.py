"""Whether a mapper was fitted for the two models at hand."""

from __future__ import annotations

import math

from kvgraft.errors import PairMismatchError
from kvgraft.mapper.data import MapperData, require_mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.models.rope import RopeSpec

__all__ = ["check_pair"]


def check_pair(
    mapper: MapperData,
    *,
    source: ModelGeometry | None = None,
    target: ModelGeometry | None = None,
    source_model: ModelIdentity | None = None,
    target_model: ModelIdentity | None = None,
) -> list[str]:
    """Refuse a mapper that was fitted for other models than these.

    What is not given, or not known to the mapper, is not compared. Two models
    of one architecture that differ only in their weights (a base model and its
    instruction tuning) cannot be distinguished.

    Args:
        mapper: The mapper.
        source: Geometry of the source's cache.
        target: Geometry of the target's cache.
        source_model: Identity of the source.
        target_model: Identity of the target.

    Returns:
        Differences that do no harm by themselves: quantisation and dtype. Maps
        carry over between precisions of one model, at some loss.

    Raises:
        ArgumentError: If ``mapper`` is none.
        PairMismatchError: Naming everything that differs.
    """
    require_mapper(mapper)
    wrong: list[str] = []
    harmless: list[str] = []
    for side, fitted, given in (
        ("source", mapper.source, source),
        ("target", mapper.target, target),
    ):
        if given is not None:
            wrong += [f"{side}: {line}" for line in _geometry_differences(fitted, given)]
            if fitted.dtype != given.dtype:
                harmless.append(f"{side}: dtype {given.dtype}, fitted on {fitted.dtype}")
    for side, known, model in (
        ("source", mapper.source_model, source_model),
        ("target", mapper.target_model, target_model),
    ):
        if known is None or model is None:
            continue
        if known.config_sha256 != model.config_sha256:
            wrong.append(
                f"{side}: {model.name} has another configuration than {known.name} "
                f"({model.config_sha256[:12]} against {known.config_sha256[:12]})"
            )
        if known.tokenizer_sha256 != model.tokenizer_sha256:
            wrong.append(
                f"{side}: {model.name} has another tokenizer than {known.name} "
                f"({model.tokenizer_sha256[:12]} against {known.tokenizer_sha256[:12]})"
            )
        if known.quantization != model.quantization:
            harmless.append(
                f"{side}: quantization {model.quantization}, fitted on {known.quantization}"
            )
    if wrong:
        shown = [*wrong[:8], *([f"and {len(wrong) - 8} more"] if len(wrong) > 8 else [])]
        raise PairMismatchError(
            f"This mapper ({mapper.describe()}) was fitted for other models. Use the one for this "
            "pair, or fit one. Differences:\n  " + "\n  ".join(shown)
        )
    return harmless


def _geometry_differences(fitted: ModelGeometry, given: ModelGeometry) -> list[str]:
    lines = []
    types = (given.model_type, fitted.model_type)
    if types[0] != types[1] and "unknown" not in types:
        lines.append(f"architecture {types[0]}, the mapper's is {types[1]}")
    if len(given.layers) != len(fitted.layers):
        return [*lines, f"{len(given.layers)} layers, the mapper's has {len(fitted.layers)}"]
    for i, (mine, yours) in enumerate(zip(fitted.layers, given.layers, strict=True)):
        lines += [f"layer {i}: {text}" for text in _layer_differences(mine, yours)]
    return lines


def _layer_differences(fitted: LayerGeometry, given: LayerGeometry) -> list[str]:
    lines = []
    for name in ("n_kv_heads", "key_dim", "value_dim", "window"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if mine != yours:
            lines.append(f"{name} {yours}, the mapper's is {mine}")
    return [*lines, *_rope_differences(fitted.rope, given.rope)]


def _rope_differences(fitted: RopeSpec, given: RopeSpec) -> list[str]:
    lines = []
    for name in ("dims", "traditional", "max_position"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if mine != yours:
            lines.append(f"RoPE {name} {yours}, the mapper's is {mine}")
    for name in ("base", "scale", "magnitude"):
        mine, yours = getattr(fitted, name), getattr(given, name)
        if not _close(mine, yours):
            lines.append(f"RoPE {name} {yours}, the mapper's is {mine}")
    mine, yours = fitted.freqs, given.freqs
    if (mine is None) != (yours is None) or (
        mine is not None
        and yours is not None
        and not (len(mine) == len(yours) and all(map(_close, mine, yours)))
    ):
        lines.append("RoPE frequencies differ")
    return lines


def _close(a: float | None, b: float | None) -> bool:
    # Frequencies computed on another device differ in the last bits.
    if a is None or b is None:
        return a is b
    return math.isclose(a, b, rel_tol=1e-5)
