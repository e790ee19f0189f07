"""Random modules, options and delays, compiled and sharded, against the same modules in one piece.

    ZCOMPILE_FUZZ_GRAPHS=10000 python -m pytest tests/test_fuzz.py
"""

import copy
import os
import time

import torch
import torch.distributed as dist

import fuzz
import zcompile
from zcompile.words import STATE

SECONDS = 120  # of fuzzing, unless a number of graphs is asked for
GRAPHS = int(os.environ.get("ZCOMPILE_FUZZ_GRAPHS", 0))
FIRST = int(os.environ.get("ZCOMPILE_FUZZ_FIRST", 0))  # seed


def batch(seed, rank):
    return torch.randn(fuzz.ROWS, fuzz.WIDTH, generator=torch.Generator().manual_seed(100 * seed + rank))


def one(seed, rank, world):
    """Losses and gradients of two steps, bitwise those of the eager sharded model and close to those of one piece."""
    reference = fuzz.Model(seed)
    eager, compiled = (zcompile.shard(copy.deepcopy(reference)) for _ in range(2))
    options = fuzz.options_of(seed)
    compiled.compile(backend="zcompile", options={"inner": "aot_eager", **options}, fullgraph=True)
    state = next(module.__dict__[STATE] for module in compiled.modules() if STATE in module.__dict__)
    state.runtime.use_transport("late c10d")  # NaN until waited for, gradients read as late as their wait
    for step in range(2):
        ours, beside = compiled(batch(seed + step, rank)), eager(batch(seed + step, rank))
        theirs = [reference(batch(seed + step, other)) for other in range(world)]
        for loss in (ours, beside, sum(theirs) / world):
            loss.backward()
        same(ours, beside, f"loss of step {step}")
        near(ours, theirs[rank], f"loss of step {step}")
        for (name, mine), other, whole in zip(
            compiled.named_parameters(), eager.parameters(), reference.parameters(), strict=True
        ):
            missing = [parameter.grad is None for parameter in (mine, other, whole)]
            assert len(set(missing)) == 1, f"gradient of {name} is missing: {missing}"
            if mine.grad is not None:
                same(mine.grad.to_local(), other.grad.to_local(), f"gradient of {name} at step {step}")
                near(mine.grad.full_tensor(), whole.grad, f"gradient of {name} at step {step}")
        for model in (compiled, eager, reference):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()


def same(one, other, what):
    assert torch.equal(one, other), f"{what}: {one} is not that of eager, {other}"


def near(one, other, what):
    error, norm = (one.detach() - other.detach()).norm(), other.detach().norm()
    assert error <= 3e-2 * norm + 1e-3, f"{what}: {one} is not near {other}"  # products in bf16, summed in another order


def fuzzed(rank, world, first, graphs, seconds):
    begin, seed = time.monotonic(), first
    while seed < first + graphs if graphs else not late(begin + seconds):
        torch._dynamo.reset()
        try:
            one(seed, rank, world)
        except Exception as error:
            raise AssertionError(f"seed {seed}, options {fuzz.options_of(seed)}") from error
        seed += 1
    return seed - first


def late(deadline):
    """Whether a rank is past it; the same on all ranks."""
    past = torch.tensor(float(time.monotonic() > deadline))
    dist.all_reduce(past, op=dist.ReduceOp.MAX)
    return bool(past)


def test_fuzzed_modules(ranks):
    counts = ranks(2).run(fuzzed, FIRST, GRAPHS, SECONDS, timeout=GRAPHS + 2 * SECONDS)
    print(f"{counts[0]} graphs")
    assert min(counts) >= (GRAPHS or 20)
