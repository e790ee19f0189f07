"""DeepSpeed ZeRO-3 engines with and without the flag, on CPU ranks, against each other."""

import os
import subprocess
import sys

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch
from torch import nn

import zcompile
from tests.support.models import VOCABULARY, Transformer, batch, loss_of

deepspeed = pytest.importorskip("deepspeed")
stage3 = pytest.importorskip("deepspeed.runtime.zero.stage3")

MICRO_STEPS = 2


class LanguageModel(Transformer):
    """The test transformer, whose forward computes the loss; DeepSpeed cannot broadcast a scalar parameter."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, tokens):
        return loss_of(super().forward, tokens)


def config_of(flag, **more):
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICRO_STEPS,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    }
    if flag is not None:
        config["zcompile"] = {"enabled": True, "inner": "aot_eager", **flag}
    return config | more


def make_engine(flag, model=None, **config):
    torch.manual_seed(0)
    model = LanguageModel() if model is None else model
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return deepspeed.initialize(model=model, model_parameters=parameters, config=config_of(flag, **config))[0]


def train(engine, rank, begin=0, end=20, length=12):
    """Of every micro-step the loss, and of those that end a step the gradient's norm, else 1."""
    curve = []
    for micro in range(begin * MICRO_STEPS, end * MICRO_STEPS):
        loss = engine(batch(micro, rank, length))
        engine.backward(loss)
        engine.step()
        ends_step = micro % MICRO_STEPS == MICRO_STEPS - 1
        curve.append((loss.item(), float(engine.get_global_grad_norm()) if ends_step else 1.0))
    return curve


def apart(one, other):
    """Largest relative differences of two curves: of losses, of norms."""
    return [max(abs(a[at] - b[at]) / b[at] for a, b in zip(one, other, strict=True)) for at in (0, 1)]


def taken(engine):
    return engine.zcompile.state is not None


def beside_eager(rank, world, flag, tolerances, config, length=12, end=20):
    eager = make_engine(None, **config)
    expected = train(eager, rank, end=end, length=length)
    eager.destroy()
    engine = make_engine(flag, **config)
    found = train(engine, rank, end=end, length=length)
    assert taken(engine), engine.zcompile.given_back
    assert not engine.tput_timer.config.synchronized
    for difference, tolerance in zip(apart(found, expected), tolerances, strict=True):
        assert difference <= tolerance, (apart(found, expected), found, expected)
    assert found[0][0] > 1.1 * found[-1][0]
    assert engine.zcompile.lean_step.cut(0) is not None
    engine.destroy()


BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    "flag, tolerance",
    [
        ({}, 0),
        ({"inner": "inductor"}, 1e-6),
    ],
    ids=["aot_eager", "inductor"],
)
def test_fp32_equals_eager(ranks, flag, tolerance):
    """On two ranks; gloo's reduce-scatter adds four up in an order of its own."""
    ranks(2).run(beside_eager, flag, (tolerance, tolerance), {})


def scattered_in_rank_order(tensors, group=None):
    """Stands in for DeepSpeed's `reduce_scatter_coalesced`: this rank's part of each tensor's mean, added up from rank 0 on."""
    rank, world = torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    found = []
    for tensor in tensors:
        gathered = [torch.empty_like(tensor) for _ in range(world)]
        torch.distributed.all_gather(gathered, tensor.contiguous(), group=group)
        length = -(-tensor.numel() // world)
        found.append((sum(gathered[1:], gathered[0]) / world).flatten()[rank * length : (rank + 1) * length])
    return found


def beside_eager_in_rank_order(rank, world):
    theirs, stage3.reduce_scatter_coalesced = stage3.reduce_scatter_coalesced, scattered_in_rank_order
    try:
        beside_eager(rank, world, {}, (0, 0), {})
    finally:
        stage3.reduce_scatter_coalesced = theirs


def test_four_ranks_equal_eager_bitwise_in_one_order(ranks):
    """Another order of adding up is all that lies between the two on four ranks."""
    ranks(4).run(beside_eager_in_rank_order)


@pytest.mark.parametrize("world", [2, 4])
def test_bf16_is_close_to_eager(ranks, world):
    ranks(world).run(beside_eager, {}, (2e-3, 1e-2), BF16, 200)


def keeps_over_micro_steps(rank, world):
    expected, stepped = train(make_engine(None), rank, end=8), {}
    for microbatch_cache_bytes in (0, 1 << 20):
        engine = make_engine({"microbatch_cache_bytes": microbatch_cache_bytes, "bucket_bytes": 500})
        assert train(engine, rank, end=8) == expected
        assert taken(engine), engine.zcompile.given_back
        stepped[microbatch_cache_bytes] = zcompile.stats(engine.module)["gathered_bytes"]["float32"]
        with torch.no_grad():
            alone = engine.module(batch(0, rank))  # sees the step, although no forward of the engine came between
            assert torch.equal(engine(batch(0, rank)), alone)
        engine.destroy()
    assert stepped[1 << 20] < 0.6 * stepped[0], stepped


def test_micro_steps_share_what_is_kept(ranks):
    ranks(2).run(keeps_over_micro_steps)


def boundaries_by_hand(rank, world):
    """As accelerate has it: the program says which micro-step is the last, and calls `step` after that one alone."""
    curves = []
    for flag in (None, {"microbatch_cache_bytes": 1 << 20, "bucket_bytes": 500}):
        engine, curve = make_engine(flag), []
        for micro in range(8):
            engine.set_gradient_accumulation_boundary(micro % MICRO_STEPS == MICRO_STEPS - 1)
            with torch.no_grad():
                engine.eval()
                engine(batch(50, rank))
                engine.train()
            loss = engine(batch(micro, rank))
            engine.backward(loss)
            if engine.is_gradient_accumulation_boundary():
                engine.step()
            curve.append(loss.item())
        assert flag is None or taken(engine), engine.zcompile.given_back
        curves.append(curve)
        engine.destroy()
    assert curves[0] == curves[1]


def test_boundaries_by_hand(ranks):
    ranks(2).run(boundaries_by_hand)


def resumed(rank, world, folder):
    whole = train(make_engine(None), rank)
    for writer, reader in ((None, {}), ({}, None), ({}, {})):
        place = f"{folder}/{writer}{reader}"
        first = make_engine(writer)
        curve = train(first, rank, end=7)
        first.save_checkpoint(place)
        second = make_engine(reader)
        train(second, rank, begin=30, end=32)  # compiled, with other values
        second.load_checkpoint(place)
        curve += train(second, rank, begin=7)
        assert curve == whole, (writer, reader, apart(curve, whole))
        first.destroy()
        second.destroy()


def test_resume_and_checkpoints_of_either_engine(ranks, tmp_path):
    ranks(2).run(resumed, str(tmp_path))


def consolidated(rank, world, folder):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    curves, weights = [], []
    for flag in (None, {}):
        engine = make_engine(flag)
        curves.append(train(engine, rank, end=3))
        engine.save_checkpoint(f"{folder}/{flag}")
        torch.distributed.barrier()
        weights.append(get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{flag}"))
        saved = engine._zero3_consolidated_16bit_state_dict()
        assert rank > 0 or all(torch.equal(value, weights[-1][name]) for name, value in saved.items())
        engine.destroy()
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())


def test_zero_to_fp32(ranks, tmp_path):
    ranks(2).run(consolidated, str(tmp_path))


class Checkpointed(LanguageModel):
    """Recomputes its blocks in backward."""

    def forward(self, tokens):
        x = self.embed(tokens[:, :-1])
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
        logits = self.head(self.norm(x)) * self.scale * self.mix.sum()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def make_sharded():
    with deepspeed.zero.Init(config_dict_or_path=config_of(None)):
        return LanguageModel()


def made_otherwise(rank, world, how):
    curves = []
    deepspeed.accelerator.get_accelerator().is_fp16_supported = (
        lambda: True
    )  # DeepSpeed wants AMX for it, torch does not
    for flag in (None, {}):
        torch.manual_seed(0)
        config = {"fp16": {"enabled": True, "initial_scale_power": 40}} if how == "fp16" else {}
        model = {"zero.Init": make_sharded, "checkpointed": Checkpointed}.get(how, LanguageModel)()
        engine = make_engine(flag, model=model, **config)
        curve = []
        for micro in range(8 * MICRO_STEPS):
            loss = engine(batch(micro, rank))
            loss.backward() if how == "loss.backward" else engine.backward(loss)
            engine.step()
            curve.append(loss.item())
        assert flag is None or taken(engine), engine.zcompile.given_back
        if how == "fp16":
            curve.append(engine.optimizer.cur_scale)
            assert engine.optimizer.cur_scale < 2**40  # steps were skipped
        curves.append(curve)
        engine.destroy()
    if how == "fp16":
        assert max(abs(a - b) / a for a, b in zip(*curves, strict=True)) < 2e-3, curves
    else:
        assert curves[0] == curves[1], curves


@pytest.mark.parametrize("how", ["zero.Init", "checkpointed", "loss.backward", "fp16"])
def test_engines_made_and_used_otherwise(ranks, how):
    if how == "loss.backward" and not hasattr(stage3.DeepSpeedZeroOptimizer_Stage3, "exit_backward"):
        pytest.skip("this DeepSpeed wants engine.backward()")
    ranks(2).run(made_otherwise, how)


class Lora(nn.Module):
    """A frozen model with a trained low-rank addition to its head."""

    def __init__(self):
        super().__init__()
        self.base = LanguageModel().requires_grad_(False)
        self.a = nn.Linear(18, 3, bias=False)
        self.b = nn.Linear(3, 18, bias=False)

    def forward(self, tokens):
        hidden = self.base.embed(tokens[:, :-1])
        hidden = hidden + self.b(self.a(hidden))
        for block in self.base.blocks:
            hidden = block(hidden)
        logits = self.base.head(self.base.norm(hidden))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class WithCodes(LanguageModel):
    """Has a frozen parameter of whole numbers, as quantized models do."""

    def __init__(self):
        super().__init__()
        self.codes = nn.Parameter(torch.arange(VOCABULARY), requires_grad=False)

    def forward(self, tokens):
        return super().forward(self.codes[tokens])


def frozen(rank, world, make):
    curves = []
    for flag in (None, {}):
        torch.manual_seed(0)
        engine = make_engine(flag, model=make())
        curves.append(train(engine, rank, end=6))
        assert flag is None or taken(engine), engine.zcompile.given_back
        engine.destroy()
    assert curves[0] == curves[1]


@pytest.mark.parametrize("make", [Lora, WithCodes])
def test_frozen_parameters(ranks, make):
    ranks(2).run(frozen, make)


def between_steps(rank, world):
    """Two engines at once, evaluation, and edits outside of the step."""
    flags = [None, {}, {}]
    engines = [make_engine(flag) for flag in flags]
    curves = [[], [], []]
    for step in range(4):
        for flag, engine, curve in zip(flags, engines, curves, strict=True):
            curve += train(engine, rank, begin=step, end=step + 1)
            engine.eval()
            with torch.no_grad():
                curve.append(engine(batch(100, rank, 9)).item())
            engine.train()
            weight = engine.module.blocks[0].down.weight
            with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):
                if rank == 0:
                    weight.data.mul_(0.9)
            masters = deepspeed.utils.safe_get_full_fp32_param(
                weight
            )  # of eager ZeRO-3: the partitions are copies of them
            deepspeed.utils.safe_set_full_fp32_param(weight, masters if flag is not None else masters * 0.9)
            engine.module.blocks[1].up.weight.requires_grad = step != 1  # by attribute
    assert taken(engines[1]) and taken(engines[2])
    assert curves[0] == curves[1] == curves[2]
    for engine in engines:
        engine.destroy()


def test_several_engines_evaluation_and_edits(ranks):
    ranks(2).run(between_steps)


def gathers_two_bytes(rank, world):
    engine = make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    train(engine, rank, end=1)
    before = {}
    for step in range(1, 8):
        zcompile.reset_stats(engine.module)
        train(engine, rank, begin=step, end=step + 1)
        gathered = zcompile.stats(engine.module)["gathered_bytes"]
        narrow = sum(parameter.ds_numel for name, parameter in engine.module.named_parameters() if narrows(name))
        assert gathered["bfloat16"] % (2 * MICRO_STEPS) == 0
        assert gathered["bfloat16"] >= 2 * MICRO_STEPS * narrow
        if step > 1:
            assert gathered == before
        before = gathered
    engine.destroy()


def narrows(name):
    return name.endswith("weight") and "norm" not in name and "embed" not in name


def gathers_exactly_two_bytes(rank, world):
    """Of each step, the first too: a product's weight is used in forward and in backward, its bias in forward."""
    engine = make_engine({}, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    engine.compile()
    uses = {"weight": 2, "bias": 1}
    linears = [name for name, module in engine.module.named_modules() if isinstance(module, nn.Linear)]
    sizes = {name: parameter.ds_numel for name, parameter in engine.module.named_parameters()}
    used = sum(
        sizes[f"{name}.{kind}"] * count for name in linears for kind, count in uses.items() if f"{name}.{kind}" in sizes
    )
    for step in range(8):
        zcompile.reset_stats(engine.module)
        train(engine, rank, begin=step, end=step + 1)
        assert zcompile.stats(engine.module)["gathered_bytes"]["bfloat16"] == 2 * used * MICRO_STEPS, step
    assert taken(engine), engine.zcompile.given_back
    engine.destroy()


def test_autocast_gathers_exactly_two_bytes_a_use_from_the_first_step(ranks):
    pytest.importorskip("deepspeed.runtime.torch_autocast")
    ranks(2).run(gathers_exactly_two_bytes)


def test_autocast_gathers_two_bytes(ranks):
    pytest.importorskip("deepspeed.runtime.torch_autocast")  # since 0.17.1
    ranks(2).run(gathers_two_bytes)


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"zcompile": {"enabled": True, "iner": "x"}}, "unknown option 'iner'; known options are inner"),
        ({"zcompile": True}, "write"),
        ({"zero_optimization": {"stage": 2}}, "asks for stage 2"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 'Remove "offload_param"'),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
        ({"compile": {"deepcompile": True}}, "deepcompile"),
    ],
)
def test_refusals(config, reason):
    from zcompile.deepspeed.config import options_of

    with pytest.raises(ValueError, match=reason):
        options_of(config_of({}, **config))


def test_pipelines_are_refused():
    from zcompile.deepspeed.config import options_of

    class PipelineModule(nn.Module):
        """Stands in for DeepSpeed's, which wants a launcher's environment to be made."""

    with pytest.raises(ValueError, match="pipeline"):
        options_of(config_of({}), PipelineModule())


FORGOTTEN = """
import deepspeed, sys, torch
assert "zcompile" not in sys.modules
config = {"train_batch_size": 1, "zero_optimization": {"stage": 3}, "zcompile": {"enabled": True, "inner": "aot_eager"},
          "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
engine = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config)[0]
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
assert engine.zcompile.state is not None, engine.zcompile.given_back
"""


def test_a_program_that_does_not_import_zcompile_is_told():
    environment = os.environ | {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    done = subprocess.run(
        [sys.executable, "-c", FORGOTTEN], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "does not import it" in done.stderr


def test_no_flag():
    from zcompile.deepspeed.config import options_of

    assert options_of(config_of(None)) is None
    assert options_of(config_of({"enabled": False}, zero_optimization={"stage": 1})) is None


def injected(rank, world, stage):
    expected_engine = make_engine(None)
    expected = train(expected_engine, rank, end=4)
    expected_engine.destroy()
    engine = make_engine({})
    takeover = engine.zcompile

    def fail(*args, **kwargs):
        raise RuntimeError("injected")

    found = []
    patched = {
        "take over": "add",
        "hooks": "remove_hooks",
        "compile": "compile_modules",
        "forward": "compiled_forward",
        "backward": "accept",
    }
    if stage in patched:
        setattr(takeover, patched[stage], fail)
    else:
        found = train(engine, rank, end=2)
        setattr(takeover.lean_step, {"norm": "square", "step": "cut"}[stage], fail)
    found += train(engine, rank, begin=len(found) // MICRO_STEPS, end=4)
    assert not taken(engine) and "injected" in takeover.given_back
    assert found == expected, (found, expected)
    assert len(engine.optimizer._grad_acc_hooks) > 0 and len(engine.optimizer.parameter_offload.forward_hooks) > 0
    assert type(engine.module.blocks[0].up) is nn.Linear and engine.tput_timer.config.synchronized
    assert engine.optimizer.persistent_parameters and all(
        one.ds_persist for one in engine.optimizer.persistent_parameters
    )
    engine.destroy()


@pytest.mark.parametrize("stage", ["take over", "hooks", "compile", "forward", "backward", "norm", "step"])
def test_a_failure_gives_the_engine_back(ranks, stage):
    ranks(2).run(injected, stage)


def tiny_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=36, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=32, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, at):
        tokens = batch(at, 0)[0]
        return {"input_ids": tokens, "labels": tokens}


def trainer(rank, world, folder):
    from transformers import Trainer, TrainingArguments

    curves = []
    for flag in (None, {}):
        config = config_of(flag, gradient_clipping="auto")
        config.update(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
        torch._dynamo.reset()
        arguments = TrainingArguments(
            f"{folder}/{flag}", deepspeed=config, torch_compile=flag is not None, learning_rate=3e-3, max_steps=6, logging_steps=1,
            per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[], save_strategy="no",
            disable_tqdm=True, seed=1,
        )  # fmt: skip
        run = Trainer(tiny_llama(), arguments, train_dataset=Sentences())
        run.train()
        curves.append([entry["loss"] for entry in run.state.log_history if "loss" in entry])
        if flag is not None:
            assert taken(run.model_wrapped), run.model_wrapped.zcompile.given_back
            assert run.model_wrapped.is_compiled
        run.model_wrapped.destroy()
        run.accelerator.free_memory()
    assert len(curves[0]) == 6 and curves[0] == curves[1], curves


def test_hugging_face_trainer(ranks, tmp_path):
    ranks(2).run(trainer, str(tmp_path))


def accelerated(rank, world, regions):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, TorchDynamoPlugin

    curves = []
    for flag in (None, {}):
        AcceleratorState._reset_state(reset_partial_state=True)
        dynamo = TorchDynamoPlugin(backend="inductor" if flag is not None else "no", use_regional_compilation=regions)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config_of(flag)), dynamo_plugin=dynamo)
        torch._dynamo.reset()
        loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
        model = tiny_llama()
        optimizer = DummyOptim(model.parameters(), lr=3e-3)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        curve = []
        for inputs in loader:
            with accelerator.accumulate(model):
                loss = model(**inputs).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            curve.append(loss.item())
        curves.append(curve)
        if flag is not None:
            assert taken(model), model.zcompile.given_back
            compiled = [module for module in model.module.modules() if module._compiled_call_impl is not None]
            assert (len(compiled) > 1) == regions
            assert zcompile.stats(model.module)["gathers"] > 0
        model.destroy()
    pairs = list(zip(*curves, strict=True))
    assert len(pairs) > 10 and max(abs(a - b) / a for a, b in pairs) < 1e-6, curves


@pytest.mark.parametrize("regions", [False, True], ids=["whole", "regions"])
def test_accelerate(ranks, regions):
    ranks(2).run(accelerated, regions)


def coalesced(engine, rank):
    with engine.coalesce_grad_reduction():
        for micro in range(MICRO_STEPS):
            engine.backward(engine(batch(micro, rank)))
    engine.step()
    return train(engine, rank, end=1)


def cannot_coalesce(rank, world):
    eager, fresh, later = make_engine(None), make_engine({}), make_engine({})
    assert coalesced(fresh, rank) == coalesced(eager, rank)
    assert "coalesce_grad_reduction" in fresh.zcompile.given_back
    train(later, rank, end=1)
    with pytest.raises(RuntimeError, match="coalesce_grad_reduction"):
        coalesced(later, rank)
    for engine in (eager, fresh, later):
        engine.destroy()


def test_coalesced_reduction_is_refused(ranks):
    if not hasattr(deepspeed.DeepSpeedEngine, "coalesce_grad_reduction"):
        pytest.skip("this DeepSpeed has none")
    ranks(2).run(cannot_coalesce)


def without_optimizer(rank, world):
    losses = []
    for flag in (None, {}):
        config = config_of(flag)
        del config["optimizer"]
        torch.manual_seed(0)
        engine = deepspeed.initialize(model=LanguageModel(), config=config)[0]
        with torch.no_grad():
            losses.append(engine(batch(0, rank)).item())
    assert losses[0] == losses[1] and "DeepSpeedZeRoOffload" in engine.zcompile.given_back


def test_an_engine_without_optimizer_stays_eager(ranks):
    ranks(2).run(without_optimizer)


def leaf_modules(rank, world):
    model = LanguageModel()
    deepspeed.utils.set_z3_leaf_modules(model, [type(model.blocks[0])])
    engine = make_engine({}, model=model)
    assert train(engine, rank, end=2)[-1][0] > 0
    assert not taken(engine) and "leaf modules" in engine.zcompile.given_back
    engine.destroy()


def test_leaf_modules_stay_eager(ranks):
    ranks(2).run(leaf_modules)
