"""A model that may be unloaded: what a handle loads, keeps and releases."""

from __future__ import annotations

import mlx.core as mx
import pytest
import zoo

from kvgraft.demo.data import bundled
from kvgraft.errors import ModelNotFoundError
from kvgraft.models.handle import (
    ModelHandle,
    choose_dtype,
    default_dtype,
    model_bytes,
    stored_bytes,
)
from kvgraft.models.loading import load_model
from kvgraft.models.probe import read_geometry

SMALL = bundled("models/small")


def test_nothing_is_loaded_before_load():
    handle = ModelHandle(SMALL, dtype=mx.float32)
    assert not handle.is_loaded and handle.can_load
    assert handle.known_geometry is None and handle.identity is None
    with pytest.raises(ModelNotFoundError, match="call load"):
        handle.geometry  # noqa: B018 - raises
    assert not handle.is_loaded
    assert handle.name == "small"
    assert handle.nbytes == stored_bytes(SMALL, mx.float32)


def test_what_is_known_outlives_the_weights():
    handle = ModelHandle(SMALL, dtype=mx.float32)
    model = handle.load()
    assert handle.load() is model
    geometry = handle.geometry
    assert geometry == read_geometry(model) and geometry.dtype == "float32"
    assert handle.nbytes == model_bytes(model)
    del model
    assert handle.unload() and not handle.is_loaded
    assert handle.known_geometry is handle.geometry is geometry
    assert handle.tokenizer is not None
    assert handle.identity == load_model(SMALL, lazy=True).identity()
    assert handle.load() is not None


def test_peek_reads_identity_and_tokenizer_only():
    handle = ModelHandle(SMALL)
    handle.peek()
    assert not handle.is_loaded and handle.tokenizer is not None
    assert handle.identity == load_model(SMALL, lazy=True).identity()


def test_loaded_unloads_only_what_it_loaded():
    handle = ModelHandle(SMALL)
    with handle.loaded() as model:
        assert handle.load() is model
        with handle.loaded() as again:
            assert again is model
        assert handle.is_loaded
        del model, again
    assert not handle.is_loaded
    with pytest.raises(ZeroDivisionError), handle.loaded():
        raise ZeroDivisionError
    assert not handle.is_loaded


def test_a_live_model_is_used_as_it_is():
    loaded = load_model(SMALL)
    before = loaded.model.parameters()["model"]["norm"]["weight"].dtype
    handle = ModelHandle(loaded, dtype=mx.float32 if before != mx.float32 else mx.float16)
    assert handle.is_loaded and not handle.can_load
    assert handle.load().parameters()["model"]["norm"]["weight"].dtype == before
    with handle.loaded():
        pass
    # The caller holds it, so it stays in memory and in the handle.
    assert not handle.unload() and handle.load() is loaded.model


def test_a_live_model_that_is_gone_cannot_be_loaded():
    handle = ModelHandle(zoo.make("qwen3"))
    assert handle.unload()
    with pytest.raises(ModelNotFoundError, match="cannot be loaded again"):
        handle.load()


def test_a_function_is_called_when_the_model_is_needed():
    made = []

    def make():
        made.append(1)
        return zoo.make("qwen3")

    handle = ModelHandle(make, dtype=mx.float16)
    assert not made and handle.name == "make" and handle.nbytes is None
    assert handle.load() is handle.load() and len(made) == 1
    assert handle.geometry.dtype == "float16"


def test_16_bit_models_run_in_float32_on_a_cpu(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.cpu))
    assert default_dtype() == mx.float32
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    assert default_dtype() is None and choose_dtype(None) is None
    assert choose_dtype("bfloat16") == mx.bfloat16
