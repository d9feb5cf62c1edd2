"""VeloxQuant-MLX's mapper artifact, read and written.

A folder of ``mapper.safetensors`` (tensors ``{layer}.w_k`` and ``.w_v``
``[n_kv_heads, in_dim, head_dim]``, ``.b_k`` and ``.b_v``) and ``manifest.json``
(``format_version`` 1). It says less than ours: one head count, head_dim and
``rope_theta`` per model, one source list per target layer, every target head
fed by all source heads; nothing about which models these are, no checksums.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from kvgraft.errors import FormatError, GeometryError, VersionError
from kvgraft.files import atomic
from kvgraft.files.reading import interpreting, read_json_file
from kvgraft.files.recognise import describe_folder, manifest_kind
from kvgraft.files.safetensors import Writer, read_header
from kvgraft.mapper.config import to_json_value
from kvgraft.mapper.data import MapperData
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.mapper.weight_store import (
    FILE_DTYPES,
    attach_files,
    check_finite,
    expected_tensors,
)
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import RopeSpec
from kvgraft.ops.quantized import dequantize

__all__ = ["export_veloxquant", "read"]

M = TypeVar("M", bound=MapperData)

MANIFEST, WEIGHTS = "manifest.json", "mapper.safetensors"
_DTYPES = {name: dtype for dtype, name in FILE_DTYPES.items()}


def tensor_names(target_layer: int, kind: str, storage: Storage) -> dict[str, str]:
    """Names of a map's tensors, by part."""
    letter = kind[0]  # keys, values
    return {"weight": f"{target_layer}.w_{letter}", "bias": f"{target_layer}.b_{letter}"}


def read(path: str | os.PathLike[str], cls: type[M]) -> M:
    """Open a VeloxQuant-MLX artifact; weights are read when used.

    The format doesn't say what dtype the models write, so both geometries say
    float16; and it names no models, so the pair can't be checked beyond shapes
    and RoPE.

    Args:
        path: The folder.
        cls: What to make, such as :class:`kvgraft.mapper.mapper.Mapper`.

    Raises:
        MapperNotFoundError: If a file is missing.
        VersionError: If its format version is not 1.
        FormatError: If it is damaged, or something else.
    """
    path = Path(path)
    manifest = read_json_file(path / MANIFEST)
    where = str(path / MANIFEST)
    if manifest_kind(manifest) != "veloxquant":
        raise FormatError(f"{where} is not the manifest of a VeloxQuant mapper.")
    if manifest["format_version"] != 1:
        raise VersionError(
            f"{where} has format version {manifest['format_version']!r}; this release reads "
            "VeloxQuant's version 1. Save the mapper with a VeloxQuant-MLX that writes it."
        )
    header = read_header(path / WEIGHTS)
    found = dict.fromkeys(header.tensors, header)
    with interpreting(where):
        source, target = _geometry(manifest["source"]), _geometry(manifest["target"])
        config = dict(manifest["config"])
        layers = [_layer(entry, header.tensors, source, target) for entry in manifest["layers"]]
        mapper = cls(
            source=source,
            target=target,
            layers=layers,
            content_space=bool(config.get("content_space", True)),
            fit={
                "by": "veloxquant-mlx",
                "plan": "full",
                "k": config.get("k"),
                "lambda": config.get("ridge_lambda"),
                "lambda_convention": "gram",
                "selection": "in-sample R² of keys and values together",
                "veloxquant_config": config,
            },
        )
        mapper.check()
    attach_files(mapper, found, tensor_names, where)
    return mapper


def _geometry(spec: Mapping[str, Any]) -> ModelGeometry:
    if spec.get("rope_traditional") or spec.get("rope_scaling"):
        raise FormatError(
            f"The manifest has a {spec.get('model_type', 'model')} with traditional RoPE or RoPE "
            "scaling, which VeloxQuant's fit refuses: it does not say how the keys are rotated. "
            "Fit the mapper again with `kvgraft fit`."
        )
    dim = int(spec["head_dim"])
    heads = int(spec["n_kv_heads"])
    layer = LayerGeometry(heads, dim, dim, RopeSpec(dim, base=float(spec["rope_theta"])))
    return ModelGeometry(
        layers=(layer,) * int(spec["n_layers"]),
        dtype="float16",
        model_type=str(spec.get("model_type", "unknown")),
    )


def _layer(
    entry: Mapping[str, Any],
    tensors: Mapping[str, Any],
    source: ModelGeometry,
    target: ModelGeometry,
) -> LayerMap:
    index = int(entry["target_layer"])
    sources = tuple(int(s) for s in entry["source_layers"])
    if not 0 <= index < len(target.layers):
        raise ValueError(f"target layer {index} is not among {len(target.layers)}")
    here = source.layers[0]
    shape = (
        target.layers[index].n_kv_heads,
        len(sources) * here.n_kv_heads * here.key_dim,
        target.layers[index].key_dim,
    )

    def linear(letter: str) -> LinearMap:
        dtypes = []
        for name in (f"{index}.w_{letter}", f"{index}.b_{letter}"):
            if name not in tensors:
                raise ValueError(f"the weights hold no tensor {name!r}")
            if tensors[name].dtype not in _DTYPES:
                raise ValueError(f"tensor {name!r} has dtype {tensors[name].dtype}")
            dtypes.append(_DTYPES[tensors[name].dtype])
        storage = Storage(dtypes[0], bias_dtype=dtypes[1])
        return LinearMap(sources, None, shape, on_disk=storage)

    scores = {
        name: float(entry[theirs])
        for name, theirs in (("r2_keys", "r2_k"), ("r2_values", "r2_v"))
        if entry.get(theirs) is not None
    }
    return LayerMap(index, linear("k"), linear("v"), scores)


def export_veloxquant(
    mapper: MapperData, path: str | os.PathLike[str], *, weight_format: str | None = None
) -> Path:
    """Write a mapper in VeloxQuant-MLX's format, whole or not at all.

    Local and grouped head mappings become full ones, with zeros for the heads that
    are not used. Quantised weights become float16.

    Args:
        mapper: The mapper.
        path: The folder; an existing VeloxQuant artifact there is replaced.
        weight_format: ``"float32"``, ``"float16"`` or ``"bfloat16"``; default as they
            are, or float16 if quantised.

    Returns:
        The path.

    Raises:
        GeometryError: If the format can't say what this mapper is.
        FormatError: If something else is in the way.
        ArtifactWriteError: If the disk is full, or writing is not permitted.
    """
    if weight_format not in (None, *FILE_DTYPES):
        raise GeometryError(
            f"Weights can be exported as {', '.join(FILE_DTYPES)}; not {weight_format}."
        )
    mapper.check()
    manifest = _manifest(mapper, weight_format)
    described = [_described(m, mapper, weight_format) for m in mapper.layers]
    tensors = expected_tensors(described, tensor_names)
    nbytes = sum(p.storage.nbytes(p.shape) for m in described for p in (m.keys, m.values))
    ours = (MANIFEST, WEIGHTS).__contains__
    with atomic.replacing_folder(path, _check_replaceable, ours) as folder:
        atomic.check_space(folder, nbytes)
        entries = [(name, *what) for name, what in tensors.items()]
        with Writer(folder / WEIGHTS, entries, {}) as writer:
            for name, array in _arrays(mapper, described):
                writer.write(name, array)
        with open(folder / MANIFEST, "x", encoding="utf-8") as file:
            file.write(json.dumps(manifest, indent=2))
            file.flush()
            os.fsync(file.fileno())
    return Path(path)


def _check_replaceable(path: Path) -> None:
    try:
        if manifest_kind(read_json_file(path / MANIFEST)) == "veloxquant":
            return
    except FormatError:
        pass
    raise FormatError(
        f"{path} exists and is not overwritten: {describe_folder(path)} Choose another path, or "
        "remove it yourself."
    )


def _spec(side: str, geometry: ModelGeometry) -> dict[str, Any]:
    first = geometry.layers[0]
    rope = first.rope
    what = None
    if any(layer != first for layer in geometry.layers):
        what = "has layers that differ in heads, head_dim, RoPE or window"
    elif first.key_dim != first.value_dim:
        what = f"has keys of {first.key_dim} and values of {first.value_dim} dimensions"
    elif first.window is not None:
        what = "has sliding windows"
    elif rope != RopeSpec(first.key_dim, base=rope.base or 1.0):
        what = "rotates its keys otherwise than over the whole head, in halves, by one rope_theta"
    if what is not None:
        raise GeometryError(
            f"VeloxQuant's format can't say that the {side} {what}. Save this mapper in kvgraft's "
            "own format."
        )
    return {
        "n_layers": len(geometry.layers),
        "n_kv_heads": first.n_kv_heads,
        "head_dim": first.key_dim,
        "rope_theta": rope.base,
        "rope_traditional": False,
        "rope_scaling": None,
        "model_type": geometry.model_type,
    }


def _manifest(mapper: MapperData, weight_format: str | None) -> dict[str, Any]:
    source, target = _spec("source", mapper.source), _spec("target", mapper.target)
    if (source["n_kv_heads"], source["head_dim"]) != (target["n_kv_heads"], target["head_dim"]):
        raise GeometryError(
            "VeloxQuant refuses pairs that differ in key/value heads or head_dim: the source has "
            f"{source['n_kv_heads']} of {source['head_dim']}, the target {target['n_kv_heads']} of "
            f"{target['head_dim']}. Save this mapper in kvgraft's own format."
        )
    for m in mapper.layers:
        if m.keys.sources != m.values.sources:
            raise GeometryError(
                f"Target layer {m.target_layer} reads keys from {list(m.keys.sources)} and values "
                f"from {list(m.values.sources)}; VeloxQuant's format has one list for both. Save "
                "this mapper in kvgraft's own format."
            )
    # Zero for what isn't known: VeloxQuant's own defaults would claim a fit that never was.
    config = {
        "k": max(len(m.keys.sources) for m in mapper.layers),
        "ridge_lambda": _gram_lambda(mapper.fit),
        "n_calib_sequences": 0,
        "calib_seq_len": 0,
        "stride": 0,
        **_known(mapper.fit.get("veloxquant_config")),
        "content_space": mapper.content_space,
        "dtype": _dtype(mapper.layers[0].keys, weight_format),
    }
    return {
        "format_version": 1,
        "source": source,
        "target": target,
        "config": to_json_value(config, "config"),
        "layers": [
            {
                "target_layer": m.target_layer,
                "source_layers": list(m.keys.sources),
                # NaN, as VeloxQuant itself writes for an unknown score.
                "r2_k": float(m.r2_k),
                "r2_v": float(m.r2_v),
            }
            for m in mapper.layers
        ],
    }


def _known(config: Any) -> dict[str, Any]:
    names = ("k", "ridge_lambda", "n_calib_sequences", "calib_seq_len", "stride")
    return {k: config[k] for k in names if k in config} if isinstance(config, Mapping) else {}


def _gram_lambda(fit: Mapping[str, Any]) -> float:
    """λ in VeloxQuant's convention (added to the Gram matrix), or 0 if unknown."""
    value, rows = fit.get("lambda"), fit.get("rows")
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return 0.0
    if fit.get("lambda_convention") == "covariance":
        return float(value) * rows if isinstance(rows, (int, float)) else 0.0
    return float(value)


def _dtype(part: LinearMap, weight_format: str | None) -> str:
    storage = part.storage
    return weight_format or ("float16" if storage.bits is not None else storage.dtype)


def _described(m: LayerMap, mapper: MapperData, weight_format: str | None) -> LayerMap:
    """The layer as it is going to be: a full head mapping, unquantised weights, not in memory."""
    first = mapper.source.layers[0]
    width = len(m.keys.sources) * first.n_kv_heads * first.key_dim

    def of(part: LinearMap) -> LinearMap:
        storage = Storage(_dtype(part, weight_format), bias_dtype=part.storage.bias_dtype)
        shape = (part.shape[0], width, part.shape[2])
        return LinearMap(part.sources, None, shape, on_disk=storage)

    return replace(m, keys=of(m.keys), values=of(m.values))


def _arrays(mapper: MapperData, described: list[LayerMap]) -> Iterator[tuple[str, mx.array]]:
    n_heads, dim = mapper.source.layers[0].n_kv_heads, mapper.source.layers[0].key_dim
    for wanted in described:
        m = mapper.read_layer(wanted.target_layer)
        for kind, part, want in (
            ("keys", m.keys, wanted.keys),
            ("values", m.values, wanted.values),
        ):
            assert part.weight is not None and part.bias is not None and want.on_disk is not None
            names = tensor_names(m.target_layer, kind, want.on_disk)
            full = _full(dequantize(part.weight), part, n_heads, dim)
            full = full.astype(getattr(mx, want.on_disk.dtype))
            for name, array in ((names["weight"], full), (names["bias"], part.bias)):
                check_finite(array, f"Target layer {m.target_layer}, {kind}")
                yield name, array


def _full(weight: mx.array, part: LinearMap, n_heads: int, dim: int) -> mx.array:
    """Weights of a full head mapping: rows of heads that a target head doesn't read are zero."""
    if part.heads is None:
        return weight
    layers = len(part.sources)
    rows = []
    for h, group in enumerate(part.heads):
        # A head may be listed twice; its rows then add up.
        blocks = weight[h].reshape(layers, len(group), dim, -1)
        full = mx.zeros((layers, n_heads, dim, weight.shape[-1]), dtype=mx.float32)
        full = full.at[:, mx.array(list(group))].add(blocks.astype(mx.float32))
        rows.append(full.reshape(layers * n_heads * dim, -1))
    return mx.stack(rows).astype(weight.dtype)
