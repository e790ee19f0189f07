"""torchao's float8 training and its NF4 tensors, by their all-gather hooks, beside FSDP2."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import parallelize_module

import zcompile
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import losses_of
from tests.support.subclasses import Block, by_fsdp2, by_zcompile

POLICIES = {"fp32": None, "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
WIDTH, HIDDEN, LAYERS = 64, 128, 3


def in_float8():
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(*(Block(nn.Parameter, WIDTH, HIDDEN) for _ in range(LAYERS)))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


def loss_of(model, step, rank):
    x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))
    x = x.to(next(model.parameters()).device)
    return (model(x).float() - x.flip(0)).square().mean()


def float8_losses(model, rank, precomputes, steps=10):
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if precomputes:
        optimizer.register_step_post_hook(lambda *_: precompute_float8_dynamic_scale_for_fsdp(model))
    return losses_of(model, loss_of, rank, steps, optimizer)


@pytest.mark.parametrize(
    "precomputes, policy", [(False, "bf16"), (True, "fp32"), slow_case(False, "fp32"), slow_case(True, "bf16")]
)
@on_ranks(2, needs="torchao")
def test_float8_training_equals_that_of_fsdp2_and_travels_in_one_byte_an_element(rank, world, policy, precomputes):
    model, reference = by_zcompile(in_float8(), POLICIES[policy]), by_fsdp2(in_float8(), POLICIES[policy])
    zcompile.reset_stats(model)
    assert torch.equal(float8_losses(model, rank, precomputes), float8_losses(reference, rank, precomputes))
    elements = LAYERS * 2 * WIDTH * HIDDEN
    assert zcompile.stats(model)["gathered_bytes"]["float8_e4m3fn"] == 10 * 2 * elements  # forward and backward


@pytest.mark.parametrize("whole", [True, slow_case(False)])
@on_ranks(2, needs="torchao")
def test_compiled_float8_training_equals_that_of_fsdp2(rank, world, whole):
    model, reference = by_zcompile(in_float8()), by_fsdp2(in_float8())
    for each in [model] if whole else model:
        each.compile(backend="zcompile" if whole else "aot_eager", options={"inner": "aot_eager"} if whole else None)
    assert torch.equal(float8_losses(model, rank, True), float8_losses(reference, rank, True))


@on_ranks(2, needs="torchao")
def test_gathers_use_the_scale_that_was_precomputed(rank, world):
    losses = {}
    for name, prepare in {"zcompile": by_zcompile, "fsdp2": by_fsdp2}.items():
        for scale in (None, torch.tensor(3.0)):
            model = prepare(in_float8())
            for layer in model:
                layer.up.weight._local_tensor._precomputed_scale = scale
            losses[name, scale is None] = loss_of(model, 0, rank).item()
    assert losses["zcompile", False] == losses["fsdp2", False] != losses["zcompile", True] == losses["fsdp2", True]


@slow
@on_ranks(4, needs="torchao")
def test_float8_training_under_tensor_parallelism_equals_that_of_fsdp2(rank, world):
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def spread():
        model = in_float8()
        for layer in model:
            for linear in (layer.up, layer.down):  # torchao adds biases to a part
                del linear.bias
                linear.bias = None
            parallelize_module(layer, mesh["tp"], {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()})
        return model

    model, reference = by_zcompile(spread(), mesh=mesh["dp"]), by_fsdp2(spread(), mesh=mesh["dp"])
    assert torch.equal(float8_losses(model, rank // 2, False), float8_losses(reference, rank // 2, False))


@on_ranks(2, needs="torchao")
def test_float8_weights_are_made_from_the_meta_device(rank, world):
    with torch.device("meta"):
        model = in_float8()
    zcompile.shard(model)
    reference = zcompile.shard(in_float8())
    assert type(model[0].up.weight.to_local()) is type(reference[0].up.weight.to_local())
    loss_of(model, 0, rank).backward()
    assert model[0].up.weight.grad.to_local().isfinite().all()


@pytest.mark.parametrize("policy", ["bf16", slow_case("fp32")])
@pytest.mark.parametrize("kind", ["int8_weight_only_quantized", "int8_mixed_precision", "bitnet"])
@on_ranks(2, needs="torchao")
def test_quantized_training_equals_that_of_fsdp2(rank, world, kind, policy):
    from torchao.prototype import quantized_training
    from torchao.quantization import quantize_

    losses = []
    for prepare in (by_zcompile, by_fsdp2):
        torch.manual_seed(0)
        model = nn.Sequential(*(Block(nn.Parameter, WIDTH, HIDDEN) for _ in range(2)))
        quantize_(model, getattr(quantized_training, f"{kind}_training")())
        model = prepare(model, POLICIES[policy])
        assert type(model[0].up.weight.to_local()).__module__.startswith("torchao.prototype.quantized_training")
        torch.manual_seed(rank)  # rounding is stochastic
        losses.append(losses_of(model, loss_of, rank, 4, torch.optim.SGD(model.parameters(), lr=0.01)))
    assert torch.equal(*losses)


class Adapted(nn.Module):
    """A linear layer whose frozen weight is NF4, with a LoRA adapter."""

    def __init__(self):
        super().__init__()
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        self.weight = nn.Parameter(to_nf4(torch.randn(WIDTH * 4, WIDTH * 4) / 16), requires_grad=False)
        self.a, self.b = nn.Linear(WIDTH * 4, 4, bias=False), nn.Linear(4, WIDTH * 4, bias=False)

    def forward(self, x):
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return x + linear_nf4(x, self.weight) + self.b(self.a(x))


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(*(Adapted() for _ in range(2)))


def adapter_losses(model, rank):
    def loss(model, step, rank):
        x = torch.randn(3, WIDTH * 4, generator=torch.Generator().manual_seed(100 * step + rank))
        return model(x).square().mean()

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return losses_of(model, loss, rank, 5, torch.optim.AdamW(trained, lr=0.01))


@on_ranks(2, needs="torchao")
def test_lora_on_an_nf4_base_trains_as_under_fsdp2(rank, world):
    model, reference = by_zcompile(adapted()), by_fsdp2(adapted())
    zcompile.reset_stats(model)
    assert torch.equal(adapter_losses(model, rank), adapter_losses(reference, rank))
    stats = zcompile.stats(model)
    assert stats["gathered_bytes"]["uint8"] == 5 * 2 * 2 * (WIDTH * 4) ** 2 // 2  # two values a byte
    assert stats["reduced_bytes"] == {"float32": 5 * sum(p.numel() * 4 for p in model.parameters() if p.requires_grad)}
