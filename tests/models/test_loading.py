"""Loading models, telling them apart and comparing their tokenizers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import zoo
from mlx.utils import tree_flatten
from tiny_tokenizer import tokenizer

from kvgraft.errors import ModelNotFoundError, TokenizerMismatchError, UnsupportedModelError
from kvgraft.models.loading import (
    ModelIdentity,
    check_tokenizers,
    identify,
    load_model,
    resolve_model,
    tokenizer_differences,
    tokenizer_digest,
)

CONFIG = {**zoo.BASE, "model_type": "qwen3", "vocab_size": 300}


def save(folder: Path, **overrides: Any) -> Path:
    """A tiny model as mlx_lm.convert would write it."""
    config = {**CONFIG, **overrides}
    model = zoo.make(zoo.Tiny("qwen3", config))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(
        str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())), {"format": "mlx"}
    )
    tokenizer().save_pretrained(folder)
    return folder


# ------------------------------------------------------------------ tokenizers


def test_equal_tokenizers_agree() -> None:
    a, b = tokenizer(), tokenizer()
    check_tokenizers(a, b)
    assert tokenizer_differences(a, b) == []
    assert tokenizer_digest(a) == tokenizer_digest(b)


def test_the_role_of_ending_a_text_may_differ() -> None:
    # As between a base model and its instruction tuning.
    a, b = tokenizer(), tokenizer(eos_token="<s>")
    check_tokenizers(a, b)
    assert tokenizer_digest(a) == tokenizer_digest(b)


@pytest.mark.parametrize(
    ("other", "shown"),
    [
        ({"added": ("<s>", "</s>", "<tool>")}, "'<tool>' is absent in the source"),
        ({"added": ("</s>", "<s>")}, "'<s>' is 258 in the source, 259 in the target"),
        ({"merges": 3}, "'on' is absent in the source, 258 in the target"),
        ({"bos": True}, "parting at id 0"),
    ],
    ids=["added token", "swapped ids", "merges", "bos"],
)
def test_differences_are_refused_and_shown(other: dict[str, Any], shown: str) -> None:
    a, b = tokenizer(), tokenizer(**other)
    with pytest.raises(TokenizerMismatchError) as caught:
        check_tokenizers(a, b)
    assert shown in str(caught.value)
    assert tokenizer_digest(a) != tokenizer_digest(b)


def test_only_a_few_of_many_differences_are_shown() -> None:
    other = tokenizer(added=tuple(f"<extra {i}>" for i in range(50)) + ("<s>", "</s>"))
    lines = tokenizer_differences(tokenizer(), other, examples=2)
    assert "and 50 more" in lines[0] and len(lines[0]) < 300


# --------------------------------------------------------------------- loading


def test_a_model_is_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny")
    loaded = load_model(folder)
    assert loaded.path == folder and loaded.name == "tiny"
    assert not loaded.model.training
    logits = loaded.model(mx.array([loaded.tokenizer.encode("the one")]))
    assert logits.shape[-1] == 300
    identity = loaded.identity()
    assert identity == identify(folder, loaded.model, loaded.tokenizer)
    assert ModelIdentity.from_dict(json.loads(json.dumps(identity.to_dict()))) == identity


def test_missing_models_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelNotFoundError, match="not a folder") as caught:
        load_model(tmp_path / "nowhere")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(ModelNotFoundError, match="no config.json"):
        load_model(tmp_path)
    folder = save(tmp_path / "tiny")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelNotFoundError, match="incomplete"):
        load_model(folder)

    import huggingface_hub

    def offline(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no network\nand a long explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelNotFoundError, match=r"owner/name.*ConnectionError: no network\)"):
        resolve_model("owner/name")


def test_models_that_do_not_load_say_so(tmp_path: Path) -> None:
    unknown = save(tmp_path / "unknown")
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps({**config, "model_type": "from_the_future"}))
    with pytest.raises(UnsupportedModelError, match="from_the_future"):
        load_model(unknown)
    wrong = save(tmp_path / "wrong")
    (wrong / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(UnsupportedModelError, match="cannot load"):
        load_model(wrong)
    cut = save(tmp_path / "cut")
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises((UnsupportedModelError, ModelNotFoundError)):
        load_model(cut)


# -------------------------------------------------------------------- identity


def test_identity_tells_models_apart_and_copies_not(tmp_path: Path) -> None:
    def identity(**changes: Any) -> ModelIdentity:
        folder = tmp_path / "m"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
        return identify(folder, None, tokenizer(), name="m")

    plain = identity()
    assert plain.quantization is None
    # The same model stored in another way …
    four_bit = identity(
        torch_dtype="float16",
        transformers_version="9.9",
        quantization={"group_size": 64, "bits": 4},
        quantization_config={"group_size": 64, "bits": 4},
    )
    assert four_bit.config_sha256 == plain.config_sha256
    assert four_bit.quantization == {"group_size": 64, "bits": 4}
    # … and another model.
    assert identity(rope_theta=1e6).config_sha256 != plain.config_sha256
    assert identity(num_hidden_layers=3).config_sha256 != plain.config_sha256


def test_identity_sees_layers_quantised_after_loading(tmp_path: Path) -> None:
    import mlx.nn as nn

    folder = save(tmp_path / "tiny")
    model = zoo.make("qwen3")
    nn.quantize(model, group_size=32, bits=8)
    assert identify(folder, model, tokenizer()).quantization == {"group_size": 32, "bits": 8}


def test_identity_needs_a_configuration(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="config.json"):
        identify(tmp_path, None, tokenizer())
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelNotFoundError, match="Cannot read"):
        identify(tmp_path, None, tokenizer())
