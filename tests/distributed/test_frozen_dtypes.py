"""Frozen parameters of any dtype, as a quantized base has them, are sharded and gathered at their own width."""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zcompile
from tests.support.packed import FP8, PackedLinear, Quantized, frozen, quantized_loss
from tests.support.raising import raises
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import BF16, FP32, close, compiled, full, pair, same_values, train_beside

by_inductor = functools.partial(compiled, inner="inductor")


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
@pytest.mark.parametrize("prepare", [zcompile.shard, compiled, slow_case(by_inductor)])
@pytest.mark.parametrize("param_dtype", [None, slow_case(torch.bfloat16)])
def test_training_beside_frozen_parameters_of_any_dtype(rank, world, prepare, param_dtype):
    tolerance = BF16 if param_dtype else FP32
    prepare = functools.partial(prepare, param_dtype=param_dtype)
    train_beside(rank, world, prepare, make=Quantized, loss=quantized_loss, tolerance=tolerance)


def bytes_of(model, chosen=lambda parameter: True):
    """Bytes of parameters by dtype, scalars left out: those are on every rank."""
    count = {}
    for parameter in model.parameters():
        if parameter.ndim and chosen(parameter):
            name = str(parameter.dtype).removeprefix("torch.")
            count[name] = count.get(name, 0) + parameter.numel() * parameter.itemsize
    return count


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_each_dtype_travels_at_its_own_width_and_nothing_frozen_is_reduced(rank, world, prepare):
    reference, model = pair(Quantized, functools.partial(prepare, param_dtype=torch.bfloat16))
    zcompile.reset_stats(model)
    with torch.no_grad():
        quantized_loss(model, 0, rank)
    counted = dict(zcompile.stats(model)["gathered_bytes"])
    expected = bytes_of(reference)
    expected["bfloat16"] = expected.pop("float32") // 2  # what is floating-point is cast before the wire
    assert counted.pop("int64") == 8  # the scalar
    assert counted == expected
    assert counted["uint8"] == sum(layer.packed.numel() for layer in (reference.first, reference.second))

    zcompile.reset_stats(model)
    quantized_loss(model, 0, rank).backward()
    trained = bytes_of(reference, lambda parameter: parameter.requires_grad)
    assert zcompile.stats(model)["reduced_bytes"] == {"bfloat16": trained["float32"] // 2}


class Stack(nn.Module):
    """A trained layer below packed ones, so that backward reads the dequantized weights."""

    def __init__(self):
        super().__init__()
        self.below = nn.Linear(32, 32)
        self.packed = nn.ModuleList(PackedLinear(32, 32) for _ in range(3))
        self.register_buffer("table", torch.linspace(-1, 1, 256))
        self.looked_up = frozen(torch.randint(0, 256, (32, 32), dtype=torch.uint8))

    def forward(self, x):
        x = self.below(x)
        for layer in self.packed:
            x = layer(x).tanh()
        return nn.functional.linear(x, self.table[self.looked_up.int()])


def test_compiled_code_saves_no_dequantized_weight(rank, world):
    reference, model = pair(Stack)
    x = torch.randn(5, 32)
    result = model(x)
    assert result.grad_fn.name() == "CompiledFunctionBackward"
    shapes = [tuple(tensor.shape) for tensor in result.grad_fn.saved_tensors]
    assert (32, 32) not in shapes and (5, 32) in shapes
    result.sum().backward()
    reference(x).sum().backward()
    close(model.below.weight.grad, reference.below.weight.grad, FP32, "below")


@pytest.mark.parametrize("world", [2, slow_case(4)])
def test_any_dtype_is_saved_and_loaded(rank, world, tmp_path):
    reference, model = pair(Quantized, zcompile.shard)
    same_values(model.state_dict(), reference.state_dict())
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    torch.manual_seed(1)
    other = zcompile.shard(Quantized())
    dcp.load({"model": other.state_dict()}, checkpoint_id=tmp_path)
    same_values(other.state_dict(), reference.state_dict())
    with zcompile.unshard(other):
        same_values(other.state_dict(), reference.state_dict())


@slow
@on_ranks(4)
def test_replicas_have_the_same_values_of_any_dtype(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train_beside(rank, world, functools.partial(zcompile.shard, mesh=mesh), make=Quantized, loss=quantized_loss)
    torch.manual_seed(rank)
    model = nn.Linear(3, 4)
    model.flag = frozen(torch.tensor(rank == 0))
    model.eighth = frozen(torch.tensor(float(rank)).to(FP8))
    zcompile.shard(model, mesh)
    assert full(model.flag.data).item() is True and full(model.eighth.data).float().item() == 0


refuses = functools.partial(raises, TypeError)


class Params4bit(nn.Parameter):
    """A parameter with state of its own, as bitsandbytes has it."""


def test_what_cannot_be_sharded_is_refused_by_name(rank, world):
    model = nn.Sequential(nn.Linear(6, 4), PackedLinear(6, 4))
    model[1].eighths = nn.Parameter(torch.zeros(3, dtype=FP8))
    refuses(r"'1.eighths' has dtype torch.float8_e4m3fn .rank \d.* Freeze it", zcompile.shard, model)
    model[1].eighths = Params4bit(torch.zeros(3, dtype=torch.uint8), requires_grad=False)
    message = r"'1.eighths' is a tests.*Params4bit \(rank \d\).*an nn.Parameter over a plain tensor.*ignored_params"
    refuses(message, zcompile.shard, model)
    zcompile.shard(model, ignored_params=[model[1].eighths])


@on_ranks(2, needs="torchao")
def test_a_tensor_of_torchao_is_refused_by_name(rank, world):
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 32))
    quantize_(model, Int8WeightOnlyConfig(), filter_fn=lambda module, path: path == "1")
    message = r"'1.weight' is a torchao\..* \(rank \d\).*Shard before quantizing.*docs/peft.md"
    refuses(message, zcompile.shard, model)
    zcompile.shard(model, ignored_params=[model[1].weight])
    assert model(torch.randn(2, 64)).shape == (2, 32)
