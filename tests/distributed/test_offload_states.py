"""zcompile.fuse_optimizer(offload="states") on CPU ranks, where a late link stands for a GPU's; tests/gpu has that."""

import functools
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.reductions import StorageWeakRef

import zcompile
from tests.support import late_link as late
from tests.support.main_parameters import EDITS_ON_CPUS, READS
from tests.support.models import Transformer
from tests.support.process import no_collector
from tests.support.ranks import slow_case
from tests.support.reference import autocast_loss, compiled, lm_loss, same_values
from zcompile.state.attributes import SHARDED
from zcompile.training.host_link import Queue
from zcompile.training.local_parts import with_local

LATE = functools.partial(late.LateLink, "states")
worlds = pytest.mark.parametrize("world", [1, 2])


@worlds
def test_reads_give_the_main_parameters_of_the_last_step(rank, world):
    """Right after a step, whose copies to the host are late."""
    values = []
    for link in (LATE(), None):
        with late.small_groups(link):
            model, optimizer = late.linear(link)
            late.train(model, optimizer, link, rank, range(2))
            for name, read in READS.items():
                late.linear_loss(model, 2, rank).backward()
                optimizer.step()
                if link is not None:
                    assert link.work[Queue.TO_HOST] and link.work[Queue.COMPUTE], "the step should be late"
                    link.finish_compute()
                optimizer.zero_grad()
                values.append({f"{name}.{key}": value.clone() for key, value in read(model).items()})
    assert {value.dtype for each in values for value in each.values()} == {torch.float32, torch.float64}  # of sums
    for offloaded, expected in zip(values[: len(READS)], values[len(READS) :], strict=True):
        same_values(offloaded, expected)


@worlds
def test_evaluation_in_float32_reads_main_parameters(rank, world):
    """What training gathers in bfloat16."""
    losses = []
    for link in (LATE(), None):
        torch.manual_seed(0)
        model = compiled(Transformer())
        with late.small_groups(link):
            optimizer = late.fused(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), link)
            for i in range(3):
                autocast_loss(model, i, rank).backward()
                late.step(optimizer, link)
                with torch.no_grad():
                    losses.append(lm_loss(model, 0, rank))
            assert link is None or "blocks.0.up.weight" in late.hosted(model, link)
    same_values(losses[:3], losses[3:])


@worlds
def test_the_next_forward_reads_what_is_written(rank, world):
    for name, edit in EDITS_ON_CPUS.items():
        results = []
        for link in (LATE(), None):
            with late.small_groups(link):
                model, optimizer = late.linear(link)
                late.train(model, optimizer, link, rank, range(2))
                before = late.linear_loss(model, 0, rank)
                edit(model, optimizer, late.linear_loss)
                if link is not None:
                    link.finish_compute()
                after = late.linear_loss(model, 0, rank)
                late.train(model, optimizer, link, rank, range(2, 4))
            assert not torch.equal(before, after), name
            if link is not None:  # with other parameters, those of the optimizer are not the model's any more
                assert len(late.hosted(model, link)) == (0 if name == "assign" else 4), name
            results.append(late.results_of(model, optimizer) | {"loss": after.detach()})
        same_values(*results)


def test_a_model_and_its_host_memory_are_freed_at_once(rank, world):
    model, optimizer = late.unfused()
    zcompile.fuse_optimizer(model, optimizer, offload="states")
    late.train(model, optimizer, None, rank, range(1))
    hosts = [getattr(each, SHARDED)().on_host.main for each in model.parameters()]
    gone = [StorageWeakRef(host.untyped_storage()) for host in hosts]
    gone += [weakref.ref(optimizer)]
    del hosts
    with no_collector():
        del model, optimizer
        assert all(each.expired() if isinstance(each, StorageWeakRef) else each() is None for each in gone)


def stays(case, rank, **how):
    """Two steps under autocast: the model, the link, and the warnings of bytes that stay on the device."""
    torch.manual_seed(0)
    model, link = (zcompile.shard if case == "eager" else compiled)(Transformer(), **how), LATE()
    with late.small_groups(link), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = late.fused(model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True), link)
        if case == "evaluation":
            with torch.no_grad():
                lm_loss(model, 0, rank)
        for i in range(2):
            autocast_loss(model, i, rank).backward()
            late.step(optimizer, link)
        counted = zcompile.stats(model)
    return model, link, counted, [str(each.message) for each in caught if "stay on the device" in str(each.message)]


@pytest.mark.parametrize(
    "case, reason", [("eager", "in torch.float32;"), slow_case("evaluation", "bfloat16 and"), ("tied", "bfloat16 and")]
)
def test_bytes_that_stay_on_the_device_are_told(rank, world, case, reason):
    """In one warning, whose remedy moves them, and in the statistics. A tied embedding is also read in float32."""
    for how in ({}, {"param_dtype": torch.bfloat16}):
        model, link, counted, told = stays(case, rank, **how)
        sizes = {name: 4 * parameter.to_local().numel() for name, parameter in model.named_parameters()}
        stayed = sum(size for name, size in sizes.items() if name not in late.hosted(model, link))
        assert counted["state_bytes_on_device"] == stayed
        assert counted["state_bytes_on_host"] == 3 * sum(sizes.values()) - stayed
        if how:
            assert not told and stayed == 4, "but for a scalar, all should have moved"
            continue
        assert ("blocks.0.up.weight" in late.hosted(model, link)) == (case == "tied")
        assert len(told) == 1 and f"of {stayed} bytes, of {sum(sizes.values())}, stay on" in told[0], told
        assert reason in told[0] and "Shard the model with zcompile.shard(model, param_dtype=torch.bfloat16)" in told[0]


def test_parts_of_larger_memory_stay_on_the_device(rank, world):
    """A warning says so. Its remedy, to copy them, moves them."""
    for assign in (True, False):
        model, link = late.unfused()[0], LATE()
        own = dict(model.named_parameters())
        parts = {name: with_local(each, torch.stack([each.to_local().detach()] * 2)[1]) for name, each in own.items()}
        model.load_state_dict(parts, assign=assign)
        with late.small_groups(link), warnings.catch_warnings(record=True) as caught:
            optimizer = late.fused(model, torch.optim.AdamW(model.parameters(), fused=True), link)
            late.train(model, optimizer, link, rank, range(2))
        told = [str(each.message) for each in caught if "stay on the device" in str(each.message)]
        assert len(late.hosted(model, link)) == (0 if assign else 4) and len(told) == assign
        assert all("shares its memory with other tensors. Load checkpoints without assign" in each for each in told)


def test_states_over_hosts_are_refused(rank, world):
    model = zcompile.shard(nn.Linear(4, 4), init_device_mesh("cpu", (1, 2)), states="global")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with pytest.raises(ValueError, match=r"'states' is not possible .* Take offload='moments'"):
        zcompile.fuse_optimizer(model, optimizer, offload="states")
    zcompile.fuse_optimizer(model, optimizer, offload="moments")


@pytest.mark.parametrize("world, replicas", [(1, 1), slow_case(2, 2)])
def test_compiled_code_of_one_rank_reads_narrow_shards(rank, world, replicas):
    """Though it was compiled before, when it read main parameters; and in replicas of one rank each."""
    results = []
    for link in (LATE(), None):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", (replicas, 1)) if replicas > 1 else None
        model = compiled(Transformer(), mesh=mesh, param_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        with late.small_groups(link):
            for i in range(4):
                if i == 2:
                    late.fused(model, optimizer, link)
                    zcompile.reset_stats(model)
                lm_loss(model, i, rank).backward()
                late.step(optimizer, link if i >= 2 else None)
        if link is not None:
            gathered = zcompile.stats(model)["gathered_bytes"]
            assert {name for name, count in gathered.items() if count} == {"bfloat16"}, gathered
        results.append(late.results_of(model, optimizer) | {"loss": lm_loss(model, 4, rank).detach()})
        if link is not None:
            getattr(model.embed.weight, SHARDED)().on_host.narrow.zero_()
            assert not torch.equal(lm_loss(model, 4, rank), results[0]["loss"])
    same_values(*results)
