"""``mapper_config.json``: everything about a mapper but its weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import metadata
from typing import Any, TypeVar

from kvgraft.errors import FormatError, VersionError
from kvgraft.files.reading import interpreting
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.mapper.quality import Quality
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import ModelIdentity

__all__ = ["FORMAT", "FORMAT_VERSION", "from_config", "to_json_value", "to_config"]

FORMAT = "kvgraft"
FORMAT_VERSION = 1

M = TypeVar("M", bound=MapperData)

_FLOAT_NAMES = ("float32", "float16", "bfloat16")


def to_config(mapper: MapperData, storage: Mapping[tuple[int, str], Storage]) -> dict[str, Any]:
    """The configuration of a mapper whose weights are stored in a given way.

    Args:
        mapper: The mapper.
        storage: By ``(target_layer, "keys" | "values")``.

    Raises:
        FormatError: If ``fit``, ``quality`` or a score can't be written as JSON.
    """

    def linear(m: LayerMap, kind: str) -> dict[str, Any]:
        part: LinearMap = getattr(m, kind)
        kept = storage[m.target_layer, kind]
        weights: dict[str, Any] = {"dtype": kept.dtype, "bias_dtype": kept.bias_dtype}
        if kept.bits is not None:
            weights |= {"bits": kept.bits, "group_size": kept.group_size}
        return {
            "sources": list(part.sources),
            "heads": None if part.heads is None else [list(group) for group in part.heads],
            "shape": list(part.shape),
            "weights": weights,
        }

    def model(geometry: ModelGeometry, identity: ModelIdentity | None) -> dict[str, Any]:
        return {
            "geometry": geometry.to_dict(),
            "identity": None if identity is None else identity.to_dict(),
        }

    config = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "kvgraft_version": _version(),
        "content_space": mapper.content_space,
        "source": model(mapper.source, mapper.source_model),
        "target": model(mapper.target, mapper.target_model),
        "layers": [
            {
                "target_layer": m.target_layer,
                "keys": linear(m, "keys"),
                "values": linear(m, "values"),
                "scores": m.scores,
            }
            for m in mapper.layers
        ],
        "fit": mapper.fit,
        "quality": mapper.quality.record,
    }
    result: dict[str, Any] = to_json_value(config, "mapper")
    return result


def _version() -> str:
    try:
        return metadata.version("kvgraft")
    except metadata.PackageNotFoundError:
        return "unknown"


def to_json_value(value: Any, where: str) -> Any:
    """A copy of ``value`` that JSON can hold; NaN and infinity become ``null``.

    Raises:
        FormatError: Naming the entry that can't be written.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, Mapping):
        return {str(k): to_json_value(v, f"{where}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json_value(v, f"{where}[{i}]") for i, v in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:  # NumPy and MLX scalars
        value = value.item()
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    raise FormatError(
        f"{where} is a {type(value).__name__}, which mapper_config.json can't hold. Use numbers, "
        "text, lists and dictionaries."
    )


def from_config(config: Any, where: str, cls: type[M]) -> M:
    """The mapper that a configuration describes, without weights.

    Args:
        config: Parsed JSON.
        where: What to call it in messages.
        cls: What to make.

    Raises:
        VersionError: If the format version isn't one this release reads.
        FormatError: If it is no kvgraft configuration or contradicts itself.
    """
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise FormatError(f"{where} is not a kvgraft configuration.")
    version = config.get("format_version")
    if version != FORMAT_VERSION or isinstance(version, bool):
        newer = type(version) is int and version > FORMAT_VERSION
        advice = "Upgrade kvgraft" if newer else "Fit or convert the mapper again"
        raise VersionError(
            f"{where} has format version {version!r}; this release reads {FORMAT_VERSION}. "
            f"{advice}."
        )
    with interpreting(where, _AGAIN):
        mapper = cls(
            source=_geometry(config["source"]["geometry"]),
            target=_geometry(config["target"]["geometry"]),
            layers=[_layer(entry) for entry in config["layers"]],
            content_space=_typed(config["content_space"], bool, "content_space"),
            source_model=_identity(config["source"].get("identity")),
            target_model=_identity(config["target"].get("identity")),
            fit=dict(_typed(config.get("fit", {}), dict, "fit")),
            quality=Quality.from_record(_typed(config.get("quality", {}), dict, "quality"), where),
        )
        mapper.check()
    return mapper


_AGAIN = "The file is damaged or was edited: get the artifact again."


def _typed(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise TypeError(f"{name} is {type(value).__name__}, not {kind.__name__}")
    return value


def _geometry(data: Mapping[str, Any]) -> ModelGeometry:
    geometry = ModelGeometry.from_dict(data)
    if geometry.dtype not in _FLOAT_NAMES:
        raise ValueError(f"the model dtype {geometry.dtype!r} is unknown")
    for i, layer in enumerate(geometry.layers):
        if min(layer.n_kv_heads, layer.key_dim, layer.value_dim) < 1:
            raise ValueError(f"layer {i} of {geometry.model_type} has no heads or dimensions")
        if layer.rope.dims > layer.key_dim:
            raise ValueError(f"layer {i} of {geometry.model_type} rotates more than its head_dim")
    return geometry


def _identity(data: Mapping[str, Any] | None) -> ModelIdentity | None:
    return None if data is None else ModelIdentity.from_dict(data)


def _layer(entry: Mapping[str, Any]) -> LayerMap:
    scores = entry.get("scores", {})
    return LayerMap(
        target_layer=_typed(entry["target_layer"], int, "target_layer"),
        keys=_linear(entry["keys"]),
        values=_linear(entry["values"]),
        scores={k: float("nan") if v is None else v for k, v in scores.items()},
    )


def _linear(entry: Mapping[str, Any]) -> LinearMap:
    heads = entry["heads"]
    weights = entry["weights"]
    n_heads, in_dim, out_dim = (_typed(n, int, "a shape") for n in entry["shape"])
    bits, group_size = weights.get("bits"), weights.get("group_size")
    dtypes = (weights["dtype"], weights["bias_dtype"])
    if any(dtype not in _FLOAT_NAMES for dtype in dtypes):
        raise ValueError(f"weights of dtype {dtypes} are unknown")
    if bits is not None:
        if bits not in (4, 8) or group_size not in (32, 64, 128):
            raise ValueError(f"weights of {bits} bits in groups of {group_size} are unknown")
        if in_dim % group_size:
            raise ValueError(f"{in_dim} inputs don't divide into groups of {group_size}")
    return LinearMap(
        sources=tuple(_typed(s, int, "a source layer") for s in entry["sources"]),
        heads=None
        if heads is None
        else tuple(tuple(_typed(g, int, "a source head") for g in group) for group in heads),
        shape=(n_heads, in_dim, out_dim),
        on_disk=Storage(dtypes[0], bits, group_size, dtypes[1]),
    )
