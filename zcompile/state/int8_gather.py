"""Gathers in int8: `zcompile.shard(gather_dtype=torch.int8)`.

[Note: int8 gathers]
Before each gather, a rank quantizes its shard, in the main parameter's dtype, as ZeRO++ does (qwZ, arXiv:2306.10209): a
block of 256 consecutive elements becomes int8 values, and a float32 scale, which is the block's largest absolute value
divided by 127. Both are components of the parameter ([Note: components] in gather_extension.py), and the unsharded
parameter is made of them on arrival, in `param_dtype`. So an element differs from its value by at most half a scale,
and by the rounding to `param_dtype`. A block with a value that is not finite becomes NaN. Main parameters, gradients
and checkpoints are those of a model without int8 gathers.

A shard is padded to whole blocks. Vectors, such as norms and biases, travel in `param_dtype`: they are a small part of
a model, and precision counts there.
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
    """Whether gathers of `parameter`, which has so many dimensions, are in int8 if those of its model are to be."""
    return ndim > 1 and part_held_by(parameter).dtype in TRAINABLE and subclass_of(parameter) is None


def quantize(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`values`, [blocks, BLOCK], as int8 of that shape, and float32 scales, [blocks, 1]."""
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
        """This rank's shard in int8, and its scales."""
        values, padded = sharded.local().reshape(-1), -(-self.chunk // BLOCK) * BLOCK
        if values.numel() < padded:
            values = nn.functional.pad(values, (0, padded - values.numel()))
        return Components(list(quantize(values.view(-1, BLOCK))), None)

    def unsharded_of(self, sharded: "ShardedParameter", metadata: Any) -> torch.Tensor:
        """The parameter in `param_dtype`, [ranks, elements of the largest shard]."""
        device, world = self.gathered[0].device, sharded.state.groups.world
        self.inner = [torch.empty(world, self.chunk, dtype=param_dtype_of(sharded), device=device)]
        self.write(sharded, metadata, self.inner[0])
        return self.inner[0]

    def write(self, sharded: "ShardedParameter", metadata: Any, unsharded: torch.Tensor) -> None:
        """Dequantize, in one kernel on a GPU unless shards are padded; the components are free then."""
        (values, scales), (made,) = self.gathered, self.inner
        if self.chunk % BLOCK == 0:
            torch.mul(values, scales, out=made.view(values.shape))
        else:
            made.copy_(torch.mul(values, scales).view(made.shape[0], -1).narrow(1, 0, self.chunk))
        free_memory(self.gathered)
