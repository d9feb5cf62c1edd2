"""Mappers in memory: shapes, checks, loading and unloading."""

from __future__ import annotations

import math
from dataclasses import replace

import mappers
import mlx.core as mx
import pytest

from kvgraft.errors import GeometryError, MapperNotFoundError
from kvgraft.mapper.layer_map import LayerMap
from kvgraft.mapper.linear_map import LinearMap, Storage
from kvgraft.ops.quantized import dequantize, quantize

GROUPS = [[0, 1], [2, 3]]


class CountingStore:
    """Fills every layer with ones, and counts."""

    def __init__(self) -> None:
        self.filled: list[int] = []

    def fill(self, layer: LayerMap) -> None:
        self.filled.append(layer.target_layer)
        for part in (layer.keys, layer.values):
            part.weight = mx.ones(part.shape)
            part.bias = mx.ones((part.shape[0], part.shape[2]))

    def read_ahead(self, layer: LayerMap) -> None:
        pass


def test_a_linear_map_reads_its_shape_off_the_weights():
    m = LinearMap.of([3, 1], mx.zeros((2, 64, 16)), mx.zeros((2, 16)), [[0, 1], [1, 0]])
    assert m.shape == (2, 64, 16)
    assert m.sources == (3, 1)
    assert m.heads == ((0, 1), (1, 0))
    assert m.n_parameters == 2 * 65 * 16


@pytest.mark.parametrize(("bits", "group_size"), [(4, 32), (4, 64), (8, 64), (8, 128)])
def test_storage_and_its_bytes_are_those_of_the_arrays(bits, group_size):
    weight = quantize(mx.ones((2, 128, 16)), bits=bits, group_size=group_size)
    bias = mx.zeros((2, 16), dtype=mx.bfloat16)
    storage = Storage.of(weight, bias)
    assert storage == Storage("float32", bits, group_size, "bfloat16")
    arrays = (weight.packed, weight.scales, weight.biases, bias)
    assert storage.nbytes((2, 128, 16)) == sum(a.nbytes for a in arrays)


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
def test_storage_of_plain_weights(dtype):
    weight, bias = mx.zeros((2, 64, 16), dtype=dtype), mx.zeros((2, 16), dtype=mx.float32)
    storage = Storage.of(weight, bias)
    assert getattr(mx, storage.dtype) == dtype and storage.bits is None
    assert storage.nbytes((2, 64, 16)) == weight.nbytes + bias.nbytes


def test_storage_of_nothing_is_an_error():
    with pytest.raises(MapperNotFoundError, match="neither in memory nor on disk"):
        _ = LinearMap((0,), None, (1, 1, 1)).storage


def test_counts_and_lists():
    m = mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True)
    assert m.source_layers == (0, 1, 2, 3)
    assert m.n_parameters == sum(
        dequantize(p.weight).size + p.bias.size for x in m.layers for p in (x.keys, x.values)
    )
    assert m.describe() == (
        f"org/large (4 layers) -> org/small (2 layers), {m.n_parameters / 1e6:.1f} M parameters"
    )
    assert "mixed (4 layers)" in replace(m, source_model=None).describe()


def test_veloxquant_names_read_the_same_weights():
    m = mappers.mapper(mappers.geometry(4, heads=4), heads=GROUPS, bits=4).layers[1]
    assert m.source_layers == [1, 2]
    assert mappers.same(m.w_k, dequantize(m.keys.weight)) and mappers.same(m.b_k, m.keys.bias)
    assert mappers.same(m.w_v, dequantize(m.values.weight)) and mappers.same(m.b_v, m.values.bias)
    assert m.r2_k == 0.76 and math.isnan(m.r2_v)
    m.unload()
    assert (m.w_k, m.b_k, m.w_v, m.b_v) == (None,) * 4
    assert math.isnan(LayerMap(0, m.keys, m.values).r2_k)


def test_layers_are_found_by_index_not_by_place():
    m = mappers.mapper()
    m.layers.reverse()
    assert m.layer(0) is m.layers[2]
    with pytest.raises(GeometryError, match=r"\[2, 1, 0\], not 3"):
        m.layer(3)


def test_load_layer_reads_what_is_absent_and_keeps_it():
    m = mappers.mapper()
    m.store = CountingStore()
    m.layers[1].unload()
    assert m.load_layer(0).is_loaded and m.store.filled == []
    assert m.load_layer(1) is m.layers[1]
    assert m.load_layer(1).is_loaded and m.store.filled == [1]
    m.unload_all()
    assert not any(x.is_loaded for x in m.layers)


def test_read_layer_leaves_the_mapper_as_it_is():
    m = mappers.mapper()
    m.store = CountingStore()
    m.layers[1].unload()
    private = m.read_layer(1)
    assert private.is_loaded and not m.layers[1].is_loaded
    shared = m.read_layer(0, keep=True)
    m.layers[0].unload()
    assert shared.is_loaded and m.store.filled == [1]
    kept = m.read_layer(0, keep=True)
    assert m.layers[0].keys.weight is kept.keys.weight and m.store.filled == [1, 0]
    m.layers[0].values.bias = None
    assert not m.layers[0].is_loaded


@pytest.mark.parametrize("read", ["load_layer", "read_layer"])
def test_unloaded_and_no_file(read):
    m = mappers.mapper()
    m.unload_all()
    with pytest.raises(MapperNotFoundError, match="layer 2 were unloaded .* Save it before"):
        getattr(m, read)(2)


@pytest.mark.parametrize(
    "good",
    [
        mappers.mapper(),
        mappers.mapper(mappers.mixed_source(), mappers.mixed_target(), separate=True),
        mappers.mapper(mappers.geometry(4, heads=4), heads=GROUPS),
        mappers.mapper(mappers.geometry(4, heads=4), bits=8),
    ],
    ids=["full", "mixed", "grouped", "quantised"],
)
def test_check_accepts_good_mappers_loaded_or_not(good):
    good.check()
    good.store = CountingStore()
    for layer in good.layers:
        layer.unload()
    good.check()


def _bad(change):
    m = mappers.mapper(mappers.geometry(4, heads=4), heads=GROUPS)
    change(m)
    return m


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.layers.clear(), "produces no layers"),
        (lambda m: setattr(m.layers[0], "target_layer", 3), "target layer 3, but the target has 3"),
        (lambda m: setattr(m.layers[0], "target_layer", -1), "target layer -1"),
        (lambda m: setattr(m.layers[0], "target_layer", 1), "target layer 1 twice"),
        (lambda m: setattr(m.layers[0].keys, "sources", ()), "0, keys: no source layers"),
        (lambda m: setattr(m.layers[0].keys, "sources", (0, 4)), r"source layers \[4\] are not"),
        (lambda m: setattr(m.layers[1].values, "sources", (0,)), "1, values: the weights are"),
        (lambda m: setattr(m.layers[0].keys, "heads", None), "head mapping ask for"),
        (lambda m: setattr(m.layers[0].keys, "heads", ((0, 1),)), "lists 1 heads, the target has"),
        (lambda m: setattr(m.layers[0].keys, "heads", ((0, 4), (1, 2))), "outside 0..3"),
        (lambda m: setattr(m.layers[0].keys, "heads", ((0, -1), (1, 2))), "outside 0..3"),
        (lambda m: setattr(m.layers[0].keys, "heads", ((0,), (1, 2))), "different widths"),
        (lambda m: setattr(m.layers[0].keys, "heads", ((), ())), "head mapping ask for"),
        (lambda m: setattr(m.layers[0].keys, "weight", mx.zeros((2, 8, 16))), "are due"),
        (lambda m: setattr(m.layers[0].values, "bias", mx.zeros((2, 8))), r"biases of \(2, 8\)"),
        (lambda m: setattr(m.layers[0].values, "shape", (2, 64, 8)), "the weights are"),
    ],
)
def test_check_names_what_is_wrong(change, message):
    with pytest.raises(GeometryError, match=message):
        _bad(change).check()


def test_foreign_linear_maps_do_not_gain_a_file():
    part = LinearMap.of([0], mx.zeros((1, 2, 2)), mx.zeros((1, 2)))
    assert part.on_disk is None
