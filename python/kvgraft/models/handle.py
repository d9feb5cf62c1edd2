"""A model that may be unloaded, and what is known about it while it is not in memory."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten

from kvgraft.errors import ModelNotFoundError
from kvgraft.models.geometry import ModelGeometry
from kvgraft.models.loading import LoadedModel, ModelIdentity, load_model
from kvgraft.models.probe import read_geometry

__all__ = [
    "ModelHandle",
    "ModelSource",
    "choose_dtype",
    "default_dtype",
    "model_bytes",
    "stored_bytes",
]

ModelSource = str | os.PathLike[str] | LoadedModel | Module | Callable[[], LoadedModel | Module]
"""A folder or repository, a live model, or a function that makes one."""


class ModelHandle:
    """A model that may be unloaded and loaded again.

    Only :meth:`load`, :meth:`loaded` and :meth:`peek` load a model; no property does.
    Geometry, identity, tokenizer and size stay known after the weights are gone,
    so a cache can be mapped without them.

    Args:
        source: Where the model comes from. A live model is used as it is; it can be
            unloaded, but not loaded again.
        dtype: Run the model in this dtype (see :func:`default_dtype`); default as
            stored. A live model keeps its own.
        name: What to call it in messages; default its repository or folder.
        nbytes: Bytes of its weights, where they can't be known before loading.

    Attributes:
        identity: Which model it is, once that is known; ``None`` for a bare module.
        tokenizer: mlx-lm's tokenizer, once the model was loaded or peeked at; ``None``
            for a bare module.
        name: What to call it in messages.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        dtype: mx.Dtype | None = None,
        name: str | None = None,
        nbytes: int | None = None,
    ) -> None:
        self._load: Callable[[], LoadedModel | Module] | None = None
        self._model: Module | None = None
        self._geometry: ModelGeometry | None = None
        self._bytes = nbytes
        self._dtype = dtype
        self._path: str | None = None
        self.identity: ModelIdentity | None = None
        self.tokenizer: Any = None
        self.name = name or ""
        if isinstance(source, (str, os.PathLike)):
            path = os.fspath(source)
            self._path = path
            self._load = lambda: load_model(path, lazy=True)
            self.name = name or (Path(path).resolve().name if Path(path).is_dir() else path)
        elif isinstance(source, (LoadedModel, Module)):
            self._take(source)
        else:
            self._load = source
            self.name = name or str(getattr(source, "__name__", "model"))

    @classmethod
    def of(cls, source: ModelSource | ModelHandle) -> ModelHandle:
        """``source`` itself if it is a handle, else a handle for it."""
        return source if isinstance(source, ModelHandle) else cls(source)

    @property
    def is_loaded(self) -> bool:
        """Whether the handle holds the model."""
        return self._model is not None

    @property
    def can_load(self) -> bool:
        """Whether :meth:`load` works after :meth:`unload`: not for a model given live."""
        return self._load is not None

    @property
    def geometry(self) -> ModelGeometry:
        """The geometry of its cache, probed the first time; does not load the model.

        Raises:
            ModelNotFoundError: If the model is not loaded and its geometry was not
                probed while it was.
            UnsupportedModelError: If its cache cannot be mapped.
        """
        if self._geometry is None:
            if self._model is None:
                raise ModelNotFoundError(
                    f"The geometry of {self.name or 'the model'} is not known before the model is "
                    "loaded: call load() first."
                )
            self._geometry = read_geometry(self._model)
        return self._geometry

    @property
    def known_geometry(self) -> ModelGeometry | None:
        """:attr:`geometry`, or ``None`` where that needs a model that is not loaded."""
        return self.geometry if self.is_loaded else self._geometry

    @property
    def nbytes(self) -> int | None:
        """Bytes of the weights: as loaded, else as stored; ``None`` if unknown."""
        if self._bytes is None and self._path is not None:
            return stored_bytes(self._path, self._dtype)
        return self._bytes

    def load(self) -> Module:
        """The live model; loaded if it is not in memory.

        Raises:
            ModelNotFoundError: If it was unloaded and nothing says how to load it, or
                its folder or repository cannot be found.
            UnsupportedModelError: If mlx-lm cannot load it.
        """
        if self._model is None:
            if self._load is None:
                raise ModelNotFoundError(
                    f"The model {self.name or 'given'} was unloaded and cannot be loaded again: "
                    "give its folder, its repository or a function that loads it."
                )
            self._take(self._load(), self._dtype)
        assert self._model is not None
        return self._model

    @contextmanager
    def loaded(self) -> Iterator[Module]:
        """The live model; unloaded afterwards if it was not loaded before.

        Raises:
            ModelNotFoundError: As :meth:`load`.
            UnsupportedModelError: As :meth:`load`.
        """
        was_loaded = self.is_loaded
        try:
            yield self.load()
        finally:
            if not was_loaded:
                self.unload()

    def peek(self) -> None:
        """Learn identity and tokenizer; the weights of a folder or repository stay on disk.

        A function that makes the model is called, and the model stays loaded.

        Raises:
            ModelNotFoundError: As :meth:`load`.
            UnsupportedModelError: As :meth:`load`.
        """
        if self._path is None:
            self.load()
        elif self.identity is None:
            found = load_model(self._path, lazy=True)
            self.identity, self.tokenizer = found.identity(), found.tokenizer

    def unload(self) -> bool:
        """Drop the model and give its memory back to the system.

        Returns:
            Whether the model is gone. ``False`` if something else still refers
            to it, so that its weights stay in memory; a model that could not be
            loaded again then stays in the handle.
        """
        if self._model is None:
            return True
        gone = weakref.ref(self._model)
        self._model = None
        if gone() is not None:
            gc.collect()
        mx.clear_cache()
        if (alive := gone()) is not None and self._load is None:
            self._model = alive
        return alive is None

    def _take(self, made: LoadedModel | Module, dtype: mx.Dtype | None = None) -> None:
        if isinstance(made, LoadedModel):
            self._model, self.tokenizer = made.model, made.tokenizer
            self.name = self.name or made.name
            if self.identity is None:
                self.identity = made.identity()
        else:
            self._model = made
            self.name = self.name or str(getattr(made, "model_type", type(made).__name__))
        if dtype is not None:
            self._model.set_dtype(dtype)
        leaves: Any = tree_flatten(cast(Any, self._model).parameters())
        for _, array in leaves:
            # One at a time: a cast holds the array in both dtypes.
            mx.eval(array)
        self._bytes = model_bytes(self._model)


def default_dtype() -> mx.Dtype | None:
    """The dtype to run models in on the default device; ``None`` as stored.

    float32 on a CPU, where MLX multiplies 16-bit matrices one element at a time.
    """
    return mx.float32 if mx.default_device() == mx.Device(mx.cpu) else None


def choose_dtype(name: str | None) -> mx.Dtype | None:
    """The dtype called ``name``, such as ``"bfloat16"``; :func:`default_dtype` for ``None``."""
    return default_dtype() if name is None else cast(mx.Dtype, getattr(mx, name))


def model_bytes(model: Any) -> int:
    """Bytes of a model's parameters, shared ones once."""
    leaves: Any = tree_flatten(model.parameters())
    return sum({id(p): int(p.nbytes) for _, p in leaves}.values())


def stored_bytes(path: str | os.PathLike[str], dtype: mx.Dtype | None = None) -> int | None:
    """Bytes that a model will take once loaded, from its files' headers.

    Args:
        path: The model's folder.
        dtype: dtype that it will be cast to; default as stored.

    Returns:
        Bytes, or ``None`` if the folder isn't here.
    """
    files = sorted(Path(path).expanduser().glob("model*.safetensors"))
    if not files:
        return None
    total = 0
    for file in files:
        weights: Any = mx.load(str(file))  # lazy: shapes and dtypes only
        for p in weights.values():
            cast = dtype is not None and mx.issubdtype(p.dtype, mx.floating)
            total += p.size * (dtype.size if cast and dtype is not None else p.dtype.size)
    return total
