"""Small models of transformers with plans of their own for tensor and expert parallelism, for tests.

Older versions of transformers have no such plans. Test files that import this module are skipped with those: it comes
before `zcompile.integrations.huggingface`, whose `distribute` needs the plans to be imported.
"""

import os

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", "5.20")

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY, TOKENS = 60, 10


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )
    )  # fmt: skip


def neox():
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return GPTNeoXForCausalLM(
        GPTNeoXConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=28, num_hidden_layers=2, num_attention_heads=4,
            use_cache=False,
        )
    )  # fmt: skip


def qwen():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=28, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_experts=4,
            num_experts_per_tok=2, use_cache=False,
        )
    )  # fmt: skip


def oss():
    from transformers import GptOssConfig, GptOssForCausalLM

    return GptOssForCausalLM(
        GptOssConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=4, num_local_experts=4, num_experts_per_tok=2, use_cache=False,
        )
    )  # fmt: skip


def deepseek():
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=28, moe_intermediate_size=16,
            num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4, n_group=2,
            topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, kv_lora_rank=8, q_lora_rank=8,
            qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4, use_cache=False,
        )
    )  # fmt: skip


def filled(make) -> nn.Module:
    """A model with biases and gains other than zeros and ones; the same on all ranks."""
    torch.manual_seed(0)
    model = make()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) / 4)
    return model


def tokens_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """A loss on tokens that this data rank alone sees at this step."""
    tokens = torch.randint(VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(1000 * step + rank))
    return model(input_ids=tokens, labels=tokens).loss
