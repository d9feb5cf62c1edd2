"""The report, in Markdown and in HTML, opened in a browser."""

from __future__ import annotations

import copy
import html
import json
import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from eval_problems import SMALL, identity
from fit_problems import prose, save_model

from kvgraft.evaluate import arms
from kvgraft.evaluate.output import default_folder, is_writable_artifact, write_results
from kvgraft.evaluate.plots import draw_all, short
from kvgraft.evaluate.report import build, to_html, to_markdown
from kvgraft.evaluate.run import measure
from kvgraft.evaluate.summary import summarise

FIGURES = {"arms", "distance", "selection", "layers", "needles", "speed"}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    path = tmp_path_factory.mktemp("report")
    model = save_model(path / "model")
    (path / "text.txt").write_text("<|endoftext|>".join(prose(120, seed) for seed in range(5)))
    mapper = identity(model)
    return summarise(mapper, measure(mapper, model, model, [path / "text.txt"], SMALL))


@pytest.fixture(scope="module")
def report(results):
    return build(results, draw_all(results))


def test_every_part_of_the_results_is_in_both_forms(results, report):
    assert set(report.figures) == FIGURES
    texts = {"html": html.unescape(to_html(report)), "md": to_markdown(report)}
    for text in texts.values():
        assert results["verdict"]["level"] in text
        for reason in results["verdict"]["reasons"]:
            assert reason.split("(")[0] in text
        for name, arm in results["arms"].items():
            assert short(name) in text
            assert f"{arm['nll'][0]:.3f}" in text
        for source in results["text"]["sources"]:
            assert source["name"] in text and source["sha256"][:12] in text
        assert results["machine"]["processor"] in text and results["versions"]["mlx"] in text
        for row in results["speed"]:
            assert str(row["tokens"]) in text
    for name in FIGURES:
        assert f"figures/{name}.svg" in texts["md"]
    assert texts["html"].count("data:image/svg+xml;base64,") == len(FIGURES)


def test_markdown_tables_are_whole(report):
    lines = to_markdown(report).splitlines()
    tables = [line for line in lines if line.startswith("|")]
    assert len(tables) > 30
    for i, line in enumerate(lines):
        if line.startswith("| -"):
            columns = line.count("|")
            assert lines[i - 1].count("|") == columns
            j = i + 1
            while j < len(lines) and lines[j].startswith("|"):
                assert len(re.findall(r"(?<!\\)\|", lines[j])) == columns
                j += 1


class _Tags(HTMLParser):
    VOID = {"meta", "img", "br"}

    def __init__(self):
        super().__init__()
        self.open, self.outside = [], []

    def handle_starttag(self, tag, attributes):
        if tag not in self.VOID:
            self.open.append(tag)
        for key, value in attributes:
            if key in ("src", "href") and not value.startswith("data:"):
                self.outside.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_html_is_one_file_and_well_formed(report):
    page = to_html(report)
    parser = _Tags()
    parser.feed(page)
    assert parser.open == [] and parser.outside == []
    assert "http" not in re.sub(r"base64,[A-Za-z0-9+/=]+", "", page)


def test_names_are_escaped(results, report):
    hostile = copy.deepcopy(results)
    hostile["models"]["source"]["name"] = "<script>alert(1)</script>|x"
    report = build(hostile, report.figures)
    assert "<script" not in to_html(report)
    assert "<script" not in to_markdown(report) and "\\|x" in to_markdown(report)


def test_what_was_not_measured_is_left_out(results):
    less = copy.deepcopy(results)
    less["needle"], less["speed"], less["attention_cosine"] = None, [], None
    less["break_even"] = {"warm": None, "cold": None}
    report = build(less, draw_all(less))
    assert set(report.figures) == FIGURES - {"needles", "speed"}
    page = to_html(report)
    assert "Exact recall" not in page and "Speed" not in page
    assert "there is no cosine" in page


def test_an_arm_that_broke_is_shown_as_such(results):
    broken = copy.deepcopy(results)
    broken["arms"][arms.MAPPED] |= {
        "nll": [None] * 3, "gap": [None] * 3, "finite": False, "kl": None, "perplexity": None,
    }  # fmt: skip
    broken["by_distance"]["gap"][arms.MAPPED] = [[None] * 3] * len(broken["by_distance"]["bins"])
    report = build(broken, draw_all(broken))
    assert "not finite" in to_html(report) and "not finite" in to_markdown(report)


def test_figures_come_out_the_same_again(results, report):
    assert draw_all(results) == report.figures


def test_files_are_written_and_written_again(results, tmp_path):
    for _ in range(2):
        files = write_results(tmp_path / "out", results)
    assert [f.name for f in files] == ["report.html", "report.md", "eval.json"]
    assert json.loads(files[2].read_text()) == results
    assert {f.stem for f in (tmp_path / "out" / "figures").iterdir()} == FIGURES
    assert sum(f.stat().st_size for f in files) < 300_000


def test_where_reports_go(tmp_path):
    (tmp_path / "a").mkdir()
    assert default_folder(tmp_path / "a", inside=True) == tmp_path / "a" / "eval"
    assert default_folder(tmp_path / "a", inside=False) == tmp_path / "a-eval"
    assert not is_writable_artifact(tmp_path / "a")
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert default_folder(tmp_path / "b.safetensors", inside=True) == tmp_path / "b-eval"


def test_matplotlib_is_loaded_by_the_report_alone():
    code = (
        "import sys, kvgraft, kvgraft.evaluate.output, kvgraft.cli.main; "
        "from kvgraft.cli.parser import build_parser; build_parser(); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# ------------------------------------------------------------------ a browser

_PLACES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
)

# Tells, in the title, what the browser made of the page.
_PROBE = """<script>
addEventListener("load", () => {
  const wide = [...document.querySelectorAll("main > *")]
    .filter(e => e.getBoundingClientRect().right > innerWidth + 1).map(e => e.className);
  document.title = JSON.stringify({
    images: [...document.images].map(i => [i.complete, i.naturalWidth, i.width]),
    tables: document.querySelectorAll("table").length,
    fetched: performance.getEntriesByType("resource").map(r => r.name)
      .filter(n => !n.startsWith("data:")),
    wide: wide,
    badge: getComputedStyle(document.querySelector(".badge")).backgroundColor,
  });
});
</script>"""


@pytest.fixture(scope="module")
def browser():
    found = next((p for p in map(shutil.which, _PLACES) if p), None)
    if found is None:
        assert not os.environ.get("KVGRAFT_CI"), "a build machine has a browser: install chromium"
        pytest.skip("no Chromium or Chrome here")
    return found


def run_browser(browser: str, profile: Path, *options: str) -> str:
    command = [
        browser,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *("--no-first-run", f"--user-data-dir={profile}", "--virtual-time-budget=5000"),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("width", [1000, 500])
def test_a_browser_shows_it(report, browser, tmp_path, width):
    page = tmp_path / "report.html"
    page.write_text(to_html(report).replace("</body>", _PROBE + "</body>"))
    size = f"--window-size={width},1400"
    dom = run_browser(browser, tmp_path / "p", "--dump-dom", size, page.as_uri())
    found = json.loads(re.search(r"<title>(.*?)</title>", dom, re.S)[1])
    assert len(found["images"]) == len(FIGURES)
    for complete, natural, shown in found["images"]:
        assert complete and natural > 400 and shown > min(400, width * 0.7)
    assert found["tables"] == 5 and found["fetched"] == [] and found["wide"] == []
    assert found["badge"] == "rgb(254, 226, 226)", "do not ship is red"


def test_the_screen_is_not_blank(report, browser, tmp_path):
    page = tmp_path / "report.html"
    page.write_text(to_html(report))
    shot = tmp_path / "shot.png"
    run_browser(
        browser, tmp_path / "p", f"--screenshot={shot}", "--window-size=1000,3000", page.as_uri()
    )
    pixels = matplotlib.image.imread(shot)[..., :3]
    assert pixels.shape[:2] == (3000, 1000)
    # Ink in every part of the page, not only at its top.
    for part in np.array_split(pixels, 6):
        assert part.std() > 0.02
