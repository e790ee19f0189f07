"""Models for tests: small ones of our own, and Hugging Face's, built from their configs with small sizes."""

import torch
from torch import nn

VOCABULARY = 61
TOKENS = 12


class Chain(nn.Sequential):
    """With a forward that is not torch.nn's, of which model.compile() compiles nothing (pytorch/pytorch#150915)."""

    def forward(self, x):
        for layer in self:
            x = layer(x)
        return x


class Block(nn.Module):
    """A pre-norm transformer block with sizes that do not divide by 2 or 4."""

    def __init__(self, width: int = 18, heads: int = 2):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x):
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A language model with tied embeddings, a scalar parameter, and a parameter smaller than four ranks."""

    def __init__(self, blocks: int = 2, width: int = 18):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.mix = nn.Parameter(torch.tensor([0.5, 0.25, 0.125]))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Mean next-token loss."""
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def batch(step: int, rank: int, length: int = TOKENS) -> torch.Tensor:
    """Tokens that `rank` sees at `step`: [2, length]."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (2, length), generator=generator)


class Sometimes(nn.Module):
    """Uses `extra` only if told to, and `deaf` without any effect on the loss."""

    def __init__(self):
        super().__init__()
        self.a, self.extra, self.b = nn.Linear(7, 9), nn.Linear(9, 9), nn.Linear(9, 5)
        self.deaf, self.never = nn.Linear(9, 3), nn.Linear(3, 3)

    def forward(self, x, use: bool):
        h = self.a(x).relu()
        if use:
            h = h + self.extra(h)
            self.deaf(h)
        return self.b(h)


def sometimes_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of a `Sometimes` that uses `extra` in every other step."""
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, step % 2 == 0).square().mean()


SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
}
HEADS = {"num_key_value_heads": 1, "head_dim": 12, "max_position_embeddings": 64}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 64,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 12,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 2,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 2,
}
VIT = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": VOCABULARY,
}
MIXTRAL = SIZES | HEADS | SPECIAL_TOKENS | {"num_local_experts": 3, "num_experts_per_tok": 2}
QWEN3_MOE = SIZES | HEADS | SPECIAL_TOKENS | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK_V3 = {
    **(SIZES | SPECIAL_TOKENS),
    "moe_intermediate_size": 16,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "max_position_embeddings": 64,
}
LLAMA4 = {
    **(SIZES | HEADS | SPECIAL_TOKENS),
    "intermediate_size_mlp": 40,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "attention_chunk_size": 32,
}


def hugging_face(name: str, experts: str = "batched_mm") -> nn.Module:
    """A small `name` from transformers.

    Args:
        experts: how a mixture computes its experts: "eager" loops over those that tokens hit.

    Raises:
        KeyError: no such model is known here.
    """
    import transformers as hf

    model_class, config_class, sizes = {
        "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, SIZES | HEADS | SPECIAL_TOKENS),
        "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, SIZES | HEADS | SPECIAL_TOKENS),
        "gpt2": (hf.GPT2LMHeadModel, hf.GPT2Config, GPT2),
        "t5": (hf.T5ForConditionalGeneration, hf.T5Config, T5),
        "vit": (hf.ViTForImageClassification, hf.ViTConfig, VIT),
        "mixtral": (hf.MixtralForCausalLM, hf.MixtralConfig, MIXTRAL),
        "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, QWEN3_MOE),
        "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, DEEPSEEK_V3),
        "llama4": (hf.Llama4ForCausalLM, hf.Llama4TextConfig, LLAMA4),
    }[name]
    config = config_class(**sizes)
    if name in ("mixtral", "qwen3_moe", "deepseek_v3", "llama4"):
        config._experts_implementation = experts
    model = model_class(config)
    if name == "gpt2":
        model.loss_type = "ForCausalLM"  # else it logs a warning in forward, which breaks any full graph
    return model


HUGGING_FACE = ("llama", "qwen3", "gpt2", "t5", "vit", "mixtral", "deepseek_v3", "llama4")


def hugging_face_loss(name: str, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of `model` on the batch that `rank` sees at `step`."""
    tokens = batch(step, rank)
    if name == "vit":
        images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(1000 * step + rank))
        return model(pixel_values=images, labels=tokens[:, 0]).loss
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss
