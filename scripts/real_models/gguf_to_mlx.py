"""Turn a GGUF file of a Llama or Qwen2 model into a folder that mlx-lm loads.

Real weights for tests are to be had as GGUF files inside packages; mlx-lm reads
its own layout. Weights are dequantised to one float dtype. Layers can be left
out, which gives a second, weaker model with the same tokenizer and KV geometry.

    python scripts/real_models/gguf_to_mlx.py IN.gguf OUT --dtype float16 --drop 14,17,25

Needs the packages ``gguf``, ``numpy``, ``safetensors`` and ``tokenizers``.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF
QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Gguf:
    """The parts of a GGUF file that are needed here."""

    def __init__(self, path: Path) -> None:
        self.reader = GGUFReader(path)
        self.arch = self.field("general.architecture")
        if self.arch not in ARCHITECTURES:
            raise SystemExit(f"{path}: architecture {self.arch!r}; only {sorted(ARCHITECTURES)}.")

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value by its full key."""
        found = self.reader.fields.get(key)
        return default if found is None else found.contents()

    def arch_field(self, key: str) -> Any:
        """A metadata value by its key under the architecture's name."""
        return self.field(f"{self.arch}.{key}")


def convert_weights(
    gguf: Gguf, drop: Collection[int], dtype: np.dtype
) -> tuple[dict[str, np.ndarray], int]:
    """All tensors under mlx-lm's names, and the number of layers kept."""
    n_layers = gguf.arch_field("block_count")
    kept = [i for i in range(n_layers) if i not in drop]
    new_index = {old: new for new, old in enumerate(kept)}
    n_heads = {
        "attn_q": gguf.arch_field("attention.head_count"),
        "attn_k": gguf.arch_field("attention.head_count_kv"),
    }
    out: dict[str, np.ndarray] = {}
    for tensor in gguf.reader.tensors:
        base, suffix = tensor.name.rsplit(".", 1)
        block = re.fullmatch(r"blk\.(\d+)\.(.+)", base)
        if block and int(block[1]) not in new_index:
            continue
        shape = tuple(int(n) for n in reversed(tensor.shape))
        array = dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if block is None:
            name = TOP[base]
        else:
            kind = block[2]
            name = f"model.layers.{new_index[int(block[1])]}.{BLOCK[kind]}"
            if gguf.arch == "llama" and kind in n_heads:
                # GGUF files of Llama interleave the two halves of each head.
                heads = n_heads[kind]
                pairs = array.reshape(heads, -1, 2, *array.shape[1:])
                array = pairs.swapaxes(1, 2).reshape(array.shape)
        out[f"{name}.{suffix}"] = np.ascontiguousarray(array.astype(dtype))
    return out, len(kept)


def fold_head(weights: dict[str, np.ndarray]) -> bool:
    """Tie the head to the embedding if they differ only by their quantisation."""
    head = weights.get("lm_head.weight")
    if head is None:
        return True
    a = head[:2000].astype(np.float32).ravel()
    b = weights["model.embed_tokens.weight"][:2000].astype(np.float32).ravel()
    if a @ b / np.sqrt((a @ a) * (b @ b)) < 0.98:
        return False
    # The head is stored with more bits.
    weights["model.embed_tokens.weight"] = weights.pop("lm_head.weight")
    return True


def build_config(gguf: Gguf, n_layers: int, tied: bool, dtype: str) -> dict[str, Any]:
    """``config.json`` as mlx-lm reads it."""
    return {
        "model_type": gguf.arch,
        "architectures": [ARCHITECTURES[gguf.arch]],
        "hidden_size": gguf.arch_field("embedding_length"),
        "num_hidden_layers": n_layers,
        "intermediate_size": gguf.arch_field("feed_forward_length"),
        "num_attention_heads": gguf.arch_field("attention.head_count"),
        "num_key_value_heads": gguf.arch_field("attention.head_count_kv"),
        "rms_norm_eps": float(f"{gguf.arch_field('attention.layer_norm_rms_epsilon'):.3g}"),
        "vocab_size": len(gguf.field("tokenizer.ggml.tokens")),
        "max_position_embeddings": gguf.arch_field("context_length"),
        "rope_theta": float(gguf.arch_field("rope.freq_base")),
        "tie_word_embeddings": tied,
        "torch_dtype": dtype,
        "bos_token_id": gguf.field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": gguf.field("tokenizer.ggml.eos_token_id"),
    }


def build_tokenizer(gguf: Gguf) -> Tokenizer:
    """The byte-level BPE tokenizer."""
    tokens = gguf.field("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ")) for m in gguf.field("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    if gguf.field("tokenizer.ggml.pre") == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), "isolated")
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    else:
        split = pre_tokenizers.Digits(individual_digits=True)
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf.field("tokenizer.ggml.token_type")
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (CONTROL, USER_DEFINED)
        ]
    )
    return tokenizer


def convert(source: Path, out: Path, dtype: str = "float16", drop: Collection[int] = ()) -> None:
    """Convert one file; see the module's text."""
    gguf = Gguf(source)
    weights, n_layers = convert_weights(gguf, drop, np.dtype(dtype))
    tied = fold_head(weights)
    out.mkdir(parents=True, exist_ok=True)
    save_file(weights, out / "model.safetensors", metadata={"format": "mlx"})
    (out / "config.json").write_text(
        json.dumps(build_config(gguf, n_layers, tied, dtype), indent=2)
    )
    build_tokenizer(gguf).save(str(out / "tokenizer.json"))
    tokens = gguf.field("tokenizer.ggml.tokens")
    eos = gguf.field("tokenizer.ggml.eos_token_id")
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": tokens[eos],
        "pad_token": tokens[gguf.field("tokenizer.ggml.padding_token_id", eos)],
        "chat_template": gguf.field("tokenizer.chat_template"),
        "model_max_length": gguf.arch_field("context_length"),
        "clean_up_tokenization_spaces": False,
    }
    (out / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    print(f"{out}: {gguf.arch}, {n_layers} layers, tied head {tied}")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", choices=["float16", "float32"], default="float16")
    parser.add_argument("--drop", default="", help="layers to leave out, such as 14,17,25")
    args = parser.parse_args()
    drop = {int(i) for i in args.drop.split(",") if i}
    convert(args.source, args.out, args.dtype, drop)


if __name__ == "__main__":
    main()
