"""Finds the cost formula of a node: the user's, a built-in one, torch's count of operations, or none."""

import logging
from typing import Any, cast

import torch
from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
from torch.fx import Node

from zcompile.costs.formulas import attention, memory_ops, products
from zcompile.costs.formulas.registry import KERNEL, Registered, kernel_function, name_of, registered
from zcompile.costs.formulas.work import Call, Work, sizes_of, tensors_in

log = logging.getLogger("zcompile")

BUILT_IN = {**products.FORMULAS, **attention.FORMULAS, **memory_ops.FORMULAS}
TRITON = ("triton_kernel_wrapper_functional", "triton_kernel_wrapper_mutation")
FUNCTIONALIZED = ("auto_functionalized", "auto_functionalized_v2")  # calls of ops that write to their arguments

# Ops in these namespaces, except those whose names begin with one of COMPUTE, need no formula: the bytes of their
# tensors tell their time.
KNOWN_NAMESPACES = ("aten", "prims", "inductor_prims", "zcompile", "_c10d_functional", "_c10d_functional_autograd")
COMPUTE = ("linalg_", "_linalg_", "_fft_", "cholesky", "_cdist", "_trilinear", "lu_", "geqrf", "triangular_solve")

_told: set[str] = set()  # ops about which `_tell` has logged


def find_work(node: Node) -> tuple[Work | None, str]:
    """Return (the `Work` of the call `node`, ""), or (None, name) if plans must take its time from its tensors' bytes.

    With None, `name` is the op's name if the op may compute, and so take longer than its bytes; "" if it may not.
    """
    target: Any = node.target
    is_higher = isinstance(target, torch._ops.HigherOrderOperator)
    schema: Any = getattr(target, "_schema", None)
    if schema is None and not is_higher:  # a Python function, such as an item of a tuple
        return None, ""
    name = "" if is_higher else schema.name
    if is_higher or registered(name) or name in BUILT_IN:
        call = call_of(node)
        name = call.name
        if (entry := registered(name)) is not None:
            work = _by_user(entry, call)
            return work, name if work is None else ""
        if name in BUILT_IN:
            return BUILT_IN[name](call), ""
    elif products.is_matmul(node):
        count = products.counted_by_torch(node)
        dtype = tensors_in(sizes_of(node.meta["val"]))[0].dtype
        return Work(flops=count, dtype=dtype) if count else None, ""
    namespace, _, op = name.partition("::")
    if namespace in KNOWN_NAMESPACES and not op.startswith(COMPUTE):
        return None, ""
    text = "%s has no cost formula, so plans count its tensors' bytes: see zcompile.register_cost"
    _tell(logging.INFO, name, text, name)
    return None, name


def call_of(node: Node) -> Call:
    """Return the call of the op or kernel that `node` makes, also through a higher-order op that wraps it."""
    target: Any = node.target
    higher = target.name() if isinstance(target, torch._ops.HigherOrderOperator) else ""
    out = sizes_of(node.meta.get("val"))
    if higher in TRITON:
        return _kernel_call(node, out)
    if higher and higher not in FUNCTIONALIZED:
        return Call(f"higher_order::{higher}", sizes_of(node.args), sizes_of(node.kwargs), out, (), node)
    op: Any = node.args[0] if higher else target
    names = tuple(argument.name for argument in op._schema.arguments)
    if higher:
        return Call(op._schema.name, (), _given_kwargs(node, names), out, names, node)
    return Call(op._schema.name, sizes_of(node.args), sizes_of(node.kwargs), out, names, node)


def _given_kwargs(node: Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return by name the arguments of the op that `node` wraps. Those that the op writes to are in `_all_bases`."""
    bases = cast(list[Any], node.kwargs.get("_all_bases", []))
    kwargs = {name: node.kwargs[name] for name in names if name in node.kwargs}
    for name in names:
        i = node.kwargs.get(f"_{name}_base_index")
        if isinstance(i, int):
            kwargs[name] = bases[i]
    return sizes_of(kwargs)


def _kernel_call(node: Node, out: Any) -> Call:
    """Return the call of a Triton kernel. Its `kwargs` are the kernel's arguments and its grid, by name."""
    kernel = kernel_side_table.get_kernel(cast(int, node.kwargs["kernel_idx"]))
    constants = kernel_side_table.get_constant_args(cast(int, node.kwargs["constant_args_idx"]))
    grid = cast(list[Any], node.kwargs["grid"])
    kwargs = {**constants, **sizes_of(node.kwargs["kwargs"]), "grid": sizes_of(grid[0]) if grid else ()}
    name = name_of(kernel) if kernel_function(kernel) is not None else f"{KERNEL}unknown"
    return Call(name, (), kwargs, out, (), node)


def _by_user(entry: Registered, call: Call) -> Work | None:
    """Return the result of the user's formula for `call`, or None and log a warning if the formula fails."""
    result = {} if call.name.startswith(KERNEL) else {"out": call.out}
    try:
        work = entry.function(*call.args, **call.kwargs, **result)
        if isinstance(work, Work):
            return work
        problem = f"it returned {work!r} and not a zcompile.Work"
    except Exception as error:
        problem = f"it raised {type(error).__name__}: {error}"
    _tell(logging.WARNING, call.name, "the cost formula of %s is not used, its bytes count: %s", call.name, problem)
    return None


def _tell(level: int, name: str, text: str, *args: Any) -> None:
    """Log `text` about the op `name`, once in a process for each op."""
    if name not in _told:
        _told.add(name)
        log.log(level, f"zcompile: {text}", *args)
