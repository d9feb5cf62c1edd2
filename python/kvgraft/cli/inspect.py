"""``kvgraft inspect``: describe a mapper, a prompt-cache file, or a model's cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from kvgraft.cache import QuantizedRows, read_cache
from kvgraft.cache.prompt_files import PromptFile, is_prompt_file, read_prompt_file
from kvgraft.cache.snapshot import LayerRows
from kvgraft.cli.pretty import format_tree
from kvgraft.errors import CacheError, MapperNotFoundError
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry

__all__ = ["add_options", "run"]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``kvgraft inspect``."""
    parser.description = "Describe a mapper, a prompt-cache file, or the cache of a model."
    parser.add_argument(
        "path",
        metavar="PATH",
        help="mapper, prompt-cache file, or model (folder or repository)",
    )
    parser.add_argument("--layers", action="store_true", help="list every layer")


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    if not args.path:
        raise MapperNotFoundError(
            "No path is given. Give a mapper, a prompt-cache file, or a model (a folder "
            "or owner/name)."
        )
    if Path(args.path).is_file() and is_prompt_file(args.path):
        _print_prompt_file(read_prompt_file(args.path), args.layers)
        return 0
    if _is_model(args.path):
        from kvgraft.models.loading import load_model
        from kvgraft.models.probe import read_geometry

        loaded = load_model(args.path)
        print(f"{args.path}: every cache passes the probe")
        _print_geometry(read_geometry(loaded.model), args.layers)
        return 0
    mapper = open_mapper(args.path)
    print(mapper.describe())
    for title, geometry in (("source", mapper.source), ("target", mapper.target)):
        print(f"\n{title}")
        _print_geometry(geometry, args.layers)
    for title, facts in (("fit", mapper.fit), ("quality", mapper.quality.record)):
        print(f"\n{title}")
        for line in format_tree({k: _without_fingerprints(v) for k, v in facts.items()}):
            print(line)
        if not facts:
            print("  nothing recorded")
    if args.layers:
        print()
        _print_layers(mapper)
    return 0


def _without_fingerprints(value: Any) -> Any:
    """Leave out kilobytes of digests."""
    if isinstance(value, dict) and "fingerprints" in value:
        return {k: v for k, v in value.items() if k != "fingerprints"}
    return value


def _print_prompt_file(file: PromptFile, every_layer: bool) -> None:
    print(f"Prompt cache of mlx-lm {file.layout}'s layout, {len(file.cache)} layers")
    print(f"  model       {file.model or 'not recorded'}")
    mark = file.provenance
    if mark is None:
        print("  origin      native (the file records no mapping)")
    while mark is not None:
        print(f"  origin      {mark.n_tokens} tokens mapped from {mark.source}: {mark.mapper}")
        mark = mark.before
    ids = "not recorded" if file.tokens is None else f"{len(file.tokens)} token ids"
    print(f"  text        {ids}")
    try:
        snapshot = read_cache(file.cache)
    except CacheError as error:
        print(f"  not mapped  {error}")
        return
    print(f"  tokens      {snapshot.offset}")
    seen: dict[str, list[int]] = {}
    for i, row in enumerate(snapshot.rows):
        seen.setdefault(_rows(row), []).append(i)
    for what, layers in seen.items():
        for shown in [[i] for i in layers] if every_layer else [layers]:
            which = f"layer {shown[0]}" if len(shown) == 1 else f"{len(shown)} layers"
            print(f"  {which}: {what}")


def _rows(row: LayerRows) -> str:
    _, heads, _, dim = row.keys.shape
    kind = f"{heads} KV heads x {dim}, tokens {row.token_ranges}"
    if isinstance(row.keys, QuantizedRows):
        return f"{kind}, {row.keys.bits} bits in groups of {row.keys.group_size}"
    return f"{kind}, {str(row.keys.dtype).removeprefix('mlx.core.')}"


def _is_model(path: str) -> bool:
    """A model folder, or the name of a repository."""
    folder = Path(path)
    return (folder / "config.json").is_file() or (not folder.exists() and path.count("/") == 1)


def _print_geometry(geometry: ModelGeometry, every_layer: bool) -> None:
    print(f"  {geometry.model_type}, {len(geometry.layers)} caches, writes {geometry.dtype}")
    seen: dict[LayerGeometry, list[int]] = {}
    for i, layer in enumerate(geometry.layers):
        seen.setdefault(layer, []).append(i)
    if every_layer:
        rows = [([i], layer) for i, layer in enumerate(geometry.layers)]
    else:
        rows = [(indices, layer) for layer, indices in seen.items()]
    for indices, layer in rows:
        which = f"cache {indices[0]}" if len(indices) == 1 else f"{len(indices)} caches"
        dims = f"{layer.key_dim}"
        if layer.value_dim != layer.key_dim:
            dims += f" (values {layer.value_dim})"
        window = "" if layer.window is None else f", window {layer.window}"
        print(f"  {which}: {layer.n_kv_heads} KV heads x {dims}, {_rope(layer)}{window}")


def _rope(layer: LayerGeometry) -> str:
    rope = layer.rope
    if rope.dims == 0:
        return "no RoPE"
    parts = [f"RoPE on {rope.dims} dims"]
    parts.append("given frequencies" if rope.base is None else f"theta {rope.base:g}")
    if rope.traditional:
        parts.append("interleaved")
    if rope.scale != 1:
        parts.append(f"positions x {rope.scale:g}")
    if rope.magnitude != 1:
        parts.append(f"magnitude {rope.magnitude:.4g}")
    return ", ".join(parts)


def _print_layers(mapper: Mapper) -> None:
    for m in mapper.layers:
        for name, part in (("keys", m.keys), ("values", m.values)):
            plan = "full" if part.heads is None else str([list(g) for g in part.heads])
            score = m.scores.get(f"r2_{name}")
            shown = "" if score is None else f"  R2 {score:.3f}"
            print(
                f"  target {m.target_layer:3d} {name:6s} from {list(part.sources)} heads {plan}"
                f"{shown}"
            )
