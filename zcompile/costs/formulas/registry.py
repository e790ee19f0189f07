"""Formulas of users' ops and Triton kernels, and which of them a plan rests on."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from zcompile.costs.formulas.work import Work

Formula = Callable[..., Work]

KERNEL = "triton:"  # how the names of Triton kernels begin


class Registered(NamedTuple):
    """What a user registered for one op."""

    function: Formula
    version: str


_registered: dict[str, Registered] = {}


def register_cost(op: Any, function: Formula, version: int | str) -> None:
    """Tell plans what a call of `op` does, so that transfers hide behind it. All ranks must register the same.

    What has no formula counts as the bytes of its tensors, which is far too little for an op that computes.

    Args:
        op: an op (`torch.ops.lib.op`, an overload of it, or what `torch.library.custom_op` returned), its name
            ("lib::op"), or a Triton kernel. A formula counts for forward alone if the op's backward is another op.
        function: called with what the op is called with, but with a `zcompile.TensorSize` (shape, dtype) for each
            tensor, and with `out=`, the result: a `TensorSize`, or a tuple of them. For a Triton kernel: with the
            kernel's arguments by their names, and with `grid=`, a tuple of numbers. It returns a `zcompile.Work`. It
            must depend on nothing but its arguments. If it raises, the call counts as bytes, with a warning.
        version: raise it when `function` changes. Plans and compiled graphs in caches are kept by it.

    Raises:
        TypeError: `op` is no op or Triton kernel, `function` cannot be called, or `version` is no number or text.

    Example::

        zcompile.register_cost(
            torch.ops.lib.product, lambda a, b, *, out: zcompile.Work(flops=2 * out.numel * a.shape[-1]), version=1
        )
    """
    if not callable(function):
        raise TypeError(f"zcompile.register_cost: the function must be callable, not {function!r}.")
    if isinstance(version, bool) or not isinstance(version, (int, str)):
        raise TypeError(f"zcompile.register_cost: version must be a number or text, not {version!r}.")
    _registered[name_of(op)] = Registered(function, str(version))


def registered(name: str) -> Registered | None:
    """What was registered under `name`, an op's or a kernel's."""
    return _registered.get(name)


def registered_costs() -> tuple[tuple[str, str], ...]:
    """(op, version) of all that was registered, by name: part of each plan, which ranks compare."""
    return tuple(sorted((name, entry.version) for name, entry in _registered.items()))


def name_of(op: Any) -> str:
    """The name under which the formula of `op` is kept: "lib::op", or "triton:module.kernel"."""
    if isinstance(op, str) and op.count("::") == 1 and all(op.split("::")):
        return op
    op = getattr(op, "_opoverload", op)  # what torch.library.custom_op returned
    if isinstance(op, torch._ops.OpOverload):
        return op._schema.name
    if isinstance(op, torch._ops.OpOverloadPacket):
        return op._qualified_op_name
    if isinstance(op, torch._ops.HigherOrderOperator):
        return f"higher_order::{op.name()}"
    kernel = kernel_function(op)
    if kernel is not None:
        return f"{KERNEL}{kernel.__module__}.{kernel.__qualname__}"
    raise TypeError(
        f"zcompile.register_cost: {op!r} is no op of torch's and no Triton kernel. Give torch.ops.lib.op, what "
        "torch.library.custom_op returned, a name such as 'lib::op', or a function with @triton.jit."
    )


def kernel_function(kernel: Any) -> Any:
    """The Python function of a Triton kernel, below its autotuner and heuristics; None if `kernel` is none."""
    seen = 0
    while not inspect.isfunction(kernel) and seen < 10:
        if not hasattr(kernel, "fn"):
            return None
        kernel, seen = kernel.fn, seen + 1
    return kernel if seen else None
