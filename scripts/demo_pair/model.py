"""A Qwen3-shaped decoder in PyTorch, small enough to train on one CPU core.

Parameter names are those of the Hugging Face and mlx-lm model less the leading "model.".
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from .corpus import END_ID, VOCABULARY

MAX_POSITIONS = 2048
ROPE_THETA = 10_000.0
NORM_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class Shape:
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    # Alike in both, so that one cache can be mapped head by head onto the other.
    num_key_value_heads: int = 2
    head_dim: int = 32


Name = Literal["large", "small"]
SHAPES: dict[Name, Shape] = {
    "large": Shape(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=4, intermediate_size=384
    ),
    "small": Shape(
        hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=320
    ),
}


class RMSNorm(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout (mlx-lm's `traditional=False`)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, shape.hidden_size, bias=False)
        self.q_norm = RMSNorm(shape.head_dim)
        self.k_norm = RMSNorm(shape.head_dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape

        def heads(projected: Tensor) -> Tensor:
            return projected.view(batch, length, -1, self.shape.head_dim)

        queries = rotate(self.q_norm(heads(self.q_proj(x))).transpose(1, 2), cos, sin)
        keys = rotate(self.k_norm(heads(self.k_proj(x))).transpose(1, 2), cos, sin)
        values = heads(self.v_proj(x)).transpose(1, 2)
        # Repeated by hand: PyTorch's fast CPU attention takes equal head counts only.
        groups = self.shape.num_attention_heads // self.shape.num_key_value_heads
        keys = keys.repeat_interleave(groups, dim=1)
        values = values.repeat_interleave(groups, dim=1)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, -1))
        return out


class MLP(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class LanguageModel(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(VOCABULARY, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = RMSNorm(shape.hidden_size)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                # Writers to the residual stream start smaller the more of them there are.
                writes = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * shape.num_hidden_layers) if writes else 1.0
                nn.init.normal_(parameter, std=0.02 * scale)
        frequencies = ROPE_THETA ** -(torch.arange(0, shape.head_dim, 2) / shape.head_dim)
        angles = torch.outer(torch.arange(MAX_POSITIONS), frequencies)
        self.cos: Tensor
        self.sin: Tensor
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits of the next token at every position."""
        length = ids.shape[1]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return functional.linear(self.norm(x), self.embed_tokens.weight)


def hugging_face_config(shape: Shape) -> dict[str, object]:
    """`config.json` for mlx-lm and transformers."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(shape),
        "vocab_size": VOCABULARY,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": NORM_EPS,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "torch_dtype": "float16",
    }
