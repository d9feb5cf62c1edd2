"""Loading a model through mlx-lm, and saying which model it is.

A mapper belongs to one pair of models, and a pair must turn the same text into
the same token ids: position ``i`` of one cache has to be position ``i`` of the
other. Both are checked by digests, so that a wrong pair is refused before any
work.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlx.nn.layers.base import Module

from kvgraft.errors import ModelNotFoundError, TokenizerMismatchError, UnsupportedModelError

__all__ = [
    "LoadedModel",
    "ModelIdentity",
    "ModelLike",
    "check_tokenizers",
    "identify",
    "load_model",
    "resolve_model",
    "tokenizer_differences",
    "tokenizer_digest",
]

PROBE_TEXTS = (
    "The quick brown fox jumps over the lazy dog.",
    "  two spaces,\ttab\nand 3 newlines\n\n\n1234567890 3.14159",
    "def f(x: int) -> list[str]:\n    return [str(x)] * 2  # don't",
    "naïve café — “quotes” … 東京 привет مرحبا 👩‍🚀",
)
"""Texts whose encodings go into a tokenizer's digest: whitespace, digits, code, scripts."""

# What may differ between copies of the same model: how it was stored, not what it is.
_STORAGE_KEYS = frozenset(
    {
        "_name_or_path",
        "dtype",
        "quantization",
        "quantization_config",
        "torch_dtype",
        "transformers_version",
    }
)

# The files that mlx-lm reads from a model's repository.
_PATTERNS = ["*.json", "model*.safetensors", "*.jinja", "*.jsonl", "*.model", "*.tiktoken", "*.txt"]


@dataclass(frozen=True)
class ModelIdentity:
    """Which model a cache or a mapper belongs to.

    Attributes:
        name: Repository name or the folder's name, for messages.
        config_sha256: Digest of ``config.json`` without the keys that only say
            how this copy is stored (dtype, quantization, library version).
        tokenizer_sha256: Digest of :func:`tokenizer_digest`.
        quantization: mlx-lm's quantization settings (``bits``, ``group_size``,
            …), or ``None`` for an unquantised model.
    """

    name: str
    config_sha256: str
    tokenizer_sha256: str
    quantization: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """A JSON-ready description; :meth:`from_dict` reads it back."""
        return {
            "name": self.name,
            "config_sha256": self.config_sha256,
            "tokenizer_sha256": self.tokenizer_sha256,
            "quantization": self.quantization,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ModelIdentity:
        """Inverse of :meth:`to_dict`."""
        quantization = data.get("quantization")
        return cls(
            name=str(data["name"]),
            config_sha256=str(data["config_sha256"]),
            tokenizer_sha256=str(data["tokenizer_sha256"]),
            quantization=None if quantization is None else dict(quantization),
        )


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run, with what is needed to say which one it is.

    Attributes:
        model: The mlx-lm model, in evaluation mode.
        tokenizer: mlx-lm's tokenizer wrapper.
        path: The folder that it was read from.
        name: Repository name, or the folder's own name: artifacts carry it, and
            must not tell where somebody keeps their files.
    """

    model: Module
    tokenizer: Any
    path: Path
    name: str

    def identity(self) -> ModelIdentity:
        """The model's :class:`ModelIdentity`."""
        return identify(self.path, self.model, self.tokenizer, name=self.name)


ModelLike = LoadedModel | str | os.PathLike[str]
"""A loaded model, or a folder or repository to load it from."""


def resolve_model(path_or_repo: str | os.PathLike[str]) -> Path:
    """Find a model's folder, downloading it when it is a repository's name.

    Raises:
        ModelNotFoundError: If there is no such folder, and no such repository
            in the local cache or on the hub (or the hub cannot be reached).
    """
    text = os.fspath(path_or_repo)
    path = Path(text).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelNotFoundError(
                f"{path} holds no config.json, so it is not an mlx-lm model. Give the folder "
                "that mlx_lm.convert wrote, or a Hugging Face repository (owner/name)."
            )
        return path
    looks_like_path = path.exists() or text.startswith((".", "~", os.sep)) or text.count("/") != 1
    if looks_like_path:
        raise ModelNotFoundError(
            f"No model at {path}: it is not a folder. Give a folder with config.json and "
            "*.safetensors, or a Hugging Face repository (owner/name)."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(text, allow_patterns=_PATTERNS))
    except Exception as error:  # its error classes differ from release to release
        raise ModelNotFoundError(
            f"Cannot get the model {text}: it is neither a local folder nor in the Hugging Face "
            f"cache, and downloading failed ({type(error).__name__}: {_first_line(error)}). "
            "Check the name and the network, or download it elsewhere and give the folder."
        ) from error


def load_model(
    path_or_repo: str | os.PathLike[str],
    *,
    tokenizer_config: Mapping[str, Any] | None = None,
    lazy: bool = False,
) -> LoadedModel:
    """Load a model and its tokenizer with mlx-lm.

    Args:
        path_or_repo: A folder, or a Hugging Face repository (``owner/name``).
        tokenizer_config: Passed on to the tokenizer, for example
            ``{"trust_remote_code": True}``.
        lazy: Leave the weights on disk until they are used.

    Raises:
        ModelNotFoundError: If it cannot be found or downloaded, or files of it
            are missing.
        UnsupportedModelError: If this mlx-lm does not know the architecture or
            the weights do not fit it.
    """
    import mlx_lm

    path = resolve_model(path_or_repo)
    try:
        loaded = mlx_lm.load(str(path), tokenizer_config=dict(tokenizer_config or {}), lazy=lazy)
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"The model at {path} is incomplete: {error}") from error
    except Exception as error:  # a bad file can fail in json, safetensors, mlx or transformers
        raise UnsupportedModelError(
            f"mlx-lm {mlx_lm.__version__} cannot load the model at {path} "
            f"({type(error).__name__}: {_first_line(error)}). If the architecture is newer than "
            "this mlx-lm, upgrade it; otherwise convert the model again with mlx_lm.convert."
        ) from error
    given = os.fspath(path_or_repo)
    name = path.resolve().name if Path(given).expanduser().is_dir() else given
    return LoadedModel(loaded[0], loaded[1], path, name)


def identify(
    model_path: str | os.PathLike[str],
    model: Module | None,
    tokenizer: Any,
    *,
    name: str | None = None,
) -> ModelIdentity:
    """Identify a model, so that another one can be distinguished from it.

    Args:
        model_path: The folder with the model's ``config.json``.
        model: The live model, or ``None``. Used only to see that layers are
            quantised when the configuration doesn't say so.
        tokenizer: Its tokenizer (mlx-lm's wrapper or a transformers one).
        name: What to call it; default the folder's name.

    Raises:
        ModelNotFoundError: If there is no readable ``config.json``.
    """
    path = Path(model_path)
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(
            f"Cannot read {path / 'config.json'} ({type(error).__name__}: {error}). "
            "Give the folder of an mlx-lm model."
        ) from error
    stored = {key: value for key, value in config.items() if key not in _STORAGE_KEYS}
    quantization = config.get("quantization") or _live_quantization(model)
    return ModelIdentity(
        name=path.resolve().name if name is None else name,
        config_sha256=_digest(stored),
        tokenizer_sha256=tokenizer_digest(tokenizer),
        quantization=quantization,
    )


def tokenizer_digest(tokenizer: Any) -> str:
    """SHA-256 over what decides how text becomes token ids.

    Vocabulary, added tokens, special tokens and the encodings of a few texts.
    The roles of special tokens that only end
    or pad a text (EOS, PAD) are left out: a base model and its instruction
    tuning may differ there and still read the same ids.
    """
    return _digest(_tokenizer_facts(tokenizer))


def tokenizer_differences(source: Any, target: Any, *, examples: int = 3) -> list[str]:
    """Every way in which two tokenizers differ, one line each; empty if they agree."""
    a, b = _tokenizer_facts(source), _tokenizer_facts(target)
    lines = []
    for key, what in (("vocab", "vocabulary"), ("added", "added tokens"), ("special", "special")):
        lines += _mapping_difference(what, a[key], b[key], examples)
    for text, x, y in zip(PROBE_TEXTS, a["encodings"], b["encodings"], strict=True):
        if x != y:
            at = next((i for i, (p, q) in enumerate(zip(x, y)) if p != q), min(len(x), len(y)))
            lines.append(
                f"{text[:24]!r}: {len(x)} ids in the source, {len(y)} in the target, "
                f"parting at id {at}: {x[at : at + 4]} against {y[at : at + 4]}"
            )
    return lines


def check_tokenizers(source: Any, target: Any) -> None:
    """Refuse a pair whose tokenizers give different ids for the same text.

    mlx-lm itself compares only ``vocab_size``, which hides added tokens.

    Raises:
        TokenizerMismatchError: With the differences, by kind and example.
    """
    lines = tokenizer_differences(source, target)
    if lines:
        raise TokenizerMismatchError(
            "The two models do not share a tokenizer, so position i of one cache is not "
            "position i of the other. Choose a pair of one family. Differences:\n  "
            + "\n  ".join(lines)
        )


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    vocab = {str(token): int(index) for token, index in tokenizer.get_vocab().items()}
    get_added = getattr(tokenizer, "get_added_vocab", None)
    added = {} if get_added is None else {str(k): int(v) for k, v in get_added().items()}
    names = [str(token) for token in getattr(tokenizer, "all_special_tokens", [])]
    # With special tokens: a BOS that only one of two adds shifts every position.
    encodings = [[int(i) for i in tokenizer.encode(text)] for text in PROBE_TEXTS]
    return {
        "vocab": vocab,
        "added": added,
        "special": {name: vocab[name] for name in names if name in vocab and name not in added},
        "encodings": encodings,
    }


def _mapping_difference(
    what: str, a: Mapping[str, int], b: Mapping[str, int], examples: int
) -> list[str]:
    tokens = [token for token in {**a, **b} if a.get(token) != b.get(token)]
    if not tokens:
        return []
    tokens.sort(key=lambda token: a.get(token, b.get(token, 0)))
    shown = ", ".join(
        f"{token!r} is {a.get(token, 'absent')} in the source, {b.get(token, 'absent')} in the "
        "target"
        for token in tokens[:examples]
    )
    rest = f", and {len(tokens) - examples} more" if len(tokens) > examples else ""
    return [f"{what}: {len(a)} against {len(b)} tokens; {shown}{rest}"]


def _live_quantization(model: Any) -> dict[str, Any] | None:
    if model is None:
        return None
    from mlx.nn.layers.quantized import QuantizedLinear

    for module in model.modules():
        if isinstance(module, QuantizedLinear):
            return {"group_size": int(module.group_size), "bits": int(module.bits)}
    return None


def _digest(data: Any) -> str:
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else "no message"
