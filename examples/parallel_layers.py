"""Small models for docs/meshes.md: layers under expert and context parallelism, a mixture, and a step."""

import torch
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd, reduce_scatter_tensor_autograd
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.functional import scaled_dot_product_attention

import zcompile


class Experts(nn.Module):
    """Four experts over the ranks of `ep`. The largest value of a token says which one it goes to."""

    def __init__(self, ep):
        super().__init__()
        self.group = ep.get_group()
        whole = 0.1 * torch.randn(4, 4, 4)  # the same on all ranks
        self.weight = nn.Parameter(distribute_tensor(whole, ep, [Shard(0)]))

    def forward(self, x):
        tokens = all_gather_tensor_autograd(x, 0, self.group)  # of all ranks of `ep`
        expert = tokens.argmax(-1, keepdim=True) - len(self.weight) * self.group.rank()
        outputs = [torch.where(expert == i, tokens @ w, 0) for i, w in enumerate(self.weight)]  # 0 for other tokens
        return reduce_scatter_tensor_autograd(sum(outputs), "sum", 0, self.group)


class Attention(nn.Module):
    """Causal attention of this rank's tokens to those of all ranks of `cp`."""

    def __init__(self, cp):
        super().__init__()
        self.group = cp.get_group()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, 4]
        k, v = (all_gather_tensor_autograd(each, 2, self.group) for each in (k, v))
        positions = torch.arange(k.shape[2], device=x.device)
        own_positions = positions.chunk(self.group.size())[self.group.rank()]
        y = scaled_dot_product_attention(q, k, v, attn_mask=own_positions[:, None] >= positions)
        return self.out(y.transpose(1, 2).flatten(-2))


def train_step(model, inputs):
    """One step of a sharded model, with clipping by the norm over all of its meshes, which is returned."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(inputs).square().mean().backward()
    norm = zcompile.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return norm


def tiny_qwen3_moe():
    """A small mixture of transformers, whose plans for tensor and expert parallelism come with it."""
    import transformers

    sizes = {"vocab_size": 64, "hidden_size": 16, "moe_intermediate_size": 16, "num_hidden_layers": 2, "head_dim": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}
    return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes, **heads))
