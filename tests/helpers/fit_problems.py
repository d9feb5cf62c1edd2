"""Features with known relations, and the fit done the direct way in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx
import numpy as np
import zoo
from mlx.utils import tree_flatten
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvgraft.fit import FeatureRows, FitConfig, Moments
from kvgraft.mapper.mapper import Mapper
from kvgraft.models.geometry import LayerGeometry, ModelGeometry
from kvgraft.models.rope import NO_ROPE


def geometry(
    layers: int, heads: int, key_dim: int, value_dim: int | None = None, windows=None
) -> ModelGeometry:
    """A model whose keys carry no rotation."""
    return ModelGeometry(
        tuple(
            LayerGeometry(
                heads, key_dim, value_dim or key_dim, NO_ROPE, windows[i] if windows else None
            )
            for i in range(layers)
        ),
        "float32",
        "made up",
    )


def noise(
    geo: ModelGeometry, rows: int, rng: np.random.Generator, mean: float = 3.0
) -> FeatureRows:
    """Independent features with different sizes and means far from 0, as keys have."""

    def one(heads: int, dim: int) -> np.ndarray:
        scale = 10.0 ** rng.uniform(-1, 1, (heads, 1, dim))
        x = rng.standard_normal((heads, rows, dim)) * scale + mean * rng.standard_normal(
            (heads, 1, dim)
        )
        return x.astype(np.float32)

    return FeatureRows(
        [one(layer.n_kv_heads, layer.key_dim) for layer in geo.layers],
        [one(layer.n_kv_heads, layer.value_dim) for layer in geo.layers],
    )


def side_by_side(layers: Sequence[np.ndarray], heads: Sequence[int] | None = None) -> np.ndarray:
    """``[rows, features]`` float64 of ``[H, rows, D]`` layers: layers, heads, dims."""
    parts = []
    for layer in layers:
        for h in range(len(layer)) if heads is None else heads:
            parts.append(layer[h])
    return np.concatenate(parts, axis=1).astype(np.float64)


def linear(
    source: FeatureRows,
    target: ModelGeometry,
    sources: Sequence[Sequence[int]],
    rng: np.random.Generator,
    *,
    error: float = 0.0,
    local: bool = False,
) -> FeatureRows:
    """A target that is an affine function of some source layers, plus noise."""

    def one(layers: list[np.ndarray], heads: int, dim: int) -> np.ndarray:
        out = []
        for h in range(heads):
            x = side_by_side(layers, [h] if local else None)
            x = x / x.std(axis=0)
            w = rng.standard_normal((x.shape[1], dim)) / np.sqrt(x.shape[1])
            y = x @ w + rng.standard_normal(dim)
            out.append(y + error * rng.standard_normal(y.shape))
        return np.stack(out).astype(np.float32)

    keys, values = [], []
    for t, layer in enumerate(target.layers):
        keys.append(one([source.keys[s] for s in sources[t]], layer.n_kv_heads, layer.key_dim))
        values.append(
            one([source.values[s] for s in sources[t]], layer.n_kv_heads, layer.value_dim)
        )
    return FeatureRows(keys, values)


def cut(rows: FeatureRows, begin: int, end: int) -> FeatureRows:
    """Some of the rows."""
    return FeatureRows([x[:, begin:end] for x in rows.keys], [x[:, begin:end] for x in rows.values])


def gathered(
    source_geo: ModelGeometry,
    target_geo: ModelGeometry,
    source: FeatureRows,
    target: FeatureRows,
    *,
    step: int = 37,
    weights: np.ndarray | None = None,
    **options,
) -> Moments:
    """Moments of rows that came in pieces."""
    moments = Moments(source_geo, target_geo, **options)
    n = source.keys[0].shape[1]
    for begin in range(0, n, step):
        end = min(n, begin + step)
        w = None
        if weights is not None:
            w = {kind: weights[begin:end] for kind in ("keys", "values")}
        moments.add(cut(source, begin, end), cut(target, begin, end), w)
    moments.flush()
    return moments


def direct(
    x: np.ndarray, y: np.ndarray, ridge: float, weights: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Ridge with an unpenalised intercept on all rows, by an augmented least squares."""
    x, y = x.astype(np.float64), y.astype(np.float64)
    w = np.ones(len(x)) if weights is None else weights
    x_mean, y_mean = np.average(x, axis=0, weights=w), np.average(y, axis=0, weights=w)
    root = np.sqrt(w)[:, None]
    rows = np.concatenate([(x - x_mean) * root, np.sqrt(ridge) * np.eye(x.shape[1])])
    right = np.concatenate([(y - y_mean) * root, np.zeros((x.shape[1], y.shape[1]))])
    solution = np.linalg.lstsq(rows, right, rcond=None)[0]
    return solution, y_mean - x_mean @ solution


def r_squared(y: np.ndarray, predicted: np.ndarray) -> float:
    """One minus squared error over the variance about the mean of ``y``."""
    return 1.0 - float(((y - predicted) ** 2).sum() / ((y - y.mean(axis=0)) ** 2).sum())


WORDS = (
    "river stone lamp seven quiet harbour green under winter letter copper road walk and the of "
    "a in to it was bright slow morning garden north bell cloud paper ship grain table king song"
).split()


def prose(n_words: int, seed: int = 0) -> str:
    """Words in no order, with full stops."""
    rng = np.random.default_rng(seed)
    words = rng.choice(WORDS, n_words)
    return " ".join(w + ("." if i % 9 == 8 else "") for i, w in enumerate(words)) + "\n"


def tokenizer(*, added: Sequence[str] = (), bos: bool = False):
    """A byte-level tokenizer of 260 ids and a few."""
    raw = Tokenizer(
        models.BPE(
            vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))},
            merges=[],
        )
    )
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken(t, special=True) for t in ("<s>", "</s>", *added)])
    if bos:
        raw.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", raw.token_to_id("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


def save_model(folder: Path, seed: int = 0, *, added: Sequence[str] = (), **config) -> Path:
    """A tiny random model in a folder, as mlx_lm.convert writes it."""
    tiny = zoo.Tiny(config.pop("model_type", "qwen3"), {"vocab_size": 264, **config})
    model = zoo.make(tiny, seed=seed)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(zoo.config_of(tiny)))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    tokenizer(added=added).save_pretrained(folder)
    return folder


# ---- pairs with a known relation

ROWS, HELD = 420, 120
EXACT = FitConfig(weight_format="float32", k=2)

PAIRS = {
    "equal": (geometry(4, 2, 8), geometry(3, 2, 8)),
    "head_dim": (geometry(4, 2, 8, 6), geometry(3, 2, 4, 10)),
    "fewer heads": (geometry(3, 4, 8), geometry(3, 2, 8)),
    "more heads": (geometry(3, 2, 8), geometry(4, 3, 6)),
}


def split(source_geo, target_geo, source, target, held=HELD, **options):
    """Moments of the first rows and of the rest."""
    n = source.keys[0].shape[1] - held
    return (
        gathered(source_geo, target_geo, cut(source, 0, n), cut(target, 0, n), **options),
        gathered(
            source_geo, target_geo, cut(source, n, n + held), cut(target, n, n + held), **options
        ),
    )


def problem(source_geo, target_geo, *, rows=ROWS, error=0.3, local=False, seed=1):
    rng = np.random.default_rng(seed)
    source = noise(source_geo, rows, rng)
    n = len(source_geo.layers)
    sources = [[t % n, (t + 1) % n] for t in range(len(target_geo.layers))]
    return source, linear(source, target_geo, sources, rng, error=error, local=local)


def same_maps(a: Mapper, b: Mapper, tolerance: float = 0.0) -> None:
    for x, y in zip(a.layers, b.layers, strict=True):
        for p, q in ((x.keys, y.keys), (x.values, y.values)):
            assert p.sources == q.sources and p.heads == q.heads
            for u, v in ((p.weight, q.weight), (p.bias, q.bias)):
                size = float(mx.abs(v).max())
                assert float(mx.abs(u - v).max()) <= tolerance * size
