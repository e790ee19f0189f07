"""`zcompile.integrations.huggingface.Accelerator` beside accelerate's own with the model under FSDP2."""

import functools
import os
from unittest.mock import patch

import accelerate
import pytest
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader

import zcompile
from tests.support.huggingface import LOSSES, Sentences, forget_accelerate, sharded_by_fsdp2, tiny_llama
from tests.support.raising import raises
from tests.support.ranks import slow_case
from tests.support.reference import same_values
from zcompile.integrations.huggingface import Accelerator, CompilePlugin
from zcompile.state.sharded_model import state_of
from zcompile.training.main_parameters import on_host

EAGER = CompilePlugin(options={"inner": "aot_eager"})
fsdp2_plugin = functools.partial(FullyShardedDataParallelPlugin, fsdp_version=2, reshard_after_forward=True)


def prepare(accelerator, *loaders):
    model = tiny_llama()
    return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), *loaders)


def train(accelerator, model, optimizer, loader, evaluation, steps=6):
    """A program as accelerate's users write it; each micro-step's loss, each step's norm, and the evaluation's loss."""
    losses, norms = [], []
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    scheduler = accelerator.prepare(scheduler)
    for inputs in loader:
        with accelerator.accumulate(model):
            loss = model(**inputs).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(norms) == steps:
            break
    model.eval()
    with torch.no_grad():
        each = [accelerator.gather_for_metrics(model(**inputs).loss.repeat(2)) for inputs in evaluation]
    model.train()
    return losses, norms, torch.cat(each).mean().item()


def prepared(sharded_by_zcompile, compiled=False):
    forget_accelerate()
    loaders = DataLoader(Sentences(), batch_size=2), DataLoader(Sentences(12), batch_size=2)
    if sharded_by_zcompile:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, dynamo_plugin=EAGER if compiled else None)
        return accelerator, *prepare(accelerator, *loaders)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = sharded_by_fsdp2(tiny_llama())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    return accelerator, model, *accelerator.prepare(optimizer, *loaders)


@pytest.mark.parametrize("compiled", [False, slow_case(True)])
def test_a_program_of_accelerate_trains_as_fsdp2(rank, world, compiled):
    theirs = train(*prepared(False))
    ours = train(*prepared(True, compiled))
    for mine, reference in zip(ours, theirs):
        assert mine == pytest.approx(reference, abs=LOSSES), (ours, theirs)
    assert len(ours[0]) == 12 and len(ours[1]) == 6 and ours[0][0] > ours[0][-1]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_plugin_for_fsdp2_gives_its_policy_and_offload(rank, world, dtype):
    """It trains as a model that is sharded with the policy's options, and states are in host memory."""
    curves = []
    for of_plugin in (False, True):
        forget_accelerate()
        policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32)
        plugin = fsdp2_plugin(cpu_offload=True, mixed_precision_policy=policy) if of_plugin else None
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, fsdp_plugin=plugin)
        model = (
            tiny_llama() if of_plugin else zcompile.shard(tiny_llama(), param_dtype=dtype, output_dtype=torch.float32)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loaders = DataLoader(Sentences(), batch_size=2), DataLoader(Sentences(12), batch_size=2)
        optimizer, model, *loaders = accelerator.prepare(optimizer, model, *loaders)
        curves.append(train(accelerator, model, optimizer, *loaders))
    assert curves[0] == curves[1]
    (offload,) = state_of(model).offloads
    assert offload.kind == ("moments" if dtype is None else "states") and offload.has_stepped
    assert (on_host(model.model.embed_tokens.weight) is not None) == (dtype is not None)


def steps(accelerator, model, optimizer, loader, count):
    """Losses over all ranks of `count` steps."""
    losses = []
    for inputs in loader:
        loss = model(**inputs).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        if len(losses) == count:
            break
    return losses


def begin(world, kind):
    """An accelerator with four sequences a step, whatever the number of ranks."""
    forget_accelerate()
    with patch.dict(os.environ, FSDP_STATE_DICT_TYPE=kind):
        accelerator = Accelerator(cpu=True)
    dataset = [{name: value for name, value in each.items() if name == "input_ids"} for each in Sentences(32)]
    for each in dataset:
        each["labels"] = each["input_ids"]  # as many tokens on each rank
    return accelerator, *prepare(accelerator, DataLoader(dataset, batch_size=4 // world))


def rank_saves(rank, world, folder, kind="SHARDED_STATE_DICT"):
    accelerator, model, optimizer, loader = begin(world, kind)
    steps(accelerator, model, optimizer, loader, 3)
    accelerator.save_state(f"{folder}/state")
    accelerator.save_model(model, f"{folder}/model")
    whole = accelerator.get_state_dict(model)
    assert bool(whole) == (rank == 0)
    values = {name: value.clone() for name, value in whole.items()}
    unwrapped, is_main = accelerator.unwrap_model(model), accelerator.is_main_process
    unwrapped.save_pretrained(f"{folder}/pretrained", state_dict=whole, is_main_process=is_main)
    return steps(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 3), 3), values


def rank_loads(rank, world, folder, kind):
    accelerator, model, optimizer, loader = begin(world, kind)
    accelerator.load_state(f"{folder}/state")
    return steps(accelerator, model, optimizer, accelerator.skip_first_batches(loader, 3), 3)


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_a_state_goes_on_at_another_number_of_ranks(ranks, tmp_path, world, kind):
    (losses, _), _ = ranks(2).run(rank_saves, str(tmp_path), kind)
    assert (tmp_path / "state/optimizer.bin").exists() == (kind == "FULL_STATE_DICT")
    assert ranks(world).run(rank_loads, str(tmp_path), kind)[0] == pytest.approx(losses, abs=LOSSES)


@pytest.mark.slow
def test_saved_models_load_without_zcompile(ranks, tmp_path):
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    (_, whole), _ = ranks(2).run(rank_saves, str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "pretrained")
    for saved in (loaded.state_dict(), load_file(tmp_path / "model/model.safetensors")):
        assert saved.keys() == whole.keys()
        same_values(saved, {name: whole[name] for name in saved})


@pytest.mark.slow
def test_micro_steps_of_accumulate_gather_once(rank, world):
    counts = {}
    for micro_steps in (1, 3):
        forget_accelerate()
        plugin = CompilePlugin(options={"inner": "aot_eager", "bucket_bytes": 0})  # groups are not kept
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=micro_steps, dynamo_plugin=plugin)
        model, optimizer, loader = prepare(accelerator, DataLoader(Sentences(12), batch_size=2))
        for inputs in list(loader)[:micro_steps]:
            with accelerator.accumulate(model):
                accelerator.backward(model(**inputs).loss)
                optimizer.step()
        counts[micro_steps] = zcompile.stats(model)
        assert not state_of(model).microbatches.accumulates
    gathered = {micro_steps: count["gathered_bytes"]["float32"] for micro_steps, count in counts.items()}
    assert gathered[3] < gathered[1], gathered  # three inside of a step, against one alone
    assert counts[3]["reduces"] == 3 * counts[1]["reduces"], counts


def refused(text, **how):
    """accelerate begins anew, and `Accelerator` refuses these arguments."""
    forget_accelerate()
    raises(ValueError, text, Accelerator, **how)


def test_what_cannot_train_is_refused_by_name(rank, world):
    for name, setting in {
        "fsdp_version=1": {"fsdp_version": 1, "reshard_after_forward": "FULL_SHARD"},
        "activation_checkpointing": {"activation_checkpointing": True},
        "reshard_after_forward=False": {"reshard_after_forward": False},
    }.items():
        refused(f"{name} .*Set fsdp_version=2", cpu=True, fsdp_plugin=fsdp2_plugin(**setting))
    refused("parallelism_config", cpu=True, parallelism_config=accelerate.ParallelismConfig())
    refused("'inductor'.*dynamo_backend='zcompile'", cpu=True, dynamo_backend="inductor")
    with patch.dict(os.environ, WORLD_SIZE=str(world)):
        refused("counts 1.*rank 0.*cpu=True")
    forget_accelerate()
    with patch.dict(os.environ, ACCELERATE_USE_FSDP="true"):  # as `accelerate launch --use_fsdp` sets it
        raises(ValueError, f"asks accelerate for FSDP.*rank {rank}", Accelerator, cpu=True)
    refused(f"mixed_precision='fp16'.*rank {rank}", cpu=True, mixed_precision="fp16")
    forget_accelerate()
    accelerator = Accelerator(cpu=True)

    model = tiny_llama()
    old = list(model.parameters())
    zcompile.shard(model)
    stale = torch.optim.SGD(old, lr=0.1)
    raises(ValueError, f"SGD holds no parameter of the models.*rank {rank}", accelerator.prepare, model, stale)
    assert accelerator.prepare(model) is model  # not wrapped in DDP, as accelerate's own does
    forget_accelerate()
    accelerator = Accelerator(cpu=True)
    model = tiny_llama()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    raises(RuntimeError, "Build the optimizer after|pass", accelerator.prepare, model)
    model, prepared = accelerator.prepare(model, early)  # together, it gets the sharded parameters
    held = [parameter for group in prepared.param_groups for parameter in group["params"]]
    assert all(ours is theirs for ours, theirs in zip(held, model.parameters(), strict=True))

    model = tiny_llama()
    used = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(**{name: value[None] for name, value in Sentences()[0].items()}).loss.backward()
    used.step()
    raises(ValueError, "state of parameter 'model.embed_tokens.weight'", accelerator.prepare, model, used)
    model = sharded_by_fsdp2(tiny_llama())
    raises(RuntimeError, "'model.embed_tokens.weight' is a DTensor", accelerator.prepare, model)


def rank_trains_in(rank, world, precision, compiled):
    forget_accelerate()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, dynamo_plugin=EAGER if compiled else None)
    model, optimizer, loader = prepare(accelerator, DataLoader(Sentences(24), batch_size=2))
    losses = steps(accelerator, model, optimizer, loader, 6)
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
    return losses, list(zcompile.stats(model)["gathered_bytes"])


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [True, False])
def test_bf16_trains_as_fp32_and_compiled_code_gathers_it(ranks, compiled):
    (losses, widths), _ = ranks(2).run(rank_trains_in, "bf16", compiled)
    (reference, _), _ = ranks(2).run(rank_trains_in, "no", False)
    assert losses == pytest.approx(reference, rel=1e-2) and losses != reference
    assert ("bfloat16" in widths) == compiled
