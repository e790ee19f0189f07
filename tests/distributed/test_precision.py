"""Mixed precision beside FSDP2 with the same policies, and fp16 with torch's GradScaler beside the unsharded model."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.models import Chain, normal
from tests.support.reference import compiled

WIDTH = 8


@dataclasses.dataclass
class Pair:
    """What pytrees do not know."""

    x: torch.Tensor
    scale: torch.Tensor


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.seen = []

    def forward(self, pair, *, mask):
        self.seen = [str(each.dtype) for each in (pair.x, pair.scale, mask, self.linear.weight)]
        y = self.norm(pair.x.to(self.linear.weight.dtype))
        self.seen.append(str(y.dtype))
        return self.linear(y.to(self.linear.weight.dtype)).float() * pair.scale.float() * mask.float()


class Model(nn.Module):
    """Its blocks return fp32, so that casts of their inputs show."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, mask):
        x = self.first(x.to(self.first.weight.dtype))
        for block in self.blocks:
            x = x + block(Pair(x.float(), torch.ones(WIDTH)), mask=mask)
        return {"y": self.last(x.to(self.last.weight.dtype)), "tokens": torch.arange(3)}


BF16, FP32 = torch.bfloat16, torch.float32
POLICIES = {
    "bf16": (MixedPrecisionPolicy(BF16, FP32), {}),
    "norms in fp32": (MixedPrecisionPolicy(BF16, FP32), {nn.LayerNorm: MixedPrecisionPolicy(FP32)}),
    "fp32 from norms in bf16": (MixedPrecisionPolicy(BF16), {nn.LayerNorm: MixedPrecisionPolicy(FP32, None, BF16)}),
    "inputs as they come": (MixedPrecisionPolicy(BF16, FP32, FP32, cast_forward_inputs=False), {}),
    "blocks alone": (MixedPrecisionPolicy(), {Block: zcompile.MixedPrecision(BF16, output_dtype=BF16)}),
    "fp16 outputs": (MixedPrecisionPolicy(BF16, BF16, torch.float16), {}),
}


def by_fsdp2(model, policy, own):
    of_blocks = dataclasses.replace(policy, output_dtype=None)
    for module in reversed(list(model.modules())):
        mine = own.get(type(module), of_blocks if isinstance(module, Block) else None)
        if mine is not None:
            fully_shard(module, mp_policy=mine)
    return fully_shard(model, mp_policy=policy)


def by_zcompile(model, policy, own):
    how = {each.name: getattr(policy, each.name) for each in dataclasses.fields(policy)}
    return zcompile.shard(model, units=own, **how)


def run(model, rank):
    generator = torch.Generator().manual_seed(rank)
    result = model(torch.randn(3, WIDTH, generator=generator), torch.randn(3, 1, generator=generator))
    result["y"].float().square().sum().backward()
    return result


@pytest.mark.parametrize("name", POLICIES)
def test_policies_are_those_of_fsdp2(rank, world, name):
    torch.manual_seed(0)
    ours, theirs = (shard(copy.deepcopy(Model()), *POLICIES[name]) for shard in (by_zcompile, by_fsdp2))
    for (key, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        with torch.no_grad():
            other.to_local().copy_(mine.to_local())
        assert mine.dtype == other.dtype == FP32, key
    for inner in ("eager", "aot_eager"):
        for each in (ours, theirs):
            each.zero_grad()
        if inner != "eager":
            ours.compile(backend="zcompile", options={"inner": inner}, fullgraph=True)
        mine, right = run(ours, rank), run(theirs, rank)
        assert mine["y"].dtype == right["y"].dtype and torch.equal(mine["y"], right["y"]), inner
        for block, other in zip(ours.blocks, theirs.blocks, strict=True):
            assert block.seen == other.seen, inner
        for (key, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            grad, right_grad = parameter.grad, other.grad
            assert isinstance(grad, DTensor) and grad.dtype == right_grad.dtype, key
            torch.testing.assert_close(grad.to_local(), right_grad.to_local(), rtol=2e-2, atol=1e-3, msg=key)


def test_policies_that_cannot_be_followed_are_refused_by_name(rank, world):
    def refused(error, message, make=Model, **how):
        with pytest.raises(error, match=message):
            zcompile.shard(make(), **how)

    def tied():
        model = Model()
        model.last.weight = model.blocks[0].linear.weight
        return model

    refused(TypeError, "output_dtype must be floating-point", output_dtype=torch.int8)
    refused(TypeError, "must be floating-point", units={Block: MixedPrecisionPolicy(torch.int8)})
    refused(TypeError, "MixedPrecision values, not torch.bfloat16", units={Block: BF16})
    refused(ValueError, "no .*Conv2d.*, for which `units` has a policy", units={nn.Conv2d: MixedPrecisionPolicy(BF16)})
    units = {Block: MixedPrecisionPolicy(BF16)}
    refused(ValueError, "'last.weight' is tied to 'blocks.0.linear.weight'", tied, units=units)


def test_registered_methods_cast_as_forwards_do(rank, world):
    """As FSDP2's `register_fsdp_forward_method`."""
    model = zcompile.shard(Model(), param_dtype=BF16, output_dtype=torch.float64)
    model.encode = lambda x: model.first(x)
    zcompile.register_forward_method(model, "encode")
    x = torch.randn(3, WIDTH)
    assert model.encode(x).dtype == torch.float64
    assert torch.compile(model.encode, backend="aot_eager")(x).dtype == torch.float64


STEPS, OVERFLOWS, SCALE = 6, 3, 2.0**12


def make():
    torch.manual_seed(0)
    return Chain(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))


def loss_of(model, step, rank):
    """In one step, gradients of rank 1 overflow in fp16."""
    return model(normal(step, rank, 4, 8)).float().square().mean() * (1e6 if (step, rank) == (OVERFLOWS, 1) else 1.0)


def unsharded(world):
    """The model, trained in fp32 without that step."""
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        if step != OVERFLOWS:
            (sum(loss_of(model, step, rank) for rank in range(world)) / world).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return model


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_a_step_that_overflows_on_one_rank_is_skipped_on_all(rank, world, prepare):
    model = prepare(make(), param_dtype=torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, rank)).backward()
        scaler.unscale_(optimizer)
        zcompile.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == (SCALE / 2 if step >= OVERFLOWS else SCALE), step
    for parameter, expected in zip(model.parameters(), unsharded(world).parameters(), strict=True):
        torch.testing.assert_close(parameter.full_tensor(), expected.detach(), rtol=0, atol=1e-3)
