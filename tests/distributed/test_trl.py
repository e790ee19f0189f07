"""`zcompile.integrations.huggingface.SFTTrainer` beside TRL's own with the model under FSDP2."""

import pytest
import torch

from tests.support.huggingface import (
    LOSSES,
    forget_accelerate,
    history,
    of_transformers,
    sharded_by_fsdp2,
    tiny_llama,
    tokenizer,
)

EAGER = {"inner": "aot_eager"}


def sentences(count):
    """Texts of 5 to 14 words, so that batches have padding."""
    from datasets import Dataset

    texts = [" ".join(f"w{(i * i + 7 * k) % 59}" for k in range(5 + i % 10)) for i in range(count)]
    return Dataset.from_dict({"text": texts})


def begin(folder, kind, **changed):
    """An SFTTrainer: "fsdp2", "eager" or "compiled"."""
    import trl

    import zcompile
    from zcompile.integrations.huggingface import SFTTrainer

    forget_accelerate()
    torch._dynamo.reset()
    settings = {
        "learning_rate": 1e-2, "max_steps": 5, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 5,
        "report_to": [], "save_strategy": "steps", "save_steps": 3, "disable_tqdm": True, "use_cpu": True, "seed": 1,
        "bf16": False, "max_length": 16, "per_device_eval_batch_size": 2, "gradient_checkpointing": kind == "eager",
    }  # fmt: skip
    args = trl.SFTConfig(str(folder), **settings | changed)
    args.device  # noqa: B018  # the process group
    model = tiny_llama()
    if kind == "fsdp2":
        args.save_strategy = "no"
        of_transformers(sharded_by_fsdp2(model))
    if kind == "compiled":
        zcompile.shard(model).compile(backend="zcompile", options=EAGER)
    trainer = trl.SFTTrainer if kind == "fsdp2" else SFTTrainer
    return trainer(model, args, train_dataset=sentences(64), eval_dataset=sentences(10), processing_class=tokenizer())


def losses_behind_the_checkpoint(trainer):
    return [each["loss"] for each in trainer.state.log_history if each.get("step", 0) > 3 and "loss" in each]


def rank_trains_as_fsdp2(rank, world, folder, kind):
    theirs = begin(f"{folder}/theirs", "fsdp2")
    theirs.train()
    ours = begin(f"{folder}/ours", kind)
    ours.train()
    reference = history(theirs)
    assert len(reference["loss"]) == 5 and len(reference["eval_loss"]) == 1, reference
    for name, values in history(ours).items():
        assert values == pytest.approx(reference[name], abs=LOSSES, rel=LOSSES), (name, values, reference[name])
    ours.save_model()
    again = begin(f"{folder}/ours", kind)
    again.train(resume_from_checkpoint=f"{folder}/ours/checkpoint-3")
    assert losses_behind_the_checkpoint(again) == pytest.approx(reference["loss"][3:], abs=LOSSES)
    whole = ours.accelerator.get_state_dict(ours.model)
    return {name: value.clone() for name, value in whole.items()}


@pytest.mark.parametrize("kind", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_sft_trainer_trains_as_fsdp2(ranks, tmp_path, kind):
    """It also resumes, and what it saves loads without zcompile."""
    from transformers import AutoModelForCausalLM

    trained, _ = ranks(2).run(rank_trains_as_fsdp2, str(tmp_path), kind)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert saved.keys() == trained.keys() and all(torch.equal(saved[name], trained[name]) for name in saved)


def rank_trains_four_sequences(rank, world, folder, kind, checkpoint):
    """The losses of steps 4 and 5; a step has the same sequences, whatever the number of ranks."""
    sizes = {"per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 1, "eval_strategy": "no"}
    trainer = begin(folder, kind, **sizes)
    trainer.train(resume_from_checkpoint=checkpoint)
    return losses_behind_the_checkpoint(trainer)


@pytest.mark.slow
@pytest.mark.parametrize("world, kind", [(1, "eager"), (4, "compiled")])
def test_a_checkpoint_of_sft_goes_on_at_another_number_of_ranks(ranks, tmp_path, world, kind):
    losses, _ = ranks(2).run(rank_trains_four_sequences, str(tmp_path), kind, None)
    resumed = ranks(world).run(rank_trains_four_sequences, str(tmp_path), kind, f"{tmp_path}/checkpoint-3")
    assert len(losses) == 2 and resumed[0] == pytest.approx(losses, abs=LOSSES)
