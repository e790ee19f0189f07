"""Steps of the optimizer with the flag and without, and what users do between a backward and a step."""

import copy

import pytest
import torch
from packaging.version import parse as version
from torch import nn

from tests.deepspeed.test_deepspeed import (
    BF16,
    MICRO_STEPS,
    LanguageModel,
    apart,
    beside_eager,
    deepspeed,
    make_engine,
    taken,
    train,
)
from tests.support.models import batch

MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
SUB_GROUPS = {"zero_optimization": {"stage": 3, "sub_group_size": 700, "stage3_param_persistence_threshold": 20}}


def test_deepspeeds_own_adam(ranks):
    """Its kernel rounds the last elements of a tensor otherwise, and counts steps outside of tensors."""
    ranks(2).run(
        beside_eager, {}, (1e-6, 1e-6), {"optimizer": {"type": "AdamW", "params": {"lr": 3e-3}}} | SUB_GROUPS, 12, 8
    )


FUSED = {
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True, "fused": True}},
    "gradient_clipping": 0.1,
}


@pytest.mark.parametrize(
    "config", [{}, SUB_GROUPS, {"gradient_clipping": 0.0}], ids=["clipped", "sub-groups", "not clipped"]
)
def test_fused_adam_divides_by_the_scale(ranks, config):
    """Where DeepSpeed multiplies by its inverse, in a pass of its own."""
    ranks(2).run(beside_eager, {}, (1e-6, 1e-6), FUSED | config, 12, 8)


def overflow(rank, world, config):
    """A step whose gradients are not finite changes nothing, and those after it are as ever."""
    eager, engine = make_engine(None, **config), make_engine({}, **config)
    for one in (eager, engine):
        train(one, rank, end=2)
    states = []
    for one in (eager, engine):
        optimizer = one.optimizer
        before = [masters.clone() for masters in optimizer.fp32_partitioned_groups_flat]
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        for at, parameter in enumerate(parameters):
            grad = torch.ones(parameter.partition_numel())
            grad[max(parameter.ds_numel - rank * grad.numel(), 0) :] = 0  # padding
            if at == 1 and rank == 0:
                grad[0] = float("inf")
            if one is engine:
                engine.zcompile.lean_step.accept(parameter, grad)
            else:
                optimizer.partition_grads([parameter], [grad])
        optimizer.independent_gradient_partition_epilogue()
        optimizer.step()
        for masters, was in zip(optimizer.fp32_partitioned_groups_flat, before, strict=True):
            assert torch.equal(masters, was)
        states.append([optimizer.optimizer.state[masters] for masters in optimizer.fp32_partitioned_groups_flat])
    for of_eager, of_engine in zip(*states, strict=True):
        for name, value in of_eager.items():
            torch.testing.assert_close(of_engine[name], value, rtol=1e-5, atol=1e-9)
    expected, found = train(eager, rank, end=3), train(engine, rank, end=3)
    assert max(apart(found, expected)) <= 1e-6
    eager.destroy()
    engine.destroy()


@pytest.mark.parametrize("config", [{}, FUSED, FUSED | SUB_GROUPS], ids=["adam", "fused", "fused sub-groups"])
def test_a_step_that_overflows(ranks, config):
    if version(deepspeed.__version__) < version("0.19"):
        pytest.skip("DeepSpeed steps with such gradients before 0.19")
    ranks(2).run(overflow, config)


def steps_like_eager(rank, world, config, by_parameter, cast_bytes):
    """Bitwise, although each in bf16 casts its own way: both engines are given the same gradients."""
    eager, engine = make_engine(None, **config), make_engine({}, **config)
    train(engine, rank, end=1)  # takes the engine over
    train(eager, rank, end=1)
    lean = engine.zcompile.lean_step
    lean.CAST_BYTES = cast_bytes
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        optimizers = [eager.optimizer, engine.optimizer]
        for of_eager, of_engine in zip(*[optimizer.fp16_groups for optimizer in optimizers], strict=True):
            for one, other in zip(of_eager, of_engine, strict=True):
                numel = one.partition_numel()
                grad = torch.randn(numel, generator=generator).to(optimizers[0].gradient_accumulation_dtype)
                grad[max(one.ds_numel - rank * numel, 0) :] = 0  # padding
                eager.optimizer.partition_grads([one], [grad])
                lean.accept(other, grad.clone())
                assert torch.equal(deepspeed.utils.safe_get_full_grad(one), deepspeed.utils.safe_get_full_grad(other))
        if step == 0:
            for optimizer in optimizers:
                for masters in optimizer.fp32_partitioned_groups_flat:  # the first step went other ways in bf16
                    masters.data.fill_(0.25)
                    for state in optimizer.optimizer.state[masters].values():
                        state.fill_(0.5) if state.dim() else state.fill_(1)
                    if "step" in optimizer.optimizer.state[masters]:  # loading a universal checkpoint has all share one
                        first = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[0]]
                        optimizer.optimizer.state[masters]["step"] = first["step"]
        for optimizer in optimizers:
            optimizer.independent_gradient_partition_epilogue()
            optimizer.step()
        for one, other in zip(*[optimizer.fp32_partitioned_groups_flat for optimizer in optimizers], strict=True):
            assert torch.equal(one, other)
            states = [optimizer.optimizer.state[masters] for optimizer, masters in zip(optimizers, (one, other))]
            assert states[0].keys() == states[1].keys()
            assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())
        assert len(engine.optimizer.optimizer.state) == len(
            eager.optimizer.optimizer.state
        )  # views leave nothing behind
        assert float(eager.optimizer._global_grad_norm) == float(engine.optimizer._global_grad_norm)
        assert not lean.kept
    assert engine.optimizer.grad_partitions_flat_buffer.numel() == 0
    assert all(bucket.buffer is None for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values())
    assert (lean.cut(0) is not None) == by_parameter
    for one in (eager, engine):
        one.destroy()


@pytest.mark.parametrize(
    "config, by_parameter, cast_bytes",
    [
        ({}, True, 1 << 20),
        (SUB_GROUPS, True, 1 << 20),
        (BF16, True, 300),
        (BF16 | SUB_GROUPS, True, 1 << 20),
        (BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, True, 300),
        (MOMENTUM, False, 1 << 20),
        (MOMENTUM | BF16 | SUB_GROUPS, False, 1 << 20),
    ],
    ids=["fp32", "sub-groups", "bf16", "bf16 sub-groups", "bf16 fp32 sums", "SGD", "SGD bf16 sub-groups"],
)
def test_steps_like_eager(ranks, config, by_parameter, cast_bytes):
    ranks(2).run(steps_like_eager, config, by_parameter, cast_bytes)


def norms_from_reduces(rank, world, config):
    """Squares come from reduces where gradients are as they were reduced, and norms are those of eager ZeRO-3, which adds up in another
    order, in fp64."""
    utils, curves = deepspeed.utils, []
    for flag in (None, {}):
        engine = make_engine(flag, gradient_accumulation_steps=1, **config)
        curve, known = [], []
        for step in range(5):
            engine.backward(engine(batch(step, rank)))
            if flag is not None and step == 0:
                squares = engine.zcompile.lean_step.reduced_squares
                of = squares.of
                squares.of = lambda parameter, grad: known.append((parameter, of(parameter, grad))) or known[-1][1]
            head, edited = engine.module.head.weight, step == 3
            if edited:
                utils.safe_set_full_grad(head, torch.ones(head.ds_shape))
            engine.step()
            if flag is not None:
                for parameter, found in known:
                    whole = parameter.partition_numel() * (rank + 1) <= parameter.ds_numel
                    assert (found is not None) == (whole and not (edited and parameter is head)), (
                        step,
                        parameter.ds_shape,
                    )
                assert len(known) == len(list(engine.module.parameters()))
                known.clear()
            curve.append((1.0, float(engine.get_global_grad_norm())))
        assert flag is None or taken(engine), engine.zcompile.given_back
        curves.append(curve)
        engine.destroy()
    assert apart(*curves)[1] < 1e-15, curves


@pytest.mark.parametrize("config", [{}, SUB_GROUPS], ids=["one group", "sub-groups"])
def test_norms_from_reduces(ranks, config):
    ranks(2).run(norms_from_reduces, config)


class Sometimes(nn.Module):
    """Uses its second layer only when told to."""

    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.told = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x):
        x = self.always(x)
        return (self.sometimes(x) if self.told else x).square().sum()


def differs_from_eager(rank, world):
    still = {"type": "SGD", "params": {"lr": 0.0}}
    engine = make_engine({}, optimizer=still, zero_allow_untested_optimizer=True)
    weight = engine.module.head.weight
    for edited in (False, True):
        if edited:
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(3.0 if rank == 0 else 0.0)
        train(engine, rank, end=1)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full_like(weight, 3.0))  # eager goes back to its masters
    engine.destroy()

    plain = {"type": "SGD", "params": {"lr": 0.1}}
    engine = make_engine(
        {}, model=Sometimes(), optimizer=plain, zero_allow_untested_optimizer=True, gradient_accumulation_steps=1
    )
    seen = []
    for told in (True, False):
        engine.module.told = told
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        seen.append(
            [
                deepspeed.utils.safe_get_full_fp32_param(layer.weight)
                for layer in (engine.module.always, engine.module.sometimes)
            ]
        )
    (always, sometimes), (always_later, sometimes_later) = seen
    assert torch.equal(sometimes, sometimes_later) and not torch.equal(
        always, always_later
    )  # eager steps with a stale gradient
    engine.destroy()


def test_edits_stay_and_unused_parameters_have_no_gradient(ranks):
    ranks(2).run(differs_from_eager)


class Uneven(nn.Module):
    """Runs its layer more often on some ranks."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, times):
        for _ in range(times):
            x = torch.tanh(self.layer(x))
        return x.square().sum()


def a_region_run_unequally_often(rank, world):
    torch.manual_seed(0)
    model = Uneven()
    reference = copy.deepcopy(model)
    sum(reference(torch.ones(2, 4), 1 + other) / world for other in range(world)).backward()
    model.layer.compile()
    still = {"type": "SGD", "params": {"lr": 0.0}}
    engine = make_engine(
        {}, model=model, optimizer=still, zero_allow_untested_optimizer=True, gradient_accumulation_steps=1
    )
    engine.compile()
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4), 1 + rank))
        for name, parameter in engine.module.named_parameters():
            expected = dict(reference.named_parameters())[name].grad
            torch.testing.assert_close(deepspeed.utils.safe_get_full_grad(parameter), expected, rtol=1e-5, atol=1e-6)
        engine.step()
    assert taken(engine), engine.zcompile.given_back
    engine.destroy()


def test_gradients_that_only_other_ranks_asked_for_are_added(ranks):
    ranks(2).run(a_region_run_unequally_often)


OFFLOAD = {
    "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "stage3_param_persistence_threshold": 20},
    "zero_force_ds_cpu_optimizer": False,
}


def offloaded_optimizer(rank, world):
    curves = []
    for flag in (None, {}):
        engine = make_engine(flag, **OFFLOAD)
        curves.append(train(engine, rank, end=4))
        assert flag is None or (taken(engine) and engine.zcompile.lean_step is None), engine.zcompile.given_back
        engine.destroy()
    assert curves[0] == curves[1], curves


def test_an_offloaded_optimizer(ranks):
    ranks(2).run(offloaded_optimizer)


class Idle(LanguageModel):
    """Has parameters that forward does not read, one of an element per rank."""

    def __init__(self):
        super().__init__()
        self.idle, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(8))


def gradients_and_states_by_hand(rank, world):
    utils, outcomes = deepspeed.utils, []
    for flag in (None, {}):
        torch.manual_seed(0)
        engine = make_engine(
            flag, model=Idle(), optimizer={"type": "AdamW", "params": {"lr": 3e-3}}
        )  # offload_states wants theirs
        module, outcome = engine.module, []
        masters = utils.safe_get_full_fp32_param(module.head.weight)
        with deepspeed.zero.GatheredParameters(module.head.weight, modifier_rank=0):
            module.head.weight.data.mul_(2)
        utils.safe_set_full_fp32_param(module.head.weight, 2 * masters)
        for step in range(3):
            for micro in range(MICRO_STEPS):
                engine.backward(engine(batch(2 * step + micro, rank)))
                if micro == 0:
                    if step == 1:
                        engine.offload_states()
                        engine.reload_states()
                    engine.step()
            utils.safe_set_full_grad(module.idle, torch.full((2,), 3.0))
            utils.safe_set_full_grad(module.other, torch.full((8,), 5.0))
            gradients = [utils.safe_get_full_grad(one) for one in (module.idle, module.other, module.embed.weight)]
            engine.step()
            outcome += [
                float(engine.get_global_grad_norm()),
                *gradients,
                utils.safe_get_full_fp32_param(module.head.weight),
            ]
        assert flag is None or (taken(engine) and engine.optimizer.grad_partitions_flat_buffer.numel() == 0)
        outcomes.append(outcome)
        engine.destroy()
    for at, (one, other) in enumerate(zip(*outcomes, strict=True)):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7, msg=lambda text: f"{at}: {text}")


def test_gradients_and_states_by_hand(ranks):
    ranks(2).run(gradients_and_states_by_hand)


def given_back_between_micro_steps(rank, world):
    curves = []
    for flag in (None, {}):
        engine = make_engine(flag)
        curve = train(engine, rank, end=2)
        engine.backward(engine(batch(50, rank)))
        engine.step()
        if flag is not None:
            assert taken(engine)
            engine.zcompile.give_back("asked for")
        engine.backward(engine(batch(51, rank)))
        engine.step()
        curves.append(curve + train(engine, rank, begin=2, end=4))
        engine.destroy()
    assert curves[0] == curves[1]


def test_an_engine_given_back_between_micro_steps(ranks):
    ranks(2).run(given_back_between_micro_steps)
