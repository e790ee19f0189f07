"""Small models of diffusers, with inputs."""

from collections.abc import Callable

import torch
from torch import nn


def diffusion_loss(model: nn.Module, step: int, generator: torch.Generator) -> torch.Tensor:
    """The mean square of what the model makes of noise."""
    device = next(model.parameters()).device
    inputs = {name: make(generator).to(device) for name, make in INPUTS[type(model).__name__].items()}
    torch.manual_seed(step)
    return model(**inputs).sample.float().square().mean()


def _unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        layers_per_block=1,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
    )


def _conditioned_unet() -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        layers_per_block=1,
        cross_attention_dim=24,
        attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )


def _dit() -> nn.Module:
    from diffusers import DiTTransformer2DModel

    return DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=2, sample_size=8, num_embeds_ada_norm=10
    )


def _vae() -> nn.Module:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 16),
        norm_num_groups=4,
        layers_per_block=1,
        sample_size=16,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )


def _stable_diffusion_3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=16,
        pooled_projection_dim=12,
    )


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=24,
        pooled_projection_dim=12,
        axes_dims_rope=(2, 2, 4),
    )


def _pixart() -> nn.Module:
    from diffusers import PixArtTransformer2DModel

    return PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        cross_attention_dim=16,
        caption_channels=24,
        use_additional_conditions=False,
    )


DIFFUSION: dict[str, Callable[[], nn.Module]] = {
    "unet": _unet,
    "unet-conditioned": _conditioned_unet,
    "dit": _dit,
    "vae": _vae,
    "stable-diffusion-3": _stable_diffusion_3,
    "flux": _flux,
    "pixart": _pixart,
}


def _noise(*shape: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randn(*shape, generator=generator)


def _below(bound: int) -> Callable[[torch.Generator], torch.Tensor]:
    return lambda generator: torch.randint(0, bound, (2,), generator=generator)


INPUTS: dict[str, dict[str, Callable[[torch.Generator], torch.Tensor]]] = {
    "UNet2DModel": {"sample": _noise(2, 3, 16, 16), "timestep": _below(1000)},
    "UNet2DConditionModel": {
        "sample": _noise(2, 4, 16, 16),
        "timestep": _below(1000),
        "encoder_hidden_states": _noise(2, 5, 24),
    },
    "DiTTransformer2DModel": {
        "hidden_states": _noise(2, 4, 8, 8),
        "timestep": _below(1000),
        "class_labels": _below(10),
    },
    "AutoencoderKL": {"sample": _noise(2, 3, 16, 16)},
    "SD3Transformer2DModel": {
        "hidden_states": _noise(2, 4, 8, 8),
        "encoder_hidden_states": _noise(2, 5, 24),
        "pooled_projections": _noise(2, 12),
        "timestep": _below(1000),
    },
    "FluxTransformer2DModel": {
        "hidden_states": _noise(2, 16, 4),
        "encoder_hidden_states": _noise(2, 5, 24),
        "pooled_projections": _noise(2, 12),
        "timestep": _noise(2),
        "img_ids": lambda generator: torch.zeros(16, 3),
        "txt_ids": lambda generator: torch.zeros(5, 3),
    },
    "PixArtTransformer2DModel": {
        "hidden_states": _noise(2, 4, 8, 8),
        "encoder_hidden_states": _noise(2, 5, 24),
        "timestep": _below(1000),
    },
}
