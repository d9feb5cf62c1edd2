"""The report, in Markdown and in HTML."""

from __future__ import annotations

import copy
import html
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from eval_problems import SMALL, identity
from fit_problems import prose, save_model

from kvgraft.evaluate import arms
from kvgraft.evaluate.arms import short_name
from kvgraft.evaluate.output import default_folder, is_writable_artifact, write_results
from kvgraft.evaluate.plots import draw_all
from kvgraft.evaluate.report import build, to_markdown
from kvgraft.evaluate.report_html import to_html
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
            assert short_name(name) in text
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


def test_without_matplotlib_the_report_has_no_figures_and_says_how_to_get_them(
    results, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    files = write_results(tmp_path / "out", results)
    assert json.loads(files[2].read_text()) == results
    for file in files[:2]:
        text = html.unescape(file.read_text())
        assert 'pip install "kvgraft[report]"' in text
        assert "figures/" not in text and "<img" not in text
    assert not (tmp_path / "out" / "figures").exists()


def test_where_reports_go(tmp_path):
    (tmp_path / "a").mkdir()
    assert default_folder(tmp_path / "a", inside=True) == tmp_path / "a" / "eval"
    assert default_folder(tmp_path / "a", inside=False) == tmp_path / "a-eval"
    assert not is_writable_artifact(tmp_path / "a")
    (tmp_path / "b.safetensors").write_bytes(b"")
    assert default_folder(tmp_path / "b.safetensors", inside=True) == tmp_path / "b-eval"


def test_matplotlib_is_loaded_for_figures_only():
    code = (
        "import sys, kvgraft, kvgraft.evaluate.output, kvgraft.cli.main; "
        "from kvgraft.cli.parser import build_parser; build_parser('eval'); "
        "sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
