"""Reduced gradients that lie in the place of shards that no gather will read again."""

import pytest
import torch
from torch import nn

from tests.support.gpu import compiled_over
from tests.support.models import Chain
from tests.support.ranks import on_gpus
from tests.support.reference import same_values
from zcompile.state.sharded_model import state_of


def make_chain():
    torch.manual_seed(0)
    layers = (nn.Linear(512, 512, bias=False) for _ in range(8))
    return compiled_over("p2p", Chain(*layers).cuda(), options={"reduce_budget_bytes": 0})


@on_gpus(2)
def test_gradients_outlive_their_transport(rank, world):
    model = make_chain()
    x = torch.randn(64, 512, device="cuda")
    for _ in range(3):
        model.zero_grad()
        model(x).square().mean().backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    copies = [grad.clone() for grad in grads]
    state_of(model).runtime.use_transport("c10d")
    del model
    torch.cuda.synchronize()
    filler = torch.full((64 << 20,), float("nan"), device="cuda")
    same_values(grads, copies)
    del filler


@pytest.mark.parametrize("world", [2, 4, 8])
@on_gpus()
def test_gradients_take_the_place_of_shards_unless_held(rank, world):
    """A gradient that is held over the next forwards keeps its values, although a shard needs its place again.

    Where nobody holds gradients, they take the place of shards.
    """
    model = make_chain()
    x = torch.randn(64, 512, device="cuda")
    held = []
    for _ in range(5):
        model(x).square().mean().backward()
        grads = [parameter.grad.to_local() for parameter in model.parameters()]
        held.append((grads, [grad.clone() for grad in grads]))
        model.zero_grad()
    for grads, copies in held:
        same_values(grads, copies)
        same_values(grads, held[0][0])
    del held, grads, copies
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    grad_bytes = sum(parameter.grad.to_local().nbytes for parameter in model.parameters())
    assert torch.cuda.memory_allocated() - before < 0.75 * grad_bytes, "no gradient took the place of a shard"
