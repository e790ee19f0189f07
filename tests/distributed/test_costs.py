"""Costs that users register: ranks must have the same ones, and `explain` says what has none."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.ranks import on_ranks
from zcompile.costs.formulas import registry

OP = "zcompile_test_costs::doubled"


@torch.library.custom_op(OP, mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """A user's op without a formula."""
    return 2 * x


doubled.register_fake(torch.empty_like)
doubled.register_autograd(lambda context, grad: 2 * grad)


class Doubling(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x):
        return doubled(self.layer(x)).sum()


@on_ranks(2)
def test_ranks_that_register_different_costs_later_are_told_before_a_graph_runs(rank, world):
    model = zcompile.shard(Doubling())
    if rank == 1:
        zcompile.register_cost(OP, lambda x, *, out: zcompile.Work(flops=out.numel), version=1)
    try:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
        message = f"has costs of .*no ops.*has costs of .*{OP}|has costs of .*{OP}.*has costs of no ops"
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(2, 8))
    finally:
        registry._registered.pop(OP, None)


@on_ranks(2)
def test_explain_says_which_op_counts_as_bytes_and_what_share_of_compute_that_is(rank, world):
    model = zcompile.shard(Doubling())
    without = zcompile.explain(model, torch.ones(2, 8))
    zcompile.register_cost(OP, lambda x, *, out: zcompile.Work(seconds=1.0), version=1)
    try:
        registered = zcompile.explain(model, torch.ones(2, 8))
    finally:
        registry._registered.pop(OP, None)
    ((name, ms),) = without.graphs[0].without_formula
    assert name == OP and 0 < ms < without.graphs[0].compute_ms
    share = f"{ms / without.graphs[0].compute_ms:.1%} of compute"
    assert f"{OP} counts as the bytes of its tensors, {share}: see zcompile.register_cost" in str(without)
    assert not registered.graphs[0].without_formula and registered.step_ms > 1000
