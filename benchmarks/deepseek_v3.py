"""A DeepSeek-V3 of transformers with 1.03 B parameters, for the profiler:

    zcompile profile --module benchmarks/deepseek_v3.py:grouped --engines zcompile,limit,fsdp2+compile

`grouped` computes experts as one grouped product, `grouped_4` does so with four sequences, `grouped_24` with 24 layers
(4.06 B parameters), and `looped` loops over the experts that tokens hit.
"""

from typing import Any

import torch
from torch import nn
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

SEQUENCE = 2048
SIZES = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 6,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 512,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 32768,
}


def model_of(experts: str, sizes: dict[str, int] = SIZES) -> nn.Module:
    """Random weights. `experts` is transformers' name of how they are computed."""
    config = DeepseekV3Config(**sizes, use_cache=False)
    config._experts_implementation = experts
    config._attn_implementation = "sdpa"
    return DeepseekV3ForCausalLM(config)


def _loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


def workload(
    experts: str, sequences: int, sizes: dict[str, int] = SIZES, tokens: int = SEQUENCE, checkpointing: bool = False
) -> tuple[nn.Module, Any, Any]:
    """The module, its batches of `sequences` times `tokens`, and its loss."""

    def batch(step: int, rank: int) -> torch.Tensor:
        seeded = torch.Generator().manual_seed(1000 * step + rank)
        return torch.randint(sizes["vocab_size"], (sequences, tokens), generator=seeded)

    model = model_of(experts, sizes)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model, batch, _loss


def grouped() -> tuple[nn.Module, Any, Any]:
    """One sequence of 2048 tokens, experts as a grouped product."""
    return workload("grouped_mm", 1)


def grouped_4() -> tuple[nn.Module, Any, Any]:
    """Four sequences, experts as a grouped product."""
    return workload("grouped_mm", 4)


def grouped_24() -> tuple[nn.Module, Any, Any]:
    """24 layers instead of 6, one sequence, experts as a grouped product."""
    return workload("grouped_mm", 1, SIZES | {"num_hidden_layers": 24})


def looped() -> tuple[nn.Module, Any, Any]:
    """One sequence, a loop over the experts that tokens hit."""
    return workload("eager", 1)
