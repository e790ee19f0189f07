"""Operations of a step and parameters of a model, counted on fake tensors: no memory, no values, no GPU.

MFU is the share of a GPU's peak that a model needs, not what an engine computes. So a forward and a backward of the
unsharded model count, and neither what checkpoints compute again nor what a causal mask leaves out: 6N + 12Lds
operations a token (arXiv:2204.02311, appendix B) for a decoder of L layers and N weights of matrices.
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
    """`parameters` of what `job` trains, `flops` of a step on one rank, and in `missing` why it has no flops.

    Raises:
        Exception: the model cannot be made of fake tensors, or is refused.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), triton_without_gpu():
        workload = load(job.model, job.module, job.sequences, job.tokens, checkpointing=False)
        counted: dict[str, Any] = {"flops": None, "missing": []}
        counted["parameters"] = sum(parameter.numel() for parameter in workload.model.parameters())
        try:
            counted["flops"] = flops_of(workload, job.precision) * job.accumulation
        except Exception as error:  # whatever it is, the model may train
            counted["missing"] = [missing_flops(f"{type(error).__name__}: {error}")]
    return counted


def missing_flops(reason: str) -> str:
    """The entry of `missing` for a model whose operations cannot be counted."""
    return f"MFU, because operations cannot be counted ({(reason.strip() or 'no reason').splitlines()[0]})"


def flops_of(workload: Workload, precision: str) -> int:
    """Operations of a forward and a backward of one batch; a multiply-add is two."""
    batch = workload.batch(0, 0)
    if precision == "bf16":  # as engines cast: grouped matmuls take nothing wider
        for parameter in workload.model.parameters():
            parameter.data = parameter.data.bfloat16()
        batch = tree_map_only(torch.Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, batch)
    formulas = {torch.ops.aten._grouped_mm: grouped_product_flops}
    with sdpa_kernel(SDPBackend.MATH):  # two matmuls; formulas of kernels count the backward's recomputation, too
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast")
        with FlopCounterMode(display=False, custom_mapping=formulas) as forward, autocast:
            loss = workload.model(batch)
        formulas = {op: _unless_recomputed(formula) for op, formula in forward.flop_registry.items()}
        with FlopCounterMode(display=False, custom_mapping=formulas) as backward:
            loss.backward()
    return forward.get_total_flops() + backward.get_total_flops()


def grouped_product_flops(left: torch.Size, right: torch.Size, *_: Any, **__: Any) -> int:
    """Operations of `aten._grouped_mm`, for which torch has no formula. Each row meets the matrix of one group.

    Rows [m, k] with [g, k, n], gradients of matrices [m, k] with [k, n], or [g, m, k] with [k, n]. Only the product of
    two stacks, [g, m, k] with [g, k, n], has g products of that size.
    """
    products = left[0] if len(left) == len(right) == 3 else 1
    return 2 * products * left[-2] * left[-1] * right[-1]


def _unless_recomputed(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula, but 0 where a checkpoint computes again, which it does in backward and with gradients enabled."""

    @functools.wraps(formula)
    def counted(*args: Any, **kwargs: Any) -> int:
        return 0 if torch.is_grad_enabled() else formula(*args, **kwargs)

    counted._get_raw = True  # type: ignore[attr-defined]  # it gets tensors, as the formula expects
    return counted
