"""`Work`, which determines the time of a call, and the sizes from which a formula computes the work."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.utils._pytree import tree_leaves

from zcompile.costs.hardware import Hardware
from zcompile.costs.unbacked_sizes import size_hint
from zcompile.graph.ops import shape_hint


@dataclass(frozen=True)
class TensorSize:
    """The shape and dtype of a tensor, as cost formulas get them. Dynamic sizes have the values of the traced call."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The size of all elements, in bytes."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Work:
    """The work of one call of an op.

    Its time is the longest of the times of `flops`, `nbytes` and an empty kernel; further launches add to it.

    Attributes:
        flops: floating-point operations of matmuls or attention. A multiply-add counts as two.
        dtype: dtype whose matmul rate applies to `flops`. Default: that of the call's first floating-point tensor.
        nbytes: bytes that are read from memory and written to it. Default: all arguments and results, once.
        launches: number of kernels. They run one after the other.
        grouped: whether `flops` are operations of a grouped matmul.
        attention: if `flops` are operations of attention, its kernel: "flash", "efficient", "cudnn", "flex" or
            "math".
        share: the fraction that attention reaches, on a GPU, of its kernel's rate in the hardware table.
        cpu_share: the same fraction on a CPU.
        seconds: additional time, such as a wait of the host for the device.
    """

    flops: float = 0.0
    dtype: torch.dtype | None = None
    nbytes: float | None = None
    launches: int = 1
    grouped: bool = False
    attention: str | None = None
    share: float = 1.0
    cpu_share: float = 1.0
    seconds: float = 0.0

    def on(self, hardware: Hardware, dtype: torch.dtype, nbytes: float) -> float:
        """Return the seconds on `hardware`. `dtype` and `nbytes` apply if the fields of these names are None."""
        seconds = (nbytes if self.nbytes is None else self.nbytes) / hardware.bytes_s
        if self.flops:
            if self.attention:
                share = self.share if hardware.attention_varies else self.cpu_share
                rate = hardware.attention_rate(self.attention) * share
            else:
                rate = hardware.matmul_rate(self.dtype or dtype) * (hardware.grouped_share if self.grouped else 1.0)
            seconds = max(seconds, self.flops / rate)
        if self.launches:  # each kernel after the first waits for the one before it
            seconds = max(seconds, hardware.kernel_s) + (self.launches - 1) * hardware.kernel_s
        return seconds + self.seconds


@dataclass(frozen=True)
class Call:
    """A call of an op or kernel, with sizes in place of tensors."""

    name: str  # of the op, without its overload, such as "aten::topk"
    args: tuple[Any, ...]  # with a `TensorSize` for each tensor, and a number for each dynamic size, as `kwargs`
    kwargs: Mapping[str, Any]
    out: Any  # a `TensorSize`, or a tuple of them and None
    names: tuple[str, ...] = ()  # of the op's parameters, from its schema. Empty if it has no schema
    node: Node | None = field(default=None, compare=False)  # for formulas that need more than sizes

    def argument(self, name: str, default: Any = None) -> Any:
        """Return the argument `name`, passed by position or by keyword; `default` if it was not passed."""
        if name in self.kwargs:
            return self.kwargs[name]
        i = self.names.index(name) if name in self.names else len(self.args)
        return self.args[i] if i < len(self.args) else default

    @property
    def outs(self) -> list[TensorSize]:
        """The tensors in the result, as sizes."""
        return tensors_in(self.out)


def tensors_in(value: Any) -> list[TensorSize]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, TensorSize)]


def nbytes_of(*values: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors_in(values))


def sizes_of(value: Any) -> Any:
    """Return `value`, arguments or a fake result, with a `TensorSize` for each tensor and a number for each size."""

    def leaf(each: Any) -> Any:
        fake = each.meta.get("val", each) if isinstance(each, Node) else each
        if isinstance(fake, torch.Tensor):
            return TensorSize(tuple(shape_hint(fake)), fake.dtype)
        if isinstance(fake, torch.SymInt):
            return size_hint(fake)
        if fake is not each and isinstance(fake, (tuple, list, dict)):
            return sizes_of(fake)
        return each

    if isinstance(value, Mapping):
        return {key: sizes_of(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return tuple(map(sizes_of, value))
    return map_aggregate(value, leaf)
