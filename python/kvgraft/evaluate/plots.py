"""The report's figures, as SVG, drawn with matplotlib (the extra ``report``)."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from kvgraft.evaluate import arms
from kvgraft.evaluate.arms import short_name
from kvgraft.evaluate.summary import recommended_arm

__all__ = ["draw_all"]

_NATIVE, _MAPPED, _ENDS, _ALONE, _NONE, _WRONG, _RAW = (
    "#4b5563",
    "#1d4ed8",
    "#60a5fa",
    "#d97706",
    "#9ca3af",
    "#dc2626",
    "#a16207",
)
_INK, _GRID = "#1f2937", "#e5e7eb"

# The reader's own sans-serif; layouts are made for a wider one, so they fit.
_FONT = "-apple-system, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"


def draw_all(results: dict[str, Any]) -> dict[str, str]:
    """Every figure that the results have data for, ``{name: SVG}``."""
    with _style():
        figures: dict[str, Callable[[dict[str, Any]], str | None]] = {
            "arms": _arms,
            "distance": _distance,
            "selection": _selection,
            "layers": _layers,
            "needles": _needles,
            "speed": _speed,
        }
        drawn = {name: draw(results) for name, draw in figures.items()}
    return {name: svg for name, svg in drawn.items() if svg is not None}


@contextmanager
def _style() -> Iterator[None]:
    import matplotlib

    settings: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "kvgraft",
        "font.family": "DejaVu Sans",
        "font.size": 9.0,
        "axes.edgecolor": "#9ca3af",
        "axes.labelcolor": _INK,
        "axes.titlesize": 9.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "grid.color": _GRID,
        "legend.frameon": False,
        "legend.fontsize": 8.5,
    }
    with matplotlib.rc_context(settings):
        yield


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _svg(figure: Any) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    return text.replace("'DejaVu Sans', sans-serif", _FONT).replace("'DejaVu Sans'", _FONT)


def _colour(name: str) -> str:
    if name.startswith(f"{arms.MAPPED},"):
        return _ENDS
    return {
        arms.NATIVE: _NATIVE,
        arms.MAPPED: _MAPPED,
        arms.ALONE: _ALONE,
        arms.NONE: _NONE,
        arms.WRONG: _WRONG,
        arms.RAW: _RAW,
    }.get(name, _NONE)


def _arms(results: dict[str, Any]) -> str | None:
    """Gap to the native cache, with intervals."""
    wanted = [arms.MAPPED, recommended_arm(results), arms.ALONE, arms.NONE, arms.WRONG, arms.RAW]
    rows = [
        (name, results["arms"][name]["gap"])
        for name in wanted
        if name is not None
        and name in results["arms"]
        and results["arms"][name]["gap"][0] is not None
    ]
    if not rows:
        return None
    figure = _figure(7.2, 0.6 + 0.36 * len(rows))
    axes = figure.subplots()
    axes.axvline(0, color=_NATIVE, lw=1.2)
    for y, (name, (mean, low, high)) in enumerate(rows):
        colour = _colour(name)
        axes.plot([low, high], [y, y], color=colour, lw=3, alpha=0.35, solid_capstyle="round")
        axes.plot([mean], [y], "o", color=colour, ms=7)
        axes.annotate(
            f"{mean:+.3f}", (mean, y), (0, 7), textcoords="offset points", ha="center", fontsize=8
        )
    axes.set_yticks(range(len(rows)), [short_name(name) for name, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.7)
    axes.margins(x=0.1)
    axes.set_xlabel("loss minus that of the target's own cache, nats per token (0: equal)")
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    return _svg(figure)


def _distance(results: dict[str, Any]) -> str | None:
    """Gap by distance from the end of the prefix."""
    found = results["by_distance"]
    if len(found["bins"]) < 2:
        return None
    figure = _figure(7.2, 3.0)
    axes = figure.subplots()
    axes.axhline(0, color=_NATIVE, lw=1.2)
    labels = [f"{a + 1}–{b}" if b > a + 1 else f"{b}" for a, b in found["bins"]]
    x = list(range(len(labels)))
    for name in (arms.MAPPED, recommended_arm(results), arms.ALONE, arms.NONE, arms.WRONG):
        rows = found["gap"].get(name)
        if name is None or rows is None or any(row[0] is None for row in rows):
            continue
        mean, low, high = zip(*rows)
        colour = _colour(name)
        if name == arms.MAPPED:
            axes.fill_between(x, low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(x, mean, "-o", color=colour, ms=4, lw=1.8, label=short_name(name))
    axes.set_xticks(x, labels)
    axes.set_xlabel("tokens after the prefix")
    axes.set_ylabel("gap, nats per token")
    axes.grid(axis="y")
    axes.legend(ncols=2, loc="best")
    return _svg(figure)


def _selection(results: dict[str, Any]) -> str | None:
    """Which source layers feed which target layer, and how much."""
    import numpy as np

    targets = results["mapper"]["target_layers"]
    n_sources = results["mapper"]["source_layer_count"]
    height = 1.1 + min(4.2, 0.16 * len(targets) + 0.5)
    figure = _figure(7.2, height)
    panels = figure.subplots(1, 2, sharey=True)
    image = None
    for axes, kind in zip(panels, ("keys", "values")):
        share = np.array(results["importance"][kind], dtype=float)
        chosen = np.zeros_like(share, dtype=bool)
        for row, sources in enumerate(results["mapper"]["sources"][kind]):
            chosen[row, sources] = True
        shown = np.ma.masked_array(share, ~chosen)
        axes.set_facecolor("#f3f4f6")
        image = axes.imshow(
            shown,
            cmap="Blues",
            vmin=0,
            vmax=max(float(share.max()), 1e-6),
            aspect="auto",
            interpolation="nearest",
        )
        axes.set_title(kind)
        axes.set_xlabel("source layer")
        step = max(1, n_sources // 8)
        axes.set_xticks(range(0, n_sources, step))
        rows = range(0, len(targets), max(1, len(targets) // 8))
        axes.set_yticks(rows, [str(targets[i]) for i in rows])
    panels[0].set_ylabel("target layer")
    bar = figure.colorbar(image, ax=list(panels), shrink=0.9, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label("share of the map")
    return _svg(figure)


def _layers(results: dict[str, Any]) -> str | None:
    """R² and attention-output cosine by target layer."""
    targets = results["mapper"]["target_layers"]
    figure = _figure(7.2, 2.8)
    axes = figure.subplots()
    lines = [
        ("R² of keys", results["r2"]["keys"]["by_layer"], _MAPPED),
        ("R² of values", results["r2"]["values"]["by_layer"], _ALONE),
    ]
    cosine = results["attention_cosine"]
    if cosine is not None:
        lines.append(("attention-output cosine", cosine["by_layer"], "#059669"))
    lowest = 0.0
    for label, values, colour in lines:
        y = [float("nan") if v is None else v for v in values]
        lowest = min([lowest, *(v for v in y if v == v)])
        axes.plot(targets, y[: len(targets)], "-o", color=colour, ms=4, lw=1.8, label=label)
    # One very bad layer would compress the range of all others.
    axes.set_ylim(max(lowest, -1.0) - 0.03, 1.03)
    axes.set_xlabel("target layer")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y")
    axes.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    return _svg(figure)


def _needles(results: dict[str, Any]) -> str | None:
    """Recall by depth and length."""
    found = results["needle"]
    if found is None:
        return None
    import numpy as np

    lengths = sorted({c["length"] for c in found["cells"]})
    depths = sorted({c["depth"] for c in found["cells"]})
    names = sorted(found["overall"], key=lambda n: (n != arms.NATIVE, n == arms.ALONE, n))
    figure = _figure(7.2, 1.35 + 0.28 * len(depths))
    panels = figure.subplots(1, len(names), sharey=True, squeeze=False)[0]
    for axes, name in zip(panels, names):
        grid = np.zeros((len(depths), len(lengths)))
        for cell in found["cells"]:
            i, j = depths.index(cell["depth"]), lengths.index(cell["length"])
            grid[i, j] = cell["right"][name] / cell["tasks"]
            axes.text(
                j,
                i,
                f"{cell['right'][name]}/{cell['tasks']}",
                ha="center",
                va="center",
                fontsize=8,
                color="white" if grid[i, j] > 0.6 else _INK,
            )
        axes.imshow(grid, cmap="Blues", vmin=0, vmax=1.1, aspect="auto", interpolation="nearest")
        title = f"{_panel_title(name)}\n{100 * found['overall'][name]:.0f} %"
        axes.set_title(title, fontsize=7.5, linespacing=1.3)
        axes.set_xticks(range(len(lengths)), [str(n) for n in lengths])
        axes.set_yticks(range(len(depths)), [f"{d:g}" for d in depths])
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
    panels[0].set_ylabel("depth of the fact")
    figure.supxlabel("tokens of context", fontsize=9)
    return _svg(figure)


def _panel_title(name: str) -> str:
    """Two short lines."""
    if name == arms.NATIVE:
        return "target's\nown cache"
    if name == arms.ALONE:
        return "source\nalone"
    cache, _, switch = name.rpartition(", switch ")
    ends = cache.removeprefix(arms.MAPPED).strip(", ")
    ends = ends.replace(" head", "").replace(" tail native", "")
    return f"mapped{', ' + ends if ends else ''}\n{switch}"


def _speed(results: dict[str, Any]) -> str | None:
    """Seconds against length."""
    rows = results["speed"]
    if len(rows) < 2:
        return None
    from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

    figure = _figure(7.2, 3.0)
    axes = figure.subplots()
    x = [r["tokens"] for r in rows]
    lines = [
        ("re-prefill by the target", "prefill_seconds", _NATIVE, "-"),
        ("hand-off, weights in memory", "handoff_warm_seconds", _MAPPED, "-"),
        ("hand-off, weights on disk", "handoff_cold_seconds", _ENDS, "--"),
    ]
    for label, key, colour, style in lines:
        if all(key in r for r in rows):
            y = [r[key] for r in rows]
            axes.plot(x, y, f"{style}o", color=colour, ms=4, lw=1.8, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(x))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter("{x:g}")
    even = results["break_even"]["warm"]
    if even is not None and even.get("is") == "about":
        axes.axvline(even["tokens"], color=_GRID, lw=6, zorder=0)
        axes.annotate(
            f"even at about {even['tokens']}",
            (even["tokens"], 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(5, 0),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("tokens handed over")
    axes.set_ylabel("seconds")
    axes.grid(which="major")
    axes.legend(loc="best")
    return _svg(figure)
