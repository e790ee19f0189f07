"""Meshes, ways to run and to shard, and divisors in pairs, beside the unsharded model; exact counts: `make compose`."""

import functools
import itertools

import pytest
import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

import zcompile
from tests.support import parallel
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import close, train_beside
from zcompile.state.sharded_model import models_of, state_of

MESHES = ["tensor", "sequence", "experts", "experts and tensor", "replicas and experts"]
INNER = ["eager", "aot_eager", "inductor"]
SHARDS = ["rows", "columns", "uneven"]
DIVISORS = [None, 1.0]
CASES = [(MESHES[i], INNER[j], SHARDS[(i + j) % 3], DIVISORS[(i + j) % 2]) for i in range(5) for j in range(3)]
CASES.append(("experts", "aot_eager", "columns", None))
IN_CI = (("tensor", "eager"), ("sequence", "eager"), ("experts", "eager"), CASES[-1][:3])
of_case = lambda *case: pytest.param(*case, marks=[] if {case[:2], case[:3]} & {*IN_CI} else slow)


def made(mesh, shard):
    """A model whose parts divide by the ranks that share them, or do not."""
    if mesh in ("tensor", "sequence"):
        return parallel.Dense(hidden=22 if shard == "uneven" else 24)
    return parallel.Mixture(experts=6 if shard == "uneven" else 4)


def sharded(model, kind, shard, divisor):
    """`model` over the meshes of `kind`. Modules read plain tensors of columns, and DTensors of all else."""
    dim = Shard(int(shard == "columns"))
    if kind in ("tensor", "sequence"):
        mesh = parallel.mesh_of("cpu", dp=2, tp=2)
        parallel.spread_dense(model, mesh["tp"], sequence=kind == "sequence")
        place = (lambda parameter: dim if parameter.ndim == 2 else None) if shard == "columns" else None
        return zcompile.shard(model, mesh["dp"], shard_placement_fn=place, gradient_divide_factor=divisor)
    if kind == "experts":
        mesh = parallel.mesh_of("cpu", efsdp=2, ep=2)
        dense, experts = mesh._flatten("dp"), mesh["efsdp"]
    elif kind == "experts and tensor":
        mesh = parallel.mesh_of("cpu", efsdp=2, ep=2, tp=2)
        dense, experts = mesh["efsdp", "ep"]._flatten("dp"), mesh["efsdp"]
        for block in model.blocks:
            plan = {name: style for name, style in parallel.TENSOR_PLAN.items() if name.startswith("attention")}
            parallelize_module(block, mesh["tp"], plan)
    else:
        mesh = parallel.mesh_of("cpu", dp_replicate=2, efsdp=2, ep=2)
        mesh["efsdp", "ep"]._flatten("fsdp")
        dense, experts = mesh["dp_replicate", "fsdp"], mesh["dp_replicate", "efsdp"]
    parallel.spread_experts(model, mesh["ep"])
    place = parallel.expert_placement(model, experts, dim, local=shard == "columns")
    return zcompile.shard(model, dense, shard_placement_fn=place, gradient_divide_factor=divisor)


def clip(model, reference):
    norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.02)
    close(zcompile.clip_grad_norm_(model.parameters(), 0.02), norm, 1e-6, "norm")
    assert norm > 0.02, "nothing was clipped"


@pytest.mark.parametrize(
    "mesh, inner, shard, divisor, world",
    [of_case(*case, 8 if "and" in case[0] else 4) for case in CASES],
    ids=lambda value: str(value).replace(" ", "-"),
)
def test_models_train_as_unsharded(rank, world, mesh, inner, shard, divisor):
    alike = 2 if mesh in ("tensor", "sequence", "experts and tensor") else 1  # ranks that have the same batches
    train_beside(
        rank // alike, world // alike,
        lambda model: parallel.maybe_compiled(sharded(model, mesh, shard, divisor), inner),
        make=lambda: made(mesh, shard), loss=parallel.token_loss, steps=5, divisor=divisor or 0,
        optimizer=functools.partial(torch.optim.AdamW, lr=0.003), before_step=clip,
    )  # fmt: skip


def test_every_pair_is_covered():
    factors = [MESHES, INNER, SHARDS, DIVISORS]
    for i, j in itertools.combinations(range(len(factors)), 2):
        assert {(case[i], case[j]) for case in CASES} == set(itertools.product(factors[i], factors[j]))


BLOCKS = 2


def all_to_alls(part):
    """How many all-to-alls of the model's own `part` starts."""
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        part()
    return sum(event.count for event in profiled.key_averages() if event.key == "_c10d_functional::all_to_all_single")


@slow
@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
@pytest.mark.parametrize("recomputed", [0, 2])
@on_ranks(4)
def test_a_block_has_two_all_to_alls_each_way(rank, world, inner, recomputed):
    """To the experts and back; a checkpoint repeats them."""
    model = parallel.checkpointed(parallel.Mixture(BLOCKS)) if recomputed else parallel.Mixture(BLOCKS)
    parallel.expert_parallel("cpu", inner, model, shard=Shard(0))
    losses = [parallel.token_loss(model, 0, rank)]
    losses.pop().backward()
    forward = all_to_alls(lambda: losses.append(parallel.token_loss(model, 1, rank)))
    backward = all_to_alls(lambda: losses.pop().backward())
    assert (forward, backward) == (2 * BLOCKS, (2 + recomputed) * BLOCKS)


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("eager"), slow_case("inductor")])
@on_ranks(4)
def test_bytes_of_each_domain_are_counted(rank, world, inner):
    """In eager, autograd keeps weights from forward to backward."""
    whole = parallel.Mixture(BLOCKS)
    experts = {id(p) for module in whole.modules() if isinstance(module, parallel.Experts) for p in module.parameters()}
    experts_bytes = sum(p.nbytes for p in whole.parameters() if id(p) in experts) // 2  # on two ranks
    dense = {name: p for name, p in whole.named_parameters() if id(p) not in experts}
    dense_bytes = sum(p.nbytes for p in dense.values())
    # Gradients of activations need weights, but not those of the first layer, of which nobody asks for one. Torch's op
    # for the gradient of a norm takes its bias, too; Inductor decomposes that op.
    needed = ("weight", *(f"norm{i}.bias" for i in (1, 2) if inner == "aot_eager"))
    again_bytes = sum(p.nbytes for name, p in dense.items() if name.endswith(needed) and not name.startswith("enter"))
    model = parallel.expert_parallel("cpu", inner, whole, shard=Shard(0))
    domains = models_of(state_of(model))
    budgets = {each.machine.memory_bytes for each in domains}
    assert len(budgets) == 1 and budgets != {0}, "a graph of experts alone would have no budget"
    assert [each.microbatch_cache_limit() > 0 for each in domains] == [True, False]
    for _ in range(2):
        zcompile.reset_stats(model)
        parallel.token_loss(model, 0, rank).backward()
        times = 3 if inner != "eager" else 2  # gathers in forward and backward, reduces
        expected = [2 * dense_bytes + again_bytes * (times - 2), times * experts_bytes]
        stats = zcompile.stats(model)
        assert stats["domain_bytes"] == expected, (stats, expected)
        assert sum(expected) == stats["gathered_bytes"]["float32"] + stats["reduced_bytes"]["float32"]
