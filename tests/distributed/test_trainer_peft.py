"""LoRA by PEFT through `zcompile.integrations.huggingface.Trainer`, beside transformers' own in one process."""

import copy

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

import zcompile
from tests.support.huggingface import ARGUMENTS, LOSSES, Sentences, forget_accelerate, history, losses_after, tiny_llama

pytestmark = pytest.mark.slow

peft = pytest.importorskip("peft")


def with_lora():
    model = tiny_llama()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


class Whole(Sentences):
    """Each has as many tokens, so that the mean of ranks is the mean of a batch."""

    def __getitem__(self, i):
        tokens = super().__getitem__(i)["input_ids"]
        return {"input_ids": tokens, "labels": tokens.clone()}


def arguments(folder, world, **others):
    from transformers import TrainingArguments

    sizes = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 4 // world}
    given = sizes | {"max_steps": 4, "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    return TrainingArguments(str(folder), **ARGUMENTS | given | others)


def begin(folder, world, kind=None, **others):
    from zcompile.integrations.huggingface import Trainer

    forget_accelerate()
    torch._dynamo.reset()
    args = arguments(folder, world, **others)
    return (kind or Trainer)(with_lora(), args, train_dataset=Whole(), eval_dataset=Whole(12))


def rank_trains_alone(rank, world, folder):
    """transformers' own Trainer on one process: what it logs, and the adapters."""
    from transformers import Trainer

    trainer = begin(folder, 1, Trainer)
    trainer.train()
    trainer.save_model()
    return history(trainer)


def rank_trains(rank, world, folder, how):
    trainer = begin(folder, world, **how)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora_" not in name}
    trainer.train()
    trainer.save_model()
    model = trainer.model
    reduced = zcompile.stats(model)["reduced_bytes"]["float32"]
    trained = sum(each.numel() * 4 for each in model.parameters() if each.requires_grad)
    assert reduced == 4 * trained, (reduced, trained)  # of each step the adapters, and nothing of the base
    for name, value in model.state_dict().items():
        assert "lora_" in name or torch.equal(value.full_tensor(), before[name.removeprefix("_orig_mod.")]), name
    return history(trainer), trainer.evaluate()["eval_loss"]


def rank_resumes(rank, world, folder, how):
    trainer = begin(folder, world, **how)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return losses_after(trainer, 2)


COMPILED = {"torch_compile": True, "torch_compile_backend": "zcompile"}


@pytest.mark.parametrize("how", [{}, COMPILED])
def test_lora_trains_as_in_one_process_and_saves_adapters_alone(ranks, tmp_path, how):
    (reference,) = ranks(1).run(rank_trains_alone, str(tmp_path / "theirs"))
    trained, evaluated = ranks(2).run(rank_trains, str(tmp_path / "ours"), how, timeout=600)[0]
    assert len(reference["loss"]) == 4 and len(reference["eval_loss"]) == 2
    for name, values in trained.items():
        assert values == pytest.approx(reference[name], abs=LOSSES, rel=LOSSES), name
    assert evaluated == pytest.approx(reference["eval_loss"][-1], abs=LOSSES)
    for folder in ("", "checkpoint-4"):
        written = {path.name for path in (tmp_path / "ours" / folder).iterdir()}
        assert "adapter_model.safetensors" in written and "model.safetensors" not in written
        ours, theirs = (adapters_in(tmp_path / each / folder) for each in ("ours", "theirs"))
        assert ours.keys() == theirs.keys() and ours
        for name, value in ours.items():
            torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-5)
    shards = FileSystemReader(tmp_path / "ours/checkpoint-4/pytorch_model_fsdp_0").read_metadata().state_dict_metadata
    # accelerate does not see that a compiled module is one of PEFT, and writes parts of the base, too.
    assert shards and all("lora_" in name for name in shards) == (not how)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(tiny_llama()), tmp_path / "ours")
    assert loaded.peft_config["default"].r == 3
    for world in (2, 1):
        rest = ranks(world).run(rank_resumes, str(tmp_path / "ours"), how, timeout=600)[0]
        assert rest == pytest.approx(reference["loss"][2:], abs=LOSSES)


def adapters_in(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")
