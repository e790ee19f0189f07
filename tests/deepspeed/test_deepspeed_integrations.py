"""Programs that know DeepSpeed and not zcompile: Hugging Face's Trainer, accelerate, and a bare script."""

import os
import subprocess
import sys

import deepspeed
import pytest
import torch

import zcompile
from tests.support.deepspeed import assert_taken_over, batch, beside_eager, largest_differences, train
from tests.support.deepspeed_config import config_of
from tests.support.huggingface import Sentences, tiny_llama
from tests.support.time_limits import scaled

pytestmark = pytest.mark.slow


def test_hugging_face_trainer_equals_eager(rank, world, tmp_path):
    from transformers import Trainer, TrainingArguments

    curves = []
    for flag in (None, {}):
        config = config_of(flag, gradient_clipping="auto")
        config.update(train_micro_batch_size_per_gpu="auto", gradient_accumulation_steps="auto")
        torch._dynamo.reset()
        arguments = TrainingArguments(
            f"{tmp_path}/{flag}", deepspeed=config, torch_compile=flag is not None, learning_rate=3e-3, max_steps=6,
            logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
            save_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = Trainer(tiny_llama(tie_word_embeddings=True), arguments, train_dataset=Sentences())
        trainer.train()
        curves.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        if flag is not None:
            assert_taken_over(trainer.model_wrapped)
            assert trainer.model_wrapped.is_compiled
        trainer.model_wrapped.destroy()
        trainer.accelerator.free_memory()
    assert len(curves[0]) == 6 and curves[0] == curves[1], curves


@pytest.mark.parametrize("regions", [False, True], ids=["whole", "regions"])
def test_accelerate_is_close_to_eager(rank, world, regions):
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState
    from accelerate.utils import DeepSpeedPlugin, DummyOptim, TorchDynamoPlugin

    curves = []
    for flag in (None, {}):
        AcceleratorState._reset_state(reset_partial_state=True)
        backend = "inductor" if flag is not None else "no"
        dynamo = TorchDynamoPlugin(backend=backend, use_regional_compilation=regions)
        config = config_of(flag)
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), dynamo_plugin=dynamo)
        torch._dynamo.reset()
        loader = torch.utils.data.DataLoader(Sentences(), batch_size=2)
        model = tiny_llama(tie_word_embeddings=True)
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
            assert_taken_over(model)
            compiled = [module for module in model.module.modules() if module._compiled_call_impl is not None]
            assert (len(compiled) > 1) == regions
            assert zcompile.stats(model.module)["gathers"] > 0
        model.destroy()
    pairs = list(zip(*curves, strict=True))
    assert len(pairs) > 10 and max(abs(eager - ours) / eager for eager, ours in pairs) < 1e-6, curves


def test_training_goes_on_after_trl_has_generated(rank, world):
    """TRL removes ZeRO-3's hooks, computes with gathered parameters, and registers the hooks again."""
    from trl.models.utils import add_hooks, remove_hooks

    def drive(engine):
        curve = train(engine, rank, end=2)
        with deepspeed.zero.GatheredParameters(engine.parameters()):
            remove_hooks(engine)
            with torch.no_grad():
                curve.append((engine.module(batch(9, rank)).item(), 1.0))
            add_hooks(engine)
        return curve + train(engine, rank, begin=2, end=4)

    assert max(largest_differences(*beside_eager(drive))) < 1e-6


PROGRAM = """
import deepspeed, sys, torch
assert "zcompile" not in sys.modules
{before}
config = {config}
config |= {{"train_batch_size": 1, "optimizer": {{"type": "AdamW", "params": {{"torch_adam": True}}}}}}
engine = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config)[0]
engine.backward(engine(torch.ones(1, 3)).sum())
engine.step()
taken_over = getattr(engine, "zcompile", None)
print("taken over", taken_over is not None and taken_over.state is not None)
"""
BLOCK = {"enabled": True, "inner": "aot_eager"}


def run_program(before=""):
    """One rank that trains a step. `before` stands before `deepspeed.initialize`."""
    environment = os.environ | {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment |= {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}  # an older install of zcompile would be imported by torch
    program = PROGRAM.format(config={"zero_optimization": {"stage": 3, "zcompile": BLOCK}}, before=before)
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=scaled(120))


def test_deepspeed_refuses_a_block_in_zero_optimization_if_nothing_imports_zcompile():
    done = run_program()
    assert done.returncode != 0 and "Extra inputs are not permitted" in done.stderr, done.stderr[-3000:]


def test_an_import_after_that_of_deepspeed_is_early_enough():
    done = run_program(before="import zcompile")
    assert done.returncode == 0 and "taken over True" in done.stdout, done.stderr[-3000:]


def test_zero_init_takes_a_config_with_the_block_in_zero_optimization(rank, world):
    import deepspeed

    config = config_of(None)
    config["zero_optimization"] |= {"zcompile": BLOCK}
    with deepspeed.zero.Init(config_dict_or_path=config):
        model = torch.nn.Linear(4, 4)
    engine = deepspeed.initialize(model=model, config=config)[0]
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert_taken_over(engine)
    engine.destroy()
