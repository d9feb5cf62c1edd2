"""The report: one document, written as Markdown and as a single HTML file."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvgraft.evaluate import arms
from kvgraft.evaluate.plots import recommended, short
from kvgraft.mapper.quality import DO_NOT_SHIP, SHIP

__all__ = ["build", "to_html", "to_markdown"]


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
    """A figure by name, with what it shows in words."""

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
        figures: SVG by name; sections whose figure is missing go without.
    """
    source, target = (_name(results, side) for side in ("source", "target"))
    blocks: list[Block] = [
        Tiles(_tiles(results)),
        Bullets(tuple((*results["verdict"]["reasons"], *results["verdict"]["notes"]))),
        Heading("What the mapped cache is worth"),
        Text(
            f"{target} reads {results['settings']['scored']} tokens of each of "
            f"{results['text']['documents']} held-out documents after a prefix of "
            f"{results['settings']['prefix']} tokens, of which it is given a cache. Only the cache "
            "differs: its own, a mapped one (also with the first and last tokens from its own), or "
            "one that should be worth nothing."
        ),
        Picture("arms", "Gap to the target's own cache, with 95 % intervals.", _alt_arms(results)),
        _arms_table(results),
        Picture(
            "distance",
            "The gap by distance from the border; the band is the mapped arm's 95 % interval.",
            "Line plot of the loss gap against the distance from the end of the prefix.",
        ),
        Heading("Layer by layer"),
        Picture(
            "layers",
            "On the held-out text: how well keys and values are met, and what becomes of the "
            "layer's output.",
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
        Heading("Native head and tail"),
        Text(_policy_line(results)),
        _policy_table(results),
        Heading("What was measured on what"),
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


def kept_share(results: dict[str, Any]) -> float | None:
    """Share of what the context is worth that the mapped cache keeps."""
    native, mapped, none = (
        results["arms"][name]["nll"][0] for name in (arms.NATIVE, arms.MAPPED, arms.NONE)
    )
    if mapped is None or none <= native:
        return None
    return float((none - mapped) / (none - native))


def _tiles(results: dict[str, Any]) -> tuple[tuple[str, str, str], ...]:
    mapped, even = results["arms"][arms.MAPPED], results["break_even"]["warm"]
    gap = mapped["gap"]
    tiles = [
        ("of the context's worth kept", _percent(kept_share(results)), "100 %: as if read again"),
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
            ("tokens: from there on faster than reading", mark + value, "weights in memory")
        )
    policy = results["policy"]
    tiles.append(
        (
            "native tokens advised",
            f"{policy['head']} + {policy['tail']}",
            "at the start + at the end",
        )
    )
    return tuple(tiles)


def _alt_arms(results: dict[str, Any]) -> str:
    parts = [
        f"{short(name)} {arm['gap'][0]:+.3f}"
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
                short(name),
                _number(arm["nll"][0]) if arm["finite"] else "not finite",
                _number(perplexity, "{:,.0f}" if (perplexity or 0) > 999 else "{:.2f}"),
                "" if name == arms.NATIVE else _number(gap[0], "{:+.3f}"),
                span,
                _percent(arm["agreement"]),
                _number(arm["kl"]) if name != arms.NATIVE else "",
            )
        )
        if name in (arms.MAPPED, recommended(results)):
            strong.add(i)
    return Table(
        ("arm", "loss", "perplexity", "gap", "95 % interval", "agrees", "KL"),
        tuple(rows),
        frozenset(strong),
    )


def _layer_line(results: dict[str, Any]) -> str:
    r2, cosine = results["r2"], results["attention_cosine"]
    line = (
        f"Mean R² {_number(r2['keys']['mean'])} (keys, RoPE taken off) and "
        f"{_number(r2['values']['mean'])} (values)"
    )
    if cosine is None:
        return f"{line}. This model's attention can't be looked at, so there is no cosine."
    return f"{line}; mean attention-output cosine {cosine['mean']:.3f}, lowest {cosine['min']:.3f}."


def _needle_blocks(results: dict[str, Any]) -> list[Block]:
    found = results["needle"]
    if found is None:
        return []
    columns = ("", *(f"{kind}" for kind in found["by_kind"]), "all")
    rows = tuple(
        (
            short(name),
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
            "five. The switch comes right before the answer, or after three quarters of the "
            "context, so that the target reads the rest and the question itself."
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
    columns = ("tokens", "read again", "map, warm", *(("map, cold",) if cold else ()))
    columns += ("head + tail", "times faster", "tokens/s", "peak MB")
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
        + ". Times faster: reading again against warm map, head and tail. Tokens per second and "
        "peak memory: reading again / mapping; memory is what they add to models and mapper. What "
        "the source took to read is not counted: it has been read when one switches."
    )
    return [
        Heading("Speed"),
        Text(_even_line(results)),
        Picture(
            "speed",
            "Seconds until the target can go on.",
            "Log-log plot of seconds against tokens for reading again and for the hand-off.",
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
            parts.append(f"With {words} the hand-off is not faster at any measured length.")
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
        parts.append(f"Head and tail of the advised policy ({ends}) are counted.")
    return " ".join(parts)


def _policy_line(results: dict[str, Any]) -> str:
    policy = results["policy"]
    if (policy["head"], policy["tail"]) == arms.PLAIN:
        advice = "Advised: none but the last token, which the target always reads itself."
    else:
        advice = (
            f"Advised: the target reads the first {policy['head']} and the last {policy['tail']} "
            "tokens itself."
        )
    return (
        f"{advice} A pair of lengths is worth its time if it removes the gap faster than reading "
        "everything does, "
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
                "may be noise" if c["value"] is None else f"{c['value']:+.4f}",
            )
        )
        if (c["head"], c["tail"]) == (policy["head"], policy["tail"]):
            strong.add(i)
    return Table(
        ("head + tail", "gap", "gain", "95 % interval", "extra time", "gain over the line"),
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


# --------------------------------------------------------------------- HTML

_STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f8fafc; color: #1f2937;
  font: 15px/1.55 -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; }
main { max-width: 880px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 10px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 40px 0 8px; }
.badge { display: inline-block; padding: 4px 14px; border-radius: 999px; font-weight: 600; }
.good { background: #dcfce7; color: #14532d; }
.fair { background: #fef3c7; color: #78350f; }
.bad { background: #fee2e2; color: #7f1d1d; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
  margin: 22px 0; }
.tile { background: #fff; border: 1px solid #e5e7eb; border-radius: 10px; padding: 12px 14px; }
.tile b { display: block; font-size: 21px; line-height: 1.2; white-space: nowrap; }
.tile span { display: block; font-size: 12.5px; color: #4b5563; }
.tile small { display: block; font-size: 11.5px; color: #6b7280; margin-top: 4px; }
ul { padding-left: 20px; } li { margin: 3px 0; }
figure { margin: 16px 0; background: #fff; border: 1px solid #e5e7eb; border-radius: 10px;
  padding: 12px; }
figure img { display: block; width: 100%; height: auto; }
figcaption { font-size: 13px; color: #4b5563; margin-top: 8px; }
.scroll { overflow-x: auto; margin: 14px 0; }
table { border-collapse: collapse; width: 100%; background: #fff; font-size: 13px;
  font-variant-numeric: tabular-nums; }
th, td { padding: 6px 10px; border-bottom: 1px solid #e5e7eb; text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
table.facts td { white-space: normal; text-align: left; overflow-wrap: anywhere; }
table.facts td:first-child { white-space: nowrap; color: #4b5563; vertical-align: top; }
th { color: #4b5563; font-weight: 600; background: #f9fafb; }
tr.strong td { font-weight: 600; background: #eff6ff; }
footer { margin-top: 40px; font-size: 12.5px; color: #6b7280; }
"""


def to_html(report: Report) -> str:
    """The report as one HTML file that needs nothing else."""
    kind = {SHIP: "good", DO_NOT_SHIP: "bad"}.get(report.verdict, "fair")
    body = [
        f"<h1>{html.escape(report.title)}</h1>",
        f'<p><span class="badge {kind}">{html.escape(report.verdict)}</span></p>',
        *(_html_block(block, report.figures) for block in report.blocks),
    ]
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(report.title)}: {html.escape(report.verdict)}</title>",
            f"<style>{_STYLE}</style>",
            "</head>",
            "<body>",
            "<main>",
            *body,
            "<footer>Written by <code>kvgraft eval</code>. What the words and rules mean: "
            "docs/quality.md of kvgraft.</footer>",
            "</main>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _html_block(block: Block, figures: dict[str, str]) -> str:
    if isinstance(block, Heading):
        return f"<h2>{html.escape(block.text)}</h2>"
    if isinstance(block, Text):
        return f"<p>{html.escape(block.text)}</p>"
    if isinstance(block, Bullets):
        return "<ul>" + "".join(f"<li>{html.escape(i)}</li>" for i in block.items) + "</ul>"
    if isinstance(block, Tiles):
        tiles = [
            f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span>'
            f"<small>{html.escape(remark)}</small></div>"
            for label, value, remark in block.items
        ]
        return f'<div class="tiles">{"".join(tiles)}</div>'
    if isinstance(block, Table):
        return _html_table(block)
    data = base64.b64encode(figures[block.name].encode()).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(block.alt)}" src="data:image/svg+xml;base64,{data}">'
        f"<figcaption>{html.escape(block.caption)}</figcaption></figure>"
    )


def _html_table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str, mark: str = "") -> str:
        inner = "".join(f"<{tag}>{html.escape(c)}</{tag}>" for c in cells)
        return f"<tr{mark}>{inner}</tr>"

    named = any(table.columns)
    head = f"<thead>{row(table.columns, 'th')}</thead>" if named else ""
    rows = "".join(
        row(cells, "td", ' class="strong"' if i in table.strong else "")
        for i, cells in enumerate(table.rows)
    )
    kind = "" if named else ' class="facts"'
    return f'<div class="scroll"><table{kind}>{head}<tbody>{rows}</tbody></table></div>'
