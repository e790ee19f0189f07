"""`plan_shards` needs no process group and describes alike on all ranks; results of a `shard_placement_fn`."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import zcompile
from zcompile.costs.formulas import registry
from zcompile.ranks import process_groups
from zcompile.sharding.plan import ShardOptions, plan_shards, spread_parameter
from zcompile.state.placement import Placement, placement_of


def mesh_of(ranks: int):
    """As much of a mesh as a plan looks at."""
    return SimpleNamespace(size=lambda: ranks, mesh_dim_names=None)


ROWS, COLUMNS = Placement(), {"placement": Placement(Shard(1))}
OTHERS = {"reduce_dtype": torch.float64, "native_reduce": True, "gradient_divide_factor": 3.0, **COLUMNS, "units": ()}
Expert = type("Expert", (nn.Linear,), {})


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(Expert(4, 4) for _ in range(2))

    def forward(self, x):
        return sum(expert(x) for expert in self.experts)


model = lambda: nn.Sequential(nn.Linear(4, 4), Experts())


def plan(model, mesh, placement=ROWS, **options):
    policy = MixedPrecisionPolicy(options.pop("param_dtype", None), options.pop("reduce_dtype", None))
    options = ShardOptions(policy, **options)
    parameters = [each for each in model.parameters() if id(each) not in options.ignored]
    return plan_shards(model, mesh, options, [(each, placement) for each in parameters])


def test_the_description_is_the_same_for_equal_models_and_names_each_parameter():
    first, second = (plan(model(), mesh_of(2), param_dtype=torch.bfloat16) for _ in range(2))
    assert first.description == second.description
    assert [line.split()[0] for line in first.description[:2]] == ["'0.weight'", "'0.bias'"]
    assert "param_dtype=torch.bfloat16" in first.options_text and first.options_text in first.description


@pytest.mark.parametrize("name, value", OTHERS.items())
def test_the_description_differs_where_ranks_would(name, value):
    assert plan(model(), mesh_of(2), **{name: value}).description != plan(model(), mesh_of(2)).description


def test_a_registered_cost_is_in_the_description():
    with torch.library._scoped_library("shard_plan", "DEF") as library:
        library.define("scaled(Tensor x) -> Tensor")
        zcompile.register_cost(torch.ops.shard_plan.scaled, lambda *sizes: None, version="7")
        try:
            assert any("shard_plan" in line and "7" in line for line in plan(model(), mesh_of(2)).description)
        finally:
            registry._registered.pop("shard_plan::scaled")


def test_modules_that_loop_over_experts_are_units_of_several_ranks_alone():
    assert list(plan(model(), mesh_of(2)).units) == ["1"]
    assert not plan(model(), mesh_of(1)).units
    assert list(plan(model(), mesh_of(1), param_dtype=torch.bfloat16).units) == ["1"]
    assert list(plan(model(), mesh_of(2), units=(Expert,)).units) == ["1.experts.0", "1.experts.1"]


def test_a_default_unit_with_columns_is_left_out():
    columns = Placement(Shard(1))
    assert not plan(model(), mesh_of(2), columns).units
    unit = Experts()
    assert spread_parameter(unit, [(each, columns) for each in unit.parameters()], mesh_of(2)) == "experts.0.weight"


def test_domains_are_in_the_order_of_their_first_parameters():
    made, mesh, others = model(), mesh_of(4), [mesh_of(2), mesh_of(2)]
    meshes = [None, others[1], others[0], others[1], mesh, None]
    placements = [(each, Placement(mesh=other)) for each, other in zip(made.parameters(), meshes, strict=True)]
    planned = plan_shards(made, mesh, ShardOptions(), placements)
    assert planned.meshes == (others[1], others[0])
    assert planned.divisor == 4 and plan(made, mesh, gradient_divide_factor=1.0).divisor == 1.0


def test_ignored_parameters_are_not_described():
    made = model()
    lines = plan(made, mesh_of(2), ignored=frozenset({id(made[0].weight)})).description
    assert not any(line.startswith("'0.weight'") for line in lines)


MESH: object = object()  # nothing looks into it


def fsdp2_result(placement):
    """FSDP2's `ShardPlacementResult`, which torch has since 2.14; before, what has its attributes."""
    kind = getattr(_fsdp_common, "ShardPlacementResult", SimpleNamespace)
    return kind(placement=placement, mesh_info=SimpleNamespace(mesh=MESH))


@pytest.mark.parametrize(
    "chosen, placement",
    [
        (None, Placement(Shard(0))),
        (Shard(1), Placement(Shard(1))),
        (Shard(-1), Placement(Shard(1))),
        (Placement(Shard(-2), MESH, True), Placement(Shard(0), MESH, True)),
        (fsdp2_result(None), Placement(Shard(0), MESH)),
        (fsdp2_result(Shard(-1)), Placement(Shard(1), MESH)),
    ],
    ids=["none", "shard", "negative", "placement", "fsdp2", "fsdp2-columns"],
)
def test_a_placement_function_may_return_what_fsdp2_takes_and_a_placement(chosen, placement):
    assert placement_of(nn.Parameter(torch.ones(2, 3)), lambda parameter: chosen) == placement


@pytest.mark.parametrize(
    "config, gpus, device",
    [
        ("cpu:gloo,cuda:nccl", True, "cuda"),  # init_process_group() on a machine with GPUs
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),  # init_process_group("gloo")
        ("cpu:gloo", False, "cpu"),
    ],
)
def test_a_model_on_the_meta_device_goes_where_the_process_group_is(monkeypatch, config, gpus, device):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus)
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    monkeypatch.setattr(dist, "get_backend", lambda: "undefined")  # as torch says after init_process_group()
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(process_groups, "init_device_mesh", lambda *made: made)
    assert process_groups.default_mesh(nn.Linear(2, 2, device="meta")) == (device, (4,))
