"""Tiny random models of every architecture in mlx-lm, for tests.

Run as a script, it prints the probe's verdict on each of them.

The sizes are made up; what matters is kept: RoPE class and parameters, partial
rotary, grouped heads, head_dim unlike hidden_size / heads, sliding layers short
enough that rings wrap, norms on queries and keys. All one-dimensional
parameters are randomised, because a norm whose weights are all 1 commutes with
a rotation and would hide itself.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map

MLX_LM = tuple(int(part) for part in version("mlx-lm").split(".")[:2])
VOCAB = 97
WINDOW = 8

# Every architecture's ModelArgs takes what it knows of this and drops the rest.
BASE: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 1e4,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "use_bias": False,
    "sliding_window": WINDOW,
    # Mixtures of experts
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "shared_intermediate_size": 32,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "moe_layer_freq": 1,
    # Latent attention
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Recurrent and convolutional layers
    "conv_bias": False,
    "conv_L_cache": 3,
    "use_conv_bias": True,
    "conv_kernel": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "layer_group_size": 2,
    "group_norm_size": 1,
}

YARN = {
    "rope_type": "yarn",
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
SLIDING4 = ["sliding_attention"] * 3 + ["full_attention"]
LINEAR_ATTN = {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 4, "head_dim": 16,
               "short_conv_kernel_size": 4}  # fmt: skip

# Reasons, as the probe words them
LATENT = "latent"
RECURRENT = "recurrent or convolutional"
SEVERAL = "several caches per layer"
NORM_AFTER = "follows RoPE"
LEARNED_POSITIONS = "learned absolute positions"
CHUNKED = "chunked attention"
UNKNOWN_CACHE = "does not know"


@dataclass(frozen=True)
class Tiny:
    """One tiny model.

    Attributes:
        name: Unique name; the model type, with what is special about it.
        config: Overrides of :data:`BASE`.
        refused: A part of the reason why the probe must refuse it, or ``None``.
        ropes: Class names that the probe must report over all caches.
        half: Whether it also runs in bfloat16 on MLX's CPU back end, whose
            gathered matrix product (experts) is float32 only.
        metal: It has Metal kernels and no others, so on the CPU the probe must
            say that it cannot run it.
        since: First mlx-lm release (major, minor) that takes this configuration.
    """

    name: str
    config: dict[str, Any] = field(default_factory=dict)
    refused: str | None = None
    ropes: tuple[str, ...] = ("RoPE",)
    half: bool = True
    metal: bool = False
    since: tuple[int, int] = (0, 0)

    @property
    def module(self) -> str:
        return str(self.config.get("module", self.name.split(" ")[0]))

    @property
    def available(self) -> bool:
        """Whether this mlx-lm has the architecture and takes the configuration."""
        if MLX_LM < self.since:
            return False
        try:
            return importlib.util.find_spec(f"mlx_lm.models.{self.module}") is not None
        except ModuleNotFoundError:
            return False


def _wrap(model_type: str, name: str, **text: Any) -> dict[str, Any]:
    """A configuration of a vision-language wrapper around a text model."""
    return {"text_config": {**BASE, **text, "model_type": model_type}, "module": name}


ZOO: list[Tiny] = [
    # ---- plain RoPE
    Tiny("Klear", {"num_hidden_layers": 4}, half=False),
    Tiny("apertus", {"post_norm": False, "qk_norm": True}),
    Tiny("bailing_moe", {"use_qkv_bias": True, "use_qk_norm": True}, half=False),
    Tiny("bailing_moe partial", {"partial_rotary_factor": 0.5}, half=False),
    Tiny("bitnet", metal=True),
    Tiny("cohere", {"use_qk_norm": True}),
    Tiny("cohere without norm", {"use_qk_norm": False}),
    Tiny("cohere2", {"num_hidden_layers": 4, "sliding_window_pattern": 4}, ropes=("RoPE", "none")),
    Tiny(
        "dbrx",
        {
            "d_model": 64,
            "n_layers": 2,
            "n_heads": 4,
            "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        },
        half=False,
    ),
    Tiny("deepseek", half=False),
    Tiny("dots1", half=False),
    Tiny("ernie4_5"),
    Tiny("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2}, half=False),
    Tiny("exaone", {"num_layers": 2}),
    Tiny("exaone llama3", {"num_layers": 2, "rope_scaling": LLAMA3}, ropes=("Llama3RoPE",)),
    Tiny(
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window_pattern": "LLLG", "rope_scaling": None},
        ropes=("RoPE", "none"),
    ),
    Tiny(
        "exaone_moe",
        {"num_hidden_layers": 4, "layer_types": SLIDING4, "is_moe_layer": [False] + [True] * 3},
        ropes=("RoPE", "none"),
        half=False,
    ),
    Tiny("gemma"),
    Tiny("gemma2", {"query_pre_attn_scalar": 16}),
    Tiny(
        "gemma3_text",
        {"num_hidden_layers": 6, "sliding_window_pattern": 3, "query_pre_attn_scalar": 16,
         "rope_local_base_freq": 1e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    Tiny("gemma3", _wrap("gemma3_text", "gemma3", num_hidden_layers=4, sliding_window_pattern=2,
                         query_pre_attn_scalar=16)),
    Tiny(
        "gemma3n",
        _wrap("gemma3n", "gemma3n", num_hidden_layers=6, num_kv_shared_layers=2,
              vocab_size_per_layer_input=VOCAB, rope_local_base_freq=1e3,
              final_logit_softcapping=30.0,
              layer_types=["sliding_attention", "full_attention"] * 3,
              activation_sparsity_pattern=[0.95, 0.0] * 3, hidden_size_per_layer_input=8,
              altup_num_inputs=4, altup_coef_clip=120.0, altup_correct_scale=True,
              altup_active_idx=0, laurel_rank=8, intermediate_size=[96] * 6),
    ),
    Tiny(
        "gemma4_text",
        {
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 2,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "sliding_window_pattern": 3,
            "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "proportional",
                    "partial_rotary_factor": 0.25,
                    "rope_theta": 1e6,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
        ropes=("ProportionalRoPE", "RoPE"),
    ),
    Tiny(
        "gemma4",
        _wrap("gemma4_text", "gemma4", num_hidden_layers=4, num_kv_shared_layers=0,
              global_head_dim=32, num_key_value_heads=1, vocab_size_per_layer_input=VOCAB,
              hidden_size_per_layer_input=8, sliding_window_pattern=2),
        ropes=("ProportionalRoPE", "RoPE"),
    ),
    Tiny("glm"),
    Tiny("glm4", {"partial_rotary_factor": 0.5}),
    Tiny("glm4_moe", {"partial_rotary_factor": 0.5, "use_qk_norm": True, "rope_scaling": None},
         half=False),
    Tiny("gpt_neox", {"rotary_emb_base": 10000, "rotary_pct": 0.25}),
    Tiny("gptj", {"n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    Tiny("granite", {"logits_scaling": 1.0, "attention_multiplier": 0.25,
                     "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    Tiny("granitemoe", {"logits_scaling": 1.0, "attention_multiplier": 0.25,
                        "embedding_multiplier": 2.0, "residual_multiplier": 0.5}, half=False),
    Tiny("helium"),
    # Up to 0.31 these two have a RoPE class of their own for every setting.
    Tiny("internlm2", {"bias": True},
         ropes=("RoPE",) if MLX_LM >= (0, 32) else ("DynamicNTKScalingRoPE",)),
    Tiny("iquestloopcoder", {"loop_window_size": WINDOW}),
    Tiny(
        "laguna",
        {
            "num_hidden_layers": 4,
            "layer_types": SLIDING4,
            "num_experts": 4,
            "mlp_layer_types": ["dense"] + ["sparse"] * 3,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                "full_attention": {**YARN, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
            },
        },
        ropes=("RoPE", "YarnRoPE"),
        half=False,
    ),
    Tiny("lille-130m", {"block_size": 2048, "n_embd": 64, "n_head": 4, "n_kv_heads": 2,
                        "n_layer": 2}),
    Tiny("llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80}),
    Tiny("llama traditional", {"rope_traditional": True}),
    Tiny("llama linear", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    Tiny("llama llama3", {"rope_scaling": LLAMA3}, ropes=("Llama3RoPE",)),
    Tiny("llama sliding", {"head_dim": 24, "layer_types": ["full_attention", "sliding_attention"]}),
    Tiny(
        "llama dynamic",
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64},
        ropes=("DynamicNTKScalingRoPE",),
        since=(0, 32),
    ),
    Tiny("llama4_text", {"intermediate_size_mlp": 96, "no_rope_layers": [1, 1, 1, 0],
                         "num_hidden_layers": 4, "use_qk_norm": True}, ropes=("RoPE", "none")),
    Tiny(
        "mellum",
        {
            "num_hidden_layers": 4,
            "layer_types": SLIDING4,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                "full_attention": {**YARN, "rope_theta": 1e6},
            },
        },
        ropes=("RoPE", "YarnRoPE"),
        half=False,
    ),
    Tiny("mimo"),
    Tiny(
        "mimo_v2_flash",
        {
            "num_hidden_layers": 4,
            "hybrid_layer_pattern": [0, 1, 1, 0],
            "moe_layer_freq": [0, 1, 1, 1],
            "add_swa_attention_sink_bias": True,
            "add_full_attention_sink_bias": False,
            "sliding_window_size": WINDOW,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "layernorm_epsilon": 1e-5,
            "rope_theta": 1e5,
            "swa_rope_theta": 1e3,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
            "head_dim": 32,
            "v_head_dim": 16,
            "swa_head_dim": 32,
            "swa_v_head_dim": 16,
            "partial_rotary_factor": 0.5,
        },
        half=False,
    ),
    Tiny("minicpm", {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 2.0}),
    Tiny("minimax", {"rotary_dim": 8}, half=False),
    Tiny(
        "ministral3",
        {
            "rope_parameters": {
                **YARN,
                "rope_theta": 1e6,
                "factor": 16.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
            }
        },
        ropes=("YarnRoPE",),
    ),
    Tiny("mistral3", _wrap("llama", "mistral3", layer_types=None)),
    Tiny("mixtral", half=False),
    Tiny("muse_glimmer", {"num_hidden_layers": 4}, ropes=("RoPE", "none")),
    Tiny(
        "muse_spark",
        _wrap("muse_spark", "muse_spark", num_hidden_layers=4, post_norm_eps=1e-8,
              rope_parameters={"rope_theta": 1e4}, layer_rope_theta=[1e4, 1e4, 1e4, 0.0],
              layer_types=SLIDING4, final_logit_softcapping=20.0, output_multiplier=0.2,
              moe_hidden_size=64, num_shared_experts=0),
        ropes=("RoPE", "none"),
        metal=True,
    ),
    Tiny("nanbeige", {"num_loops": 2}),
    Tiny("nanochat", ropes=("Attention",)),
    Tiny("nemotron", {"hidden_act": "relu2"}),
    Tiny(
        "nemotron-nas",
        {
            "num_hidden_layers": 3,
            "block_configs": [
                {
                    "attention": {"no_op": skip, "replace_with_linear": False,
                                  "n_heads_in_group": 2},
                    "ffn": {"no_op": False, "replace_with_linear": False, "ffn_mult": 2.0},
                }
                for skip in (False, True, False)
            ],
        },
    ),
    Tiny("olmo", {"d_model": 64, "n_layers": 2, "mlp_hidden_size": 96, "n_heads": 4,
                  "embedding_size": VOCAB}),
    Tiny("olmo2"),
    Tiny("olmo3", {"num_hidden_layers": 4, "layer_types": SLIDING4, "rope_scaling": YARN},
         ropes=("RoPE", "YarnRoPE")),
    Tiny("olmoe", half=False),
    Tiny(
        "openelm",
        {"num_transformer_layers": 2, "model_dim": 64, "ffn_dim_divisor": 16,
         "num_query_heads": [4, 8], "num_kv_heads": [2, 4], "ffn_multipliers": [1.0, 2.0]},
    ),
    Tiny("phi", {"partial_rotary_factor": 0.5}),
    Tiny("phi3"),
    Tiny("phi3 linear", {"rope_scaling": {"type": "linear", "factor": 4.0, "long_factor": [1.0]}}),
    Tiny(
        "phi3 longrope 0.75",
        {
            "hidden_size": 128,
            "original_max_position_embeddings": 128,
            "partial_rotary_factor": 0.75,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 12,
                "long_factor": [1.0 + i for i in range(12)],
            },
        },
        ropes=("SuScaledRoPE",),
    ),
    # It writes to fixed ids of its logits, past the end of a small vocabulary.
    Tiny("phi3small", {"vocab_size": 100352, "dense_attention_every_n_layers": 2,
                       "ff_intermediate_size": 96, "gegelu_limit": 20.0,
                       "blocksparse_block_size": 32,
                       "blocksparse_num_local_blocks": 2, "blocksparse_vert_stride": 2}),
    Tiny(
        "phimoe",
        {
            "original_max_position_embeddings": 128,
            "rope_scaling": {
                "type": "longrope",
                "long_mscale": 1.25,
                "short_mscale": 1.25,
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + i for i in range(8)],
            },
        },
        ropes=("SuScaledRoPE",),
        half=False,
    ),
    Tiny("phixtral", {"num_vocab": VOCAB, "model_dim": 64, "num_heads": 4, "num_layers": 2,
                      "rotary_dim": 8}, half=False),
    Tiny("pixtral", _wrap("llama", "pixtral")),
    Tiny("plamo", {"n_shared_head": 2}),
    Tiny("plamo3", {"num_hidden_layers": 4, "sliding_window_pattern": 2, "window_size": WINDOW,
                    "rope_local_theta": 1e3}),
    Tiny("qwen", {"kv_channels": 16}),
    Tiny("qwen2"),
    Tiny("qwen2 yarn", {"rope_scaling": YARN}, ropes=("YarnRoPE",)),
    Tiny("qwen2_moe", half=False),
    Tiny("qwen2_vl", _wrap("qwen2", "qwen2_vl")),
    Tiny("qwen3", {"head_dim": 32}),
    Tiny("qwen3 rope_parameters", {"rope_theta": None,
                                   "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
         since=(0, 32)),
    Tiny("qwen3_moe", half=False),
    Tiny("qwen3_vl", _wrap("qwen3", "qwen3_vl")),
    Tiny("qwen3_vl_moe", _wrap("qwen3_moe", "qwen3_vl_moe"), half=False),
    Tiny("seed_oss", {"rope_scaling": {"rope_type": "default"}}),
    Tiny("smollm3", {"num_hidden_layers": 4}, ropes=("RoPE", "none")),
    Tiny("solar_open", {"partial_rotary_factor": 1.0}, half=False),
    Tiny(
        "spark2_5",
        {
            "num_hidden_layers": 4,
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                "full_attention": {
                    "rope_theta": 1e6,
                    "rope_type": "default",
                    "partial_rotary_factor": 0.5,
                },
            },
        },
    ),
    Tiny("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.25, "qk_layernorm": True}),
    Tiny("starcoder2"),
    Tiny(
        "step3p5",
        {
            "num_hidden_layers": 4,
            "num_attention_groups": 2,
            "layer_types": ["full_attention", "sliding_attention"] * 2,
            "partial_rotary_factors": [0.5, 1.0] * 2,
            "moe_num_experts": 4,
            "moe_top_k": 2,
            "share_expert_dim": 32,
            "moe_layers_enum": "2,3",
        },
        half=False,
    ),
    Tiny("talkie", ropes=("Attention",)),
    Tiny("telechat3"),
    Tiny("telechat3 yarn", {"rope_scaling": {**YARN, "rope_type": "telechat3-yarn",
                                             "type": "telechat3-yarn"}}, ropes=("YarnRoPE",)),
    Tiny(
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_scaling": {**YARN, "factor": 32.0, "original_max_position_embeddings": 4096,
                             "truncate": False},
        },
        ropes=("YarnRoPE",),
        half=False,
    ),
    Tiny("afmoe", {"num_hidden_layers": 4, "layer_types": SLIDING4, "num_dense_layers": 1},
         ropes=("RoPE", "none"), half=False),
    Tiny("internlm3", {"rope_scaling": None},
         ropes=("RoPE",) if MLX_LM >= (0, 32) else ("DynamicNTKScalingRoPE",)),
    Tiny("internlm3 dynamic", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0},
                               "max_position_embeddings": 64}, ropes=("DynamicNTKScalingRoPE",)),
    Tiny("hunyuan_v1_dense without norm",
         {"use_qk_norm": False, "rope_scaling": {"alpha": 1000.0, "factor": 1.0,
                                                 "type": "dynamic"}},
         ropes=("DynamicNTKAlphaRoPE",)),
    # ---- refused
    Tiny("afm7", {"hidden_dim": 64, "num_layers": 4, "num_kv_reuse_layers": 2, "num_heads": 4,
                  "num_kv_heads": 2}, refused=NORM_AFTER),
    Tiny("baichuan_m1", {"sliding_window_layers": [1], "conv_window": 2}, refused=SEVERAL),
    Tiny("bailing_hybrid", refused=RECURRENT),
    Tiny("bailing_moe_linear", refused=RECURRENT),
    Tiny("bailing_moe_v3", {"num_hidden_layers": 4, "layer_group_size": 2}, refused=RECURRENT),
    Tiny("deepseek_v2", {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
         refused=LATENT),
    Tiny("deepseek_v3", refused=LATENT),
    Tiny("deepseek_v32", {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4},
         refused=SEVERAL),
    Tiny("deepseek_v41", {"o_groups": 2, "o_lora_rank": 8, "hc_mult": 2, "index_n_heads": 2,
                          "index_head_dim": 16, "index_topk": 4, "compress_ratios": [0, 0]},
         refused=UNKNOWN_CACHE),
    Tiny("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
         refused=SEVERAL),
    Tiny("gear", {"num_hidden_layers": 3, "layer_types": ["conv", "sliding_attention",
                                                          "full_attention"]}, refused=RECURRENT),
    Tiny("glm4_moe_lite", refused=LATENT),
    Tiny("glm_moe_dsa", {"index_head_dim": 16, "index_n_heads": 2, "index_topk": 4,
                         "topk_method": "noaux_tc", "scoring_func": "sigmoid",
                         "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}},
         refused=SEVERAL),
    Tiny("gpt2", {"n_ctx": 2048, "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 2048,
                  "num_key_value_heads": 4}, refused=LEARNED_POSITIONS),
    Tiny("gpt_bigcode", {"n_embd": 64, "n_layer": 2, "n_inner": 96, "n_head": 4,
                         "n_positions": 2048, "num_key_value_heads": 1},
         refused=LEARNED_POSITIONS),
    Tiny("granitemoehybrid", {"layer_types": ["mamba", "attention"], "mamba_n_heads": 4,
                              "mamba_d_head": 32, "mamba_n_groups": 1, "mamba_conv_bias": True,
                              "mamba_proj_bias": False, "embedding_multiplier": 1.0,
                              "attention_multiplier": 0.25, "logits_scaling": 1.0,
                              "residual_multiplier": 1.0}, refused=RECURRENT),
    Tiny("hunyuan", {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True,
                     "use_qk_norm": True, "use_cla": False, "cla_share_factor": 2,
                     "rope_scaling": {"alpha": 1000.0, "factor": 1.0, "type": "dynamic"}},
         refused=NORM_AFTER),
    Tiny("hunyuan_v1_dense", {"use_qk_norm": True,
                              "rope_scaling": {"alpha": 1000.0, "factor": 1.0,
                                               "type": "dynamic"}}, refused=NORM_AFTER),
    Tiny("jamba", {"attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
                   "expert_layer_period": 2}, refused=RECURRENT),
    Tiny("kimi_k25", _wrap("deepseek_v3", "kimi_k25"), refused=LATENT),
    Tiny("kimi_k3", _wrap("kimi_linear", "kimi_k3", linear_attn_config=LINEAR_ATTN,
                          attn_res_block_size=2, num_experts_per_token=2), refused=RECURRENT),
    Tiny("kimi_linear", {"linear_attn_config": LINEAR_ATTN, "model_max_length": 2048},
         refused=RECURRENT),
    Tiny("kimi_vl", _wrap("deepseek_v3", "kimi_vl"), refused=LATENT),
    Tiny("lfm2", {"block_dim": 64, "block_multiple_of": 8, "block_ffn_dim_multiplier": 1.0,
                  "block_auto_adjust_ff_dim": False, "block_ff_dim": 96,
                  "full_attn_idxs": [1]}, refused=RECURRENT),
    Tiny("lfm2-vl", _wrap("lfm2", "lfm2-vl", block_dim=64, block_multiple_of=8,
                          block_ffn_dim_multiplier=1.0, block_auto_adjust_ff_dim=False,
                          block_ff_dim=96, full_attn_idxs=[1]), refused=RECURRENT),
    Tiny("lfm2_moe", {"use_expert_bias": True, "num_dense_layers": 1, "full_attn_idxs": [1]},
         refused=RECURRENT),
    Tiny(
        "llama4",
        {"module": "llama4",
         "text_config": {**BASE, "model_type": "llama4_text", "attention_chunk_size": WINDOW,
                         "interleave_moe_layer_step": 2, "intermediate_size_mlp": 96,
                         "num_hidden_layers": 4, "rope_scaling": LLAMA3, "use_qk_norm": True,
                         "num_experts_per_tok": 1}},
        refused=CHUNKED,
    ),
    Tiny("longcat_flash", {"attention_method": "MLA", "zero_expert_type": "identity",
                           "ffn_hidden_size": 96, "moe_topk": 2, "expert_ffn_hidden_size": 32,
                           "zero_expert_num": 1, "num_layers": 2, "mla_scale_q_lora": True,
                           "mla_scale_kv_lora": True}, refused=SEVERAL),
    Tiny("longcat_flash_ngram", {"ffn_hidden_size": 96, "moe_topk": 2,
                                 "expert_ffn_hidden_size": 32, "zero_expert_num": 1,
                                 "num_layers": 2, "mla_scale_q_lora": True,
                                 "mla_scale_kv_lora": True, "ngram_vocab_size_ratio": 3,
                                 "emb_neighbor_num": 2, "emb_split_num": 2}, refused=RECURRENT),
    Tiny("mamba", {"state_size": 16, "time_step_rank": 4}, refused=RECURRENT),
    Tiny("mamba2", {"num_heads": 8, "state_size": 16, "n_groups": 1,
                    "time_step_limit": (0.001, 0.1), "time_step_rank": 4}, refused=RECURRENT),
    Tiny("minicpm3", {"dim_model_base": 64, "scale_depth": 1.4, "scale_emb": 1.0,
                      "num_key_value_heads": 4,
                      "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 4,
                                       "short_factor": [1.0] * 4,
                                       "original_max_position_embeddings": 512}},
         refused=LATENT),
    Tiny("minimax_m3_vl", _wrap("minimax_m3", "minimax_m3_vl", dense_intermediate_size=96,
                                layer_types=["full_attention"] * 2,
                                mlp_layer_types=["dense"] * 2), refused=SEVERAL),
    Tiny("mistral4", {"rope_parameters": {**YARN, "rope_theta": 1e4, "mscale": 1.0,
                                          "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}},
         refused=LATENT),
    Tiny("nemotron_h", {"mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_proj_bias": False,
                        "ssm_state_size": 16, "n_groups": 1,
                        "hybrid_override_pattern": ["M", "*"]}, refused=RECURRENT),
    Tiny("olmo_hybrid", {"layer_types": ["linear_attention", "full_attention"],
                         "linear_allow_neg_eigval": True}, refused=RECURRENT),
    Tiny("plamo2", {"hidden_size_per_head": 16, "mamba_num_heads": 4, "attention_window_size": 8,
                    "full_attention_idx": [1]}, refused=RECURRENT),
    Tiny("qwen3_5", _wrap("qwen3_5", "qwen3_5", full_attention_interval=2), refused=RECURRENT),
    Tiny("qwen3_5_moe", _wrap("qwen3_5_moe", "qwen3_5_moe", full_attention_interval=2),
         refused=RECURRENT),
    Tiny("qwen3_next", {"full_attention_interval": 2, "partial_rotary_factor": 0.5},
         refused=RECURRENT),
    Tiny("recurrent_gemma", {"conv1d_width": 4, "logits_soft_cap": 30.0,
                             "attention_window_size": WINDOW, "num_key_value_heads": 1,
                             "block_types": ["recurrent", "attention"]}, refused=RECURRENT),
    Tiny("rwkv7", {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8,
                   "decay_low_rank_dim": 8}, refused=RECURRENT),
    Tiny("youtu_llm", {"num_key_value_heads": 4}, refused=LATENT),
]  # fmt: skip


def config_of(tiny: Tiny) -> dict[str, Any]:
    config = {**BASE, **tiny.config}
    config.setdefault("model_type", config.pop("module", tiny.module))
    return config


def make(tiny: Tiny | str, dtype: mx.Dtype = mx.float32, seed: int = 0) -> Any:
    """A tiny random model, the same for the same seed."""
    if isinstance(tiny, str):
        tiny = next(entry for entry in ZOO if entry.name == tiny)
    if tiny.module == "olmo":  # only looks whether ai2-olmo, its checkpoints' code, is there
        sys.modules.setdefault("hf_olmo", ModuleType("hf_olmo"))
    mx.random.seed(seed)
    arch = importlib.import_module(f"mlx_lm.models.{tiny.module}")
    model = arch.Model(arch.ModelArgs.from_dict(config_of(tiny)))

    def randomise(p: mx.array) -> mx.array:
        if not mx.issubdtype(p.dtype, mx.floating):
            return p
        # Norms' weights, and whatever starts out constant.
        if p.ndim == 1 or mx.array_equal(p, mx.broadcast_to(p.reshape(-1)[0], p.shape)):
            p = 1.0 + 0.3 * mx.random.normal(p.shape)
        return p.astype(dtype)

    model.update(tree_map(randomise, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def architectures() -> list[str]:
    """Every model file of this mlx-lm that defines a language model."""
    folder = Path(importlib.import_module("mlx_lm.models").__file__).parent
    return [
        path.stem
        for path in sorted(folder.glob("*.py"))
        if "\nclass Model(" in path.read_text() and "\nclass ModelArgs(" in path.read_text()
    ]


def expected_reason(tiny: Tiny) -> str | None:
    """A part of the reason that the probe must give here, or ``None`` if it must pass."""
    if tiny.metal and not mx.metal.is_available():
        return "could not read one token"
    return tiny.refused


def main() -> int:
    """Print a table of the probe's verdicts."""
    from kvgraft.models.probe import probe_table

    mx.disable_compile()  # on the CPU it calls a C++ compiler, function by function
    counts = dict.fromkeys(("pass", "refused", "absent", "unlike expected"), 0)
    types: dict[str, set[str]] = {"pass": set(), "refused": set()}
    print(f"mlx {mx.__version__}, mlx-lm {version('mlx-lm')}, {mx.default_device()}")
    print("model | caches | RoPE classes | largest error | verdict")
    for tiny in ZOO:
        if not tiny.available:
            counts["absent"] += 1
            print(f"{tiny.name} | - | - | - | not in this mlx-lm")
            continue
        rows = probe_table(make(tiny))
        errors = [row.error for row in rows if row.error is not None]
        reason = next((row.reason for row in rows if row.reason), None)
        verdict = "pass" if reason is None else "refused"
        counts[verdict] += 1
        types[verdict].add(tiny.module)
        expected = expected_reason(tiny)
        if (reason is None) != (expected is None) or (expected or "") not in (reason or ""):
            counts["unlike expected"] += 1
        ropes = ", ".join(sorted({row.rope for row in rows if row.rope})) or "-"
        worst = f"{max(errors):.1e}" if errors else "-"
        print(f"{tiny.name} | {len(rows)} | {ropes} | {worst} | {reason or 'pass'}")
    tally = ", ".join(f"{n} {what}" for what, n in counts.items())
    kinds = ", ".join(f"{len(names)} {what}" for what, names in types.items())
    print(f"configurations: {tally}; model types: {kinds}")
    known = {tiny.module for tiny in ZOO}
    others = sorted(name for name in architectures() if name not in known)
    print(f"architectures of this mlx-lm that are not in the zoo: {', '.join(others) or 'none'}")
    return 1 if counts["unlike expected"] else 0


if __name__ == "__main__":
    sys.exit(main())
