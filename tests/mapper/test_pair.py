"""A mapper is refused for other models than its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mappers
import pytest

from kvgraft.errors import (
    PairMismatchError,
)
from kvgraft.mapper.pair import check_pair
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import ModelIdentity
from kvgraft.models.rope import RopeSpec


def _other_rope(g: ModelGeometry, **changes: Any) -> ModelGeometry:
    layer = g.layers[1]
    layers = list(g.layers)
    layers[1] = replace(layer, rope=replace(layer.rope, **changes))
    return replace(g, layers=tuple(layers))


def test_the_right_pair_passes():
    m = mappers.mapper(mappers.mixed_source(), mappers.mixed_target())
    assert check_pair(m) == []
    assert check_pair(m, source=m.source, target=m.target, source_model=m.source_model,
                      target_model=m.target_model) == []  # fmt: skip


def test_precision_is_reported_and_not_refused():
    m = mappers.mapper()
    notes = check_pair(
        m,
        source=replace(m.source, dtype="bfloat16"),
        source_model=replace(m.source_model, name="copy", quantization=None),
    )
    assert len(notes) == 2 and "bfloat16" in notes[0] and "quantization None" in notes[1]


def test_last_bits_of_frequencies_do_not_matter():
    m = mappers.mapper(mappers.mixed_source(), mappers.mixed_target())
    first = m.source.layers[0]
    nudged = tuple(f * (1 + 1e-7) for f in first.rope.freqs)
    layers = (replace(first, rope=replace(first.rope, freqs=nudged)), *m.source.layers[1:])
    assert check_pair(m, source=replace(m.source, layers=layers)) == []


def test_an_unknown_identity_is_not_compared():
    m = replace(mappers.mapper(), source_model=None)
    assert check_pair(m, source_model=ModelIdentity("x", "y", "z")) == []


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (lambda m: {"source": replace(m.source, layers=m.source.layers[:3])},
         "source: 3 layers, the mapper's has 4"),
        (lambda m: {"source": m.target, "target": m.source}, "source: 3 layers.*\n.*target: "),
        (lambda m: {"target": mappers.geometry(3, heads=4)}, "target: layer 0: n_kv_heads 4, the"),
        (lambda m: {"target": mappers.geometry(3, dim=8)}, "key_dim 8, the mapper's is 16"),
        (lambda m: {"target": replace(m.target, model_type="other")}, "architecture other"),
        (lambda m: {"source": _other_rope(m.source, base=5e5)},
         "source: layer 1: RoPE base 500000.0, the mapper's is 10000.0"),
        (lambda m: {"source": _other_rope(m.source, scale=0.5)}, "RoPE scale 0.5"),
        (lambda m: {"source": _other_rope(m.source, traditional=True)}, "RoPE traditional True"),
        (lambda m: {"source": _other_rope(m.source, magnitude=1.1)}, "RoPE magnitude 1.1"),
        (lambda m: {"source": _other_rope(m.source, dims=8)}, "RoPE dims 8"),
        (lambda m: {"source": _other_rope(m.source, base=None, freqs=(1.0,) * 8)},
         "RoPE base None.*\n.*frequencies differ"),
        (lambda m: {"target": replace(m.target, layers=tuple(
            replace(x, window=8) for x in m.target.layers))}, "window 8, the mapper's is None"),
        (lambda m: {"source_model": replace(m.source_model, config_sha256="f" * 64)},
         "another configuration than org/large .ffffffffffff against aaaaaaaaaaaa"),
        (lambda m: {"target_model": replace(m.target_model, tokenizer_sha256="f" * 64)},
         "target: org/small has another tokenizer"),
    ],
)  # fmt: skip
def test_another_pair_is_refused_by_what_differs(given, message):
    m = mappers.mapper()
    with pytest.raises(PairMismatchError, match=message):
        check_pair(m, **given(m))


def test_many_differences_are_summed_up():
    m = mappers.mapper(mappers.geometry(30), mappers.geometry(2))
    with pytest.raises(PairMismatchError, match="and 112 more"):
        check_pair(m, source=mappers.geometry(30, heads=1, dim=8, rope=RopeSpec(16, base=2.0)),
                   target=m.target)  # fmt: skip
