"""The model card, ``README.md``, of an artifact."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from kvgraft.mapper.data import MapperData

__all__ = ["model_card"]


def model_card(mapper: MapperData, nbytes: int) -> str:
    """What the mapper is, how it was fitted, what was measured, how to use it.

    Args:
        mapper: The mapper.
        nbytes: Size of its weights as stored.
    """
    names = [m.name if m else g.model_type for m, g in _models(mapper)]
    kinds = {
        "full" if m.heads is None else "per head"
        for layer in mapper.layers
        for m in (layer.keys, layer.values)
    }
    counts = sorted({len(layer.keys.sources) for layer in mapper.layers})
    lines = [
        *_front_matter(mapper),
        f"# Key/value mapper: {names[0]} to {names[1]}",
        "",
        f"Maps the key/value cache of **{names[0]}** into that of **{names[1]}**, so that a "
        "conversation can continue in the second model without re-prefill. One affine map "
        "for the keys and one for the values of each target layer, fitted in closed form "
        "(Heo et al., [arXiv:2608.03893](https://arxiv.org/abs/2608.03893)).",
        "",
        "| | source | target |",
        "|---|---|---|",
        f"| model | {names[0]} | {names[1]} |",
        *_geometry_rows(mapper),
        "",
        f"{mapper.n_parameters / 1e6:.1f} M parameters in {nbytes / 1e6:.1f} MB; "
        f"{len(mapper.layers)} target layers, each from {_span(counts)} source layers, head "
        f"mapping "
        f"{' and '.join(sorted(kinds))}.",
        "",
        "## Quality",
        "",
        *_quality(mapper.quality.record),
        "",
        "## Fit",
        "",
        *_table(mapper.fit, "setting", "Not recorded."),
        "",
        "## Use",
        "",
        "kvgraft is not on PyPI: run `pip install .` in a checkout of its repository. Then:",
        "",
        "```shell",
        "kvgraft verify THIS_FOLDER",
        "```",
        "",
        "```python",
        "from kvgraft import load_mapper, transfer_cache",
        "",
        'mapper = load_mapper("THIS_FOLDER")',
        "# {layer: (keys, values)}, each [n_kv_heads, N, head_dim], keys as cached (post-RoPE)",
        "target_kv = transfer_cache(source_kv, mapper)",
        "```",
        "",
    ]
    return "\n".join(lines)


def _models(mapper: MapperData) -> Iterator[tuple[Any, Any]]:
    yield mapper.source_model, mapper.source
    yield mapper.target_model, mapper.target


def _front_matter(mapper: MapperData) -> list[str]:
    lines = ["---", "library_name: mlx", "tags:", "- mlx", "- kvgraft", "- kv-cache"]
    # The hub rejects cards whose base models are local paths.
    hub = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
    names = [m.name for m, _ in _models(mapper) if m and re.fullmatch(hub, m.name)]
    if names:
        lines += ["base_model:", *(f"- {name}" for name in names)]
    return [*lines, "---", ""]


def _geometry_rows(mapper: MapperData) -> list[str]:
    sides = (mapper.source, mapper.target)

    def row(name: str, cells: list[str]) -> str:
        return f"| {name} | {' | '.join(cells)} |"

    return [
        row("layers", [str(len(g.layers)) for g in sides]),
        row("key/value heads", [_span(sorted({x.n_kv_heads for x in g.layers})) for g in sides]),
        row("head_dim", [_span(sorted({x.key_dim for x in g.layers})) for g in sides]),
    ]


def _span(numbers: list[int]) -> str:
    if not numbers:
        return "no"
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]}"


def _quality(quality: Mapping[str, Any]) -> list[str]:
    """The verdict first, then the numbers that it rests on."""
    if not quality:
        return [
            "**Not evaluated.** Nothing was measured on held-out text. Run `kvgraft eval` before "
            "you rely on it: a mapper can be worse than an empty context."
        ]
    losses, policy, text = (quality.get(name) for name in ("nll", "policy", "text"))
    if not (isinstance(losses, Mapping) and isinstance(policy, Mapping)):
        return _table(quality, "measured", "")
    lines = [f"**Verdict: {_cell(quality.get('verdict', 'unknown'))}.**", ""]
    lines += [
        f"- {_cell(line)}" for name in ("reasons", "notes") for line in (quality.get(name) or ())
    ]
    lines += ["", "| held-out loss of the continuation | nats per token |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_number(value)} |" for name, value in losses.items()]
    rows = {
        "next token as with the target's own cache": quality.get("agreement"),
        "KL divergence from the target's own prediction, nats": quality.get("kl"),
        "attention-output cosine": quality.get("attention_cosine"),
    }
    for title, name in (("R² of {}", "r2"), ("needles found: {}", "needle")):
        found = quality.get(name)
        if isinstance(found, Mapping):
            rows |= {title.format(key): value for key, value in found.items()}
    even = quality.get("break_even_tokens")
    if isinstance(even, Mapping):
        rows |= {f"faster than re-prefill from, tokens ({k})": v for k, v in even.items()}
    rows["native tokens recommended, start and end"] = (
        f"{policy.get('head')} and {policy.get('tail')}"
    )
    lines += ["", "| measured | |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_number(value)} |" for name, value in rows.items()]
    if isinstance(text, Mapping):
        files = ", ".join(
            str(s.get("name")) for s in text.get("sources", ()) if isinstance(s, Mapping)
        )
        lines += [
            "",
            f"{text.get('documents')} documents from {_cell(files)}; a prefix of "
            f"{quality.get('prefix')} tokens, {quality.get('scored')} scored; "
            f"{_cell(text.get('disjoint') or 'may overlap the calibration text')}. "
            f"Measured {quality.get('date')} on {_machine(quality.get('machine'))}.",
        ]
    return lines


def _number(value: Any) -> str:
    if value is None:
        return "none"
    return f"{value:.3f}" if isinstance(value, float) else _cell(value)


def _machine(found: Any) -> str:
    if not isinstance(found, Mapping):
        return "an unknown machine"
    names = ("processor", "system", "device")
    return _cell(", ".join(str(found[n]) for n in names if found.get(n)))


def _table(data: Mapping[str, Any], title: str, otherwise: str) -> list[str]:
    rows = list(_flatten(data, ""))
    if not rows:
        return [otherwise]
    return [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _flatten(data: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for key, value in data.items():
        if key == "fingerprints":  # for machines
            continue
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{name}.")
        elif isinstance(value, (list, tuple)):
            if len(value) <= 4 and not any(isinstance(v, (list, tuple, Mapping)) for v in value):
                yield name, ", ".join(map(_cell, value))
        else:
            yield name, _cell(value)


def _cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")
