"""A vision-language-action model like OpenVLA, for `zcompile profile`: two image towers, a projector, a language model.

Run: zcompile profile --module benchmarks/openvla.py:build --precision autocast
    --engines zero3,deepcompile,zero3+zcompile,zcompile,fsdp2+compile

DINOv2 and SigLIP have 3 layers each at the widths of OpenVLA's towers, Llama 4 layers at those of its 7 B model.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import Dinov2Config, Dinov2Model, LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

IMAGE, PATCH, TEXT, VOCABULARY = 224, 14, 64, 32064
DINO = Dinov2Config(hidden_size=1024, num_hidden_layers=3, num_attention_heads=16, image_size=IMAGE, patch_size=PATCH)
SIGLIP = SiglipVisionConfig(
    hidden_size=1152,
    intermediate_size=4304,
    num_hidden_layers=3,
    num_attention_heads=16,
    image_size=IMAGE,
    patch_size=PATCH,
    vision_use_head=False,
)
LLAMA = LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=4,
    num_attention_heads=32,
    use_cache=False,
)


class VisionLanguageAction(nn.Module):
    def __init__(self):
        super().__init__()
        self.dino, self.siglip, self.llama = Dinov2Model(DINO), SiglipVisionModel(SIGLIP), LlamaForCausalLM(LLAMA)
        width, wide = DINO.hidden_size + SIGLIP.hidden_size, 4 * (DINO.hidden_size + SIGLIP.hidden_size)
        sizes = [(width, wide), (wide, LLAMA.hidden_size), (LLAMA.hidden_size, LLAMA.hidden_size)]
        linears = [nn.Linear(*size) for size in sizes]
        self.projector = nn.Sequential(linears[0], nn.GELU(), linears[1], nn.GELU(), linears[2])

    def forward(self, images: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The loss of the next token behind the image: of `images` [batch, 3, 224, 224], `tokens` [batch, length]."""
        patches = self.dino(images).last_hidden_state[:, 1:], self.siglip(images).last_hidden_state
        prefix = self.projector(torch.cat(patches, -1))
        embedded = torch.cat([prefix, self.llama.get_input_embeddings()(tokens).to(prefix.dtype)], 1)
        logits = self.llama(inputs_embeds=embedded).logits[:, prefix.shape[1] : -1]
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


def batch(step: int, rank: int, size: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    images = torch.randn(size, 3, IMAGE, IMAGE, generator=generator)
    return images, torch.randint(VOCABULARY, (size, TEXT), generator=generator)


def build() -> tuple[nn.Module, Callable[..., Any], Callable[..., torch.Tensor]]:
    return VisionLanguageAction(), batch, lambda module, inputs: module(*inputs)
