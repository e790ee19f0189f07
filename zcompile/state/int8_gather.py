"""Gathers in int8: `zcompile.shard(gather_dtype=torch.int8)`.

[Note: int8 gathers]
Before each all-gather, a rank quantizes its shard of the main parameter, as ZeRO++ does (qwZ, arXiv:2306.10209). Each
256 consecutive elements become 256 int8 values and one float32 scale: their largest absolute value divided by 127. Both
are all-gathered ([Note: components] in gather_extension.py), and dequantized to `param_dtype` on arrival. So an
element's error is at most half a scale, plus the rounding to `param_dtype`. If one of the 256 elements is not finite,
all of them become NaN. Main parameters, gradients and checkpoints are as without int8 gathers.

A shard is padded to a multiple of 256 elements. Vectors, such as norms and biases, are gathered in `param_dtype`.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from zcompile._C import free_memory
from zcompile.options import TRAINABLE
from zcompile.state.gather_extension import Components, GatherExtension, param_dtype_of, part_held_by, subclass_of

if TYPE_CHECKING:
    from zcompile.state.sharded_parameter import ShardedParameter

BLOCK = 256  # elements with one scale
LARGEST = 127
SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def is_quantized(parameter: torch.Tensor, ndim: int) -> bool:
    """Whether `gather_dtype=torch.int8` applies to `parameter`, whose unsharded form has `ndim` dimensions."""
    return ndim > 1 and part_held_by(parameter).dtype in TRAINABLE and subclass_of(parameter) is None


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize `values` [n, BLOCK]. Return int8 values of that shape and float32 scales [n, 1]."""
    scales = torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True).float()
    scales = scales.div_(LARGEST).clamp_(min=SMALLEST_SCALE)
    return torch.div(values, scales).round_().to(torch.int8), scales


class Int8Gather(GatherExtension):
    """How a plain parameter is gathered in int8; see [Note: int8 gathers]."""

    kind = "a parameter that is gathered in int8"

    def __init__(self, chunk: int):
        super().__init__()
        self.chunk = chunk  # elements of the largest shard

    def components_of(self, sharded: "ShardedParameter") -> Components:
        values, padded = sharded.local().reshape(-1), -(-self.chunk // BLOCK) * BLOCK
        if values.numel() < padded:
            values = nn.functional.pad(values, (0, padded - values.numel()))
        return Components(list(quantize(values.view(-1, BLOCK))), None)

    def unsharded_of(self, sharded: "ShardedParameter", metadata: Any) -> torch.Tensor:
        """Return the unsharded parameter in `param_dtype`, [ranks, elements of the largest shard]."""
        device, world = self.gathered[0].device, sharded.state.groups.world
        self.inner = [torch.empty(world, self.chunk, dtype=param_dtype_of(sharded), device=device)]
        self.write(sharded, metadata, self.inner[0])
        return self.inner[0]

    def write(self, sharded: "ShardedParameter", metadata: Any, unsharded: torch.Tensor) -> None:
        """Dequantize the gathered components (on a GPU in one kernel, unless shards are padded), then free them."""
        (values, scales), (made,) = self.gathered, self.inner
        if self.chunk % BLOCK == 0:
            torch.mul(values, scales, out=made.view(values.shape))
        else:
            made.copy_(torch.mul(values, scales).view(made.shape[0], -1).narrow(1, 0, self.chunk))
        free_memory(self.gathered)
