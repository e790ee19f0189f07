"""Engines with the flag beside eager ZeRO-3: losses, norms, gathers, checkpoints, compiled files, the page's claims."""

import json
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import zcompile
from tests.support import deepspeed as engines
from tests.support.artifacts import cache_in
from tests.support.deepspeed import deepspeed
from tests.support.deepspeed_config import BF16, MICROBATCHES, config_of
from tests.support.models import VOCABULARY, batch, normal
from tests.support.pages import ROOT, blocks_of, check_config
from tests.support.ranks import on_ranks, slow_case
from zcompile.artifact.aot import lacking

BY_LOSS = pytest.param("loss.backward", marks=engines.needs_loss_backward)


@pytest.mark.parametrize(
    "world, flag, tolerances, config, length, end",
    [
        (2, {}, (0, 0), {}, 12, 8),  # of four ranks, gloo's reduce-scatter sums in an order of its own
        slow_case(2, {"inner": "inductor"}, (1e-6, 1e-6), {}, 12, 8),
        *(slow_case(world, {}, (2e-3, 1e-2), BF16, 200, 20) for world in (2, 4)),
    ],
    ids=["fp32", "inductor", "bf16", "bf16 of four"],
)
def test_training_is_close_to_eager(ranks, world, flag, tolerances, config, length, end):
    ranks(world).run(engines.rank_trains_beside_eager, flag, tolerances, config, length, end)


def test_quantized_weights_travel_in_int8_and_train_close_to_eager(rank, world):
    expected = engines.train(engines.make_engine(None), rank, end=8)
    engine = engines.make_engine({}, zero_optimization={"stage": 3, "zero_quantized_weights": True})
    curve = engines.train(engine, rank, end=6)
    engines.assert_taken_over(engine)
    stats = zcompile.stats(engine.module)["gathered_bytes"]
    assert stats["int8"] > 4 * stats["float32"]
    engine.zcompile.give_back("a test")  # from then on, DeepSpeed gathers, in float32
    curve += engines.train(engine, rank, 6, 8)
    assert 0 < max(engines.largest_differences(curve, expected)) < 0.01


class Checkpointed(engines.LanguageModel):
    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)) * self.scale * self.mix.sum()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_sharded():
    with deepspeed.zero.Init(config_dict_or_path=config_of(None)):
        return engines.LanguageModel()


@pytest.mark.slow
@pytest.mark.parametrize("how", ["zero.Init", BY_LOSS, "checkpointed", "fp16"])
def test_engines_made_and_used_otherwise_equal_eager(rank, world, how):
    # DeepSpeed wants AMX for fp16, torch does not.
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True

    def drive(engine):
        curve = []
        for microbatch in range(8 * MICROBATCHES):
            loss = engine(batch(microbatch, rank))
            loss.backward() if how == "loss.backward" else engine.backward(loss)
            engine.step()
            curve.append(loss.item())
        if how == "fp16":
            curve.append(engine.optimizer.cur_scale)
            assert engine.optimizer.cur_scale < 2**40  # steps were skipped
        return curve

    config = {"fp16": {"enabled": True, "initial_scale_power": 40}} if how == "fp16" else {}
    make = {"zero.Init": make_sharded, "checkpointed": Checkpointed}.get(how, engines.LanguageModel)
    expected, curve = engines.beside_eager(drive, make, **config)
    assert curve == (pytest.approx(expected, rel=2e-3) if how == "fp16" else expected)


class Lora(nn.Module):
    """A frozen model with a trained low-rank addition, and a frozen parameter of integers, as quantized models have."""

    def __init__(self):
        super().__init__()
        self.base = engines.LanguageModel().requires_grad_(False)
        self.codes = nn.ParameterList([nn.Parameter(torch.arange(VOCABULARY), requires_grad=False)])  # not the first
        self.a = nn.Linear(18, 3, bias=False)
        self.b = nn.Linear(3, 18, bias=False)

    def forward(self, tokens):
        hidden = self.base.embed(self.codes[0][tokens[:, :-1]])
        hidden = hidden + self.b(self.a(hidden))
        for block in self.base.blocks:
            hidden = block(hidden)
        logits = self.base.head(self.base.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.slow
def test_frozen_parameters_equal_eager(rank, world):
    expected, curve = engines.beside_eager(lambda engine: engines.train(engine, rank, end=6), Lora)
    assert curve == expected


@pytest.mark.slow
def test_several_engines_that_evaluate_and_edit_equal_eager(rank, world):
    """Two engines with the flag and one without take turns. Between steps they evaluate, and parameters are edited."""
    flags = [None, {}, {}]
    taking_turns = [engines.make_engine(flag) for flag in flags]
    curves = [[], [], []]
    for step in range(4):
        for flag, engine, curve in zip(flags, taking_turns, curves, strict=True):
            curve += engines.train(engine, rank, begin=step, end=step + 1)
            engine.eval()
            with torch.no_grad():
                curve.append(engine(batch(100, rank, 9)).item())
            engine.train()
            weight = engine.module.blocks[0].down.weight
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                if rank == 0:
                    weight.data.mul_(0.9)
            # Eager ZeRO-3 copies its partitions from the main parameter, which is edited too.
            main = deepspeed.utils.safe_get_full_fp32_param(weight)
            deepspeed.utils.safe_set_full_fp32_param(weight, main if flag is not None else main * 0.9)
            engine.module.blocks[1].up.weight.requires_grad = step != 1  # by attribute
    assert engines.is_taken_over(taking_turns[1]) and engines.is_taken_over(taking_turns[2])
    assert curves[0] == curves[1] == curves[2]
    for engine in taking_turns:
        engine.destroy()


class SecondLayerSometimes(nn.Module):
    def __init__(self):
        super().__init__()
        self.always, self.sometimes, self.uses_both = nn.Linear(3, 3), nn.Linear(3, 3), True

    def forward(self, x):
        x = self.always(x)
        return (self.sometimes(x) if self.uses_both else x).square().sum()


def sgd(lr):
    """What DeepSpeed's config says of SGD without momentum."""
    return {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "zero_allow_untested_optimizer": True}


@pytest.mark.slow
def test_edits_of_parameters_outlive_steps(rank, world):
    """Eager ZeRO-3 goes back to its main parameters instead."""
    engine = engines.make_engine({}, **sgd(lr=0.0))
    weight = engine.module.head.weight
    for edited in (False, True):
        if edited:
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                weight.data.fill_(3.0 if rank == 0 else 0.0)
        engines.train(engine, rank, end=1)
    with deepspeed.zero.GatheredParameters(weight):
        assert torch.equal(weight, torch.full_like(weight, 3.0))
    engine.destroy()


@pytest.mark.slow
def test_unused_parameters_do_not_step(rank, world):
    """Eager ZeRO-3 steps with a stale gradient instead."""
    engine = engines.make_engine({}, model=SecondLayerSometimes(), gradient_accumulation_steps=1, **sgd(lr=0.1))
    weights = []
    for uses_both in (True, False):
        engine.module.uses_both = uses_both
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        layers = (engine.module.always, engine.module.sometimes)
        weights.append([deepspeed.utils.safe_get_full_fp32_param(layer.weight) for layer in layers])
    (always, sometimes), (always_later, sometimes_later) = weights
    assert torch.equal(sometimes, sometimes_later) and not torch.equal(always, always_later)
    engine.destroy()


@pytest.mark.slow
def test_either_engine_resumes_from_checkpoints_of_either(rank, world, tmp_path):
    whole = engines.train(engines.make_engine(None), rank)
    for writer, reader in ((None, {}), ({}, None), ({}, {})):
        checkpoint = f"{tmp_path}/{writer}{reader}"
        first = engines.make_engine(writer)
        curve = engines.train(first, rank, end=7)
        first.save_checkpoint(checkpoint)
        second = engines.make_engine(reader)
        engines.train(second, rank, begin=30, end=32)  # compiled, with other values
        second.load_checkpoint(checkpoint)
        curve += engines.train(second, rank, begin=7)
        assert curve == whole, (writer, reader, engines.largest_differences(curve, whole))
        first.destroy()
        second.destroy()


@pytest.mark.slow
def test_zero_to_fp32_reads_checkpoints(rank, world, tmp_path):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    curves, weights = [], []
    for flag in (None, {}):
        engine = engines.make_engine(flag)
        curves.append(engines.train(engine, rank, end=3))
        engine.save_checkpoint(f"{tmp_path}/{flag}")
        torch.distributed.barrier()
        weights.append(get_fp32_state_dict_from_zero_checkpoint(f"{tmp_path}/{flag}"))
        saved = engine._zero3_consolidated_16bit_state_dict()
        assert rank > 0 or all(torch.equal(value, weights[-1][name]) for name, value in saved.items())
        engine.destroy()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


@pytest.mark.slow
def test_microbatches_share_gathers(rank, world):
    expected, gathered = engines.train(engines.make_engine(None), rank, end=8), {}
    for microbatch_cache_bytes in (0, 1 << 20):
        engine = engines.make_engine({"microbatch_cache_bytes": microbatch_cache_bytes, "bucket_bytes": 500})
        assert engines.train(engine, rank, end=8) == expected
        engines.assert_taken_over(engine)
        gathered[microbatch_cache_bytes] = zcompile.stats(engine.module)["gathered_bytes"]["float32"]
        with torch.no_grad():
            # The module sees the step, although no forward of the engine came between.
            alone = engine.module(batch(0, rank))
            assert torch.equal(engine(batch(0, rank)), alone)
        engine.destroy()
    assert gathered[1 << 20] < 0.6 * gathered[0], gathered


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 1])
@on_ranks(2, needs="deepspeed.runtime.torch_autocast")  # since 0.17.1
def test_autocast_gathers_exactly_two_bytes_a_use(rank, world, first):
    """From the first step, or from the second without `engine.compile()`. Backward uses weights again, no biases."""
    engine = engines.make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.compile() if first == 0 else engines.train(engine, rank, end=first)
    uses = {"weight": 2, "bias": 1}
    linears = [name for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)]
    sizes = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
    used = sum(sizes.get(f"{name}.{kind}", 0) * count for name in linears for kind, count in uses.items())
    before = None
    for step in range(first, 8):
        zcompile.reset_stats(engine.module)
        engines.train(engine, rank, begin=step, end=step + 1)
        gathered = zcompile.stats(engine.module)["gathered_bytes"]
        assert gathered["bfloat16"] == 2 * used * MICROBATCHES, step
        assert step <= 1 or gathered == before
        before = gathered
    engines.assert_taken_over(engine)
    engine.destroy()


def rank_trains_from_file(rank, world, folder, path):
    counters.clear()
    flag = {"inner": "inductor"} | ({} if path is None else {"artifact": str(path)})
    with cache_in(folder):
        engine, losses = engines.make_engine(flag, nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))), []
        for step in range(4):
            loss = engine(normal(step, rank, 2, 5)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        engines.assert_taken_over(engine)
        compiled = engine.zcompile.state.provenance.compiled
        engine.destroy()
    return losses, compiled, bool(counters["stats"])


@pytest.mark.slow
@pytest.mark.skipif(bool(lacking()), reason=lacking())
def test_an_engine_loads_what_an_earlier_one_compiled(ranks, inductor_cache, tmp_path):
    path, cache = tmp_path / "model.zc", inductor_cache
    expected = ranks(2).run(rank_trains_from_file, cache, None)
    first = ranks(2).run(rank_trains_from_file, cache, path)
    second = ranks(2).run(rank_trains_from_file, tmp_path / "empty", path)
    for (losses, by, _), (one, by_one, _), (two, by_two, traced) in zip(expected, first, second, strict=True):
        assert losses == one == two
        assert (by, by_two, traced) == ("compiled by this process", f"loaded from {path}", False)
        assert by_one == f"loaded: rank 0 compiled it, because {path} was not there"


WITHOUT_EFFECT = {
    "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 1, "stage3_max_live_parameters": 1,
    "stage3_param_persistence_threshold": 10**6, "reduce_bucket_size": 100, "overlap_comm": False,
    "contiguous_gradients": False, "reduce_scatter": False,
}  # fmt: skip
ON_TOP = {"communication_data_type": "fp32"}


def trained(rank, **config):
    """Losses and norms of two steps, and what went over the wire."""
    engine = engines.make_engine({}, **config)
    curve = engines.train(engine, rank, end=2)
    engines.assert_taken_over(engine)
    counted = zcompile.stats(engine.module)
    engine.destroy()
    return curve, counted


@pytest.mark.slow
def test_options_that_have_no_effect_change_nothing(rank, world):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    expected = trained(rank, zero_optimization=zero, **BF16)
    assert expected[1]["reduced_bytes"].keys() == {"bfloat16"}
    assert trained(rank, zero_optimization=zero | WITHOUT_EFFECT, **BF16, **ON_TOP) == expected


def test_the_page_names_the_options_that_have_no_effect():
    rows = re.findall(r"^\| (.*) \| no effect", (ROOT / "docs/deepspeed.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == WITHOUT_EFFECT.keys() | ON_TOP.keys()


@pytest.mark.slow
def test_a_threshold_of_granularity_makes_units(rank, world):
    engine = engines.make_engine({}, zero_optimization={"stage": 3, "stage3_module_granularity_threshold": 10**6})
    engines.train(engine, rank, end=1)
    assert engines.is_taken_over(engine) and engine.zcompile.state.units is not None
    engine.destroy()


@pytest.mark.slow
def test_the_page_runs(rank, world, tmp_path):
    found = blocks_of("docs/deepspeed.md")
    assert {block.language for block in found} == {"python", "json"}
    for block in found:
        if block.language == "json":
            check_config(block.text)
    blocks = {block.language: block.text for block in found}
    file = f"{tmp_path}/ds_config_{rank}.json"
    with open(file, "w") as config:
        json.dump(config_of(None) | json.loads(f"{{{blocks['json']}}}"), config)
    names = {"model": engines.LanguageModel()}
    exec(compile(blocks["python"].replace("ds_config.json", file), "docs/deepspeed.md", "exec"), names)
    engine = names["engine"]
    assert engine.zcompile.options == {} and not engine.zcompile.given_back
    engine.destroy()
