"""Tuning of the fitted map on the target's predictions (experimental).

Least squares weights all errors of a cached number alike; the target does not. After
the closed form, the same affine map (same weights, same cost at hand-off) is trained
for some steps so that the target, continuing from the mapped cache, predicts what it
would predict from its native one: the loss is the KL divergence between the two. Each
document is used once if there are enough of them, else several times; with few
documents, tuning overfits. Documents that are not trained on decide which step is
kept, if any.

Steps are taken in units of the features' standard deviations, so that inputs of
different sizes change the output by about as much.

Experimental: off by default, and measured on small pairs only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np

from kvgraft import cache as caches
from kvgraft.errors import FitError
from kvgraft.fit.config import FitConfig
from kvgraft.fit.search import Documents
from kvgraft.fit.weight_format import store_weight
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap
from kvgraft.mapper.mapper import Mapper
from kvgraft.mapper.transfer import iter_transfer
from kvgraft.models.forward import prefill
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.rope import RopeTable, strip_rope
from kvgraft.ops.fused import map_layer
from kvgraft.ops.quantized import dequantize
from kvgraft.progress import Notify, Progress

__all__ = ["TuneResult", "divergence", "tune"]

EVALUATIONS = 8
"""How often the held-out documents are scored. The divergence rises at first, so
stopping at the first rise would be too early."""

KEPT_BYTES = 768 << 20
"""Documents that are used again are kept up to this many bytes, instead of re-prefilled."""

_WARM_UP = 4

Params = dict[str, mx.array]


@dataclass(frozen=True)
class TuneResult:
    """What tuning did.

    Attributes:
        mapper: The tuned mapper, or the one it started from if that was better.
        steps: Steps that the returned mapper has seen.
        before: KL divergence on the held-out documents at the start, nats per
            token.
        after: The same of the returned mapper.
        trace: ``(step, divergence)`` as it was measured.
    """

    mapper: Mapper
    steps: int
    before: float
    after: float
    trace: tuple[tuple[int, float], ...]


def divergence(
    mapper: Mapper, documents: Documents, model: Any, geometry: ModelGeometry
) -> list[float]:
    """KL divergence per document of the target's predictions from a mapped cache.

    Args:
        mapper: The mapper.
        documents: What the source has read.
        model: The target.
        geometry: The target's geometry.

    Returns:
        Means over the tokens after the prefix, nats per token: how far the
        predictions from the mapped cache are from those with the target's own.
    """
    out = []
    for i, source in enumerate(documents.source):
        ids = _rest(documents, i)
        wanted = _native_logits(model, documents, i)
        mapped = iter_transfer(source, mapper, unload_after=False, dtype=geometry.mx_dtype)
        cache = caches.build_cache(geometry, ((k, v) for _, k, v in mapped))
        got = model(ids, cache=cache)[0].astype(mx.float32)
        out.append(float(_kl(wanted, got)))
        mx.clear_cache()
    return out


def tune(
    mapper: Mapper,
    training: Callable[[int], Documents],
    heldout: Documents,
    model: Any,
    geometry: ModelGeometry,
    *,
    config: FitConfig,
    distinct: int | None = None,
    kept_bytes: int = KEPT_BYTES,
    progress: Progress | None = None,
    notify: Notify | None = None,
) -> TuneResult:
    """Tune all maps of a mapper together.

    Args:
        mapper: Where to start; not changed.
        training: Gives the ``i``-th document to train on, alone. All have one
            length and prefix.
        heldout: Other documents, which decide what is kept.
        model: The target; its weights stay as they are.
        geometry: The target's geometry.
        config: ``tune_steps``, ``tune_batch``, ``tune_rate``, and how weights are
            stored.
        distinct: After how many documents ``training`` begins again, if it does.
            What has been read is then kept, as far as ``kept_bytes`` go.
        kept_bytes: Memory for that.
        progress: Called with (steps done, steps in all).
        notify: Called with a line at each evaluation.

    Raises:
        FitError: If there are no held-out documents.
    """
    if not heldout.source:
        raise FitError("Tuning needs documents that it does not train on.")
    steps, batch = config.tune_steps, config.tune_batch
    before = float(np.mean(divergence(mapper, heldout, model, geometry)))
    trace = [(0, before)]
    best: tuple[float, int, Mapper] = (before, 0, mapper)
    training_set = _DocumentCache(
        training, model, distinct, kept_bytes if steps * batch > (distinct or 0) else 0
    )
    tunable = _TunableMap(mapper, training_set(0)[0])
    params: Params = tunable.zeros()
    optimizer = optim.Adam(learning_rate=_schedule(config.tune_rate, steps), betas=[0.9, 0.99])

    def loss(params: Params, document: Documents, wanted: mx.array) -> mx.array:
        cache = tunable.cache(params, document.source[0])
        got = model(_rest(document, 0), cache=cache)[0].astype(mx.float32)
        return _kl(wanted, got)

    gradient = mx.value_and_grad(loss)
    marks = {round(steps * (i + 1) / EVALUATIONS) for i in range(EVALUATIONS)}
    for step in range(steps):
        total, value = tunable.zeros(), 0.0
        for n in range(batch):
            document, wanted = training_set(step * batch + n)
            one, grads = gradient(params, document, wanted)
            total = {name: total[name] + grads[name] / batch for name in total}
            mx.eval(total, one)
            value += float(one) / batch
            mx.clear_cache()
        if not np.isfinite(value):
            break  # the best so far is kept
        params = optimizer.apply_gradients(total, params)
        mx.eval(params, optimizer.state)
        if progress is not None:
            progress(step + 1, steps)
        if step + 1 not in marks:
            continue
        candidate = tunable.mapper(params, config)
        found = float(np.mean(divergence(candidate, heldout, model, geometry)))
        trace.append((step + 1, found))
        if notify is not None:
            notify(f"tuning, step {step + 1}: divergence {found:.4f} (before: {before:.4f})")
        if found < best[0]:
            best = found, step + 1, candidate
    after, taken, tuned = best
    return TuneResult(tuned, taken, before, after, tuple(trace))


def _schedule(rate: float, steps: int) -> Any:
    """Linear warm-up, then cosine decay to a tenth."""
    rise = min(_WARM_UP, max(1, steps // 4))
    fall = optim.cosine_decay(rate, max(1, steps - rise), 0.1 * rate)
    return optim.join_schedules([optim.linear_schedule(rate / rise, rate, rise), fall], [rise])


class _DocumentCache:
    """Training documents with the target's predictions from its native cache."""

    def __init__(
        self, read: Callable[[int], Documents], model: Any, distinct: int | None, room: int
    ) -> None:
        self._read, self._model = read, model
        self._distinct, self._room = distinct, room if distinct else 0
        self._kept: dict[int, tuple[Documents, mx.array]] = {}

    def __call__(self, i: int) -> tuple[Documents, mx.array]:
        at = i if self._distinct is None else i % self._distinct
        if at in self._kept:
            return self._kept[at]
        document = self._read(i)
        wanted = mx.stop_gradient(_native_logits(self._model, document, 0))
        size = wanted.nbytes + sum(x.nbytes for kv in document.source[0].values() for x in kv)
        if size <= self._room:
            mx.eval(wanted, document.source)
            self._room -= size
            self._kept[at] = document, wanted
        return document, wanted


class _TunableMap:
    """A mapper as a differentiable function of normalised changes to its weights."""

    def __init__(self, mapper: Mapper, documents: Documents) -> None:
        self.mapper_before = mapper
        self._positions = mx.arange(documents.prefix - 1, dtype=mx.int32)
        self._dense: Params = {}
        self._unit: Params = {}
        self._strip: dict[Any, RopeTable | None] = {}
        for m in mapper.layers:
            loaded = mapper.load_layer(m.target_layer)
            for kind, part in (("keys", loaded.keys), ("values", loaded.values)):
                assert part.weight is not None and part.bias is not None
                name = f"{m.target_layer}.{kind}"
                self._dense[f"{name}.weight"] = dequantize(part.weight).astype(mx.float32)
                self._dense[f"{name}.bias"] = part.bias.astype(mx.float32)
                self._set_units(name, kind, part, documents)
        mx.eval(self._dense, self._unit)

    def _set_units(self, name: str, kind: str, part: LinearMap, documents: Documents) -> None:
        """Set by how much a step of size 1 changes each number."""
        spread = mx.array(self._spread(kind, part, documents))  # [heads, in]
        weight = self._dense[f"{name}.weight"]
        out = mx.sqrt(mx.square(weight * spread[..., None]).sum(axis=1, keepdims=True))
        size = mx.maximum(out, 1e-6)  # about the spread of what comes out
        width = weight.shape[1] ** 0.5
        self._unit[f"{name}.weight"] = size / (mx.maximum(spread, 1e-6)[..., None] * width)
        self._unit[f"{name}.bias"] = size[:, 0]

    def _spread(self, kind: str, part: LinearMap, documents: Documents) -> np.ndarray:
        source = self.mapper_before.source
        stds = []
        for layer in part.sources:
            rows = []
            for kv in documents.source[:4]:
                x = kv[layer][0 if kind == "keys" else 1][0]
                if kind == "keys" and self.mapper_before.content_space:
                    x = strip_rope(x, self._positions, source.layers[layer].rope)
                rows.append(np.array(x.astype(mx.float32)))
            stds.append(np.concatenate(rows, axis=1).std(axis=1))  # [heads, dims]
        if part.heads is None:
            row = np.concatenate([s.reshape(-1) for s in stds])
            return np.repeat(row[None], part.shape[0], axis=0)
        return np.stack(
            [np.concatenate([s[g] for s in stds for g in group]) for group in part.heads]
        )

    def zeros(self) -> Params:
        """No change: the mapper that tuning starts from."""
        return {name: mx.zeros(x.shape) for name, x in self._dense.items()}

    def _moved(self, params: Params, name: str) -> mx.array:
        return self._dense[name] + self._unit[name] * params[name]

    def cache(self, params: Params, source: dict[int, tuple[mx.array, mx.array]]) -> list[Any]:
        """The target's cache as the changed map produces it; differentiable."""
        from mlx_lm.models.cache import KVCache

        mapper, out = self.mapper_before, []
        for m in sorted(mapper.layers, key=lambda m: m.target_layer):
            spec = mapper.target.layers[m.target_layer].rope
            strip = rotate = None
            if mapper.content_space:
                strip = [self._table(s) for s in m.keys.sources]
                rotate = spec.table(self._positions)
            name = f"{m.target_layer}"
            entry: Any = KVCache()  # type: ignore[no-untyped-call]
            entry.keys = map_layer(
                [source[s][0] for s in m.keys.sources],
                self._moved(params, f"{name}.keys.weight"),
                self._moved(params, f"{name}.keys.bias"),
                heads=m.keys.heads,
                strip=strip,
                rotate=rotate,
                dtype=mapper.target.mx_dtype,
            )
            entry.values = map_layer(
                [source[s][1] for s in m.values.sources],
                self._moved(params, f"{name}.values.weight"),
                self._moved(params, f"{name}.values.bias"),
                heads=m.values.heads,
                dtype=mapper.target.mx_dtype,
            )
            entry.offset = self._positions.size
            out.append(entry)
        return out

    def _table(self, layer: int) -> RopeTable | None:
        spec = self.mapper_before.source.layers[layer].rope
        if spec not in self._strip:
            self._strip[spec] = spec.table(self._positions, inverse=True)
        return self._strip[spec]

    def mapper(self, params: Params, config: FitConfig) -> Mapper:
        """The changed map as a mapper, with weights stored as ``config`` says."""
        layers: list[LayerMap] = []
        for m in self.mapper_before.layers:
            parts = {}
            for kind, part in (("keys", m.keys), ("values", m.values)):
                name = f"{m.target_layer}.{kind}"
                dense = np.array(self._moved(params, f"{name}.weight")).astype(np.float64)
                stored = store_weight(dense, config, f"Target layer {m.target_layer}, {kind}")
                bias = self._moved(params, f"{name}.bias")
                mx.eval(bias)
                parts[kind] = LinearMap.of(part.sources, stored, bias, part.heads)
            # The scores are still the closed form's; callers with moments recompute them.
            layers.append(LayerMap(m.target_layer, parts["keys"], parts["values"], dict(m.scores)))
        return replace(
            self.mapper_before, layers=layers, fit=dict(self.mapper_before.fit), store=None
        )


def _rest(documents: Documents, i: int) -> mx.array:
    """``[1, n]`` tokens that are read on top of the prefix, the last one left out."""
    return mx.array(documents.tokens[i][documents.prefix - 1 : -1])[None]


def _native_logits(model: Any, documents: Documents, i: int) -> mx.array:
    tokens: Sequence[int] = documents.tokens[i][: documents.prefix - 1].tolist()
    cache = prefill(model, tokens)
    logits: mx.array = model(_rest(documents, i), cache=cache)[0].astype(mx.float32)
    return logits


def _kl(wanted: mx.array, got: mx.array) -> mx.array:
    """Mean over tokens of KL(wanted || got), from logits."""
    p = wanted - mx.logsumexp(wanted, axis=-1, keepdims=True)
    q = got - mx.logsumexp(got, axis=-1, keepdims=True)
    return (mx.exp(p) * (p - q)).sum(axis=-1).mean()
