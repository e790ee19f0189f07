"""Ways to read parameters x engines x states: the largest difference from the unsharded model, or the error.

`python -m tests.support.reads_matrix --ranks 2 --engines blocks aot_eager fsdp2` prints a table, a row for each way.
"""

import argparse
import contextlib
import copy
import functools

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import zcompile
from tests.support.blocks import shard_in_blocks
from tests.support.ranks import Ranks
from tests.support.reads import WAYS, WIDTH, Reader, reading
from tests.support.reference import full

STATES = ("train", "frozen", "no_grad")
TOLERANCE, BF16 = 2e-6, 1e-3  # of losses and gradients; of the way that computes in bf16


def as_root(model):
    return zcompile.shard(model)


def as_units(model):
    return zcompile.shard(model, units=[Reader])


def by_fsdp2(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


def compiled(model, inner):
    torch._dynamo.reset()
    zcompile.shard(model)
    model.compile(backend="zcompile", options={"inner": inner})
    return model


ENGINES = {
    "root": as_root,
    "blocks": shard_in_blocks,
    "units": as_units,
    "aot_eager": functools.partial(compiled, inner="aot_eager"),
    "inductor": functools.partial(compiled, inner="inductor"),
    "fsdp2": by_fsdp2,
}


def batch(step, rank):
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def freeze(model):
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("b.weight"))


def difference(rank, world, prepare, way, state):
    """The largest difference between losses, and between gradients, of three steps and those of the unsharded model."""
    torch.manual_seed(0)
    reference = nn.Sequential(reading(way)(), reading(way)())
    model = prepare(copy.deepcopy(reference))
    if state == "frozen":
        freeze(model), freeze(reference)
    found = 0.0
    for step in range(3):
        with torch.no_grad() if state == "no_grad" else contextlib.nullcontext():
            ours = model(batch(step, rank)).square().mean()
            theirs = [reference(batch(step, other)).square().mean() for other in range(world)]
        found = max(found, abs(ours - theirs[rank]).item())
        if state == "no_grad":
            continue
        ours.backward(), (sum(theirs) / world).backward()
        for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"{name} has a gradient: {mine.grad is not None}"
            if mine.grad is not None:
                found = max(found, (full(mine.grad) - other.grad).abs().max().item())
        with torch.no_grad():
            for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                if mine.grad is not None:
                    mine.sub_(mine.grad, alpha=0.1), other.sub_(other.grad, alpha=0.1)
        model.zero_grad(), reference.zero_grad()
    return found


def outcome(rank, world, engine, way, state):
    """ "right", by how much it is wrong, or the error."""
    try:
        found = difference(rank, world, ENGINES[engine], way, state)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}".replace("\n", " ")
    return "right" if found <= (BF16 if way == "autocast" else TOLERANCE) else f"wrong by {found:.1e}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="*", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--states", nargs="*", choices=STATES, default=STATES)
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=WAYS)
    arguments = parser.parse_args()
    pool = Ranks(arguments.ranks)
    for engine in arguments.engines:
        counts = {"right": 0, "refused": 0, "wrong": 0}
        for way in arguments.ways:
            for state in arguments.states:
                found = pool.run(outcome, engine, way, state, timeout=300, allow_failure=True)
                kind = next((each for each in found if each != "right"), "right")
                counts["right" if kind == "right" else "wrong" if kind.startswith("wrong") else "refused"] += 1
                if kind != "right":
                    print(f"{engine}, {arguments.ranks} ranks, {way}, {state}: {kind}", flush=True)
        print(f"{engine}, {arguments.ranks} ranks: {counts}", flush=True)
    pool.stop()


if __name__ == "__main__":
    main()
