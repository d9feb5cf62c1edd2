"""The report: its content from the results, and its Markdown form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.evaluate import arms
from kvgraft.evaluate.arms import short_name
from kvgraft.evaluate.metrics import share_kept
from kvgraft.evaluate.summary import recommended_arm

__all__ = [
    "NO_FIGURES",
    "Block",
    "Bullets",
    "Heading",
    "Picture",
    "Report",
    "Table",
    "Text",
    "Tiles",
    "build",
    "to_markdown",
]

NO_FIGURES = 'The report has no figures: they need matplotlib (`pip install "kvgraft[report]"`).'


@dataclass(frozen=True)
class Heading:
    """A section's title."""

    text: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Table:
    """A table; the first column is text, the others are numbers."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    strong: frozenset[int] = frozenset()
    """Rows that stand out."""


@dataclass(frozen=True)
class Tiles:
    """The numbers to read first: ``(label, value, remark)``."""

    items: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Picture:
    """A figure by name, with its caption and alternative text."""

    name: str
    caption: str
    alt: str


Block = Heading | Text | Bullets | Table | Tiles | Picture


@dataclass(frozen=True)
class Report:
    """The parts of a report.

    Attributes:
        title: The pair.
        verdict: The verdict's level.
        blocks: What follows, in order.
        figures: SVG by name.
    """

    title: str
    verdict: str
    blocks: tuple[Block, ...]
    figures: dict[str, str]


def build(results: dict[str, Any], figures: dict[str, str]) -> Report:
    """The report on results.

    Args:
        results: What :func:`kvgraft.evaluate.summary.summarise` returned.
        figures: SVG by name; those that are missing are left out.
    """
    source, target = (_name(results, side) for side in ("source", "target"))
    blocks: list[Block] = [
        Tiles(_tiles(results)),
        Bullets(tuple((*results["verdict"]["reasons"], *results["verdict"]["notes"]))),
        *(() if figures else (Text(NO_FIGURES),)),
        Heading("Loss with the mapped cache"),
        Text(
            f"{target} reads {results['settings']['scored']} tokens of each of "
            f"{results['text']['documents']} held-out documents after a prefix of "
            f"{results['settings']['prefix']} tokens that it has as a cache. Only the cache "
            "differs: its own, a mapped one (also with native tokens at the start and the end), "
            "or a control: none, another document's, a random map's."
        ),
        Picture("arms", "Gap to the target's own cache, with 95 % intervals.", _alt_arms(results)),
        _arms_table(results),
        Picture(
            "distance",
            "The gap by distance from the end of the prefix; the band is the mapped arm's "
            "95 % interval.",
            "Line plot of the loss gap against the distance from the end of the prefix.",
        ),
        Heading("Layer by layer"),
        Picture(
            "layers",
            "On the held-out text: R² of keys and values, and the cosine of the layer's attention "
            "output with mapped against native keys and values.",
            "Line plot of R² of keys and values and of the attention-output cosine by layer.",
        ),
        Text(_layer_line(results)),
        Picture(
            "selection",
            "Source layers that feed each target layer; darker: a larger share of the map.",
            "Two heat maps, target layers by source layers, for keys and values.",
        ),
        *_needle_blocks(results),
        *_speed_blocks(results),
        Heading("Native start and end"),
        Text(_policy_line(results)),
        _policy_table(results),
        Heading("Models, text and machine"),
        _setting_table(results, source, target),
    ]
    kept = tuple(b for b in blocks if not isinstance(b, Picture) or b.name in figures)
    return Report(f"{source} → {target}", results["verdict"]["level"], kept, figures)


# ------------------------------------------------------------------ contents


def _name(results: dict[str, Any], side: str) -> str:
    return str(results["models"][side]["name"])


def _number(value: Any, form: str = "{:.3f}") -> str:
    return "–" if value is None else form.format(value)


def _percent(value: Any) -> str:
    return _number(None if value is None else 100 * value, "{:.0f} %")


def _seconds(value: float) -> str:
    if value == 0:
        return "–"
    if value < 0.1:
        return f"{1000 * value:.1f} ms"
    return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"


def _share_kept(results: dict[str, Any]) -> float | None:
    native, mapped, none = (
        results["arms"][name]["nll"][0] for name in (arms.NATIVE, arms.MAPPED, arms.NONE)
    )
    if native is None or mapped is None or none is None:
        return None
    return share_kept(none - mapped, none - native)


def _tiles(results: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    mapped, even = results["arms"][arms.MAPPED], results["break_even"]["warm"]
    gap = mapped["gap"]
    tiles = [
        ("of the context's benefit kept", _percent(_share_kept(results)), "100 %: as re-prefill"),
        (
            "nats per token lost",
            _number(gap[0], "{:+.3f}"),
            "" if gap[1] is None else f"95 %: {gap[1]:+.3f} to {gap[2]:+.3f}",
        ),
        ("next tokens agree", _percent(mapped["agreement"]), "with the target's own cache"),
    ]
    needle = results["needle"]
    if needle is not None:
        found = needle["overall"][f"{arms.MAPPED}, switch before the answer"]
        tiles.append(
            (
                "needles found",
                _percent(found),
                f"own cache: {_percent(needle['overall'][arms.NATIVE])}",
            )
        )
    if even is not None:
        value = "never" if even["tokens"] is None else f"{even['tokens']}"
        mark = "≤ " if even.get("is") == "at most" else ""
        tiles.append(
            ("tokens: faster than re-prefill from there on", mark + value, "weights in memory")
        )
    policy = results["policy"]
    tiles.append(
        (
            "native tokens recommended",
            f"{policy['head']} + {policy['tail']}",
            "at the start + at the end",
        )
    )
    return tuple(tiles)


def _alt_arms(results: dict[str, Any]) -> str:
    parts = [
        f"{short_name(name)} {arm['gap'][0]:+.3f}"
        for name, arm in results["arms"].items()
        if name not in (arms.NATIVE, arms.RANDOM) and arm["gap"][0] is not None
    ]
    return "Gaps in nats per token: " + ", ".join(parts) + "."


def _arms_table(results: dict[str, Any]) -> Table:
    rows = []
    strong = set()
    for i, (name, arm) in enumerate(results["arms"].items()):
        gap, perplexity = arm["gap"], arm["perplexity"]
        span = "" if gap[0] is None or name == arms.NATIVE else f"{gap[1]:+.3f} to {gap[2]:+.3f}"
        rows.append(
            (
                short_name(name),
                _number(arm["nll"][0]) if arm["finite"] else "not finite",
                _number(perplexity, "{:,.0f}" if (perplexity or 0) > 999 else "{:.2f}"),
                "" if name == arms.NATIVE else _number(gap[0], "{:+.3f}"),
                span,
                _percent(arm["agreement"]),
                _number(arm["kl"]) if name != arms.NATIVE else "",
            )
        )
        if name in (arms.MAPPED, recommended_arm(results)):
            strong.add(i)
    return Table(
        ("arm", "loss", "perplexity", "gap", "95 % interval", "agrees", "KL"),
        tuple(rows),
        frozenset(strong),
    )


def _layer_line(results: dict[str, Any]) -> str:
    r2, cosine = results["r2"], results["attention_cosine"]
    line = (
        f"Mean R² {_number(r2['keys']['mean'])} (keys without RoPE) and "
        f"{_number(r2['values']['mean'])} (values)"
    )
    if cosine is None:
        return f"{line}. This model's attention cannot be instrumented, so there is no cosine."
    return f"{line}; mean attention-output cosine {cosine['mean']:.3f}, lowest {cosine['min']:.3f}."


def _needle_blocks(results: dict[str, Any]) -> list[Block]:
    found = results["needle"]
    if found is None:
        return []
    columns = ("", *(f"{kind}" for kind in found["by_kind"]), "all")
    rows = tuple(
        (
            short_name(name),
            *(_percent(found["by_kind"][kind][name]) for kind in found["by_kind"]),
            _percent(found["overall"][name]),
        )
        for name in found["overall"]
    )
    return [
        Heading("Exact recall"),
        Text(
            f"{found['tasks']} facts, each among four look-alikes in held-out text, asked for at "
            "the end; the value itself must be among the first eight words. Guessing gives one in "
            "five. The target takes over right before the answer, or after three quarters of the "
            "context; then it reads the rest and the question itself."
        ),
        Picture(
            "needles",
            "Facts found by depth and length of context.",
            "Grids of recall by depth and context length, one per arm.",
        ),
        Table(columns, rows),
    ]


def _speed_blocks(results: dict[str, Any]) -> list[Block]:
    rows = results["speed"]
    if not rows:
        return []
    cold = all("map_cold_seconds" in r for r in rows)
    columns = ("tokens", "re-prefill", "map, warm", *(("map, cold",) if cold else ()))
    columns += ("native tokens", "times faster", "tokens/s", "peak MB")
    table = tuple(
        (
            str(r["tokens"]),
            _seconds(r["prefill_seconds"]),
            _seconds(r["map_warm_seconds"]),
            *((_seconds(r["map_cold_seconds"]),) if cold else ()),
            _seconds(r["native_seconds"]),
            f"{r['prefill_seconds'] / r['handoff_warm_seconds']:.1f}",
            f"{r['prefill_tokens_per_second']:,.0f} / {r['map_tokens_per_second']:,.0f}",
            f"{r['prefill_peak_bytes'] / 1e6:,.0f} / {r['map_peak_bytes'] / 1e6:,.0f}",
        )
        for r in rows
    )
    dropped = all(r.get("file_cache_dropped") for r in rows)
    note = (
        "Same process, same tokens. Cold: the artifact is opened anew"
        + (", with its files dropped from the system's cache" if dropped else "")
        + ". Times faster: re-prefill against warm map and native tokens. Tokens per second and "
        "peak memory: re-prefill / mapping; memory is what they add to models and mapper. The "
        "source's prefill is not counted: it is done before the switch."
    )
    return [
        Heading("Speed"),
        Text(_even_line(results)),
        Picture(
            "speed",
            "Seconds until the target can generate.",
            "Log-log plot of seconds against tokens for re-prefill and for the hand-off.",
        ),
        Table(columns, table),
        Text(note),
    ]


def _even_line(results: dict[str, Any]) -> str:
    parts = []
    for kind, words in (("warm", "weights in memory"), ("cold", "weights on disk")):
        even = results["break_even"][kind]
        if even is None:
            continue
        if even["tokens"] is None:
            parts.append(f"With {words} the hand-off is not faster at the longest measured length.")
        elif even["is"] == "at most":
            parts.append(
                f"With {words} the hand-off is faster at every measured length, from "
                f"{even['tokens']} tokens on."
            )
        else:
            parts.append(
                f"With {words} the hand-off is faster from about {even['tokens']} tokens on."
            )
    policy = results["policy"]
    if (policy["head"], policy["tail"]) != arms.PLAIN:
        ends = f"{policy['head']} + {policy['tail']}"
        parts.append(f"The recommended native tokens ({ends}) are counted.")
    return " ".join(parts)


def _policy_line(results: dict[str, Any]) -> str:
    policy = results["policy"]
    if (policy["head"], policy["tail"]) == arms.PLAIN:
        advice = "Recommended: none but the last token, which the target always reads itself."
    else:
        advice = (
            f"Recommended: the target reads the first {policy['head']} and the last "
            f"{policy['tail']} tokens itself."
        )
    return (
        f"{advice} A pair of lengths is recommended if it removes more of the gap per second than "
        "re-prefill, "
        f"which takes {_seconds(policy['prefill_seconds'])} against "
        f"{_seconds(policy['map_seconds'])} for mapping."
    )


def _policy_table(results: dict[str, Any]) -> Table:
    rows, strong = [], set()
    policy = results["policy"]
    for i, c in enumerate(policy["candidates"]):
        gain = c["gain"]
        plain = (c["head"], c["tail"]) == arms.PLAIN
        rows.append(
            (
                f"{c['head']} + {c['tail']}",
                _number(c["gap"][0], "{:+.3f}"),
                "" if plain else _number(gain[0], "{:+.4f}"),
                "" if plain or gain[1] is None else f"{gain[1]:+.4f} to {gain[2]:+.4f}",
                _seconds(c["seconds"]),
                "not significant" if c["value"] is None else f"{c['value']:+.4f}",
            )
        )
        if (c["head"], c["tail"]) == (policy["head"], policy["tail"]):
            strong.add(i)
    return Table(
        ("start + end", "gap", "gain", "95 % interval", "extra time", "gain over the line"),
        tuple(rows),
        frozenset(strong),
    )


def _setting_table(results: dict[str, Any], source: str, target: str) -> Table:
    text, machine, settings = results["text"], results["machine"], results["settings"]
    fit = results["mapper"]["fit"]
    fitted = ", ".join(f"{k} {fit[k]}" for k in ("plan", "k", "rows", "weights") if k in fit)
    device = machine["device"]
    blas = f", {machine['blas']}" if machine["blas"] and device == "cpu" else ""
    rows = [
        ("mapper", results["mapper"]["summary"]),
        ("fitted with", fitted or "not recorded"),
        ("source", _model(results["models"]["source"])),
        ("target", _model(results["models"]["target"])),
        (
            "text",
            "; ".join(f"{s['name']} (SHA-256 {s['sha256'][:12]}…)" for s in text["sources"]),
        ),
        ("held out", text["disjoint"] or "not proved: the artifact has no fingerprints"),
        (
            "sample",
            f"{text['documents']} documents, {settings['scored']} scored tokens each, seed "
            f"{settings['seed']}",
        ),
        (
            "machine",
            f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']} GB, "
            f"{machine['system']}, {device}{blas}; map: {machine['map_layer']}",
        ),
        ("versions", ", ".join(f"{k} {v}" for k, v in results["versions"].items())),
        ("date", results["date"]),
    ]
    return Table(("", ""), tuple(rows))


def _model(found: dict[str, Any]) -> str:
    quantised = found.get("quantization")
    kind = f"{quantised.get('bits')}-bit" if isinstance(quantised, dict) else "not quantised"
    return f"{found['name']}, {kind}, configuration {found['config_sha256'][:12]}…"


# ----------------------------------------------------------------- Markdown


def to_markdown(report: Report, figures: str = "figures") -> str:
    """The report as Markdown.

    Args:
        report: The report.
        figures: Folder of the SVG files, relative to the file.
    """
    out = [f"# {_md(report.title)}", "", f"**Verdict: {report.verdict}**", ""]
    for block in report.blocks:
        if isinstance(block, Heading):
            out.append(f"## {block.text}")
        elif isinstance(block, Text):
            out.append(_md(block.text))
        elif isinstance(block, Bullets):
            out += [f"- {_md(item)}" for item in block.items]
        elif isinstance(block, Tiles):
            cells = [(label, value, remark) for label, value, remark in block.items]
            out += _md_table(("", "", ""), cells)
        elif isinstance(block, Table):
            strong = [
                tuple(f"**{c}**" if c and i in block.strong else c for c in map(_md, row))
                for i, row in enumerate(block.rows)
            ]
            out += _md_table(block.columns, strong, escaped=True)
        else:
            out += [f"![{_md(block.alt)}]({figures}/{block.name}.svg)", "", f"*{block.caption}*"]
        out.append("")
    return "\n".join(out)


def _md(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def _md_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, escaped: bool = False
) -> list[str]:
    shown = [row if escaped else [_md(c) for c in row] for row in rows]
    marks = ["---", *["---:"] * (len(columns) - 1)]
    if not any(columns):
        marks = ["---"] * len(columns)
    return [
        "| " + " | ".join(columns) + " |",
        "| " + " | ".join(marks) + " |",
        *("| " + " | ".join(row) + " |" for row in shown),
    ]
