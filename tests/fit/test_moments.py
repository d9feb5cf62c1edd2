"""Streaming moments against all rows at once, and their files."""

from __future__ import annotations

import gc
import tracemalloc

import numpy as np
import pytest
from fit_problems import cut, gathered, geometry, noise, side_by_side
from safetensors import safe_open

from kvgraft.errors import FitError, FormatError, TruncatedFileError, VersionError
from kvgraft.files.safetensors import Writer, write_arrays
from kvgraft.fit import FeatureRows, Moments, MomentSet
from kvgraft.models.geometry import ModelGeometry

ROWS = 301


def problem(rows=ROWS, seed=0):
    rng = np.random.default_rng(seed)
    source, target = geometry(3, 2, 8, 6), geometry(2, 2, 4, 10)
    return source, target, noise(source, rows, rng, 30.0), noise(target, rows, rng, 30.0)


def everything(moments: Moments, kind: str, heads=None, target_heads=None):
    """All that can be asked of moments, as one list of arrays."""
    view = MomentSet(moments)
    layers = range(len(moments.source.layers))
    out = [np.array(view.count(kind)), view.xx(kind, layers, heads)]
    for t in moments.targets:
        out += [view.xy(kind, layers, heads, [t], target_heads)]
        out += [view.yy(kind, heads, [t], target_heads)]
        out += view.means(kind, layers, heads, [t], target_heads)
    return out


def expected(
    source: FeatureRows, target: FeatureRows, kind: str, heads, target_heads, weights=None
):
    x = side_by_side(source.of(kind), heads)
    w = np.ones(len(x)) if weights is None else weights
    x_mean = np.average(x, axis=0, weights=w)
    xc = x - x_mean
    out = [np.array(w.sum()), (xc * w[:, None]).T @ xc]
    for layer in target.of(kind):
        y = side_by_side([layer], target_heads)
        y_mean = np.average(y, axis=0, weights=w)
        yc = y - y_mean
        out += [(xc * w[:, None]).T @ yc, (w[:, None] * yc**2).sum(axis=0), x_mean, y_mean]
    return out


def assert_close(got, want, tolerance=1e-5):
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("kind", ["keys", "values"])
@pytest.mark.parametrize("chunk_rows", [1, 50, 10_000])
@pytest.mark.parametrize("weighted", [False, True])
def test_equals_all_rows_at_once(kind, chunk_rows, weighted):
    source_geo, target_geo, source, target = problem()
    weights = np.random.default_rng(5).uniform(0.1, 4, ROWS) if weighted else None
    got = gathered(source_geo, target_geo, source, target, chunk_rows=chunk_rows, weights=weights)
    want = expected(source, target, kind, None, None, weights)
    assert_close(everything(got, kind), want)
    # Sub-blocks in another order and of single heads.
    view = MomentSet(got)
    x = side_by_side([source.of(kind)[2], source.of(kind)[0]], [1])
    w = np.ones(ROWS) if weights is None else weights
    xc = x - np.average(x, axis=0, weights=w)
    assert_close([view.xx(kind, (0, 2), (1,))], [_reordered((xc * w[:, None]).T @ xc)])


def _reordered(m: np.ndarray) -> np.ndarray:
    """Blocks (2, 0) as (0, 2)."""
    h = len(m) // 2
    order = np.r_[h : 2 * h, 0:h]
    return m[np.ix_(order, order)]


@pytest.mark.parametrize("head", [0, 1])
def test_head_structure_holds_the_same_numbers(head):
    source_geo, target_geo, source, target = problem()
    local = gathered(source_geo, target_geo, source, target, structure="heads")
    want = expected(source, target, "keys", [head], [head])
    assert_close(everything(local, "keys", (head,), (head,)), want)
    full = gathered(source_geo, target_geo, source, target)
    assert_close(everything(full, "keys", (head,), (head,)), want)
    assert local.nbytes < 0.6 * full.nbytes
    with pytest.raises(FitError, match="head_mapping='local' only"):
        MomentSet(local).xx("keys", (0,), None)
    with pytest.raises(FitError, match="same head of the target"):
        MomentSet(local).xy("keys", (0,), (0,), [0], (1,))


def test_parts_by_kind_head_and_target_serve_like_one():
    source_geo, target_geo, source, target = problem()
    whole = MomentSet(gathered(source_geo, target_geo, source, target, structure="heads"))
    parts = MomentSet(
        [
            gathered(
                source_geo,
                target_geo,
                source,
                target,
                structure="heads",
                kinds=(kind,),
                heads=(head,),
                targets=(t,),
            )
            for kind in ("keys", "values")
            for head in (0, 1)
            for t in (0, 1)
        ]
    )
    for kind in ("keys", "values"):
        for h in ((0,), (1,)):
            for t in (0, 1):
                a = whole.xy(kind, (1, 2), h, [t], h), whole.yy(kind, h, [t], h)
                b = parts.xy(kind, (1, 2), h, [t], h), parts.yy(kind, h, [t], h)
                assert_close(b, a, 1e-6)


def test_merging_equals_one_run():
    source_geo, target_geo, source, target = problem()
    one = gathered(source_geo, target_geo, source, target)
    a = gathered(source_geo, target_geo, cut(source, 0, 90), cut(target, 0, 90))
    b = gathered(source_geo, target_geo, cut(source, 90, ROWS), cut(target, 90, ROWS))
    a.merge(b)
    for kind in ("keys", "values"):
        assert_close(everything(a, kind), everything(one, kind), 1e-6)
    empty = Moments(source_geo, target_geo)
    empty.merge(one)
    one.merge(Moments(source_geo, target_geo))
    assert_close(everything(empty, "keys"), everything(one, "keys"), 0)
    with pytest.raises(FitError, match="cannot be merged"):
        one.merge(Moments(target_geo, source_geo))


def test_effective_count():
    source_geo, target_geo, source, target = problem(4)
    weights = np.array([1.0, 1.0, 2.0, 0.0])
    got = gathered(source_geo, target_geo, source, target, weights=weights)
    assert got.effective_count("keys") == pytest.approx(16 / 6)
    assert got.count("keys") == 4


@pytest.mark.parametrize("structure", ["full", "heads"])
@pytest.mark.parametrize("mapped", [False, True])
def test_file_holds_the_same_numbers(tmp_path, structure, mapped):
    source_geo, target_geo, source, target = problem()
    moments = gathered(source_geo, target_geo, source, target, structure=structure)
    moments.save(tmp_path / "m.safetensors", {"note": "α"})
    back, info = Moments.load(tmp_path / "m.safetensors", mapped=mapped)
    assert info == {"note": "α"}
    head = (1,) if structure == "heads" else None
    assert_close(
        everything(back, "values", head, head), everything(moments, "values", head, head), 0
    )
    if not mapped:  # it can go on from there
        back.add(source, target)
        moments.add(source, target)
        a, b = everything(back, "keys", head, head), everything(moments, "keys", head, head)
        assert_close(a, b, 0)
    # It is a safetensors file like any other.
    with safe_open(tmp_path / "m.safetensors", "np") as file:
        name = "keys.mean" if structure == "full" else "keys.1.mean"
        assert file.get_tensor(name).shape[0] > 0


def test_bad_files_are_refused(tmp_path):
    source_geo, target_geo, source, target = problem(20)
    path = tmp_path / "m.safetensors"
    moments = gathered(source_geo, target_geo, source, target)
    moments.save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(TruncatedFileError):
        Moments.load(path)
    path.write_bytes(b"not a file of that kind" * 10)
    with pytest.raises(FormatError):
        Moments.load(path)
    write_arrays(path, {"a": np.zeros(2)}, {})
    with pytest.raises(FormatError, match="not a kvgraft moments file"):
        Moments.load(path)
    write_arrays(path, {"a": np.zeros(2)}, {"format": "kvgraft-moments", "format_version": "99"})
    with pytest.raises(VersionError, match="99"):
        Moments.load(path)
    with pytest.raises(FormatError):
        Moments.load(tmp_path / "absent")


def test_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    source_geo, target_geo, source, target = problem(20)
    path = tmp_path / "m.safetensors"
    moments = gathered(source_geo, target_geo, source, target)
    moments.save(path)
    before = path.read_bytes()

    def full(self, *args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Writer, "write", full)
    with pytest.raises(FitError, match="the disk is full"):
        moments.save(path)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["m.safetensors"]


def test_wrong_shapes_are_refused():
    source_geo, target_geo, source, target = problem(5)
    moments = Moments(source_geo, target_geo)
    with pytest.raises(FitError, match="do not fit the geometry"):
        moments.add(target, target)
    with pytest.raises(FitError, match="do not fit the geometry"):
        moments.add(source, cut(target, 0, 4))


def test_unequal_heads_have_no_head_structure():
    with pytest.raises(FitError, match="same number of KV heads"):
        Moments(geometry(1, 2, 4), geometry(1, 1, 4), structure="heads")


def test_planned_bytes_are_the_bytes():
    source_geo, target_geo = geometry(5, 2, 16), geometry(4, 2, 8)
    for options in ({}, {"structure": "heads"}, {"kinds": ("keys",), "targets": (1, 2)}):
        moments = Moments(source_geo, target_geo, **options)
        held = sum(
            b.mean.nbytes + b.squares.nbytes + sum(r.nbytes for r in b.rows)
            for b in moments._blocks.values()
        )
        assert moments.nbytes == held
        assert Moments.planned_bytes(source_geo, target_geo, **options) == held


def test_peak_memory_does_not_grow_with_the_text():
    source_geo, target_geo = geometry(3, 1, 32), geometry(3, 1, 32)

    def peak(sequences: int) -> int:
        rng = np.random.default_rng(0)
        gc.collect()
        tracemalloc.start()
        moments = Moments(source_geo, target_geo, chunk_rows=64)
        for _ in range(sequences):
            moments.add(noise(source_geo, 32, rng), noise(target_geo, 32, rng))
        moments.flush()
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert moments.count("keys") == 32 * sequences
        return top

    few, many = peak(4), peak(40)
    all_rows = 40 * 32 * 4 * 2 * (source_geo_width(source_geo) + source_geo_width(target_geo))
    assert many < few + 0.05 * all_rows


def source_geo_width(geo: ModelGeometry) -> int:
    return sum(layer.n_kv_heads * layer.key_dim for layer in geo.layers)


def test_nearly_dependent_features():
    """What tells features of one layer from those of another, as alike as real ones are.

    With float32 products the error here is a third of the smallest eigenvalue.
    """
    source, target = geometry(2, 1, 4), geometry(1, 1, 4)
    rng = np.random.default_rng(3)
    rows = noise(source, 6000, rng, 30.0)
    first = rows.keys[0]
    little = 1e-3 * first.std(axis=1, keepdims=True) * rng.standard_normal(first.shape)
    rows.keys[1] = (first + little).astype(np.float32)
    moments = gathered(source, target, rows, noise(target, 6000, rng), step=512)
    want = expected(rows, rows, "keys", None, None)[1]
    got = MomentSet(moments).xx("keys", (0, 1), None)
    scale = np.sqrt(np.outer(np.diag(want), np.diag(want)))
    smallest = np.linalg.eigvalsh(want / scale)[0]
    assert smallest < 1e-6  # of a largest one of 2
    assert np.abs(np.linalg.eigvalsh((got - want) / scale)).max() < 1e-6 * smallest
