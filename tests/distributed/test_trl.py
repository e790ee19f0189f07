"""`zcompile.integrations.huggingface.SFTTrainer` beside TRL's own with the model under FSDP2."""

import pytest
import torch

from tests.support.huggingface import (
    ARGUMENTS,
    LOSSES,
    forget_accelerate,
    history,
    losses_after,
    of_transformers,
    sharded_by_fsdp2,
    tiny_llama,
    tokenizer,
    whole_state,
)
from tests.support.ranks import on_ranks

EAGER = {"inner": "aot_eager"}


def sentences(count):
    """Texts of 5 to 14 words, so that batches have padding."""
    from datasets import Dataset

    texts = [" ".join(f"w{(i * i + 7 * k) % 59}" for k in range(5 + i % 10)) for i in range(count)]
    return Dataset.from_dict({"text": texts})


def begin(folder, kind):
    """An SFTTrainer: "fsdp2", "eager" or "compiled"."""
    import trl

    import zcompile
    from zcompile.integrations.huggingface import SFTTrainer

    forget_accelerate()
    torch._dynamo.reset()
    settings = {
        "max_steps": 5, "gradient_accumulation_steps": 2, "eval_steps": 5, "save_strategy": "steps", "save_steps": 3,
        "bf16": False, "max_length": 16, "gradient_checkpointing": kind == "eager",
    }  # fmt: skip
    args = trl.SFTConfig(str(folder), **ARGUMENTS | settings)
    args.device  # noqa: B018  # the process group
    model = tiny_llama()
    if kind == "fsdp2":
        args.save_strategy = "no"
        of_transformers(sharded_by_fsdp2(model))
    if kind == "compiled":
        zcompile.shard(model).compile(backend="zcompile", options=EAGER)
    trainer = trl.SFTTrainer if kind == "fsdp2" else SFTTrainer
    return trainer(model, args, train_dataset=sentences(64), eval_dataset=sentences(10), processing_class=tokenizer())


@pytest.mark.parametrize("kind", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
@on_ranks(2)
def test_sft_trainer_trains_as_fsdp2(rank, world, tmp_path, kind):
    """It also resumes, and what it saves loads without zcompile."""
    from transformers import AutoModelForCausalLM

    theirs = begin(f"{tmp_path}/theirs", "fsdp2")
    theirs.train()
    ours = begin(f"{tmp_path}/ours", kind)
    ours.train()
    reference = history(theirs)
    assert len(reference["loss"]) == 5 and len(reference["eval_loss"]) == 1, reference
    for name, values in history(ours).items():
        assert values == pytest.approx(reference[name], abs=LOSSES, rel=LOSSES), (name, values, reference[name])
    ours.save_model()
    again = begin(f"{tmp_path}/ours", kind)
    again.train(resume_from_checkpoint=f"{tmp_path}/ours/checkpoint-3")
    assert losses_after(again, 3) == pytest.approx(reference["loss"][3:], abs=LOSSES)
    trained, saved = whole_state(ours), AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    if rank == 0:  # which has the whole state
        assert saved.keys() == trained.keys() and all(torch.equal(saved[name], trained[name]) for name in saved)
