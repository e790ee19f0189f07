"""`zcompile.shard(gather_dtype=torch.int8)`: error bounds, widths on the wire, and training beside plain gathers."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zcompile
from tests.support.blocks import FORMS, shard_in_blocks
from tests.support.ranks import on_ranks
from tests.support.reference import over
from tests.support.subclasses import COMPILED, adam_losses, batch_loss, by_zcompile, seeded
from zcompile.state.int8_gather import quantize

BLOCK = 256
stack = functools.partial(seeded, nn.Parameter)
wide, wide_loss = functools.partial(stack, width=64, hidden=32), functools.partial(batch_loss, width=64)


def in_int8(model, dtype=None, mesh=None, form=shard_in_blocks):
    return form(model, mesh, param_dtype=dtype, gather_dtype=torch.int8)


def blocks_of(values, world):
    """The blocks that share a scale: views of `values`."""
    shards = values.data.split(-(-values.shape[0] // world))
    return [block for shard in shards for block in shard.view(-1).split(BLOCK)]


def dequantized(model, world):
    """`model` with the values that int8 gathers give its matrices, computed block by block."""
    for block in (block for each in model.parameters() if each.ndim > 1 for block in blocks_of(each, world)):
        scale = block.abs().max() / 127
        block.copy_((block / scale).round() * scale)
    return model


def as_read(model, loss):
    """The parameters that a forward reads, by their names."""
    seen = {}
    for path, module in model.named_modules():
        read = lambda own, of=path: {f"{of}.{name}": each.detach().clone() for name, each in own._parameters.items()}
        module.register_forward_pre_hook(lambda module, _, read=read: seen.update(read(module)))
    loss(model)
    return seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world, width, hidden", [(1, 64, 32), (2, 64, 32), (2, 12, 17), (3, 12, 1)])
def test_values_differ_by_half_a_scale_and_by_the_rounding_to_param_dtype(rank, world, width, hidden, dtype):
    model, reference = (stack(width=width, hidden=hidden) for _ in range(2))
    for each in (model, reference):
        each[1].up.weight.data[: hidden // 2].zero_()
    seen = as_read(in_int8(model, dtype), functools.partial(batch_loss, step=0, rank=rank, width=width))
    differ = 0
    for name, exact in reference.named_parameters():
        assert seen[name].dtype == dtype and seen[name].shape == exact.shape
        for block, read in zip(blocks_of(exact, world), blocks_of(seen[name], world), strict=True):
            bound = (1 / 254 + torch.finfo(dtype).eps) * block.abs().max() if exact.ndim > 1 else 0
            assert ((block.to(dtype if exact.ndim == 1 else block.dtype) - read).abs() <= bound).all(), name
            differ += (block.to(dtype) != read).sum().item()
    assert differ


@pytest.mark.parametrize("transport", ["c10d", "late c10d"])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_are_those_of_plain_gathers_of_the_dequantized_values(rank, world, form, transport):
    model, reference = over(transport, in_int8(stack(), form=FORMS[form])), by_zcompile(dequantized(stack(), world))
    for each in (model, reference):
        for layer in each:
            layer.norm.bias.requires_grad_(False)
            layer.up.weight.requires_grad_(False)
        batch_loss(each, 0, rank).backward()
    for (name, mine), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) is (not mine.requires_grad)
        if mine.requires_grad:
            torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local(), rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("how", ["eager", *COMPILED])
def test_matrices_travel_in_one_byte_an_element_and_four_for_256(rank, world, how):
    model, reference = in_int8(wide(), torch.bfloat16), by_zcompile(wide())
    COMPILED.get(how, lambda model: None)(model)
    losses = [adam_losses(each, rank, loss=wide_loss) for each in (model, reference)]
    torch.testing.assert_close(*losses, rtol=0.01, atol=0)
    zcompile.reset_stats(model)
    wide_loss(model, 0, rank).backward()
    stats, matrices, vectors = zcompile.stats(model), 3 * 2 * 64 * 32, 3 * (64 + 64 + 32 + 64)
    in_a_pass = {"int8": matrices, "float32": matrices // BLOCK * 4, "bfloat16": vectors * 2}
    assert stats["gathered_bytes"] == {dtype: 2 * nbytes for dtype, nbytes in in_a_pass.items()}
    assert stats["reduced_bytes"] == {"bfloat16": 2 * (matrices + vectors)}
    if how == "model":
        assert zcompile.explain(model, torch.ones(2, 64)).widths == (
            ("bfloat16", vectors, in_a_pass["bfloat16"]),
            ("float32 and int8", matrices, in_a_pass["float32"] + in_a_pass["int8"]),
        )


def test_a_value_that_is_not_finite_makes_its_block_nan(rank, world):
    model = wide()
    model[0].up.weight.data[0, 0], model[0].up.weight.data[20, 5] = torch.inf, torch.nan
    read = as_read(in_int8(model), functools.partial(wide_loss, step=0, rank=rank))["0.up.weight"].view(-1, BLOCK)
    assert read.isnan().all(1).nonzero().flatten().tolist() == [0, 20 * 64 // BLOCK]
    assert read.isfinite().sum() == read.numel() - 2 * BLOCK


def test_checkpoints_and_whole_parameters_are_exact(rank, world, tmp_path):
    model, loaded, exact = in_int8(stack(hidden=17)), by_zcompile(stack(hidden=17)), stack(hidden=17)
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    adam_losses(loaded, rank, steps=1)
    dcp.load({"model": (state := loaded.state_dict())}, checkpoint_id=tmp_path)
    loaded.load_state_dict(state)
    whole, before = dict(zcompile.full_parameters(model)), batch_loss(model, 0, rank)
    with zcompile.unshard(model, writeback=True):
        for name, other in exact.named_parameters():
            for each in (whole[name], model.get_parameter(name), loaded.get_parameter(name).full_tensor()):
                assert torch.equal(each, other), name
            model.get_parameter(name).data.mul_(2)
    for each, other in zip(model.parameters(), exact.parameters(), strict=True):
        assert torch.equal(each.full_tensor(), 2 * other)
    for assign in (False, True):
        model.load_state_dict(by_zcompile(stack(hidden=17)).state_dict(), assign=assign)
        assert torch.equal(batch_loss(model, 0, rank), before)


@pytest.mark.parametrize("offload", [None, "moments", "states"])
def test_fused_steps_and_microbatches_train_as_others(rank, world, offload):
    model, reference = (in_int8(stack(), torch.bfloat16) for _ in range(2))
    fuse = functools.partial(zcompile.fuse_optimizer, offload=offload)
    assert torch.equal(adam_losses(model, rank, fuse=fuse, fused=True), adam_losses(reference, rank, fused=True))
    with zcompile.accumulate(model):
        for each in (model, model):
            batch_loss(each, 0, rank).backward()
    batch_loss(reference, 0, rank).mul(2).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(mine.grad.to_local(), other.grad.to_local())


@on_ranks(4)
def test_replicas_and_tensor_parallelism_train(rank, world):
    mesh, spread = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), stack()
    for layer in spread:
        parallelize_module(layer, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for given, own_mesh, batch in ((stack(), mesh, rank), (spread, mesh["dp"], rank // 2)):
        models = in_int8(given, mesh=own_mesh), by_zcompile(stack(), mesh=mesh)
        torch.testing.assert_close(*(adam_losses(each, batch) for each in models), rtol=0.01, atol=0)


def test_scales_of_float64_values_are_float32():
    values = torch.randn(3, BLOCK, dtype=torch.float64)
    quantized, scales = quantize(values)
    assert scales.dtype == torch.float32 and quantized.dtype == torch.int8
    assert ((quantized * scales - values).abs() <= 0.501 * scales).all()


def test_other_dtypes_dimensions_and_compiled_functions_are_refused(rank, world):
    int8 = functools.partial(zcompile.shard, gather_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"gather_dtype must be torch.int8 or None, not torch.float8_e4m3fn"):
        zcompile.shard(stack(), gather_dtype=torch.float8_e4m3fn)
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("host", "gpu"))
    with pytest.raises(ValueError, match=r"gather_dtype=torch.int8 with states='global'.*Leave out one of the two"):
        int8(stack(), mesh, states="global")
    with pytest.raises(ValueError, match=r"'0.up.weight' \(rank \d\) is to be sharded along dimension 1.*Shard\(0\)"):
        int8(stack(), shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None)
    model = int8(stack(), shard_placement_fn=lambda parameter: Shard(0))  # the remedy
    with pytest.raises(Exception, match=r"(?s)'0.up.weight', a parameter that is gathered in int8.*model\.compile\(\)"):
        torch.compile(lambda x: model(x), backend="zcompile", options={"inner": "aot_eager"})(torch.ones(2, 12))
