"""Steps of the optimizer with the flag, against those of eager ZeRO-3, also those of DeepSpeed's own Adam."""

from unittest import mock

import pytest
import torch
from packaging.version import parse as version
from torch import nn

from tests.support import deepspeed as engines
from tests.support.deepspeed import deepspeed
from tests.support.deepspeed_config import BF16, MICROBATCHES, SUB_GROUPS, config_of
from tests.support.late_link import LateLink
from tests.support.models import batch
from tests.support.reference import same_values
from zcompile.training.host_link import Queue
from zcompile.training.offload import MOMENTS

pytestmark = pytest.mark.slow

MOMENTUM = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "zero_allow_untested_optimizer": True}
ADAM = {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True, "fused": True}}
FUSED = {"optimizer": ADAM, "gradient_clipping": 0.1}
OWN_ADAM = {"type": "AdamW", "params": {"lr": 3e-3}}


@pytest.fixture(scope="module")
def compile_adam():
    """Compile DeepSpeed's in this process, because ranks have a time limit."""
    deepspeed.accelerator.get_accelerator().create_op_builder("FusedAdamBuilder").load()


@pytest.mark.parametrize(
    "config",
    [FUSED, FUSED | SUB_GROUPS, FUSED | {"gradient_clipping": 0.0}, {"optimizer": OWN_ADAM} | SUB_GROUPS],
    ids=["clipped", "sub-groups", "not clipped", "DeepSpeed's own"],
)
def test_kernels_of_adam_are_close_to_eager(ranks, compile_adam, config):
    """torch's divides by the scale, eager multiplies by its inverse; DeepSpeed's own rounds last elements otherwise."""
    ranks(2).run(engines.rank_trains_beside_eager, {}, (1e-6, 1e-6), config, 12, 8)


@pytest.mark.skipif(version(deepspeed.__version__) < version("0.19"), reason="DeepSpeed steps with them before 0.19")
@pytest.mark.parametrize("config", [{}, FUSED, FUSED | SUB_GROUPS], ids=["adam", "fused", "fused sub-groups"])
def test_a_step_that_overflows_changes_nothing(rank, world, config):
    """A step whose gradients are not finite changes no main parameter, and the steps after it are as ever."""
    eager, engine = engines.make_engine(None, **config), engines.make_engine({}, **config)
    for trained in (eager, engine):
        engines.train(trained, rank, end=2)
    states = []
    for stepped in (eager, engine):
        optimizer = stepped.optimizer
        before = [main.clone() for main in optimizer.fp32_partitioned_groups_flat]
        parameters = [parameter for group in optimizer.fp16_groups for parameter in group]
        for i, parameter in enumerate(parameters):
            grad = torch.ones(parameter.partition_numel())
            grad[max(parameter.ds_numel - rank * grad.numel(), 0) :] = 0  # padding
            if i == 1 and rank == 0:
                grad[0] = float("inf")
            if stepped is engine:
                engine.zcompile.lean_step.accept(parameter, grad)
            else:
                optimizer.partition_grads([parameter], [grad])
        optimizer.independent_gradient_partition_epilogue()
        optimizer.step()
        same_values(optimizer.fp32_partitioned_groups_flat, before)
        states.append([optimizer.optimizer.state[main] for main in optimizer.fp32_partitioned_groups_flat])
    for eager_state, engine_state in zip(*states, strict=True):
        for name, value in eager_state.items():
            torch.testing.assert_close(engine_state[name], value, rtol=1e-5, atol=1e-9)
    expected, curve = engines.train(eager, rank, end=3), engines.train(engine, rank, end=3)
    assert max(engines.largest_differences(curve, expected)) <= 1e-6
    eager.destroy()
    engine.destroy()


def set_states(optimizers):
    """Give main parameters and their states the same values in all `optimizers`: the first step in bf16 differs."""
    for optimizer in optimizers:
        first_state = optimizer.optimizer.state[optimizer.fp32_partitioned_groups_flat[0]]
        for main in optimizer.fp32_partitioned_groups_flat:
            main.data.fill_(0.25)
            main_state = optimizer.optimizer.state[main]
            for state in main_state.values():
                state.fill_(0.5) if state.dim() else state.fill_(1)
            if "step" in main_state:  # after loading a universal checkpoint, all share one
                main_state["step"] = first_state["step"]


@pytest.mark.parametrize(
    "config, by_parameter, cast_bytes",
    [
        pytest.param({}, True, 1 << 20, id="fp32"),
        pytest.param(SUB_GROUPS, True, 1 << 20, id="sub-groups"),
        pytest.param(BF16, True, 300, id="bf16"),
        pytest.param(BF16 | SUB_GROUPS, True, 1 << 20, id="bf16 sub-groups"),
        pytest.param(BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}, True, 300, id="bf16 fp32 sums"),
        pytest.param(MOMENTUM, False, 1 << 20, id="SGD"),
        pytest.param(MOMENTUM | BF16 | SUB_GROUPS, False, 1 << 20, id="SGD bf16 sub-groups"),
    ],
)
def test_steps_equal_eager_bitwise(rank, world, config, by_parameter, cast_bytes):
    """Both engines get the same gradients, because each casts to bf16 in its own way."""
    eager, engine = engines.make_engine(None, **config), engines.make_engine({}, **config)
    engines.train(engine, rank, end=1)  # takes the engine over
    engines.train(eager, rank, end=1)
    lean = engine.zcompile.lean_step
    lean.CAST_BYTES = cast_bytes
    generator = torch.Generator().manual_seed(rank)
    for step in range(3):
        optimizers = [eager.optimizer, engine.optimizer]
        for eager_group, group in zip(*[optimizer.fp16_groups for optimizer in optimizers], strict=True):
            for eager_parameter, parameter in zip(eager_group, group, strict=True):
                numel = eager_parameter.partition_numel()
                grad = torch.randn(numel, generator=generator).to(optimizers[0].gradient_accumulation_dtype)
                grad[max(eager_parameter.ds_numel - rank * numel, 0) :] = 0  # padding
                eager.optimizer.partition_grads([eager_parameter], [grad])
                lean.accept(parameter, grad.clone())
                grads = [deepspeed.utils.safe_get_full_grad(either) for either in (eager_parameter, parameter)]
                assert torch.equal(*grads)
        if step == 0:
            set_states(optimizers)
        for optimizer in optimizers:
            optimizer.independent_gradient_partition_epilogue()
            optimizer.step()
        for eager_main, main in zip(*[optimizer.fp32_partitioned_groups_flat for optimizer in optimizers], strict=True):
            assert torch.equal(eager_main, main)
            eager_state, state = eager.optimizer.optimizer.state[eager_main], engine.optimizer.optimizer.state[main]
            assert eager_state.keys() == state.keys()
            same_values(eager_state, state)
        sizes = [len(optimizer.optimizer.state) for optimizer in optimizers]
        assert sizes[0] == sizes[1], "views left states behind"
        assert float(eager.optimizer._global_grad_norm) == float(engine.optimizer._global_grad_norm)
        assert not lean.gradients
    assert engine.optimizer.grad_partitions_flat_buffer.numel() == 0
    assert all(bucket.buffer is None for bucket in getattr(engine.optimizer, "ipg_buckets", {}).values())
    assert (lean.cut(0) is not None) == by_parameter
    eager.destroy()
    engine.destroy()


def record_squares(reduced_squares):
    """A list that gets a pair at each call of `reduced_squares.of`: the parameter, and what the call returned."""
    recorded, of = [], reduced_squares.of

    def recording(parameter, grad):
        recorded.append((parameter, of(parameter, grad)))
        return recorded[-1][1]

    reduced_squares.of = recording
    return recorded


@pytest.mark.parametrize("config", [pytest.param({}, id="one group"), pytest.param(SUB_GROUPS, id="sub-groups")])
def test_norms_come_from_reduces(rank, world, config):
    """Squares come from reduces unless the gradient was edited afterwards; norms are eager ZeRO-3's, summed in fp64."""

    def drive(engine):
        recorded, curve, has_flag = [], [], hasattr(engine, "zcompile")
        for step in range(5):
            engine.backward(engine(batch(step, rank)))
            if has_flag and step == 0:
                recorded = record_squares(engine.zcompile.lean_step.reduced_squares)
            head, edited = engine.module.head.weight, step == 3
            if edited:
                deepspeed.utils.safe_set_full_grad(head, torch.ones(head.ds_shape))
            engine.step()
            for parameter, square in recorded:
                whole = parameter.partition_numel() * (rank + 1) <= parameter.ds_numel
                expected = whole and not (edited and parameter is head)
                assert (square is not None) == expected, (step, parameter.ds_shape)
            assert len(recorded) == (len(list(engine.module.parameters())) if has_flag else 0)
            recorded.clear()
            curve.append((1.0, float(engine.get_global_grad_norm())))
        return curve

    curves = engines.beside_eager(drive, gradient_accumulation_steps=1, **config)
    assert engines.largest_differences(*curves)[1] < 1e-15, curves


TO_CPU = {"stage3_param_persistence_threshold": 20, "offload_optimizer": {"device": "cpu", "pin_memory": False}}
OFFLOAD = {"zero_optimization": {"stage": 3} | TO_CPU, "zero_force_ds_cpu_optimizer": False}


def test_an_optimizer_offloaded_to_pageable_memory_equals_eager(rank, world):
    def drive(engine):
        curve = engines.train(engine, rank, end=4)
        assert not hasattr(engine, "zcompile") or engine.zcompile.lean_step is None
        return curve

    expected, curve = engines.beside_eager(drive, **OFFLOAD)
    assert curve == expected


ON_HOST = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}


def stepped(engine, rank, path, loads=None):
    """Losses and norms, then main parameters and states of steps, some of them after a checkpoint and an edit."""
    curve = engines.train(engine, rank, end=3)
    engine.save_checkpoint(path)
    engine.load_checkpoint(loads or path)
    utils, head = deepspeed.utils, engine.module.head.weight
    moment = utils.safe_get_full_optimizer_state(head, "exp_avg")
    utils.safe_set_full_optimizer_state(head, 2 * moment, "exp_avg")
    curve += engines.train(engine, rank, begin=3, end=6)
    parameters = list(engine.module.parameters())
    states = [[utils.safe_get_full_optimizer_state(each, name) for each in parameters] for name in MOMENTS]
    return curve, [*map(utils.safe_get_full_fp32_param, parameters), *states[0], *states[1]]


@pytest.mark.parametrize("config", [{}, pytest.param(BF16 | SUB_GROUPS, id="bf16"), pytest.param(FUSED, id="fused")])
def test_offloaded_steps_equal_those_without_offload(rank, world, tmp_path, config):
    """Bit by bit, also after the checkpoint of the other one. On a LateLink, copies without a wait stay away."""
    zero, results, link = config_of(None, **config)["zero_optimization"], [], LateLink("")
    sizes = {"GRAIN": 128, "GROUP_BYTES": 12 * 256}
    with (
        mock.patch("zcompile.integrations.deepspeed.optimizer_step.host_link_of", lambda device: link),
        mock.patch.multiple("zcompile.training.streamed_groups", **sizes),
    ):
        for number, (offload, loads) in enumerate([({}, None), (ON_HOST, None), ({}, 1), (ON_HOST, 0)]):
            engine = engines.make_engine({}, **config | {"zero_optimization": zero | offload})
            loads = None if loads is None else f"{tmp_path}/{loads}"
            results.append(stepped(engine, rank, f"{tmp_path}/{number}", loads))
            engines.assert_taken_over(engine)
            assert (engine.zcompile.lean_step.link is link) == bool(offload)
            assert engine.optimizer.grad_partitions_flat_buffer.numel() == 0
            engine.destroy()
    assert link.runs[Queue.COMPUTE] > 60, "matrices should go through the device in pieces"
    for curve, tensors in results[1:]:
        assert curve == results[0][0], (curve, results[0][0])
        same_values(tensors, results[0][1])


def test_an_offloaded_optimizer_that_gets_hooks_goes_on_in_eager(rank, world):
    def drive(engine):
        curve = engines.train(engine, rank, end=2)
        assert not hasattr(engine, "zcompile") or engine.zcompile.lean_step.link is not None
        engine.optimizer.optimizer.register_step_post_hook(lambda *_: None)
        curve += engines.train(engine, rank, begin=2, end=4)
        assert not hasattr(engine, "zcompile") or "step hooks" in engine.zcompile.given_back
        return curve

    curves = []
    for flag in (None, {}):
        engine = engines.make_engine(flag, zero_optimization={"stage": 3} | ON_HOST)
        curves.append(drive(engine))
        engine.destroy()
    assert max(engines.largest_differences(*curves)) <= 1e-6, curves


class Idle(engines.LanguageModel):
    """Has parameters that forward does not read, one of an element per rank."""

    def __init__(self):
        super().__init__()
        self.idle, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(8))


@pytest.mark.usefixtures("compile_adam")
def test_gradients_and_states_edited_by_hand_equal_eager(rank, world):
    utils = deepspeed.utils

    def drive(engine):
        module, outcome = engine.module, []
        main = utils.safe_get_full_fp32_param(module.head.weight)
        with deepspeed.zero.GatheredParameters(module.head.weight, modifier_rank=0):
            module.head.weight.data.mul_(2)
        utils.safe_set_full_fp32_param(module.head.weight, 2 * main)
        for step in range(3):
            for microbatch in range(MICROBATCHES):
                engine.backward(engine(batch(2 * step + microbatch, rank)))
                if microbatch == 0:
                    if step == 1:
                        engine.offload_states()
                        engine.reload_states()
                    engine.step()
            utils.safe_set_full_grad(module.idle, torch.full((2,), 3.0))
            utils.safe_set_full_grad(module.other, torch.full((8,), 5.0))
            parameters = (module.idle, module.other, module.embed.weight)
            gradients = [utils.safe_get_full_grad(parameter) for parameter in parameters]
            engine.step()
            main = utils.safe_get_full_fp32_param(module.head.weight)
            outcome += [float(engine.get_global_grad_norm()), *gradients, main]
        assert not hasattr(engine, "zcompile") or engine.optimizer.grad_partitions_flat_buffer.numel() == 0
        return outcome

    outcomes = engines.beside_eager(drive, Idle, optimizer=OWN_ADAM)  # offload_states wants DeepSpeed's
    for i, (expected, ours) in enumerate(zip(*outcomes, strict=True)):
        torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-7, msg=lambda text, i=i: f"{i}: {text}")
