"""Compare engines on a model of your own.

    python examples/profile_own_model.py --engines zcompile,fsdp2 --ranks 2 --steps 10

`build` makes the model, its batches and its loss. The options are those of `zcompile profile`.
"""

import sys

import torch
from torch import nn

from zcompile.cli import main

WIDTH, CLASSES, PICTURES = 256, 10, 64


def build():
    """The module, its batches and its loss, all on the device that is torch's default when this is called."""
    model = nn.Sequential(
        nn.Flatten(),
        nn.Linear(3 * 16 * 16, WIDTH),
        *(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(6)
        ),
        nn.Linear(WIDTH, CLASSES),
    )

    def batch(step: int, rank: int):
        """Pictures [64, 3, 16, 16] and their classes [64]: what this rank trains on in this micro-step."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        classes = torch.randint(CLASSES, (PICTURES,), generator=generator)
        noise = torch.randn(PICTURES, 3, 16, 16, generator=generator)
        return noise + classes[:, None, None, None] / CLASSES, classes

    def loss(model: nn.Module, batch) -> torch.Tensor:
        pictures, classes = batch
        return nn.functional.cross_entropy(model(pictures), classes)

    return model, batch, loss


if __name__ == "__main__":
    sys.exit(main(["profile", "--module", f"{__file__}:build", *sys.argv[1:]]))
