"""Expert and tensor parallelism beside FSDP2 under the same: placements, shards, steps and checkpoints."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from tests.support import parallel
from tests.support.blocks import shard_in_blocks
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import clipped_steps, close, same_values

FP32 = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def dense(kind, dp, tp, policy=FP32):
    """A model under tensor parallelism, sharded by `kind`; the same values on all ranks."""
    mesh = parallel.mesh_of("cpu", dp=dp, tp=tp)
    torch.manual_seed(0)
    model = parallel.spread_dense(parallel.Dense(), mesh["tp"], sequence=False)
    if kind == "zcompile":
        return shard_in_blocks(model, mesh["dp"], param_dtype=policy.param_dtype)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


ROWS = Shard(0)


def mixture(kind, efsdp, ep, shard=ROWS, policy=FP32):
    mesh = parallel.mesh_of("cpu", efsdp=efsdp, ep=ep)
    torch.manual_seed(0)
    model = parallel.spread_experts(parallel.Mixture(), mesh["ep"])
    if kind == "zcompile":
        placement = parallel.expert_placement(model, mesh["efsdp"], shard)
        dtype = policy.param_dtype
        return shard_in_blocks(model, mesh._flatten("dp"), shard_placement_fn=placement, param_dtype=dtype)
    for experts in (each for each in model.modules() if isinstance(each, parallel.Experts)):
        fully_shard(experts, mesh=mesh["efsdp"], shard_placement_fn=lambda parameter: shard, mp_policy=policy)
        for parameter in experts.parameters():  # a mean over fewer ranks, and over gloo FSDP2 takes no other divisor
            parameter.register_post_accumulate_grad_hook(lambda parameter: parameter.grad.div_(ep))
    return fully_shard(model, mesh=mesh._flatten("dp"), mp_policy=policy)


@pytest.mark.parametrize(
    "make, sizes, policy, tolerance",
    [
        (dense, (2, 2), FP32, 1e-6),
        (mixture, (2, 2), FP32, 1e-6),
        (mixture, (2, 2), BF16, 1e-2),
        slow_case(dense, (2, 2), BF16, 1e-2),
        *(slow_case(mixture, sizes, FP32, 1e-6) for sizes in ((2, 2, Shard(1)), (1, 4), (4, 1))),
    ],
)
@on_ranks(4)
def test_placements_shards_and_steps_are_those_of_fsdp2(rank, world, make, sizes, policy, tolerance):
    ours, theirs = (make(kind, *sizes, policy=policy) for kind in ("zcompile", "fsdp2"))
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert mine.placements == other.placements and mine.device_mesh == other.device_mesh, (name, mine, other)
        assert torch.equal(mine.to_local(), other.to_local()), name
    data_rank = rank // 2 if make is dense else rank
    steps = (clipped_steps(model, parallel.token_loss, data_rank, 0.02, steps=5) for model in (ours, theirs))
    for mine, other in zip(*steps, strict=True):
        for kind, value, right in zip(("loss", "norm"), mine, other, strict=True):
            close(value, right, tolerance, kind)
        assert other[1] > 0.02, "nothing was clipped"
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        close(mine, other.full_tensor(), tolerance, name)


def kinds_in_forward(model, parents):
    """Of each parameter of the modules `parents`, in the order in which their forwards begin: what a forward sees."""
    seen = []

    def look(module, *_):
        for name, parameter in module.named_parameters(recurse=False):
            placements = parameter.placements if isinstance(parameter, DTensor) else ()
            kind = isinstance(parameter, nn.Parameter), parameter.is_leaf, parameter.requires_grad
            seen.append((name, placements, tuple(parameter.shape), *kind))

    hooks = [module.register_forward_pre_hook(look) for module in model.modules() if isinstance(module, parents)]
    parallel.token_loss(model, 0, model.data_rank).backward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("make", [dense, mixture])
@on_ranks(4)
def test_forwards_see_the_parameters_that_fsdp2_shows_them(rank, world, make):
    ours, theirs = (make(kind, 2, 2) for kind in ("zcompile", "fsdp2"))
    for model in (ours, theirs):
        model.data_rank = rank // 2 if make is dense else rank
        next(model.parameters()).requires_grad_(False)
    seen = kinds_in_forward(ours, (nn.Linear, nn.LayerNorm))
    assert seen == kinds_in_forward(theirs, (nn.Linear, nn.LayerNorm)) and len(seen) > 10
    assert any(placements for _, placements, *_ in seen) == (make is dense)


@on_ranks(4)
def test_a_write_to_a_parameter_of_tensor_parallelism_is_refused(rank, world):
    model = dense("zcompile", 2, 2)
    up = model.blocks[0].feed.up

    @torch.no_grad()
    def write(*_):
        up.weight.mul_(2)

    up.register_forward_pre_hook(write)
    with pytest.raises(RuntimeError, match=rf"'blocks.0.feed.up.weight' was modified in place .* on rank {rank}"):
        parallel.token_loss(model, 0, rank // 2)


@pytest.mark.parametrize(
    "make, source, target",
    [
        (dense, ("zcompile", 2, 2), ("fsdp2", 4, 1)),
        (mixture, ("fsdp2", 2, 2), ("zcompile", 1, 4)),
        slow_case(dense, ("fsdp2", 4, 1), ("zcompile", 2, 2)),
        slow_case(mixture, ("zcompile", 2, 2), ("fsdp2", 4, 1)),
    ],
)
@on_ranks(4)
def test_checkpoints_load_into_other_sizes(rank, world, tmp_path, make, source, target):
    """From `source`, a kind with its sizes, to `target`; all values must be those that were saved."""
    saved = make(*source)
    with torch.no_grad():
        for i, parameter in enumerate(saved.parameters()):
            parameter.mul_(i + 1)
    dcp.save(saved.state_dict(), checkpoint_id=tmp_path)
    loaded = make(*target)
    state = loaded.state_dict()
    dcp.load(state, checkpoint_id=tmp_path)
    loaded.load_state_dict(state)
    same_values(loaded, saved)
    assert all(isinstance(parameter, DTensor) for parameter in loaded.parameters())
