"""What a step of a mixture under expert parallelism sends: exact counts of its own all-to-alls, and of bytes."""

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.profiler import ProfilerActivity, profile

import zcompile
from tests.support.parallel import Experts, Mixture, checkpointed, expert_parallel, token_loss
from tests.support.ranks import on_ranks

slow = pytest.mark.slow
BLOCKS = 2


def all_to_alls(part):
    """How many all-to-alls of the model's own `part` starts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        part()
    return sum(event.count for event in profiled.key_averages() if event.key == "_c10d_functional::all_to_all_single")


def plain():
    return Mixture(BLOCKS)


def recomputing():
    return checkpointed(plain())


@slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make, recomputed", [(plain, 0), (recomputing, 2)])
@on_ranks(4)
def test_a_block_has_two_all_to_alls_each_way(rank, world, inner, make, recomputed):
    """To the experts and back; a checkpoint repeats them."""
    model = expert_parallel("cpu", inner, make(), shard=Shard(0))
    losses = [token_loss(model, 0, rank)]
    losses.pop().backward()
    forward = all_to_alls(lambda: losses.append(token_loss(model, 1, rank)))
    backward = all_to_alls(lambda: losses.pop().backward())
    assert (forward, backward) == (2 * BLOCKS, (2 + recomputed) * BLOCKS)


@pytest.mark.parametrize(
    "inner", ["aot_eager", pytest.param("eager", marks=slow), pytest.param("inductor", marks=slow)]
)
@on_ranks(4)
def test_bytes_of_each_domain_are_counted(rank, world, inner):
    """In eager, autograd keeps weights from forward to backward."""
    torch.manual_seed(0)
    whole = plain()
    experts = {id(p) for module in whole.modules() if isinstance(module, Experts) for p in module.parameters()}
    experts_bytes = sum(p.nbytes for p in whole.parameters() if id(p) in experts) // 2  # on two ranks
    dense = {name: p for name, p in whole.named_parameters() if id(p) not in experts}
    dense_bytes = sum(p.nbytes for p in dense.values())
    # Gradients of activations need weights, but not those of the first layer, of which nobody asks for one. Torch's op
    # for the gradient of a norm takes its bias, too; Inductor decomposes that op.
    needed = ("weight", *(f"norm{i}.bias" for i in (1, 2) if inner == "aot_eager"))
    again_bytes = sum(p.nbytes for name, p in dense.items() if name.endswith(needed) and not name.startswith("enter"))
    model = expert_parallel("cpu", inner, whole, shard=Shard(0))
    for _ in range(2):
        zcompile.reset_stats(model)
        token_loss(model, 0, rank).backward()
        times = 3 if inner != "eager" else 2  # gathers in forward and backward, reduces
        expected = [2 * dense_bytes + again_bytes * (times - 2), times * experts_bytes]
        stats = zcompile.stats(model)
        assert stats["domain_bytes"] == expected, (stats, expected)
        assert sum(expected) == stats["gathered_bytes"]["float32"] + stats["reduced_bytes"]["float32"]
