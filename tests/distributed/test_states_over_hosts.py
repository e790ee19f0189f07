"""`shard(states="global")`: states over all ranks, parameters gathered inside of a host; csrc/runtime/host_shards.h."""

import functools
import re
from math import ceil

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zcompile
from tests.support import deferred
from tests.support import reference as ref
from tests.support.deferred import ADAMW, all_close, reference_grads, run
from tests.support.main_parameters import EDITS_ON_CPUS
from tests.support.mixtures import Experts, MixtureModel, routed_loss
from tests.support.models import Chain, Sometimes, Transformer, batch, loss_of, mean_square, sometimes_loss
from tests.support.ranks import on_ranks, slow_case
from zcompile.costs.hardware import Hosts
from zcompile.explanation.workloads import WithLoss
from zcompile.state.sharded_model import state_of

TIGHT = 1e-6


def over_hosts(hosts, world, states="global"):
    """The arguments of `shard` for so many hosts."""
    mesh = dist.init_device_mesh("cpu", (hosts, world // hosts), mesh_dim_names=("host", "gpu"))
    return {"mesh": mesh, "states": states}


def prepared(inner, hosts, world, states="global", **how):
    return deferred.prepared(inner, **over_hosts(hosts, world, states), **how)


CASES = [*((inner, 2, 4, "c10d") for inner in ("eager", "aot_eager"))]
CASES += [("eager", 3, 6, "c10d"), ("aot_eager", 2, 4, "late c10d")]
SLOW = [("aot_eager", 3, 6, "c10d"), ("inductor", 2, 4, "c10d"), ("eager", 4, 4, "c10d"), ("eager", 1, 2, "c10d")]


@pytest.mark.parametrize("inner, hosts, world, transport", [*CASES, *(slow_case(*each) for each in SLOW)])
@on_ranks()
def test_training_equals_that_of_the_unsharded_model(rank, world, inner, hosts, transport):
    """Of sizes that do not divide, a scalar, tied embeddings, and a parameter of fewer rows than ranks."""

    def prepare(model):
        model = prepared(inner, hosts, world)(model)
        state_of(model).runtime.use_transport(transport)
        return model

    model = ref.train_beside(rank, world, prepare, tolerance=TIGHT)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 0:
            assert len(parameter.to_local()) <= ceil(ceil(len(parameter) / (world // hosts)) / hosts), name


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("how", [{}, {"param_dtype": torch.bfloat16}])
@pytest.mark.parametrize("hosts, world", [(2, 4), (3, 6)])
@on_ranks()
def test_gradients_are_bitwise_those_of_replicas(rank, world, inner, hosts, how):
    """Of HSDP, which adds up inside of a host and then over hosts, too; from three hosts on, in pieces."""
    models = [ref.pair(Transformer, prepared(inner, hosts, world, states, **how))[1] for states in (None, "global")]
    losses = [ref.lm_loss(model, 0, rank) for model in models]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    ref.same_values(*([each.grad for each in model.parameters()] for model in models))


@pytest.mark.parametrize("states", ["global", None])
@on_ranks(4)
def test_ranks_of_all_hosts_plan_alike(rank, world, states):
    model = zcompile.shard(WithLoss(Transformer(), loss_of), **over_hosts(2, world, states))
    plan = zcompile.explain(model, batch(0, rank)).to_json()  # without bytes of this rank's shards, which are uneven
    dist.all_gather_object(plans := [None] * world, re.sub(r'"(live|peak)_bytes": \d+', "", plan))
    assert len(set(plans)) == 1 and '"live_bytes": ' in plan


@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("hosts, world", [(2, 4), (3, 6)])
@pytest.mark.parametrize("states", ["global", None])
@on_ranks()
def test_a_step_crosses_hosts_with_one_gather_and_one_reduce_of_the_model(rank, world, states, hosts, microbatches):
    """HSDP gathers nothing from other hosts. The costs of plans count the same bytes."""
    torch.manual_seed(0)
    layers = Chain(nn.Linear(24, 48), nn.GELU(), nn.Linear(48, 12))  # sizes divide by 6 and by 4, and all take part
    model = ref.compiled(layers, **over_hosts(hosts, world, states), param_dtype=torch.bfloat16)
    optimizer = ADAMW(model.parameters())
    shard = sum(parameter.numel() for parameter in model.parameters()) // (world // hosts)
    piece = shard // hosts * (hosts - 1)  # elements, that this rank gets from ranks on other hosts
    gathered, reduced = (2 * piece, 4 * piece) if states else (0, 8 * piece)
    costs = Hosts(hosts, shards_states=bool(states), sums_once=True, itemsize=2)
    assert (costs.gathered_bytes(shard), costs.summed_bytes(shard)) == (gathered, reduced)
    loss = mean_square(6, 24)
    for step in range(3):
        zcompile.reset_stats(model)
        with zcompile.accumulate(model, reduce="shards"):
            for microbatch in range(microbatches):
                loss(model, 4 * step + microbatch, rank).backward()
        before = zcompile.stats(model)
        optimizer.step()
        optimizer.zero_grad()
        stats = zcompile.stats(model)
        assert stats["replica_bytes"] == reduced
        assert before["host_shard_bytes"] == (gathered if step == 0 else 0)  # the first forward has no step before
        assert stats["host_shard_bytes"] - before["host_shard_bytes"] == gathered
        assert stats["reduces"] == 4 * microbatches


@pytest.mark.parametrize("reduce", ["each", "shards", "last"])
@pytest.mark.parametrize("inner", ["eager", slow_case("aot_eager")])
@on_ranks(4)
def test_microbatches_accumulate(rank, world, inner, reduce):
    all_close(run(rank, prepared(inner, 2, world), reduce)[1], reference_grads(world))
    runs = [run(rank, prepared(inner, 2, world, param_dtype=torch.bfloat16), reduce)[1] for _ in range(2)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("how", [{}, {"units": [nn.Linear]}])
@pytest.mark.parametrize("reduce", ["each", "shards"])
@on_ranks(4)
def test_a_parameter_that_one_host_does_not_use_has_the_gradient_of_the_others(rank, world, reduce, how):
    """A parameter that no rank uses has none. Host 0 uses `extra` in even steps, host 1 in odd ones."""

    def loss(model, step, rank):
        return sometimes_loss(model, step + rank // 2, rank)

    of = {"count": 1, "make": Sometimes, "loss_of": loss}
    _, grads, _ = run(rank, prepared("eager", 2, world, **how), reduce, **of)
    all_close(grads, reference_grads(world, **of))


@pytest.mark.parametrize("inner", ["eager", slow_case("aot_eager")])
@on_ranks(4)
def test_ranks_may_hit_different_experts(rank, world, inner):
    prepare = prepared(inner, 2, world, **({"fullgraph": False} if inner != "eager" else {}))
    ref.train_beside(rank, world, prepare, make=lambda: MixtureModel(Experts), loss=routed_loss, steps=3)


@pytest.mark.parametrize("clip", [torch.nn.utils.clip_grad_norm_, zcompile.clip_grad_norm_])
@on_ranks(4)
def test_norms_of_gradients_are_those_of_the_unsharded_model(rank, world, clip):
    norms = []

    def before_step(model, reference):
        ours = clip(model.parameters(), 0.1)
        theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        norms.append((getattr(ours, "full_tensor", lambda: ours)(), theirs))

    ref.train_beside(rank, world, prepared("eager", 2, world), tolerance=1e-5, before_step=before_step)
    assert len(norms) == 4
    for ours, theirs in norms:
        torch.testing.assert_close(ours, theirs)


def partly_frozen():
    model = Transformer()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" in name)
    return model


@on_ranks(4)
def test_frozen_parameters_cross_hosts_once(rank, world):
    def after_step(model, reference, step):
        trained = [each for each in state_of(model).parameters.values() if each.parameter.requires_grad]
        rows = [ceil(ceil(each.shape[0] / 2) / 2) for each in trained]  # of two hosts with two ranks each
        assert step == 0 or zcompile.stats(model)["host_shard_bytes"] == 4 * sum(rows)
        zcompile.reset_stats(model)

    ref.train_beside(
        rank, world, prepared("eager", 2, world), make=partly_frozen, tolerance=TIGHT, after_step=after_step
    )


@on_ranks(4)
def test_forwards_read_the_values_that_were_written_to_parameters(rank, world):
    for edit in EDITS_ON_CPUS.values():
        reference, model = ref.pair(Transformer, prepared("eager", 2, world))
        optimizer = ADAMW(model.parameters(), fused=True)
        for step in range(2):
            ref.same_backward(rank, world, model, reference, ref.lm_loss, step, TIGHT)
            before = ref.lm_loss(model, step, rank)
            edit(model, optimizer, ref.lm_loss)
            reference.load_state_dict({name: ref.full(value) for name, value in model.state_dict().items()})
            with torch.no_grad():
                after = ref.lm_loss(model, step, rank)
                ref.close(after, ref.lm_loss(reference, step, rank), TIGHT, "loss")
            assert step > 0 or not torch.equal(before, after)


@pytest.mark.parametrize("around", [False, True])
@on_ranks(4)
def test_a_step_that_moves_no_version_counter_is_seen(rank, world, around):
    """As those of fused optimizers, and of programs that write through `.data`."""
    reference, model = ref.pair(Transformer, prepared("eager", 2, world))
    for step in range(3):
        if around:
            with zcompile.accumulate(model, reduce="shards"):
                ref.lm_loss(model, step, rank).backward()
            sum(ref.lm_loss(reference, step, other) / world for other in range(world)).backward()
            ref.same_grads(model, reference, 2 * TIGHT)
        else:
            ref.same_backward(rank, world, model, reference, ref.lm_loss, step, 2 * TIGHT)
        for each in (model, reference):
            for parameter in each.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                grad = parameter.grad.to_local() if hasattr(parameter, "to_local") else parameter.grad
                local.data.add_(grad, alpha=-0.1)
                parameter.grad = None


@on_ranks(4)
def test_whole_parameters_have_the_width_of_main_parameters(rank, world):
    reference, model = ref.pair(Transformer, prepared("eager", 2, world, param_dtype=torch.bfloat16))
    ref.lm_loss(model, 0, rank)
    with zcompile.unshard(model):
        ref.same_values(model, reference)
    exported = dict(zcompile.full_parameters(model))
    for name, value in reference.state_dict().items():
        assert torch.equal(exported[name], value), name
    with torch.no_grad(), zcompile.unshard(model, writeback=True):
        for parameter in model.parameters():
            parameter.add_(1e-5)  # which bf16 would lose
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(1e-5)
    ref.same_values(model, reference)


KINDS = {"global": over_hosts, "replicas": functools.partial(over_hosts, states=None), "plain": lambda hosts, world: {}}


@pytest.mark.parametrize(
    "source, target",
    [("global", "plain"), ("plain", "global"), ("global", "replicas"), ("replicas", "global"), ("global", "global")],
)
@on_ranks(4)
def test_checkpoints_move_between_modes(rank, world, tmp_path, source, target):
    """Training goes on from a checkpoint as without it, with Adam's moments."""
    models, optimizers = [], []
    for seed, kind in enumerate((source, target)):
        torch.manual_seed(seed)
        models.append(zcompile.shard(Transformer(), **KINDS[kind](2, world)))
        optimizers.append(torch.optim.AdamW(models[-1].parameters(), lr=1e-3))
        ref.losses_of(models[-1], ref.lm_loss, rank, 2, optimizers[-1])
    of_model, of_optimizer = get_state_dict(models[0], optimizers[0])
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    of_model, of_optimizer = get_state_dict(models[1], optimizers[1])
    dcp.load({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=tmp_path)
    set_state_dict(models[1], optimizers[1], model_state_dict=of_model, optim_state_dict=of_optimizer)
    ref.same_values(models[1], models[0])
    for ours, theirs in zip(optimizers[1].state.values(), optimizers[0].state.values(), strict=True):
        ref.same_values(ours, theirs)
    ours, theirs = (ref.losses_of(each, ref.lm_loss, rank, 2, optimizer) for each, optimizer in zip(models, optimizers))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


@on_ranks(4)
def test_unsupported_arguments_are_refused_by_every_rank(rank, world):
    def refused(pattern, model, error=ValueError, **how):
        with pytest.raises(error, match=pattern):
            zcompile.shard(model, **how)
        zcompile.shard(model, mesh=how.get("mesh"))  # the remedy

    here = over_hosts(2, world)
    refused("states must be 'global' or None, not 'local'", nn.Linear(4, 4), **here | {"states": "local"})
    refused(r"needs a 2-D mesh .host x gpu.*leave states out", nn.Linear(4, 4), states="global")
    cut = {"shard_placement_fn": lambda parameter: torch.distributed.tensor.Shard(parameter.ndim - 1)}
    refused(r"'weight' .rank \d. is a DTensor.*another dimension.*Leave states out", nn.Linear(4, 4), **here, **cut)


@on_ranks(4)
def test_a_model_without_backward_crosses_hosts_once(rank, world):
    model = zcompile.shard(Transformer(), **over_hosts(2, world)).eval()
    with torch.no_grad():
        first = loss_of(model, batch(0, rank))
        crossed = zcompile.stats(model)["host_shard_bytes"]
        assert torch.equal(loss_of(model, batch(0, rank)), first)
    assert zcompile.stats(model)["host_shard_bytes"] == crossed > 0


@on_ranks(4)
def test_moments_in_host_memory_change_no_bit(rank, world):
    results = []
    for offload in (None, "moments"):
        _, model = ref.pair(Transformer, functools.partial(zcompile.shard, **over_hosts(2, world)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        for step in range(3):
            ref.lm_loss(model, step, rank).backward()
            optimizer.step()
        states = [value for each in optimizer.state.values() for value in each.values()]
        results.append([*model.parameters(), *states])
    ref.same_values(*([getattr(each, "_local_tensor", each).detach() for each in result] for result in results))
