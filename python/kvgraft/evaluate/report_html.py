"""The report as one HTML file with its figures inline.

For readers without a Markdown viewer: it can be mailed or attached as it is, while
``report.md`` needs its folder of figures beside it.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from kvgraft.evaluate.report import Block, Bullets, Heading, Report, Table, Text, Tiles
from kvgraft.mapper.quality import DO_NOT_SHIP, SHIP

__all__ = ["to_html"]

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
    """The report as one HTML file that needs no other file."""
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
            "<footer>Written by <code>kvgraft eval</code>. Terms and rules: "
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
