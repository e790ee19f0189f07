"""Cost formulas that users register for their own ops and Triton kernels."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from zcompile.costs.formulas.work import Work

Formula = Callable[..., Work]

KERNEL = "triton:"  # how the names of Triton kernels begin


class Registered(NamedTuple):
    """A formula that a user registered, and its version."""

    function: Formula
    version: str


_registered: dict[str, Registered] = {}


def register_cost(op: Any, function: Formula, version: int | str) -> None:
    """Register how much work a call of `op` does, so that transfers overlap it. All ranks must register the same.

    An op without a formula counts as the bytes of its tensors, which is far too little for an op that computes.

    Args:
        op: an op (`torch.ops.lib.op`, an overload of it, or the result of `torch.library.custom_op`), its name
            ("lib::op"), or a Triton kernel. An op's formula does not apply to its backward if that is another op.
        function: returns a `zcompile.Work` for a call. Its arguments are the op's, with a `zcompile.TensorSize` (shape,
            dtype) in place of each tensor, and `out=`, the result: a `TensorSize`, or a tuple of them. For a Triton
            kernel, they are the kernel's arguments by name, and `grid=`, a tuple of numbers. `function` must depend
            only on its arguments. If it raises, the bytes of the call's tensors count, and a warning is logged.
        version: change it when `function` changes, because caches of compiled graphs are keyed by the version.

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
    return _registered.get(name)


def registered_costs() -> tuple[tuple[str, str], ...]:
    """Return (op, version) of all registered formulas, sorted by op: a part of each plan, which ranks compare."""
    return tuple(sorted((name, entry.version) for name, entry in _registered.items()))


def name_of(op: Any) -> str:
    """Return the name under which the formula of `op` is registered: "lib::op", or "triton:module.kernel"."""
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
        f"zcompile.register_cost: {op!r} is no op of torch's and no Triton kernel. Pass torch.ops.lib.op, the "
        "result of torch.library.custom_op, a name such as 'lib::op', or a function with @triton.jit."
    )


def kernel_function(kernel: Any) -> Any:
    """Return the Python function of a Triton kernel, without autotuner and heuristics; None for other values."""
    seen = 0
    while not inspect.isfunction(kernel) and seen < 10:
        if not hasattr(kernel, "fn"):
            return None
        kernel, seen = kernel.fn, seen + 1
    return kernel if seen else None
