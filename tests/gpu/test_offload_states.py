"""Main parameters in host memory: reads and writes of them, and gathers that see these, on GPUs."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zcompile
from tests.support.gpu import Wide, compiled_over
from tests.support.main_parameters import EDITS, READS, halve
from tests.support.models import Chain
from tests.support.ranks import on_gpus
from tests.support.reference import same_values
from zcompile.state.attributes import SHARDED
from zcompile.state.sharded_model import state_of


def make(transport, offload, seed=0):
    torch.manual_seed(seed)
    model = compiled_over(transport, Chain(Wide(512, 1029), nn.Linear(512, 77)).cuda(), param_dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    return model, zcompile.fuse_optimizer(model, optimizer, offload=offload)


def loss_of(model, step, rank):
    x = torch.randn(64, 512, device="cuda", generator=torch.Generator("cuda").manual_seed(10 * step + rank))
    return model(x).float().square().mean()


def train(model, optimizer, rank, steps):
    for step in steps:
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()


def results_of(model, optimizer):
    """Copies of this rank's parts, on the CPU."""
    states = optimizer.state_dict()["state"]
    values = dict(model.named_parameters()) | {f"{i}.{name}": each for i in states for name, each in states[i].items()}
    return {name: getattr(value, "_local_tensor", value).detach().cpu().clone() for name, value in values.items()}


@pytest.mark.parametrize("world, transport", [(2, "p2p"), (2, "c10d"), (1, "c10d")])
@on_gpus()
def test_reads_give_the_main_parameters_of_the_last_step(rank, world, transport):
    values = []
    for offload in ("states", None):
        model, optimizer = make(transport, offload)
        for step, (name, read) in enumerate(READS.items()):
            train(model, optimizer, rank, [step])
            values.append({f"{name}.{key}": value for key, value in read(model).items()})
    for offloaded, expected in zip(values[: len(READS)], values[len(READS) :], strict=True):
        same_values(offloaded, expected)


@pytest.mark.parametrize("world, transport", [(2, "p2p"), (2, "delayed p2p"), (2, "c10d"), (1, "c10d")])
@on_gpus()
def test_the_next_forward_reads_what_is_written(rank, world, transport):
    for name, edit in EDITS.items():
        results = []
        for offload in ("states", None):
            model, optimizer = make(transport, offload)
            train(model, optimizer, rank, range(3))
            with torch.no_grad():
                before = loss_of(model, 0, rank)
            edit(model, optimizer, loss_of)
            with torch.no_grad():
                after, again = loss_of(model, 0, rank), loss_of(model, 0, rank)
            assert torch.equal(after, again) and not torch.equal(before, after), name
            train(model, optimizer, rank, range(3, 5))
            results.append(results_of(model, optimizer) | {"loss": after.cpu()})
        same_values(*results)


@pytest.mark.parametrize("world", [1, 2])
@on_gpus()
def test_checkpoints_resume_with_and_without_offload(rank, world, tmp_path):
    """From and to each of offloaded and not, by DCP."""
    results, transport = [], "p2p" if world > 1 else "c10d"
    for saves in ("states", None):
        model, optimizer = make(transport, saves)
        train(model, optimizer, rank, range(3))
        model_state, state = get_state_dict(model, optimizer)
        dcp.save({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / f"{saves}")
        for loads in ("states", None):
            model, optimizer = make(transport, loads, seed=7)
            model_state, state = get_state_dict(model, optimizer)
            dcp.load({"model": model_state, "optimizer": state}, checkpoint_id=tmp_path / f"{saves}")
            set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=state)
            train(model, optimizer, rank, range(3, 6))
            results.append(results_of(model, optimizer))
    for result in results[1:]:
        same_values(result, results[0])


@pytest.mark.parametrize("world", [1, 2])
@on_gpus()
def test_captured_graphs_read_narrow_shards(rank, world):
    results = []
    for offload in ("states", None):
        torch.manual_seed(0)
        model = zcompile.shard(Chain(Wide(512, 1029), nn.Linear(512, 77)).cuda(), param_dtype=torch.bfloat16)
        # On one rank, code without offload casts parameters inside of kernels, where Inductor leaves the rounding out.
        options = {"cuda_graphs": True, "inductor": {"emulate_precision_casts": True}}
        model.compile(backend="zcompile", options=options)
        if world > 1:
            state_of(model).runtime.use_transport("p2p")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        train(model, optimizer, rank, range(6))
        halve(model)
        train(model, optimizer, rank, range(6, 9))
        assert zcompile.stats(model)["cuda_graphs"]["replays"] >= 6, zcompile.stats(model)["cuda_graphs"]
        results.append(results_of(model, optimizer))
    same_values(*results)


@pytest.mark.parametrize("world", [1, 2])
@on_gpus()
def test_evaluation_in_float32_reads_main_parameters(rank, world):
    """What training gathers in bfloat16: by autocast, so they move in the first step."""
    losses = []
    for offload in ("states", None):
        torch.manual_seed(0)
        model = compiled_over("p2p" if world > 1 else "c10d", Chain(Wide(512, 1029), nn.Linear(512, 77)).cuda())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        for step in range(4):
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_of(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            cached_bytes = zcompile.stats(model)["transport_bytes"]
            with torch.no_grad():
                losses.append(loss_of(model, 0, rank))
            if offload:  # peers keep no float32 copies, which each step would make from host memory
                assert zcompile.stats(model)["transport_bytes"] == cached_bytes
        on_host = [getattr(each, SHARDED)().on_host is not None for each in model.parameters()]
        assert all(on_host) if offload else not any(on_host)
    same_values(losses[:4], losses[4:])
