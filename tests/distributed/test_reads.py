"""Forwards read parameters in all ways that users know, and train as the unsharded model does, in eager and compiled.

Each runs with all parameters trained, with most of them frozen, and without gradients. FSDP2 does so, too.
"""

import functools
import itertools

import pytest
import torch
from torch import nn

import zcompile
from tests.support.blocks import by_fsdp2, shard_in_blocks
from tests.support.models import mean_square
from tests.support.ranks import on_ranks, slow
from tests.support.reads import BREAK_GRAPHS, NOT_COMPILED, WAYS, WIDTH, Reader, reading
from tests.support.reference import backward_beside, compiled, full, pair

EAGER, COMPILED = ("root", "blocks", "units"), ("aot_eager", "inductor")
STATES = ("train", "frozen", "no_grad")
TOLERANCE, BF16 = 2e-6, 1e-3  # of losses and gradients; of the way that computes in bf16


def compiled_by(inner, model):
    torch._dynamo.reset()
    return compiled(model, inner=inner, fullgraph=model[0].way not in BREAK_GRAPHS)


ENGINES = {
    "root": zcompile.shard,
    "blocks": shard_in_blocks,
    "units": functools.partial(zcompile.shard, units=[Reader]),
    "aot_eager": functools.partial(compiled_by, "aot_eager"),
    "inductor": functools.partial(compiled_by, "inductor"),
    "fsdp2": by_fsdp2,
}


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("b.weight"))


def difference(rank, world, engine, way, state):
    """The largest difference between losses, and between gradients, of three steps and those of the unsharded model."""
    count = 1 if engine in COMPILED else 2  # compiled code has no blocks
    reference, model = pair(lambda: nn.Sequential(*(reading(way)() for _ in range(count))), ENGINES[engine])
    if state == "frozen":
        freeze(model), freeze(reference)
    loss, found = mean_square(3, WIDTH), 0.0
    for step in range(3):
        if state == "no_grad":
            with torch.no_grad():
                found = max(found, abs(loss(model, step, rank) - loss(reference, step, rank)).item())
            continue
        ours, theirs = backward_beside(rank, world, model, reference, loss, step)
        found = max(found, abs(ours - theirs).item())
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient: {mine.grad is not None}"
            if mine.grad is not None:
                found = max(found, (full(mine.grad) - other.grad).abs().max().item())
        for each in (model, reference):
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            each.zero_grad()
    return found


def outcome(rank, world, engine, way, state):
    """ "right", by how much it is wrong, or the error."""
    try:
        found = difference(rank, world, engine, way, state)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    return "right" if found <= (BF16 if way == "autocast" else TOLERANCE) else f"wrong by {found:.1e}"


def all_right(rank, world, engine, ways, state):
    left_out = NOT_COMPILED if engine in COMPILED and state == "train" else ()
    left_out = ("state_dict()",) if engine == "fsdp2" else left_out  # an error in a forward of FSDP2
    found = {way: outcome(rank, world, engine, way, state) for way in ways if way not in left_out}
    assert set(found.values()) == {"right"}, {way: what for way, what in found.items() if what != "right"}


@pytest.mark.parametrize(
    "engine, state",
    [
        pytest.param(engine, state, marks=slow if engine == "aot_eager" and state != "train" else ())
        for engine in (*EAGER, "aot_eager")
        for state in STATES
    ],
)
def test_a_forward_may_read_its_parameters_in_any_way(rank, world, engine, state):
    """By each engine each way in one of the states. Compiled takes long, since each way is another model to compile."""
    first = [*EAGER, "aot_eager"].index(engine) + STATES.index(state)
    all_right(rank, world, engine, list(WAYS)[first % 3 :: 3], state)


CASES = [*itertools.product((*EAGER, *COMPILED), (1, 2, 3), STATES), *itertools.product(("fsdp2",), (2,), STATES)]


@slow
@pytest.mark.parametrize("engine, world, state", CASES)
@on_ranks(timeout=900)
def test_a_forward_may_read_its_parameters_in_any_way_in_each_state(rank, world, engine, state):
    all_right(rank, world, engine, list(WAYS), state)
