"""Prompt-cache files of both layouts, and mlx-lm's own programs on what is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mappers
import mlx.core as mx
import mlx_lm
import numpy as np
import pytest
import zoo
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    BatchRotatingKVCache,
    CacheList,
    ChunkedKVCache,
    KVCache,
    RotatingKVCache,
    load_prompt_cache,
    make_prompt_cache,
    save_prompt_cache,
    trim_prompt_cache,
)
from tiny_tokenizer import tokenizer

from kvgraft.cache import Provenance, is_mapped, mark, provenance_of, read_cache
from kvgraft.cache.map import map_cache
from kvgraft.cache.prompt_files import is_prompt_file, read_prompt_file, write_prompt_file
from kvgraft.cli.main import main
from kvgraft.demo.data import bundled
from kvgraft.errors import (
    ArtifactWriteError,
    CacheError,
    CacheFileNotFoundError,
    FormatError,
    GeometryError,
    PairMismatchError,
    TruncatedFileError,
    UnsupportedCacheError,
)
from kvgraft.handoff.transfer_file import prompt_tokens, transfer_file
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.quality import Quality
from kvgraft.models.forward import prefill
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry
from kvgraft.models.token_ranges import TokenRanges

H, D = 2, 64
SECRET = 12345.678  # a number that stands for words that must not be in a file
LARGE, SMALL = str(bundled("models/large")), str(bundled("models/small"))
MAPPER = str(bundled("mapper"))
PROMPT = (
    "Tell me about the harbour. Anna keeps the key of the boat house under the third stone, and "
    "nobody but her brother knows it."
)


def rows(n: int, seed: int = 0, dim: int = D) -> mx.array:
    return mx.random.normal((1, H, n, dim), key=mx.random.key(seed))


def kinds() -> dict[str, Any]:
    """One filled cache of each kind, by name."""
    plain = KVCache()
    plain.update_and_fetch(rows(5), -rows(5))
    kept = RotatingKVCache(max_size=8, keep=2)
    window = RotatingKVCache(max_size=8)
    for i in range(19):
        kept.update_and_fetch(rows(1, i), -rows(1, i))
        window.update_and_fetch(rows(1, i), -rows(1, i))
    young = RotatingKVCache(max_size=300)
    for i in range(3):
        young.update_and_fetch(rows(1, i), -rows(1, i))
    other = KVCache()
    other.update_and_fetch(rows(5, 7), -rows(5, 7))
    return {
        "plain": plain,
        "quantised": plain.to_quantized(group_size=32, bits=4),
        "kept": kept,
        "window": window,
        "young": young,
        "list": CacheList(plain, other),
    }


def file_031(path: Path, cache: list[Any], metadata: dict[str, str]) -> None:
    """What mlx-lm 0.31 writes, from the outside of the cache objects."""

    def state(c: Any) -> Any:
        if isinstance(c, CacheList):
            return [state(inner) for inner in c.caches]
        if isinstance(c, (BatchKVCache, BatchRotatingKVCache)):
            n = getattr(c, "_offset", c._idx)
            return c.keys[..., :n, :], c.values[..., :n, :], c.offset, c.left_padding
        return c.keys_and_values() if hasattr(c, "keys_and_values") else c.state

    def info(c: Any) -> Any:
        if isinstance(c, CacheList):
            return [type(i).__name__ for i in c.caches], [info(i) for i in c.caches]
        if isinstance(c, RotatingKVCache):
            return tuple(map(str, (c.keep, c.max_size, c.offset, c._idx)))
        if isinstance(c, BatchRotatingKVCache):
            return tuple(map(str, (c.max_size, c._offset, c._idx, c.rotated)))
        if hasattr(c, "bits"):
            return tuple(map(str, (c.offset, c.group_size, c.bits)))
        return ""

    arrays = dict(tree_flatten([state(c) for c in cache]))
    header = [[info(c) for c in cache], metadata, [type(c).__name__ for c in cache]]
    mx.save_safetensors(str(path), arrays, dict(tree_flatten(header)))


def file_032(path: Path, cache: list[Any], metadata: dict[str, str]) -> None:
    """What mlx-lm 0.32 writes."""
    scalars: list[Any] = [""]

    def state(c: Any) -> Any:
        if isinstance(c, CacheList):
            return [(state(inner), type(inner).__name__) for inner in c.caches]
        if isinstance(c, BatchKVCache):
            return c.keys, c.values, c.offset, c.left_padding, c._idx
        if isinstance(c, BatchRotatingKVCache):
            counters = (c.max_size, c._offset, c._idx, c.rotated)
            return c.keys, c.values, c.offset, c.left_padding, *counters
        if isinstance(c, RotatingKVCache):
            return c.keys, c.values, c.offset, c.keep, c.max_size, c._idx
        if hasattr(c, "bits"):
            return c.keys, c.values, c.offset, c.group_size, c.bits
        return c.keys, c.values, c.offset

    arrays = {}
    for key, value in tree_flatten([state(c) for c in cache]):
        if isinstance(value, mx.array):
            arrays[key] = value
        elif isinstance(value, str):
            scalars.append((key, "string"))
            arrays[key] = mx.array([ord(c) for c in value])
        elif value is None:
            scalars.append((key, "none"))
            arrays[key] = mx.array([])
        else:
            scalars.append((key, "scalar"))
            arrays[key] = mx.array(value)
    header = [metadata, [type(c).__name__ for c in cache], scalars]
    mx.save_safetensors(str(path), arrays, dict(tree_flatten(header)))


WRITERS = {"0.31": file_031, "0.32": file_032}
INSTALLED = "0.32" if zoo.MLX_LM >= (0, 32) else "0.31"


def content(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    arrays, metadata = mx.load(str(path), return_metadata=True)
    return arrays, metadata


def same_cache(a: list[Any], b: list[Any]) -> None:
    x, y = read_cache(a), read_cache(b)
    assert x.offset == y.offset and x.token_ranges == y.token_ranges
    for got, want in zip(x.keys + x.values, y.keys + y.values, strict=True):
        assert got.dtype == want.dtype and mx.array_equal(got, want)


# --------------------------------------------------------------------- reading


@pytest.mark.parametrize("kind", list(kinds()))
def test_the_layout_here_is_the_one_that_mlx_lm_writes(kind: str, tmp_path: Path) -> None:
    cache, said = [kinds()[kind]] * 2, {"model": "m", "tokenizer_config": "{}"}
    WRITERS[INSTALLED](tmp_path / "ours.safetensors", cache, said)
    save_prompt_cache(str(tmp_path / "theirs.safetensors"), cache, said)
    (ours, header), (theirs, wanted) = (
        content(tmp_path / f"{who}.safetensors") for who in ("ours", "theirs")
    )
    assert header == wanted and ours.keys() == theirs.keys()
    assert all(mx.array_equal(ours[k], theirs[k]) for k in ours)


@pytest.mark.parametrize("layout", list(WRITERS))
@pytest.mark.parametrize("kind", list(kinds()))
def test_both_layouts_are_read(kind: str, layout: str, tmp_path: Path) -> None:
    path = tmp_path / "cache.safetensors"
    cache = [kinds()[kind], kinds()[kind]]
    said = {"model": "some/model", "tokenizer_config": '{"a": 1}', "mine": "yes"}
    WRITERS[layout](path, cache, said)
    assert is_prompt_file(path)
    found = read_prompt_file(path)
    assert found.layout == layout and found.metadata == said and found.model == "some/model"
    assert found.tokens is None and found.provenance is None
    assert [type(c) for c in found.cache] == [type(c) for c in cache]
    same_cache(found.cache, cache)
    if kind == "plain":  # the buffer behind is left out
        assert found.cache[0].keys.shape[2] == found.cache[0].offset == 5


@pytest.mark.parametrize("layout", list(WRITERS))
def test_a_batch_in_a_file_is_read_by_row(layout: str, tmp_path: Path) -> None:
    a, b = KVCache(), KVCache()
    a.update_and_fetch(rows(3, 1), -rows(3, 1))
    b.update_and_fetch(rows(7, 2), -rows(7, 2))
    batch = KVCache.merge([a, b])
    x = mx.concatenate([rows(1, 3), rows(1, 4)])
    batch.update_and_fetch(x, x)  # so that there is a buffer behind
    WRITERS[layout](tmp_path / "b.safetensors", [batch], {})
    found = read_prompt_file(tmp_path / "b.safetensors").cache
    for i, n in enumerate((4, 8)):
        got, want = read_cache(found, row=i), read_cache([batch], row=i)
        assert got.offset == n and mx.array_equal(got.keys[0], want.keys[0])


@pytest.mark.parametrize("steps", [1, 9])
@pytest.mark.parametrize("layout", list(WRITERS))
def test_a_batch_of_rings_in_a_file_is_read_by_row(layout: str, steps: int, tmp_path: Path) -> None:
    rings = []
    for n in (3, 20):
        ring = RotatingKVCache(max_size=8)
        ring.update_and_fetch(rows(n, n), -rows(n, n))
        rings.append(ring)
    batch = RotatingKVCache.merge(rings)
    for i in range(steps):
        x = mx.concatenate([rows(1, 100 + i), rows(1, 200 + i)])
        batch.update_and_fetch(x, -x)
        for j, ring in enumerate(rings):
            ring.update_and_fetch(x[j : j + 1], -x[j : j + 1])
    save = [batch]
    said = {"model": "m", "tokenizer_config": "{}"}
    WRITERS[layout](tmp_path / "b.safetensors", save, said)
    if layout == INSTALLED:
        save_prompt_cache(str(tmp_path / "theirs.safetensors"), save, said)
        ours, theirs = content(tmp_path / "b.safetensors"), content(tmp_path / "theirs.safetensors")
        assert ours[1] == theirs[1]
        assert all(mx.array_equal(ours[0][k], theirs[0][k]) for k in theirs[0])
    found = read_prompt_file(tmp_path / "b.safetensors").cache
    for i, ring in enumerate(rings):
        got, want = read_cache(found, row=i), read_cache([ring])
        assert got.offset == want.offset
        part = got.token_ranges[0] & want.token_ranges[0]
        assert part.covers(TokenRanges.last(got.offset, 8))
        for name in ("keys", "values"):
            a, b = getattr(got, name)[0], getattr(want, name)[0]
            assert mx.array_equal(
                got.token_ranges[0].take(part, a), want.token_ranges[0].take(part, b)
            )


@pytest.mark.parametrize("layout", list(WRITERS))
def test_more_than_ten_layers_stay_in_order(layout: str, tmp_path: Path) -> None:
    cache = []
    for i in range(61):
        entry = KVCache()
        entry.update_and_fetch(mx.full((1, 1, 2, 4), float(i)), mx.full((1, 1, 2, 4), float(i)))
        cache.append(entry)
    WRITERS[layout](tmp_path / "c.safetensors", cache, {})
    snapshot = read_cache(read_prompt_file(tmp_path / "c.safetensors").cache)
    assert [k[0, 0, 0, 0].item() for k in snapshot.keys] == list(range(61))


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text"])
@pytest.mark.parametrize("layout", list(WRITERS))
def test_a_model_goes_on_from_a_file_of_either_layout(
    name: str, layout: str, tmp_path: Path
) -> None:
    model = zoo.make(name)
    native = prefill(model, list(range(1, 22)))
    WRITERS[layout](tmp_path / "c.safetensors", native, {})
    read = read_prompt_file(tmp_path / "c.safetensors").cache
    for ids in ([[5]], [[6, 7, 8]], [[9]]):
        want, got = model(mx.array(ids), cache=native), model(mx.array(ids), cache=read)
        assert mx.array_equal(got, want)


@pytest.mark.parametrize("layout", list(WRITERS))
@pytest.mark.parametrize("entry", [ChunkedKVCache(8), ArraysCache(2)])
def test_other_kinds_are_refused_by_name(layout: str, entry: Any, tmp_path: Path) -> None:
    name = type(entry).__name__
    header = {"0.31": {"0.0": "", "2.0": name}, "0.32": {"1.0": name, "2.0": ""}}[layout]
    mx.save_safetensors(str(tmp_path / "c.safetensors"), {"0.0": rows(1)}, header)
    with pytest.raises(UnsupportedCacheError, match=f"Layer 0 of the file is a {name}"):
        read_prompt_file(tmp_path / "c.safetensors")


def test_an_empty_cache_of_032_is_told(tmp_path: Path) -> None:
    file_032(tmp_path / "c.safetensors", [KVCache()], {})
    with pytest.raises(CacheError, match="empty"):
        read_cache(read_prompt_file(tmp_path / "c.safetensors").cache)


def test_what_is_no_prompt_cache_is_told(tmp_path: Path) -> None:
    with pytest.raises(CacheFileNotFoundError, match="mlx_lm.cache_prompt") as caught:
        read_prompt_file(tmp_path / "none.safetensors")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(FormatError, match="weights of a model"):
        read_prompt_file(Path(SMALL) / "model.safetensors")
    (tmp_path / "text.safetensors").write_text("hello, this is no cache at all")
    with pytest.raises(FormatError):
        read_prompt_file(tmp_path / "text.safetensors")
    assert not is_prompt_file(tmp_path / "text.safetensors")


@pytest.mark.parametrize("layout", list(WRITERS))
def test_damaged_files_are_told(layout: str, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    WRITERS[layout](path, [kinds()["window"]], {})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TruncatedFileError):
        read_prompt_file(path)
    WRITERS[layout](path, [kinds()["window"]], {})
    arrays, header = content(path)
    # A class that does not go with the arrays, and arrays that are missing.
    renamed = {k: v.replace("Rotating", "Quantized") for k, v in header.items()}
    mx.save_safetensors(str(path), arrays, renamed)
    with pytest.raises((FormatError, CacheError)):
        read_cache(read_prompt_file(path).cache)
    mx.save_safetensors(str(path), {"0.0": arrays["0.0"]}, header)
    with pytest.raises(FormatError, match="don't fit together"):
        read_prompt_file(path)


# --------------------------------------------------------------------- writing


@pytest.mark.parametrize("kind", list(kinds()))
def test_what_is_written_loads_into_mlx_lm(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    cache = [kinds()[kind], kinds()[kind]]
    write_prompt_file(path, cache, model="org/target", tokenizer_config='{"x": 1}')
    loaded, said = load_prompt_cache(str(path), return_metadata=True)
    assert said == {"model": "org/target", "tokenizer_config": '{"x": 1}'}
    same_cache(list(loaded), cache)
    same_cache(read_prompt_file(path).cache, cache)
    assert [p.name for p in tmp_path.iterdir()] == ["c.safetensors"]


def fill_secret(entry: Any, n: int) -> None:
    x = mx.full((1, H, n, D), SECRET)
    entry.update_and_fetch(x, x)


def test_trimmed_tokens_are_not_in_the_file(tmp_path: Path) -> None:
    secret = bytes(memoryview(mx.full((1,), SECRET)))
    cache = [KVCache(), RotatingKVCache(max_size=64), CacheList(KVCache(), KVCache())]
    leaves = [cache[0], cache[1], *cache[2].caches]
    for entry in leaves:
        entry.update_and_fetch(rows(4), -rows(4))
        fill_secret(entry, 6)
    assert trim_prompt_cache(cache, 6) == 6
    for entry in leaves:
        assert secret in bytes(memoryview(entry.keys))  # it is still in memory
    path = tmp_path / "c.safetensors"
    write_prompt_file(path, cache, model="m")
    assert secret not in path.read_bytes()
    same_cache(read_prompt_file(path).cache, cache)
    for name, x in content(path)[0].items():
        assert x.ndim != 4 or x.shape[2] == 4, name
    # The same after quantising, where the words don't show as such.
    quantised = [cache[0].to_quantized(group_size=32, bits=8)]
    write_prompt_file(path, quantised, model="m")
    assert all(x.shape[2] == 4 for x in content(path)[0].values() if x.ndim == 4)


def test_tokens_that_left_the_window_are_not_in_the_file(tmp_path: Path) -> None:
    secret = bytes(memoryview(mx.full((1,), SECRET)))
    entry = RotatingKVCache(max_size=8)
    fill_secret(entry, 3)
    entry = RotatingKVCache(max_size=8)
    entry.update_and_fetch(
        mx.concatenate([mx.full((1, H, 12, D), SECRET), rows(8)], axis=2),
        mx.concatenate([mx.full((1, H, 12, D), SECRET), rows(8)], axis=2),
    )
    assert entry.keys.shape[2] == 20  # one call leaves all of it in the buffer
    write_prompt_file(tmp_path / "c.safetensors", [entry], model="m")
    assert secret not in (tmp_path / "c.safetensors").read_bytes()


def test_a_padded_buffer_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    entry = KVCache()
    entry.update_and_fetch(rows(5), rows(5))
    write_prompt_file(path, [entry], model="m")
    assert entry.keys.shape[2] == 256 and entry.offset == 5  # the original is as it was
    assert path.stat().st_size < 2 * 5 * H * D * 4 + 2000


def test_the_mark_and_the_tokens_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    cache = [kinds()["plain"]]
    first = Provenance("big", "small", "a mapper", 5)
    second = Provenance("small", "tiny", "another", 5, before=first)
    mark(cache, second)
    write_prompt_file(
        path, cache, model="m", metadata={"mine": "1", "kvgraft_tokens": "x"}, tokens=range(5)
    )
    found = read_prompt_file(path)
    assert found.provenance == second and is_mapped(found.cache)
    assert found.tokens == (0, 1, 2, 3, 4) and found.metadata["mine"] == "1"
    # mlx-lm reads it as well, and shows the mark to whoever looks.
    _, said = load_prompt_cache(str(path), return_metadata=True)
    assert json.loads(said["kvgraft_provenance"])["source"] == "small"
    # A native cache written with the old metadata does not inherit the mark.
    write_prompt_file(path, [kinds()["plain"]], model="m", metadata=found.metadata)
    assert read_prompt_file(path).provenance is None


@pytest.mark.parametrize(
    "said", [{"kvgraft_provenance": "[1]"}, {"kvgraft_tokens": '["a"]'}, {"kvgraft_tokens": "{"}]
)
def test_damaged_marks_are_told(said: dict[str, str], tmp_path: Path) -> None:
    WRITERS[INSTALLED](tmp_path / "c.safetensors", [kinds()["plain"]], said)
    with pytest.raises(FormatError, match="can't be read"):
        read_prompt_file(tmp_path / "c.safetensors")


def test_other_files_are_not_overwritten(tmp_path: Path) -> None:
    cache = [kinds()["plain"]]
    with pytest.raises(ArtifactWriteError, match=r"called \*.safetensors"):
        write_prompt_file(tmp_path / "c.bin", cache, model="m")
    weights = tmp_path / "model.safetensors"
    shutil.copy(Path(SMALL) / "model.safetensors", weights)
    before = weights.read_bytes()
    with pytest.raises(ArtifactWriteError, match="is no prompt cache; it is not overwritten"):
        write_prompt_file(weights, cache, model="m")
    assert weights.read_bytes() == before
    write_prompt_file(tmp_path / "c.safetensors", cache, model="m")
    write_prompt_file(tmp_path / "c.safetensors", cache, model="n")
    assert read_prompt_file(tmp_path / "c.safetensors").model == "n"


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, *args: Any) -> None:
        Path(name).write_text("half")
        raise RuntimeError("disk on fire")

    monkeypatch.setattr("mlx_lm.models.cache.save_prompt_cache", fail)
    with pytest.raises(ArtifactWriteError, match="disk on fire"):
        write_prompt_file(tmp_path / "c.safetensors", [kinds()["plain"]], model="m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cache", "error"),
    [
        ([KVCache()], CacheError),
        ([BatchKVCache([0, 0])], UnsupportedCacheError),
        ([ArraysCache(2)], UnsupportedCacheError),
        (KVCache(), CacheError),
    ],
)
def test_caches_that_cannot_be_written_are_told(
    cache: Any, error: type[Exception], tmp_path: Path
) -> None:
    with pytest.raises(error):
        write_prompt_file(tmp_path / "c.safetensors", cache, model="m")
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------- transfer and mlx-lm's programs


def run(*args: str, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *args],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prompt that mlx_lm.cache_prompt read with the source model."""
    path = tmp_path_factory.mktemp("prompt") / "large.safetensors"
    done = run(
        "mlx_lm", "cache_prompt", "--model", LARGE, "--prompt", PROMPT,
        "--prompt-cache-file", str(path),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    return {"large": load_model(LARGE), "small": load_model(SMALL), "mapper": Mapper.load(MAPPER)}


def ids_of(pair: dict[str, Any], prompt_file: Path) -> list[int]:
    n = read_cache(read_prompt_file(prompt_file).cache).offset
    return list(prompt_tokens(pair["small"].tokenizer, PROMPT, n))


def test_from_cache_prompt_through_transfer_to_generate(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "small.safetensors"
    done = run(
        "kvgraft", "transfer", str(prompt_file), str(out), "--mapper", MAPPER,
        "--target", SMALL,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Mapped" in done.stdout and "mlx_lm.generate --prompt-cache-file" in done.stdout
    question = " Where is the key?"
    said = run(
        "mlx_lm", "generate", "--prompt-cache-file", str(out), "--prompt", question,
        "--max-tokens", "12", "--verbose", "F",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr

    # The same in one process: native prefill of the source, map, go on.
    small, large = pair["small"], pair["large"]
    ids = ids_of(pair, prompt_file)
    cache = map_cache(prefill(large.model, ids), pair["mapper"], small.model)
    template = small.tokenizer.apply_chat_template(
        [{"role": "user", "content": "<query>"}], tokenize=False, add_generation_prompt=True
    )
    # The template strips the text, as it does in mlx_lm.generate.
    rest = question.strip() + template[template.index("<query>") + len("<query>") :]
    want = mlx_lm.generate(
        small.model,
        small.tokenizer,
        small.tokenizer.encode(rest, add_special_tokens=False),
        max_tokens=12,
        prompt_cache=cache,
    )
    assert want and said.stdout.strip() == want.strip()
    # Another model's name is refused by mlx-lm itself.
    wrong = run(
        "mlx_lm", "generate", "--prompt-cache-file", str(out), "--model", LARGE, "--prompt", "x",
    )  # fmt: skip
    assert wrong.returncode != 0 and "different model" in wrong.stderr


def test_transfer_marks_and_keeps_what_the_file_said(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "small.safetensors"
    done = transfer_file(prompt_file, out, pair["mapper"], SMALL)
    given, made = read_prompt_file(prompt_file), read_prompt_file(out)
    n = read_cache(given.cache).offset
    assert (done.n_tokens, done.n_mapped) == (n, n)
    assert made.model == SMALL and made.layout == INSTALLED
    assert made.metadata["tokenizer_config"] == given.metadata["tokenizer_config"]
    found = made.provenance
    assert found is not None and found.n_tokens == n and found.before is None
    want = map_cache(given.cache, pair["mapper"], pair["small"].model)
    same_cache(made.cache, want)
    # Mapping what was mapped is told; here it doesn't even fit.
    with pytest.raises(GeometryError):
        transfer_file(out, tmp_path / "again.safetensors", pair["mapper"], SMALL)


@pytest.mark.parametrize(("head", "tail"), [(5, 0), (0, 7), (4, 3)])
def test_native_start_and_end_are_read_by_the_target(
    head: int, tail: int, prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "small.safetensors"
    done = transfer_file(
        prompt_file,
        out,
        pair["mapper"],
        SMALL,
        prompt=PROMPT,
        native_start=head,
        native_end=tail + 1,
    )
    ids = ids_of(pair, prompt_file)
    n = len(ids)
    assert done.n_mapped == n - head - tail
    made = read_prompt_file(out)
    assert made.tokens == tuple(ids) and made.provenance.n_tokens == n - head - tail
    got = read_cache(made.cache)
    model = pair["small"].model
    native = read_cache(prefill(model, ids[:head])) if head else None
    mapped = map_cache(read_prompt_file(prompt_file).cache, pair["mapper"], model)
    trim_prompt_cache(mapped, tail)
    for i, entry in enumerate(mapped):
        if native is not None:
            assert mx.array_equal(got.keys[i][:, :, :head], native.keys[i])
            entry.keys[..., :head, :] = native.keys[i]
            entry.values[..., :head, :] = native.values[i]
    if tail:
        model(mx.array([ids[n - tail :]]), cache=mapped)
    for i, entry in enumerate(mapped):
        assert entry.offset == got.offset == n
        assert mx.allclose(got.keys[i], entry.keys[..., :n, :], atol=1e-3)
        assert mx.allclose(got.values[i], entry.values[..., :n, :], atol=1e-3)
    # The ids in the file serve the next time.
    assert read_prompt_file(out).tokens == tuple(ids)


@pytest.mark.parametrize("bits", [None, 4])
def test_another_text_of_the_same_length_is_refused(
    bits: int | None, prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    given = read_prompt_file(prompt_file)
    ids = ids_of(pair, prompt_file)
    cache = given.cache
    if bits is not None:
        cache = [c.to_quantized(group_size=32, bits=bits) for c in cache]
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    write_prompt_file(source, cache, model=LARGE, tokens=ids)
    assert transfer_file(source, out, pair["mapper"], SMALL, native_start=2).n_tokens == len(ids)
    out.unlink()
    write_prompt_file(source, cache, model=LARGE, tokens=[*ids[7:], *ids[:7]])
    with pytest.raises(CacheError, match="not the token ids of the cache"):
        transfer_file(source, out, pair["mapper"], SMALL, native_start=2)
    assert not out.exists()


def test_a_quantised_file_goes_in_and_out(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "q.safetensors"
    given = read_prompt_file(prompt_file)
    quantised = [c.to_quantized(group_size=32, bits=8) for c in given.cache]
    save_prompt_cache(str(source), quantised, given.metadata)
    out = tmp_path / "small.safetensors"
    code = main(
        ["transfer", str(source), str(out), "--mapper", MAPPER, "--target", SMALL,
         "--kv-bits", "8", "--kv-group-size", "32"]
    )  # fmt: skip
    assert code == 0
    assert "small.safetensors --kv-bits 8 --kv-group-size 32 --prompt" in capsys.readouterr().out
    said = run(
        "mlx_lm", "generate", "--prompt-cache-file", str(out), "--prompt", " Who?",
        "--max-tokens", "3", "--kv-bits", "8", "--kv-group-size", "32",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    plain = map_cache(given.cache, pair["mapper"], pair["small"].model)
    for a, b in zip(
        read_cache(read_prompt_file(out).cache).keys, read_cache(plain).keys, strict=True
    ):
        assert mx.abs(a - b).mean() < 0.03 * mx.abs(b).mean()


def test_tokens_trimmed_from_the_source_do_not_come_through(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    # mlx-lm 0.32 saves them with the source's file.
    given = read_prompt_file(prompt_file)
    ids = ids_of(pair, prompt_file)
    cache = prefill(pair["large"].model, ids)
    trim_prompt_cache(cache, 9)
    source, out = tmp_path / "in.safetensors", tmp_path / "out.safetensors"
    save_prompt_cache(str(source), cache, given.metadata)
    done = transfer_file(source, out, pair["mapper"], SMALL)
    n = len(ids) - 9
    assert done.n_tokens == n
    assert all(x.shape[2] == n for x in content(out)[0].values() if x.ndim == 4)
    want = map_cache(
        prefill(pair["large"].model, ids), pair["mapper"], pair["small"].model, n_tokens=n
    )
    same_cache(read_prompt_file(out).cache, want)


def save_sliding(folder: Path, layer_types: list[str], seed: int) -> Path:
    """A tiny model with sliding layers and a tokenizer, as mlx_lm.convert would write it."""
    config = {
        **zoo.BASE, "model_type": "llama", "vocab_size": 300, "layer_types": layer_types,
        "num_hidden_layers": len(layer_types),
    }  # fmt: skip
    model = zoo.make(zoo.Tiny("llama", config), seed=seed)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, {"format": "mlx"})
    tokenizer().save_pretrained(folder)
    return folder


def test_sliding_and_limited_caches_go_through_mlx_lms_programs(tmp_path: Path) -> None:
    full, sliding = "full_attention", "sliding_attention"
    a = save_sliding(tmp_path / "a", [full, sliding, full], 1)
    b = save_sliding(tmp_path / "b", [sliding, full], 2)
    source, target = load_model(a), load_model(b)
    layers = []
    for t, s in ((0, 1), (1, 2)):
        part = mappers.linear(
            np.random.default_rng(t), read_geometry(source.model), "key", [s], 2, 16
        )
        layers.append(LayerMap(t, part, part))
    mapper = Mapper(
        read_geometry(source.model), read_geometry(target.model), layers,
        source_model=source.identity(), target_model=target.identity(),
    )  # fmt: skip
    mapper.save(tmp_path / "mapper")
    cached, out = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    prompt = "the one on the bench in the sun"  # longer than the window
    done = run(
        "mlx_lm", "cache_prompt", "--model", str(a), "--prompt", prompt,
        "--prompt-cache-file", str(cached),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = run(
        "kvgraft", "transfer", str(cached), str(out), "--mapper", str(tmp_path / "mapper"),
        "--target", str(b),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = run(
        "mlx_lm", "generate", "--prompt-cache-file", str(out), "--prompt", "the", "--max-tokens",
        "12", "--verbose", "F",
    )  # fmt: skip
    assert said.returncode == 0, said.stderr
    ids = target.tokenizer.encode(prompt)
    assert len(ids) > zoo.WINDOW
    made = read_prompt_file(out).cache
    assert [type(c) for c in made] == [RotatingKVCache, KVCache]
    assert [c.keys.shape[2] for c in made] == [zoo.WINDOW, len(ids)]
    cache = map_cache(prefill(source.model, ids), mapper, target.model)
    rest = target.tokenizer.encode("the")
    want = mlx_lm.generate(target.model, target.tokenizer, rest, max_tokens=12, prompt_cache=cache)
    assert said.stdout.strip() == want.strip()


def test_files_of_another_model_are_refused(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    # Another configuration behind the same shapes.
    other = tmp_path / "other"
    shutil.copytree(LARGE, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    given = read_prompt_file(prompt_file)
    source = tmp_path / "in.safetensors"
    write_prompt_file(source, given.cache, model=str(other))
    with pytest.raises(PairMismatchError, match="another configuration"):
        transfer_file(source, out, pair["mapper"], SMALL)
    # Another target.
    with pytest.raises(PairMismatchError):
        transfer_file(prompt_file, out, pair["mapper"], LARGE)
    # The target's own file.
    write_prompt_file(source, prefill(pair["small"].model, [1, 2, 3]), model=SMALL)
    with pytest.raises(GeometryError, match="another model made"):
        transfer_file(source, out, pair["mapper"], SMALL)
    assert not out.exists()


def test_a_place_that_cannot_be_written_is_told_before_any_work(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_work(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("work was begun")

    monkeypatch.setattr("kvgraft.handoff.transfer_file.read_prompt_file", no_work)
    taken = tmp_path / "taken.safetensors"
    taken.write_bytes((Path(SMALL) / "model.safetensors").read_bytes())
    (tmp_path / "file").write_text("")
    for out, why in (
        (tmp_path / "c.bin", r"called \*.safetensors"),
        (taken, "not overwritten"),
        (tmp_path / "file" / "c.safetensors", "c.safetensors"),
    ):
        with pytest.raises(ArtifactWriteError, match=why):
            transfer_file(prompt_file, out, pair["mapper"], SMALL)
    # A folder that is missing is made, as everywhere.
    with pytest.raises(AssertionError, match="begun"):
        transfer_file(prompt_file, tmp_path / "new" / "c.safetensors", pair["mapper"], SMALL)
    assert list((tmp_path / "new").iterdir()) == []


def test_what_cannot_be_compared_is_noted(
    prompt_file: Path, pair: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.safetensors"
    given = read_prompt_file(prompt_file)
    source = tmp_path / "in.safetensors"
    write_prompt_file(source, given.cache, model="/nowhere/large")
    notes = transfer_file(source, out, pair["mapper"], SMALL).notes
    assert any("is not on this machine" in note for note in notes)
    save_prompt_cache(str(source), given.cache, {})
    notes = transfer_file(source, out, pair["mapper"], SMALL).notes
    assert any("doesn't say which model" in note for note in notes)
    # Another chat template in the target.
    other = tmp_path / "other"
    shutil.copytree(SMALL, other)
    config = json.loads((other / "tokenizer_config.json").read_text())
    config["chat_template"] = "{{ messages[0]['content'] }}"
    (other / "tokenizer_config.json").write_text(json.dumps(config))
    notes = transfer_file(prompt_file, out, pair["mapper"], str(other)).notes
    assert any("different chat templates" in note for note in notes)
    assert not any(
        "chat templates" in n for n in transfer_file(prompt_file, out, pair["mapper"], SMALL).notes
    )


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--native-start", "3"], "does not hold"),
        (["--native-end", "-1"], "at least 1"),
        (["--native-start", "3", "--prompt-file", "PROMPT+"], "it is not the text that was cached"),
        (["--native-start", "10000", "--prompt-file", "PROMPT"], "nothing is left to map"),
        (["--prompt-file", "/nowhere/prompt.txt"], "/nowhere/prompt.txt"),
        (["--kv-bits", "8"], "--kv-group-size 64.*use 32"),
        (["--target", "/nowhere/model"], "/nowhere/model"),
        (["--mapper", "/nowhere/mapper"], "/nowhere/mapper"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_named_and_nothing_written(
    args: list[str], message: str, prompt_file: Path, tmp_path: Path, capsys: Any
) -> None:
    import re

    for name, text in (("PROMPT", PROMPT), ("PROMPT+", PROMPT + " And more of it.")):
        (tmp_path / name).write_text(text)
    args = [str(tmp_path / a) if a.startswith("PROMPT") else a for a in args]
    out = tmp_path / "out.safetensors"
    base = ["transfer", str(prompt_file), str(out), "--mapper", MAPPER, "--target", SMALL]
    assert main([*base, *args]) == 1
    assert re.search(message, capsys.readouterr().err)
    assert not out.exists()


def evaluated(quality: dict[str, Any]) -> Mapper:
    mapper = Mapper.load(MAPPER)
    mapper.quality = Quality.from_record(quality)
    return mapper


def test_what_the_evaluation_says_is_heeded(prompt_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.safetensors"
    bad = evaluated({"verdict": "do not ship", "reasons": ["It is worse."]})
    with pytest.raises(PairMismatchError, match="do not ship.: It is worse"):
        transfer_file(prompt_file, out, bad, SMALL)
    assert not out.exists()
    forced = transfer_file(prompt_file, out, bad, SMALL, force=True)
    assert any("It is worse" in note for note in forced.notes)
    good = evaluated({"verdict": "ship", "policy": {"head": 4, "tail": 3}})
    # The native end counts the token after the prompt, which the target reads anyway.
    done = transfer_file(prompt_file, out, good, SMALL, prompt=PROMPT)
    assert done.n_tokens - done.n_mapped == 4 + 2
    # The ids are in a file made so; a native one has none.
    done = transfer_file(prompt_file, out, good, SMALL)
    assert done.n_mapped == done.n_tokens
    assert any(
        "recommends a native start of 4 and a native end of 3" in note for note in done.notes
    )
    done = transfer_file(prompt_file, out, good, SMALL, prompt=PROMPT, native_start=0)
    assert done.n_tokens - done.n_mapped == 2
    with pytest.raises(CacheError, match="does not hold"):
        transfer_file(prompt_file, out, good, SMALL, native_start=0)


def test_inspect_shows_what_a_file_holds(prompt_file: Path, tmp_path: Path, capsys: Any) -> None:
    assert main(["inspect", str(prompt_file)]) == 0
    shown = capsys.readouterr().out
    assert f"model       {LARGE}" in shown and "native" in shown and "6 layers: 2 KV heads" in shown
    out = tmp_path / "out.safetensors"
    transfer_file(prompt_file, out, Mapper.load(MAPPER), SMALL, prompt=PROMPT)
    assert main(["inspect", str(out), "--layers"]) == 0
    shown = capsys.readouterr().out
    assert "tokens mapped from large" in shown and "token ids" in shown and "layer 2:" in shown
    file_032(out, [KVCache()], {})
    assert main(["inspect", str(out)]) == 0
    assert "Layer 0 of the cache is empty" in capsys.readouterr().out


def test_the_source_is_not_overwritten(prompt_file: Path, pair: dict[str, Any]) -> None:
    before = prompt_file.read_bytes()
    with pytest.raises(CacheError, match="would be lost"):
        transfer_file(prompt_file, prompt_file, pair["mapper"], SMALL)
    assert prompt_file.read_bytes() == before


def test_provenance_survives_a_chain() -> None:
    first = Provenance("a", "b", "m", 3)
    chain = Provenance("b", "c", "n", 3, before=first)
    assert Provenance.from_json(chain.to_json()) == chain
    with pytest.raises(ValueError):
        Provenance.from_json("3")
    cache = make_prompt_cache(zoo.make("qwen3"))
    mark(cache, chain)
    assert provenance_of(cache) == chain
