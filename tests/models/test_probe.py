"""The probe over every architecture of mlx-lm, and over models made to deceive it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
import zoo
from identity import identity_mapper
from mlx.utils import tree_flatten
from mlx_lm.models import internlm3
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.rope_utils import ProportionalRoPE

from kvgraft.cache.map import map_cache
from kvgraft.errors import KvgraftError, UnsupportedModelError
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.probe import TOLERANCE, probe_table, read_geometry
from kvgraft.models.rope import NO_ROPE, RopeSpec, apply_rope, strip_rope
from kvgraft.models.rope_candidates import rope_candidates

HERE = [tiny for tiny in zoo.ZOO if tiny.available]
PASSING = [tiny for tiny in HERE if zoo.expected_reason(tiny) is None]
REFUSED = [tiny for tiny in HERE if zoo.expected_reason(tiny) is not None]

# Attention with sinks does not hand on the value that all tokens share, and how
# much of it depends on the query; only the first layer sees the bare token.
# iquestloopcoder's second pass weighs two attentions by its rotated queries.
FIRST_CACHE_ONLY = {"gpt_oss", "iquestloopcoder", "mimo_v2_flash"}
# Keys that are normalised or put together after RoPE, so that no output of
# mx.fast.rope is what the cache holds.
NOT_RECORDED = {"gptj", "nanochat", "talkie"}
# mlx-lm's olmo fails on more than one token at a time.
ONE_BY_ONE = {"olmo"}
FLOAT32 = 1e-5
BFLOAT16 = 2e-2


@pytest.fixture(autouse=True, scope="module")
def no_compilation() -> Iterator[None]:
    """On the CPU mx.compile calls a C++ compiler, for each function of each model."""
    mx.disable_compile()
    yield
    mx.enable_compile()


def by_name(tiny: zoo.Tiny) -> str:
    return tiny.name


def relative(got: mx.array, want: mx.array) -> float:
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    return float(mx.abs(got - want).max() / mx.abs(want).max())


@contextmanager
def recorded_ropes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[mx.array, mx.array]]]:
    """Inputs and outputs of ``mx.fast.rope`` while it lasts."""
    real, calls = mx.fast.rope, []

    def rope(x: mx.array, *args: Any, **kwargs: Any) -> mx.array:
        out = real(x, *args, **kwargs)
        calls.append((x, out))
        return out

    with monkeypatch.context() as patch:
        patch.setattr(mx.fast, "rope", rope)
        yield calls


def prefilled(model: nn.Module, ids: mx.array, chunk: int | None = None) -> list[Any]:
    """Caches after one call: rings, too, then hold every token in order."""
    caches = make_prompt_cache(model)
    chunk = chunk or ids.shape[1]
    for start in range(0, ids.shape[1], chunk):
        model(ids[:, start : start + chunk], cache=caches)
        mx.eval([(cache.keys, cache.values) for cache in caches])
    return caches


def keys_of(cache: Any) -> mx.array:
    return cache.keys[..., : cache.offset, :]


# ----------------------------------------------------------------- what passes


@pytest.mark.parametrize("tiny", PASSING, ids=by_name)
def test_probe_passes_and_strips_what_was_cached(
    tiny: zoo.Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zoo.make(tiny)
    rows = probe_table(model)
    assert [row.reason for row in rows] == [None] * len(make_prompt_cache(model))
    assert max(row.error for row in rows) <= TOLERANCE["float32"]
    assert sorted({row.rope for row in rows}) == sorted(tiny.ropes)
    geometry = read_geometry(model)
    assert geometry.layers == tuple(row.layer for row in rows)
    assert geometry.dtype == "float32"
    text = json.dumps(geometry.to_dict(), allow_nan=False)
    assert ModelGeometry.from_dict(json.loads(text)) == geometry

    # The same token over and over: with every value alike, attention hands on
    # that value, so all keys of a layer are one vector, turned to each position.
    n = 24  # three windows
    chunk = 1 if tiny.module in ONE_BY_ONE else n
    for i, cache in enumerate(prefilled(model, mx.full((1, n), 5), chunk)):
        if tiny.module in FIRST_CACHE_ONLY and i > 0:
            continue
        layer, keys = geometry.layers[i], keys_of(cache)
        assert keys.shape == (1, layer.n_kv_heads, n, layer.key_dim)
        assert cache.values.shape[-1] == layer.value_dim
        assert layer.window == getattr(cache, "max_size", None)
        stripped = strip_rope(keys, mx.arange(n), layer.rope)
        assert relative(stripped, mx.broadcast_to(stripped[:, :, :1], keys.shape)) < FLOAT32
        if layer.rope.dims == 0:
            assert relative(keys, mx.broadcast_to(keys[:, :, :1], keys.shape)) < FLOAT32
        else:
            assert relative(keys, mx.broadcast_to(keys[:, :, :1], keys.shape)) > 1e-2

    # Random tokens: what mx.fast.rope was given against what is stripped.
    if tiny.module in ONE_BY_ONE:
        return
    with recorded_ropes(monkeypatch) as calls:
        caches = prefilled(model, mx.random.randint(0, zoo.VOCAB, (1, n), key=mx.random.key(3)))
    matched = 0
    for layer, cache in zip(geometry.layers, caches, strict=True):
        keys = keys_of(cache)
        before = next(
            (x for x, y in calls if y.shape == keys.shape and mx.array_equal(y, keys)), None
        )
        if before is None:
            continue
        matched += 1
        inside = mx.arange(layer.key_dim) < layer.rope.dims
        content = before / mx.where(inside, layer.rope.magnitude, 1.0)
        assert relative(strip_rope(keys, mx.arange(n), layer.rope), content) < FLOAT32
    turning = sum(layer.rope.dims > 0 for layer in geometry.layers)
    assert matched == (0 if tiny.module in NOT_RECORDED else turning)


HALF = (
    "cohere2",
    "exaone4",
    "gemma3_text",
    "gemma4_text",
    "glm4",
    "llama llama3",
    "llama4_text",
    "ministral3",
    "nanochat",
    "olmo3",
    "phi3 longrope 0.75",
    "qwen2",
    "qwen3",
    "smollm3",
    "stablelm",
)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, mx.bfloat16) for name in HALF] + [(name, mx.float16) for name in HALF[::4]],
)
def test_probe_passes_in_half_precision(name: str, dtype: mx.Dtype) -> None:
    model = zoo.make(name, dtype)
    geometry = read_geometry(model)
    assert geometry.mx_dtype == dtype
    in_float32 = read_geometry(zoo.make(name))
    assert geometry.layers == in_float32.layers
    n = 24
    for layer, cache in zip(geometry.layers, prefilled(model, mx.full((1, n), 5)), strict=True):
        keys = keys_of(cache)
        assert keys.dtype == dtype
        stripped = strip_rope(keys, mx.arange(n), layer.rope)
        assert relative(stripped, mx.broadcast_to(stripped[:, :, :1], keys.shape)) < 2 * BFLOAT16
        # Stripped and put back, the cache is the same but for entries so near
        # zero that float32's rounding of their pair reaches them.
        again = apply_rope(stripped, mx.arange(n), layer.rope).astype(dtype)
        assert relative(again, keys) < 1e-6


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("tiny", REFUSED, ids=by_name)
def test_refused_with_the_reason(tiny: zoo.Tiny) -> None:
    model = zoo.make(tiny)
    with pytest.raises(UnsupportedModelError) as caught:
        read_geometry(model)
    assert zoo.expected_reason(tiny) in str(caught.value)
    assert "Re-prefill" in str(caught.value)
    rows = probe_table(model)
    assert len(rows) == len(make_prompt_cache(model))
    assert all(row.layer is None or row.reason is None for row in rows)


def test_not_a_model_is_refused() -> None:
    for thing in (object(), nn.Linear(2, 2), None):
        with pytest.raises(UnsupportedModelError, match="not an mlx-lm language model"):
            read_geometry(thing)


# ----------------------------------------------------- made to measure, to deceive


class Toy(nn.Module):
    """One attention layer's keys and values, and whatever ``turn`` does to the keys."""

    def __init__(self, heads: int = 2, dim: int = 16) -> None:
        super().__init__()
        self.layers = [None]
        self.heads, self.dim = heads, dim
        self.embed = nn.Embedding(zoo.VOCAB, heads * dim)
        self.rope = nn.RoPE(dim)
        self.writes = 1

    def turn(self, keys: mx.array, offset: int) -> mx.array:
        return self.rope(keys, offset=offset)

    def values(self, keys: mx.array, offset: int) -> mx.array:
        return 2 * keys

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        keys = self.embed(ids).reshape(*ids.shape, self.heads, self.dim).transpose(0, 2, 1, 3)
        offset = cache[0].offset
        for _ in range(self.writes):
            cache[0].update_and_fetch(self.turn(keys, offset), self.values(keys, offset))
        return keys


def only_row(model: Toy) -> Any:
    (row,) = probe_table(model)
    return row


def test_toy_passes() -> None:
    row = only_row(Toy())
    assert row.reason is None and row.error == 0.0
    assert row.layer == LayerGeometry(2, 16, 16, RopeSpec(16, base=10000.0))


def test_a_rope_module_that_is_not_used_does_not_mislead() -> None:
    class Unused(Toy):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return keys

    row = only_row(Unused())
    assert row.rope == "none" and row.layer.rope == NO_ROPE


def test_the_module_in_use_is_found_among_others() -> None:
    class Several(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.others = [nn.RoPE(16, base=1e6), nn.RoPE(8), nn.RoPE(16, traditional=True)]
            self.vision = nn.RoPE(64, base=50.0)  # wider than the head

        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return self.others[1](keys, offset=offset)

    assert only_row(Several()).layer.rope == RopeSpec(8, base=10000.0)


def test_geometry_follows_the_live_module_not_the_configuration() -> None:
    model = zoo.make("qwen2")
    assert model.args.rope_theta == 1e4
    for layer in model.layers:
        layer.self_attn.rope.base = 3e5
    assert {layer.rope.base for layer in read_geometry(model).layers} == {3e5}


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
def test_small_pairs_count_beside_large_ones(dtype: mx.Dtype) -> None:
    # Real keys have entries hundreds of times larger than others. A rotation
    # that is wrong only on a small pair must not hide behind a large one.
    class Lopsided(Toy):
        def __init__(self) -> None:
            super().__init__()
            weight = mx.ones((zoo.VOCAB, 32))
            weight[:, ::16] = 200.0
            self.embed.weight = weight.astype(dtype)

        def turn(self, keys: mx.array, offset: int) -> mx.array:
            right = self.rope(keys, offset=offset)
            wrong = nn.RoPE(16, base=1e6)(keys, offset=offset)
            return mx.where(mx.arange(16) % 8 == 3, wrong, right)

    assert "fits no RoPE" in only_row(Lopsided()).reason


def test_unknown_rotations_are_refused() -> None:
    class Reversed(Toy):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return self.rope(keys[..., ::-1], offset=offset)[..., ::-1]

    assert "fits no RoPE" in only_row(Reversed()).reason


def test_a_learned_norm_after_rope_is_refused_and_one_without_weights_is_not() -> None:
    class Normed(Toy):
        def __init__(self, weight: mx.array | None) -> None:
            super().__init__()
            self.weight = weight

        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return mx.fast.rms_norm(self.rope(keys, offset=offset), self.weight, 1e-6)

    assert only_row(Normed(None)).reason is None
    assert only_row(Normed(mx.ones(16))).reason is None  # all weights alike: it commutes
    assert "follows RoPE" in only_row(Normed(mx.arange(1.0, 17.0))).reason


def test_moving_values_are_refused() -> None:
    class Moving(Toy):
        def values(self, keys: mx.array, offset: int) -> mx.array:
            return keys + 0.1 * offset

    assert "learned absolute positions" in only_row(Moving()).reason

    class Latent(Moving):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return keys

    assert "latent attention" in only_row(Latent()).reason


def test_two_rotations_that_cannot_be_told_apart_are_refused() -> None:
    # Only the first pair is ever filled, and all bases turn it alike.
    class Bare(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.other = nn.RoPE(16, base=1e6)
            weight = mx.zeros((zoo.VOCAB, 2, 16))
            weight[..., 0] = 1.0
            weight[..., 8] = 0.5
            self.embed.weight = weight.reshape(zoo.VOCAB, 32)

    assert "both fit" in only_row(Bare()).reason


def test_a_rope_that_turns_nothing_is_no_rope() -> None:
    class Still(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.rope = ProportionalRoPE(16, 0)

    row = only_row(Still())
    assert row.reason is None and row.rope == "none" and row.layer.rope == NO_ROPE


def test_caches_that_prove_nothing_are_refused() -> None:
    silent, twice, zero, spoiled = Toy(), Toy(), Toy(), Toy()
    silent.writes, twice.writes = 0, 2
    zero.embed.weight = mx.zeros((zoo.VOCAB, 32))
    spoiled.embed.weight = mx.full((zoo.VOCAB, 32), float("nan"))
    assert "never writes" in only_row(silent).reason
    assert "several times" in only_row(twice).reason
    assert "zero or not finite" in only_row(zero).reason
    assert "zero or not finite" in only_row(spoiled).reason


def test_a_token_whose_embedding_is_zero_is_passed_over() -> None:
    model = Toy()
    weight = mx.array(model.embed.weight)
    weight[5] = 0.0
    model.embed.weight = weight
    assert only_row(model).reason is None


def test_odd_shapes_and_dtypes_are_refused() -> None:
    class Odd(Toy):
        def values(self, keys: mx.array, offset: int) -> mx.array:
            return keys[0]

    class Integers(Toy):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return (100 * keys).astype(mx.int32)

    assert "[batch, heads, tokens, head_dim]" in only_row(Odd()).reason
    assert "not floats" in only_row(Integers()).reason


def test_unknown_cache_classes_are_refused_by_name() -> None:
    class Own(Toy):
        def make_cache(self) -> list[KVCache]:
            return [self.kind()]

    for name in ("RingCache", "KVCache"):  # also one that only has a known name
        model = Own()
        model.kind = type(name, (KVCache,), {})
        assert f"{name}, which kvgraft does not know" in only_row(model).reason


def test_a_model_that_fails_is_refused_with_its_own_words() -> None:
    class Failing(Toy):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            raise RuntimeError("needs a GPU")

    with pytest.raises(UnsupportedModelError, match="RuntimeError: needs a GPU"):
        read_geometry(Failing())


def test_mixed_dtypes_are_described_by_the_wider() -> None:
    class Mixed(Toy):
        def values(self, keys: mx.array, offset: int) -> mx.array:
            return keys.astype(mx.bfloat16)

    assert read_geometry(Mixed()).dtype == "float32"


def test_quantised_models_write_the_dtype_of_their_scales() -> None:
    model = zoo.make("qwen3", mx.bfloat16)
    nn.quantize(model, group_size=32, bits=4)
    geometry = read_geometry(model)
    assert geometry.dtype == "bfloat16"
    assert geometry.layers == read_geometry(zoo.make("qwen3")).layers


# ------------------------------------------------------------ limits of positions


@pytest.mark.parametrize("name", ["llama dynamic", "internlm3 dynamic"])
def test_dynamic_ntk_holds_up_to_its_limit_and_not_beyond(name: str) -> None:
    tiny = next(tiny for tiny in zoo.ZOO if tiny.name == name)
    if not tiny.available:
        assert zoo.MLX_LM < (0, 32)
        return
    model = zoo.make(tiny)
    geometry = read_geometry(model)
    for layer in geometry.layers:
        # Up to 0.31, internlm3 takes the length from the axis of its two heads.
        counts_heads = name.startswith("internlm3") and zoo.MLX_LM < (0, 32)
        assert layer.rope.max_position == (63 if counts_heads else 64)
    limit = geometry.layers[0].rope.max_position
    ids = mx.full((1, limit), 5)
    # Up to the last token that the spec describes …
    for layer, cache in zip(geometry.layers, prefilled(model, ids, 1), strict=True):
        stripped = strip_rope(keys_of(cache), mx.arange(limit), layer.rope)
        same = mx.broadcast_to(stripped[:, :, :1], stripped.shape)
        assert relative(stripped, same) < FLOAT32
    # … and one token more, whose key it does not.
    caches = prefilled(model, mx.full((1, limit + 1), 5), 1)
    layer, keys = geometry.layers[0], keys_of(caches[0])
    stripped = strip_rope(keys, mx.arange(limit + 1), layer.rope)
    assert relative(stripped[:, :, limit], stripped[:, :, 0]) > 1e-3


def test_a_length_taken_from_the_axis_of_heads_limits_positions() -> None:
    class Counting(Toy):
        def __init__(self) -> None:
            super().__init__(heads=3)
            self.rope = internlm3.DynamicNTKScalingRoPE(16, 64, False, 1e4, 2.0)

    model = Counting()
    spec = only_row(model).layer.rope
    assert spec == RopeSpec(16, base=1e4, scale=2.0, max_position=64 - 3 + 1)
    keys = mx.random.normal((1, 3, 1, 16), key=mx.random.key(0))
    for position, holds in ((spec.max_position - 1, True), (spec.max_position, False)):
        stripped = strip_rope(model.turn(keys, position), mx.array([position]), spec)
        assert (relative(stripped, keys) < FLOAT32) == holds


def test_positions_stay_inside_a_table_of_positions() -> None:
    # gptj's tiny configuration ends at 128; asking for position 1000 could read
    # past the end of a learned table.
    asked: list[int] = []

    class Watching(Toy):
        def turn(self, keys: mx.array, offset: int) -> mx.array:
            asked.append(offset)
            return super().turn(keys, offset)

    model = Watching()
    model.args = type("Args", (), {"max_position_embeddings": 128})()
    assert only_row(model).reason is None
    assert max(asked) == 127


# ------------------------------------------------------------------- no traces


def snapshot(model: nn.Module) -> list[tuple[Any, ...]]:
    """Identity of everything that a model holds."""
    out: list[tuple[Any, ...]] = [(k, id(v)) for k, v in tree_flatten(dict(model))]
    for path, module in model.named_modules():
        out.append((path, type(module), tuple(sorted(module)), module.training))
        out += [(path, name, id(value)) for name, value in sorted(vars(module).items())]
    return out


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "gpt_oss", "hunyuan_v1_dense", "gpt2"])
@pytest.mark.parametrize("training", [False, True])
def test_the_probe_leaves_no_trace(name: str, training: bool) -> None:
    model = zoo.make(name)
    model.train(training)
    values = [mx.array(p) for _, p in tree_flatten(model.parameters())]
    before = snapshot(model)
    state = [mx.array(s) for s in mx.random.state]
    probe_table(model)
    assert snapshot(model) == before
    for (_, now), then in zip(tree_flatten(model.parameters()), values, strict=True):
        assert mx.array_equal(now, then)
    for now, then in zip(mx.random.state, state, strict=True):
        assert mx.array_equal(now, then)


def test_dropout_is_off_while_probing_and_on_again_after() -> None:
    class Dropping(Toy):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)

        def turn(self, keys: mx.array, offset: int) -> mx.array:
            return self.rope(self.drop(keys), offset=offset)

    model = Dropping().train()
    assert only_row(model).reason is None
    assert model.training and model.drop.training


# ----------------------------------------------------------------- candidates


def test_each_rotation_is_listed_once() -> None:
    candidates = rope_candidates(zoo.make("gemma3_text"))
    specs = [candidate.spec for candidate in candidates]
    assert len(specs) == len(set(specs)) == 3  # local, global, none
    assert NO_ROPE in specs


def test_modules_that_only_look_like_ropes_do_no_harm() -> None:
    class Odd(nn.Module):
        dims, base = 7, 1e4  # an odd number of dimensions is no rotation

    class Words(nn.Module):
        dims, base = 8, "ten"

    class Narrow(nn.Module):
        dims, base, factor, max_position_embeddings = 2, 1e4, 2.0, 64  # divides by dims - 2

    model = Toy()
    model.odd, model.words, model.narrow = Odd(), Words(), Narrow()
    assert {c.origin for c in rope_candidates(model)} == {"RoPE", "none"}
    assert only_row(model).reason is None


# mlx-lm PR 1698, 953, 1507, mlxcel 1358: configuration and live model disagree.
def test_the_geometry_is_what_the_live_model_does() -> None:
    model = zoo.make("qwen2 yarn")
    geometry = read_geometry(model)
    # Whatever the configuration may say, e.g. an attention_factor that is ignored.
    model.args.rope_scaling = {**model.args.rope_scaling, "attention_factor": 3.0}
    model.args.rope_theta = 5e5
    assert read_geometry(model) == geometry
    rope = geometry.layers[0].rope
    assert rope.freqs is not None and rope.magnitude > 1
    # The other way round: another module, the same configuration.
    for layer in model.layers:
        layer.self_attn.rope._freqs = layer.self_attn.rope._freqs * 2
    assert read_geometry(model) != geometry
    native = prefill(model, [3, 14, 15, 9, 26, 5])
    with pytest.raises(KvgraftError, match="RoPE frequencies differ"):
        mapper = identity_mapper(zoo.make("qwen2 yarn"))
        map_cache(native, mapper, model)
