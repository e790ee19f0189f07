"""Small models of diffusers, with inputs."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

Make = Callable[[torch.Generator], torch.Tensor]


def _noise(*shape: int) -> Make:
    return lambda generator: torch.randn(*shape, generator=generator)


def _below(bound: int) -> Make:
    return lambda generator: torch.randint(0, bound, (2,), generator=generator)


class Kind(NamedTuple):
    """A class of diffusers, the arguments of its constructor, and what makes the arguments of its forward."""

    name: str
    sizes: dict[str, Any]
    inputs: dict[str, Make]


STAGES = {"block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1}
HEADS = {"num_attention_heads": 2, "attention_head_dim": 8}
TEXT = {"encoder_hidden_states": _noise(2, 5, 24)}
LATENTS = {"hidden_states": _noise(2, 4, 8, 8), "timestep": _below(1000)}
KINDS = {
    "unet": Kind(
        "UNet2DModel",
        dict(
            STAGES, sample_size=16, attention_head_dim=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        ),
        {"sample": _noise(2, 3, 16, 16), "timestep": _below(1000)},
    ),
    "unet-conditioned": Kind(
        "UNet2DConditionModel",
        dict(
            STAGES, sample_size=16, attention_head_dim=8, cross_attention_dim=24,
            down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
            up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        ),
        {"sample": _noise(2, 4, 16, 16), "timestep": _below(1000), **TEXT},
    ),
    "dit": Kind(
        "DiTTransformer2DModel",
        dict(HEADS, in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=10),
        {**LATENTS, "class_labels": _below(10)},
    ),
    "vae": Kind(
        "AutoencoderKL",
        dict(
            STAGES, sample_size=16, block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        ),
        {"sample": _noise(2, 3, 16, 16)},
    ),
    "flux": Kind(
        "FluxTransformer2DModel",
        dict(
            HEADS, in_channels=4, num_layers=1, num_single_layers=1, joint_attention_dim=24, pooled_projection_dim=12,
            axes_dims_rope=(2, 2, 4),
        ),
        dict(
            TEXT, hidden_states=_noise(2, 16, 4), pooled_projections=_noise(2, 12), timestep=_noise(2),
            img_ids=lambda generator: torch.zeros(16, 3), txt_ids=lambda generator: torch.zeros(5, 3),
        ),
    ),
}  # fmt: skip


def diffusion_model(kind: str) -> nn.Module:
    import diffusers

    return getattr(diffusers, KINDS[kind].name)(**KINDS[kind].sizes)


def diffusion_loss(model: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    """The mean square of what the model makes of noise."""
    device = next(model.parameters()).device
    kind = next(each for each in KINDS.values() if each.name == type(model).__name__)
    inputs = {name: make(generator).to(device) for name, make in kind.inputs.items()}
    torch.manual_seed(step)
    return model(**inputs).sample.float().square().mean()
