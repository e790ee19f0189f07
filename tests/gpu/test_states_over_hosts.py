"""`shard(states="global")` on GPUs, over NCCL and peer to peer inside of a host."""

import functools

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support.gpu import compiled_over, make_transformer
from tests.support.ranks import on_gpus
from tests.support.reference import lm_loss, losses_of, pair, same_values, train_beside

# Hosts and ranks of each. Peer to peer, a host has several.
CASES = [("c10d", (2, 1), 2), ("late c10d", (2, 1), 2)]
CASES += [(each, (1, 2), 2) for each in ("c10d", "p2p")]
CASES += [(each, (2, 2), 4) for each in ("c10d", "p2p", "late c10d", "late p2p", "delayed p2p")]


def over(transport, shape, states="global", **how):
    mesh = dist.init_device_mesh("cuda", shape, mesh_dim_names=("host", "gpu"))
    return functools.partial(compiled_over, transport, mesh=mesh, states=states, **how)


@pytest.mark.parametrize("transport, shape, world", CASES)
@on_gpus()
def test_training_is_close_to_unsharded(rank, world, transport, shape):
    train_beside(rank, world, over(transport, shape), make=make_transformer, tolerance=1e-4, steps=6)


@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@pytest.mark.parametrize("reduce", ["each", "shards"])
@on_gpus(4)
def test_steps_in_bf16_are_bitwise_equal_from_run_to_run(rank, world, reduce, transport):
    runs, parameters = [], []
    for _ in range(2):
        _, model = pair(make_transformer, over(transport, (2, 2), param_dtype=torch.bfloat16, inner="aot_eager"))
        optimizer, losses = torch.optim.AdamW(model.parameters(), fused=True), []
        for step in range(4):
            with zcompile.accumulate(model, reduce=reduce):
                for microbatch in range(2):
                    losses.append(lm_loss(model, 2 * step + microbatch, rank))
                    losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        runs.append(torch.stack(losses).detach())
        parameters.append([parameter.full_tensor() for parameter in model.parameters()])
    assert torch.equal(*runs)
    same_values(*parameters)


@on_gpus(4)
def test_peers_read_the_parameters_that_nccl_gathers(rank, world):
    runs = []
    for transport in ("c10d", "p2p"):
        _, model = pair(make_transformer, over(transport, (2, 2), param_dtype=torch.bfloat16, inner="aot_eager"))
        optimizer = zcompile.fuse_optimizer(model, torch.optim.AdamW(model.parameters(), fused=True))
        runs.append(losses_of(model, lm_loss, rank, 5, optimizer))
    assert torch.equal(*runs)


@on_gpus(3)
def test_three_replicas_add_up_in_pieces_as_states_over_hosts_do(rank, world):
    how = {"param_dtype": torch.bfloat16, "inner": "aot_eager"}
    models = [pair(make_transformer, over("c10d", (3, 1), states, **how))[1] for states in (None, "global")]
    for model in models:
        lm_loss(model, 0, rank).backward()
    same_values(*([parameter.grad for parameter in model.parameters()] for model in models))
