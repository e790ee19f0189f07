"""Counts the floating-point operations of a step and the parameters of a model, on fake tensors: without a GPU.

MFU is the model's operations per second, divided by the GPU's peak operations per second. The model's operations are
those of one forward and one backward of the unsharded model, for every engine. Recomputation is not counted. Attention
is counted without a causal mask. For a decoder of L layers, width d, sequence length s and N weights in matrices, the
count is 6N + 12Lds operations per token (arXiv:2204.02311, appendix B).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from zcompile.explanation.without_gpu import triton_without_gpu
from zcompile.explanation.workloads import Workload, load
from zcompile.profile.launch import Job


def count_step(job: Job) -> dict[str, Any]:
    """Count the parameters of the model of `job`, and the floating-point operations of a step on one rank.

    Returns:
        `parameters`; `flops`, None if the operations cannot be counted; and `missing`, the reasons why not.

    Raises:
        Exception: the model cannot be built on fake tensors (without data), or the workload is not valid.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), triton_without_gpu():
        workload = load(job.model, job.module, job.sequences, job.tokens, checkpointing=False)
        counted: dict[str, Any] = {"flops": None, "missing": []}
        counted["parameters"] = sum(parameter.numel() for parameter in workload.model.parameters())
        try:
            counted["flops"] = flops_of(workload, job.precision) * job.accumulation
        except Exception as error:  # the model may train nevertheless
            counted["missing"] = [missing_flops(f"{type(error).__name__}: {error}")]
    return counted


def missing_flops(reason: str) -> str:
    """Return the text that `missing` in a report has for a model whose operations cannot be counted."""
    return f"MFU, because operations cannot be counted ({(reason.strip() or 'no reason').splitlines()[0]})"


def flops_of(workload: Workload, precision: str) -> int:
    """Count the floating-point operations of forward and backward of one batch. A multiply-add counts as two."""
    batch = workload.batch(0, 0)
    if precision == "bf16":  # as engines cast; grouped matmuls take bf16 alone
        for parameter in workload.model.parameters():
            parameter.data = parameter.data.bfloat16()
        batch = tree_map_only(torch.Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, batch)
    formulas = {torch.ops.aten._grouped_mm: grouped_product_flops}
    with sdpa_kernel(SDPBackend.MATH):  # two matmuls; formulas of fused kernels count recomputation, too
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
        with FlopCounterMode(display=False, custom_mapping=formulas) as forward, autocast:
            loss = workload.model(batch)
        formulas = {op: _unless_recomputed(formula) for op, formula in forward.flop_registry.items()}
        with FlopCounterMode(display=False, custom_mapping=formulas) as backward:
            loss.backward()
    return forward.get_total_flops() + backward.get_total_flops()


def grouped_product_flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """Count the floating-point operations of `aten._grouped_mm`, for which torch has no formula.

    Shapes [g, m, k] x [g, k, n] take 2gmkn operations. Other shapes take 2mkn: [m, k] x [g, k, n], where each row is
    multiplied by one of g matrices; [m, k] x [k, n], the gradients of the matrices; and [g, m, k] x [k, n].
    """
    products = left[0] if len(left) == len(right) == 3 else 1
    return 2 * products * left[-2] * left[-1] * right[-1]


def _unless_recomputed(formula: Callable[..., int]) -> Callable[..., int]:
    """Return `formula`, but 0 while grad mode is on. In a backward, only checkpointing's recomputation turns it on."""

    @functools.wraps(formula)
    def counted(*args: Any, **kwargs: Any) -> int:
        return 0 if torch.is_grad_enabled() else formula(*args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]  # it gets tensors, as the formula expects
    return counted
