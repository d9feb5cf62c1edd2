"""kvbridge's mapper artifact (github.com/souvikDevloper/kvbridge), read only.

A folder of ``mapper.safetensors`` (``key_weight.{l}`` and ``value_weight.{l}``
``[n_kv_heads, in_dim, head_dim]``, ``key_bias.{l}``, ``value_bias.{l}``) and
``manifest.json`` (``schema_version`` 1). It leaves RoPE to the program that
uses it, so the caller has to say what the two models' caches look like. The
layout is that of commit 949d81d.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvgraft.errors import (
    ChecksumError,
    FormatError,
    PairMismatchError,
    VersionError,
)
from kvgraft.files.reading import interpreting, read_json_file, sha256_of
from kvgraft.files.recognise import manifest_kind
from kvgraft.files.safetensors import read_header
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.weight_store import FILE_DTYPES, attach_files
from kvgraft.models.geometry import ModelGeometry

__all__ = ["read"]

MANIFEST, WEIGHTS = "manifest.json", "mapper.safetensors"


def tensor_names(target_layer: int, kind: str, storage: Storage) -> dict[str, str]:
    """Names of a map's tensors, by part."""
    stem = {"keys": "key", "values": "value"}[kind]
    return {"weight": f"{stem}_weight.{target_layer}", "bias": f"{stem}_bias.{target_layer}"}


def read(path: str | os.PathLike[str], *, source: ModelGeometry, target: ModelGeometry) -> Mapper:
    """Open a kvbridge artifact; weights are read when used.

    Save the result with :meth:`kvgraft.mapper.mapper.Mapper.save` to have an artifact
    that says everything itself.

    Args:
        path: The folder.
        source: Geometry of the source's cache, see
            :func:`kvgraft.models.probe.read_geometry`.
        target: Geometry of the target's cache.

    Raises:
        MapperNotFoundError: If a file is missing.
        VersionError: If its schema version is not 1.
        ChecksumError: If the weights are not those the manifest names.
        PairMismatchError: If the manifest names models of other shapes.
        FormatError: If it is damaged, or something else.
    """
    path = Path(path)
    manifest = read_json_file(path / MANIFEST)
    where = str(path / MANIFEST)
    if manifest_kind(manifest) != "kvbridge":
        raise FormatError(f"{where} is not the manifest of a kvbridge mapper.")
    if manifest.get("schema_version") != 1:
        raise VersionError(
            f"{where} has schema version {manifest.get('schema_version')!r}; this release reads "
            "kvbridge's version 1."
        )
    header = read_header(path / WEIGHTS)
    if sha256_of(header.path) != manifest.get("weights_sha256"):
        raise ChecksumError(f"{header.path} is not the file that {where} was written for.")
    with interpreting(where):
        for side, geometry in (("source", source), ("target", target)):
            _check_signature(side, manifest[f"{side}_signature"], geometry)
        storage = Storage(manifest["storage_dtype"], bias_dtype=manifest["storage_dtype"])
        if storage.dtype not in FILE_DTYPES:
            raise ValueError(f"weights of dtype {storage.dtype} are unknown")
        fit = dict(manifest["fit_config"])
        layers = [
            _layer(index, sources, manifest, storage, source, target)
            for index, sources in enumerate(manifest["selected_layers"])
        ]
        mapper = Mapper(
            source=source,
            target=target,
            layers=layers,
            content_space=bool(fit["content_space"]),
            fit={
                "by": "kvbridge",
                "plan": "full",
                "k": fit.get("top_k"),
                "lambda": fit.get("ridge_alpha"),
                "lambda_convention": "gram",
                "kvbridge": {
                    "source": manifest["source_signature"],
                    "target": manifest["target_signature"],
                    "fit_config": fit,
                },
            },
        )
        mapper.check()
    attach_files(mapper, dict.fromkeys(header.tensors, header), tensor_names, where)
    return mapper


def _check_signature(side: str, signature: Mapping[str, Any], geometry: ModelGeometry) -> None:
    want = tuple(int(signature[key]) for key in ("num_layers", "num_kv_heads", "head_dim"))
    have = {(len(geometry.layers), x.n_kv_heads, d) for x in geometry.layers
            for d in (x.key_dim, x.value_dim)}  # fmt: skip
    if have != {want}:
        raise PairMismatchError(
            f"This mapper's {side} ({signature.get('model_id')}) has {want[0]} layers, {want[1]} "
            f"key/value heads and head_dim {want[2]}; the geometry given has {sorted(have)}. Give "
            "the geometry of that model."
        )


def _layer(
    index: int,
    sources: list[int],
    manifest: Mapping[str, Any],
    storage: Storage,
    source: ModelGeometry,
    target: ModelGeometry,
) -> LayerMap:
    here, there = source.layers[0], target.layers[0]
    shape = (there.n_kv_heads, len(sources) * here.n_kv_heads * here.key_dim, there.key_dim)
    scores = {
        name: float(manifest[theirs][index])
        for name, theirs in (("r2_keys", "fit_key_r2"), ("r2_values", "fit_value_r2"))
        if manifest.get(theirs)
    }
    keys, values = (
        LinearMap(tuple(int(s) for s in sources), None, shape, on_disk=storage) for _ in range(2)
    )
    return LayerMap(index, keys, values, scores)
