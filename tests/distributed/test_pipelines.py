"""Schedules of torch.distributed.pipelining: stages whose parameters are sharded over the data-parallel ranks."""

import contextlib
import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from tests.support import blocks, parallel
from tests.support.models import normal
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import compiled, same_grads

MICROBATCHES = 4
loss_of = lambda output, target: (output - target).square().mean()
STAGES = {  # of each of the two pipeline ranks
    "ScheduleGPipe": ((0,), (1,)),
    "Schedule1F1B": ((0,), (1,)),
    "ScheduleInterleaved1F1B": ((0, 2), (1, 3)),
    "ScheduleInterleavedZeroBubble": ((0, 2), (1, 3)),
    "ScheduleZBVZeroBubble": ((0, 3), (1, 2)),
}


def stage_of(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 6))


FORMS = blocks.FORMS | {"compiled": functools.partial(compiled, fullgraph=False)}
CASES = [  # torch itself compiles no stage whose backward is split
    pytest.param(name, form, reduce, marks=[] if (form, reduce) == ("blocks", "last") or "ZBV" in name else slow)
    for name in STAGES
    for form in FORMS
    for reduce in ("each", "last")
    if form != "compiled" or "Zero" not in name
]


@pytest.mark.parametrize("name, form, reduce", CASES)
@on_ranks(4)
def test_a_schedule_gives_the_gradients_of_one_process(rank, world, name, form, reduce):
    """Its first step infers shapes by a backward of its own, and its last one divides `.grad` by the microbatches."""
    torch._dynamo.reset()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "data"))
    numbers = STAGES[name][mesh.get_local_rank("pipeline")]
    count = 2 * len(numbers)
    reference = [stage_of(number) for number in range(count)]
    parts = [FORMS[form](stage_of(number), mesh=mesh["data"]) for number in numbers]
    group = mesh["pipeline"].get_group()
    stages = [PipelineStage(part, i, count, torch.device("cpu"), group=group) for part, i in zip(parts, numbers)]
    schedule = getattr(schedules, name)(stages if len(stages) > 1 else stages[0], MICROBATCHES, loss_fn=loss_of)
    for step in range(2):
        batches = normal(step, 0, 2, 2 * MICROBATCHES, 6)
        batch = batches[mesh.get_local_rank("data")]
        with contextlib.ExitStack() as stack:
            for part in parts:
                stack.enter_context(zcompile.accumulate(part, reduce=reduce))
                part.zero_grad()
            schedule.step(*([batch] if 0 in numbers else []), **({"target": batch} if count - 1 in numbers else {}))
        for each in batches:
            (loss_of(nn.Sequential(*reference)(each), each) / 2).backward()
        for part, number in zip(parts, numbers, strict=True):
            same_grads(part, reference[number])
        for each in reference:
            each.zero_grad()


def tensor_parallel(stage, mesh):
    spread = parallelize_module(stage, mesh["tp"], parallel.TENSOR_PLAN)
    return zcompile.shard(spread, mesh["dp"]), mesh["dp"].get_local_rank()


def expert_parallel(stage, mesh):
    placement = parallel.expert_placement(parallel.spread_experts(stage, mesh["ep"]), mesh["efsdp"], Shard(0))
    fsdp = mesh["efsdp", "ep"]._flatten("fsdp")
    return zcompile.shard(stage, fsdp, shard_placement_fn=placement), fsdp.get_local_rank()


SPREAD = {
    "tp": (tensor_parallel, ("pp", "dp", "tp"), functools.partial(parallel.DenseBlock, parallel.HIDDEN)),
    "ep": (expert_parallel, ("pp", "efsdp", "ep"), functools.partial(parallel.MixtureBlock, False, parallel.EXPERTS)),
}

SHORT = [("tp", "aot_eager", 4), ("ep", "eager", 4)]


@pytest.mark.parametrize(
    "kind, inner, world",
    [each if each in SHORT else slow_case(*each) for each in itertools.product(SPREAD, ("eager", "aot_eager"), (4, 8))],
)
def test_stages_may_be_spread_by_tensor_or_expert_parallelism(rank, world, kind, inner):
    spread, names, make = SPREAD[kind]
    mesh = init_device_mesh("cpu", (2, world // 4, 2), mesh_dim_names=names)
    number, reference = mesh.get_local_rank("pp"), [make(), make()]
    part, data_rank = spread(copy.deepcopy(reference[number]), mesh)
    compiled_part = parallel.maybe_compiled(part, inner, False)
    stage = PipelineStage(compiled_part, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = schedules.Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_of)
    batches = normal(0, 0, world // (4 if kind == "tp" else 2), MICROBATCHES, parallel.TOKENS, parallel.WIDTH)
    for _ in range(2):
        part.zero_grad()
        with zcompile.accumulate(part, reduce="last"):
            schedule.step(target=batches[data_rank]) if number else schedule.step(batches[data_rank])
    for each in batches:
        (loss_of(reference[1](reference[0](each)), each) / len(batches)).backward()
    same_grads(part, reference[number])
    norm = zcompile.clip_grad_norm_(part.parameters(), float("inf")).square()
    torch.distributed.all_reduce(norm, group=stage.group)
    nn.utils.clip_grads_with_norm_(part.parameters(), 0.01, norm.sqrt(), foreach=False)
    nn.utils.clip_grad_norm_(nn.ModuleList(reference).parameters(), 0.01)
    same_grads(part, reference[number])
