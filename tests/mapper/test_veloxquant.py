"""Other programs' artifacts, against VeloxQuant-MLX itself.

Measured differences of keys, as relative RMS, on the maps below (5 to 4 layers,
2 heads of 32, k = 3, float16 weights, 256 tokens); values are bit-equal::

    cache      position 0…   1000…     30000…
    float32    1.3e-6        7.4e-6    1.8e-4   (angles by another formula)
    float16    4.5e-4        3.5e-4    3.6e-4   (it rounds stripped keys before the map)
    bfloat16   3.5e-3        2.8e-3    2.5e-3   (the same)

Against float64, float16 keys at 0… are off by 2.1e-4 here and 4.2e-4 there.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import mappers
import mlx.core as mx
import numpy as np
import oracle
import pytest
import veloxquant_mlx.transfer as vq
import veloxquant_mlx.transfer.apply as velox_apply

import kvgraft
from kvgraft.errors import (
    FormatError,
    GeometryError,
    MapperNotFoundError,
    TruncatedFileError,
    VersionError,
)
from kvgraft.mapper import veloxquant
from kvgraft.mapper.mapper import Mapper, open_mapper
from kvgraft.mapper.verify import verify_artifact
from kvgraft.models.geometry import LayerGeometry
from kvgraft.models.rope import NO_ROPE, RopeSpec

H, D, N = 2, 32, 256
SOURCE = vq.ModelKVSpec(5, H, D, 1e6, model_type="large")
TARGET = vq.ModelKVSpec(4, H, D, 1e4, model_type="small")
# One step of the cache's dtype; for float32 see the table above.
LIMIT = {mx.float16: 2**-10, mx.bfloat16: 2**-7}
LIMIT32 = {0: 4e-6, 1000: 2e-5, 30_000: 5e-4}


def activations(spec: vq.ModelKVSpec, seed: int) -> dict[int, tuple[mx.array, mx.array]]:
    """Keys and values with a common cause, so that a map exists; keys rotated."""
    hidden = np.random.default_rng(0).normal(size=(N, 32))
    rng = np.random.default_rng(seed)

    def one() -> mx.array:
        rows = hidden @ rng.normal(size=(32, H * D)) / 5
        rows += rng.normal(size=(N, H * D)) * 0.1 + rng.normal(size=(1, H * D))
        return mx.array(rows.reshape(N, H, D).transpose(1, 0, 2).astype(np.float32))

    return {
        layer: (vq.apply_rope(one(), mx.arange(N), spec.rope_theta), one())
        for layer in range(spec.n_layers)
    }


SOURCE_KV, TARGET_KV = activations(SOURCE, 1), activations(TARGET, 2)


def fit(**config: Any) -> vq.CrossModelMapper:
    config = {"k": 3, **config}
    return vq.fit_mapper(
        SOURCE_KV, TARGET_KV, SOURCE, TARGET, mx.arange(N), vq.MapperConfig(**config)
    )


@pytest.fixture(scope="module")
def fitted() -> vq.CrossModelMapper:
    return fit()


@pytest.fixture
def folder(fitted, tmp_path):
    return fitted.save(tmp_path / "vq")


def cast(kv: dict[int, tuple[mx.array, mx.array]], dtype: mx.Dtype) -> dict[int, Any]:
    return {layer: (k.astype(dtype), v.astype(dtype)) for layer, (k, v) in kv.items()}


def assert_alike(theirs: dict[int, Any], ours: dict[int, Any], limit: float) -> None:
    assert theirs.keys() == ours.keys()
    for layer in theirs:
        (k, v), (kk, vv) = theirs[layer], ours[layer]
        assert k.shape == kk.shape and k.dtype == kk.dtype
        assert v.shape == vv.shape and v.dtype == vv.dtype
        assert oracle.nmse(oracle.to_numpy(kk), oracle.to_numpy(k)) ** 0.5 < limit
        # One step for values too, though on most machines they are bit-equal.
        step = {mx.float32: 4e-6, **LIMIT}[v.dtype]
        assert oracle.nmse(oracle.to_numpy(vv), oracle.to_numpy(v)) ** 0.5 < step


# ------------------------------------------------- their artifact, our transfer


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("offset", [0, 1000, 30_000])
def test_their_artifact_gives_their_result(folder, dtype, offset):
    source_kv = cast(SOURCE_KV, dtype)
    positions = mx.arange(offset, offset + N)
    theirs = vq.transfer_cache(source_kv, vq.load_mapper(folder), positions)
    ours = kvgraft.transfer_cache(source_kv, kvgraft.load_mapper(folder), positions)
    assert_alike(theirs, ours, LIMIT.get(dtype, LIMIT32[offset]))


@pytest.mark.parametrize("weights", ["float32", "bfloat16"])
def test_their_other_weights(tmp_path, weights):
    folder = fit(dtype=weights).save(tmp_path / "vq")
    theirs = vq.transfer_cache(SOURCE_KV, vq.load_mapper(folder))
    mapper = kvgraft.load_mapper(folder)
    assert mapper.layers[0].keys.storage.dtype == weights
    assert_alike(theirs, kvgraft.transfer_cache(SOURCE_KV, mapper), 1e-5)


def test_a_map_of_rotated_keys(tmp_path):
    folder = fit(content_space=False).save(tmp_path / "vq")
    mapper = kvgraft.load_mapper(folder)
    assert not mapper.content_space
    theirs = vq.transfer_cache(SOURCE_KV, vq.load_mapper(folder))
    # Float32 sums in another order: whose order theirs has depends on the BLAS.
    assert_alike(theirs, kvgraft.transfer_cache(SOURCE_KV, mapper), 4e-6)


def test_our_float16_keys_are_the_closer_ones(folder):
    source_kv = cast(SOURCE_KV, mx.float16)
    mapper = kvgraft.load_mapper(folder)
    theirs = vq.transfer_cache(source_kv, vq.load_mapper(folder))
    ours = kvgraft.transfer_cache(source_kv, mapper)
    for layer in ours:
        want, _ = oracle.map_cache_layer(mapper, source_kv, layer, np.arange(N))
        mine, yours = (
            oracle.nmse(oracle.to_numpy(x[layer][0]), want) ** 0.5 for x in (ours, theirs)
        )
        assert mine < 2.5e-4 < yours


def test_our_calls_take_their_arguments(fitted, folder):
    """By place and by name, the same calls to both."""
    for module in (velox_apply, kvgraft):
        mapper = module.load_mapper(str(folder))
        positions = mx.arange(N)
        out = module.transfer_cache(SOURCE_KV, mapper)
        assert set(out) == set(range(4)) and out[0][0].shape == (H, N, D)
        module.transfer_cache(SOURCE_KV, mapper, positions, False)
        named = module.transfer_cache(
            source_kv=SOURCE_KV, mapper=mapper, positions=positions, unload_after=True
        )
        keys, values = module.transfer_layer(mapper, 2, SOURCE_KV, positions)
        assert mx.allclose(keys, named[2][0]) and mx.allclose(values, named[2][1])
        lm = mapper.load_layer(2)
        assert lm.target_layer == 2 and lm.is_loaded and lm.w_k.shape == (H, 3 * H * D, D)
        assert lm.b_v.shape == (H, D) and 0.5 < lm.r2_k <= 1.0
        lm.unload()
        assert lm.w_k is None and not lm.is_loaded
        mapper.unload_all()
        assert mapper.n_parameters == fitted.n_parameters
        assert isinstance(mapper.describe(), str)
    for ours, theirs in zip(kvgraft.CrossModelMapper.load(folder).layers, fitted.layers):
        assert ours.source_layers == theirs.source_layers
        assert (ours.r2_k, ours.r2_v) == (theirs.r2_k, theirs.r2_v)


def test_what_their_manifest_says(folder):
    mapper = kvgraft.load_mapper(folder)
    assert [len(g.layers) for g in (mapper.source, mapper.target)] == [5, 4]
    assert mapper.source.layers[0] == LayerGeometry(H, D, D, RopeSpec(D, base=1e6))
    assert mapper.target.model_type == "small"
    assert mapper.source_model is None
    assert mapper.fit["lambda"] == 0.01 and mapper.fit["lambda_convention"] == "gram"
    assert not any(m.is_loaded for m in mapper.layers)
    report = verify_artifact(folder)
    assert report.ok and report.kind == "veloxquant" and "no checksum" in str(report)


def test_their_artifact_saved_in_our_format(folder, tmp_path):
    mapper = kvgraft.load_mapper(folder)
    mapper.save(tmp_path / "ours")
    again = kvgraft.load_mapper(tmp_path / "ours")
    a, b = (kvgraft.transfer_cache(SOURCE_KV, m) for m in (mapper, again))
    assert all(mappers.same(x, y) for i in a for x, y in zip(a[i], b[i]))


def test_layers_that_are_not_the_first_ones(tmp_path):
    """Their issues 618 and 642: indices are layers, not places in a list."""
    some = {i: SOURCE_KV[i] for i in (1, 2, 4)}
    theirs = vq.fit_mapper(
        some, {i: TARGET_KV[i] for i in (1, 3)}, SOURCE, TARGET, mx.arange(N),
        vq.MapperConfig(k=2),
    )  # fmt: skip
    folder = theirs.save(tmp_path / "vq")
    mapper = kvgraft.load_mapper(folder)
    assert set(mapper.source_layers) <= {1, 2, 4}
    ours = kvgraft.transfer_cache(some, mapper)
    assert list(ours) == [1, 3]
    assert_alike(vq.transfer_cache(some, vq.load_mapper(folder)), ours, 1e-5)


# ------------------------------------------------- our artifact, their transfer


def ours_like_theirs(**options: Any) -> Mapper:
    source = mappers.geometry(5, H, D, RopeSpec(D, base=1e6), name="large")
    target = mappers.geometry(4, H, D, name="small")
    return mappers.mapper(source, target, **{"k": 3, **options})


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("offset", [0, 1000])
def test_they_read_what_we_export(tmp_path, dtype, offset):
    mapper = ours_like_theirs()
    out = veloxquant.export_veloxquant(mapper, tmp_path / "vq")
    assert out == tmp_path / "vq"
    source_kv = cast(SOURCE_KV, dtype)
    positions = mx.arange(offset, offset + N)
    theirs = vq.load_mapper(tmp_path / "vq")
    assert theirs.n_parameters == mapper.n_parameters
    assert_alike(
        vq.transfer_cache(source_kv, theirs, positions),
        kvgraft.transfer_cache(source_kv, mapper, positions),
        LIMIT.get(dtype, LIMIT32[offset]),
    )


@pytest.mark.parametrize(
    ("options", "limit"),
    [
        ({"dtype": mx.float16}, 1e-5),
        ({"dtype": mx.bfloat16}, 1e-5),
        ({"bits": 8}, 5e-4),  # their float16 weights round ours
        ({"bits": 4}, 5e-4),
        ({"heads": [[0], [1]]}, 1e-5),
        ({"heads": [[1], [0]]}, 1e-5),
        ({"heads": [[1, 0], [0, 0]]}, 1e-5),
        ({"content_space": False}, 4e-6),
    ],
    ids=["f16", "bf16", "8bit", "4bit", "local", "crossed", "repeated", "rotated"],
)
def test_they_read_what_we_expand(tmp_path, options, limit):
    mapper = ours_like_theirs(**options)
    veloxquant.export_veloxquant(mapper, tmp_path / "vq")
    theirs = vq.load_mapper(tmp_path / "vq")
    assert theirs.load_layer(0).w_k.shape == (H, 3 * H * D, D)
    ours = kvgraft.transfer_cache(SOURCE_KV, mapper)
    them = vq.transfer_cache(SOURCE_KV, theirs)
    for layer in ours:
        for a, b in zip(ours[layer], them[layer]):
            assert oracle.nmse(oracle.to_numpy(b), oracle.to_numpy(a)) ** 0.5 < limit


@pytest.mark.parametrize("weights", ["float32", "float16", "bfloat16"])
def test_weights_of_an_export(tmp_path, weights):
    veloxquant.export_veloxquant(ours_like_theirs(), tmp_path / "vq", weight_format=weights)
    theirs = vq.load_mapper(tmp_path / "vq")
    assert theirs.load_layer(1).w_v.dtype == getattr(mx, weights)
    assert theirs.config.dtype == weights
    with pytest.raises(GeometryError, match="exported as float32, float16, bfloat16; not 4bit"):
        veloxquant.export_veloxquant(ours_like_theirs(), tmp_path / "vq", weight_format="4bit")


def test_there_and_back(folder, tmp_path):
    """Reading theirs and exporting it gives theirs again."""
    veloxquant.export_veloxquant(kvgraft.load_mapper(folder), tmp_path / "b")
    for name in ("source", "target", "config", "layers", "format_version"):
        a, b = (
            json.loads((d / "manifest.json").read_text())[name] for d in (folder, tmp_path / "b")
        )
        assert a == b, name
    a, b = (mx.load(str(d / "mapper.safetensors")) for d in (folder, tmp_path / "b"))
    assert a.keys() == b.keys() and all(mappers.same(a[k], b[k]) for k in a)


def test_an_export_claims_no_fit_that_never_was(tmp_path):
    mapper = ours_like_theirs()
    for info, want in (
        ({}, 0.0),
        ({"lambda": 0.5, "lambda_convention": "gram"}, 0.5),
        ({"lambda": 1e-3, "lambda_convention": "covariance", "rows": 128_000}, 128.0),
        ({"lambda": 1e-3, "lambda_convention": "covariance"}, 0.0),
    ):
        mapper.fit = info
        veloxquant.export_veloxquant(mapper, tmp_path / "vq")
        config = vq.load_mapper(tmp_path / "vq").config
        assert config.ridge_lambda == want
        assert (config.n_calib_sequences, config.calib_seq_len, config.stride) == (0, 0, 0)
        assert config.k == 3
    layers = vq.load_mapper(tmp_path / "vq").layers
    assert layers[1].r2_k == 0.76 and math.isnan(layers[1].r2_v)


def _geometry(mapper: Mapper, side: str, **changes: Any) -> Mapper:
    """The mapper with one layer of a side changed; only export is to look at it."""
    g = getattr(mapper, side)
    first, *rest = g.layers
    return replace(mapper, **{side: replace(g, layers=(replace(first, **changes), *rest))})


def _all_layers(mapper: Mapper, side: str, **changes: Any) -> Mapper:
    g = getattr(mapper, side)
    layers = tuple(replace(layer, **changes) for layer in g.layers)
    return replace(mapper, **{side: replace(g, layers=layers)})


G = mappers.geometry


@pytest.mark.parametrize(
    ("mapper", "message"),
    [
        (mappers.mapper(G(4, 2, 16), G(3, 4, 16)), "the source has 2 of 16, the target 4 of 16"),
        (mappers.mapper(G(4, 2, 16), G(3, 2, 32)), "the source has 2 of 16, the target 2 of 32"),
        (mappers.mapper(separate=True), "one list for both"),
        (_all_layers(mappers.mapper(), "source", rope=RopeSpec(8, base=1e4)), "source rotates"),
        (_all_layers(mappers.mapper(), "target", rope=mappers.YARN), "target rotates"),
        (_all_layers(mappers.mapper(), "target", rope=mappers.LLAMA3), "target rotates"),
        (_all_layers(mappers.mapper(), "source", rope=RopeSpec(16, True, 1e4)), "source rotates"),
        (_all_layers(mappers.mapper(), "source", rope=NO_ROPE), "source rotates"),
        (
            _all_layers(mappers.mapper(), "source", rope=RopeSpec(16, base=1e4, max_position=9)),
            "source rotates",
        ),
        (_geometry(mappers.mapper(), "source", rope=RopeSpec(16, base=1e6)), "layers that differ"),
        (_all_layers(mappers.mapper(), "target", window=512), "sliding windows"),
        (
            mappers.mapper(
                replace(G(3), layers=(LayerGeometry(2, 16, 8, RopeSpec(16, base=1e4)),) * 3)
            ),
            "keys of 16 and values of 8",
        ),
    ],
)  # fmt: skip
def test_what_their_format_cant_say_is_refused(tmp_path, mapper, message):
    with pytest.raises(GeometryError, match=message):
        veloxquant.export_veloxquant(mapper, tmp_path / "vq")
    assert list(tmp_path.iterdir()) == []


def test_an_export_overwrites_only_their_artifacts(folder, tmp_path):
    mapper = ours_like_theirs()
    (folder / "notes").write_text("kept")
    veloxquant.export_veloxquant(mapper, folder)
    assert (folder / "notes").read_text() == "kept"
    assert len(kvgraft.load_mapper(folder).layers) == 4
    (tmp_path / "other").mkdir()
    (tmp_path / "other/manifest.json").write_text("{}")
    for there in (tmp_path / "other", mapper.save(tmp_path / "ours")):
        with pytest.raises(FormatError, match="exists and is not overwritten"):
            veloxquant.export_veloxquant(mapper, there)
    with pytest.raises(FormatError, match="exists and is not overwritten"):
        mapper.save(folder)


def test_an_export_that_fails_leaves_the_old_one(folder, monkeypatch):
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    mapper = ours_like_theirs()
    mapper.layers[3].values.weight[0, 0, 0] = float("nan")
    with pytest.raises(GeometryError, match="layer 3, values: .* NaN"):
        veloxquant.export_veloxquant(mapper, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in folder.parent.iterdir()] == [folder.name]


# ------------------------------------------------------- damage to their artifact


@pytest.mark.parametrize(
    ("edit", "kind", "message"),
    [
        (lambda m: m.update(format_version=2), VersionError, "format version 2; .* version 1"),
        (lambda m: m["source"].pop("head_dim"), FormatError, "lacks the entry 'head_dim'"),
        (lambda m: m["source"].update(rope_scaling={"factor": 8}), FormatError, "RoPE scaling"),
        (lambda m: m["target"].update(rope_traditional=True), FormatError, "traditional RoPE"),
        (lambda m: m["layers"][0].update(target_layer=9), FormatError, "target layer 9 is not"),
        (lambda m: m["layers"][0].update(source_layers=[0, 1, 9]), FormatError, "contradicts"),
        (lambda m: m["layers"][0].update(source_layers=[0]), FormatError, "is F16 .* says F16"),
        (lambda m: m["layers"].pop(), FormatError, "which .*manifest.json doesn't describe"),
        (lambda m: m["layers"].append({"target_layer": 0, "source_layers": [0, 1, 2]}),
         FormatError, "twice"),
        (lambda m: m.update(layers=3), FormatError, "can't be read"),
        (lambda m: m["source"].update(n_layers=0), FormatError, "can't be read"),
        (lambda m: m["source"].update(n_layers=math.inf), FormatError, "can't be read"),
        (lambda m: m["source"].update(n_kv_heads=4), FormatError, "don't belong together"),
    ],
)  # fmt: skip
def test_manifests_that_dont_fit(folder, edit, kind, message):
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    edit(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(kind, match=message):
        open_mapper(folder)
    assert not verify_artifact(folder).ok


def test_files_of_theirs_that_are_damaged(folder):
    weights = folder / "mapper.safetensors"
    data = weights.read_bytes()
    weights.write_bytes(data[:-1])
    with pytest.raises(TruncatedFileError):
        open_mapper(folder)
    weights.unlink()
    with pytest.raises(MapperNotFoundError, match="mapper.safetensors"):
        open_mapper(folder)
    weights.write_bytes(data)
    (folder / "manifest.json").write_text("{")
    with pytest.raises(FormatError, match="manifest.json is not valid JSON"):
        open_mapper(folder)
    with pytest.raises(FormatError, match="VeloxQuant mapper; give the folder"):
        open_mapper(weights)


def test_their_weights_with_other_dtypes_or_missing(folder):
    path = folder / "mapper.safetensors"
    arrays = mx.load(str(path))
    mx.eval(arrays)
    whole = arrays["1.w_k"]
    arrays["1.w_k"] = whole.astype(mx.int32)
    mx.save_safetensors(str(path), arrays)
    with pytest.raises(FormatError, match="'1.w_k' has dtype I32"):
        open_mapper(folder)
    del arrays["1.w_k"]
    mx.save_safetensors(str(path), arrays)
    with pytest.raises(FormatError, match="no tensor '1.w_k'"):
        open_mapper(folder)
