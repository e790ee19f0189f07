"""zcompile's SFTTrainer beside TRL's with the model under FSDP2, and TRL's other trainers through `TrainerMixin`."""

import pytest
import torch

from tests.support import huggingface as hf
from tests.support.ranks import slow_case

pytest.importorskip("trl")
EAGER = {"inner": "aot_eager"}
words = lambda i, count: " ".join(f"w{(i * i + 7 * k) % 59}" for k in range(count))


def sentences(count):
    """Texts of 5 to 14 words, so that batches have padding."""
    from datasets import Dataset

    return Dataset.from_dict({"text": [words(i, 5 + i % 10) for i in range(count)]})


def begin(folder, kind):
    """An SFTTrainer: "fsdp2", "eager" or "compiled"."""
    import trl

    import zcompile
    from zcompile.integrations.huggingface import SFTTrainer

    hf.forget_accelerate()
    settings = {
        "max_steps": 5, "gradient_accumulation_steps": 2, "eval_steps": 5, "save_strategy": "steps", "save_steps": 3,
        "bf16": False, "max_length": 16, "gradient_checkpointing": kind == "eager",
    }  # fmt: skip
    args = trl.SFTConfig(str(folder), **hf.ARGUMENTS | settings)
    args.device  # noqa: B018  # the process group
    model = hf.tiny_llama()
    if kind == "fsdp2":
        args.save_strategy = "no"
        hf.of_transformers(hf.sharded_by_fsdp2(model))
    if kind == "compiled":
        zcompile.shard(model).compile(backend="zcompile", options=EAGER)
    trainer = trl.SFTTrainer if kind == "fsdp2" else SFTTrainer
    return trainer(
        model, args, train_dataset=sentences(64), eval_dataset=sentences(10), processing_class=hf.tokenizer()
    )


@pytest.mark.parametrize("kind", ["eager", slow_case("compiled")])
def test_sft_trainer_trains_as_fsdp2(rank, world, tmp_path, kind):
    """It also resumes, and what it saves loads without zcompile."""
    from transformers import AutoModelForCausalLM

    theirs = begin(f"{tmp_path}/theirs", "fsdp2")
    theirs.train()
    ours = begin(f"{tmp_path}/ours", kind)
    ours.train()
    reference = hf.history(theirs)
    hf.same_history(hf.history(ours), reference, 5, 1)
    ours.save_model()
    again = begin(f"{tmp_path}/ours", kind)
    again.train(resume_from_checkpoint=f"{tmp_path}/ours/checkpoint-3")
    assert hf.losses_after(again, 3) == pytest.approx(reference["loss"][3:], abs=hf.LOSSES)
    trained = hf.whole_state(ours)
    for folder in ("ours", "ours/checkpoint-5") if rank == 0 else ():  # rank 0 has the whole state
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert saved.keys() == trained.keys() and all(torch.equal(saved[name], trained[name]) for name in saved)


CONFIG = hf.ARGUMENTS | {
    "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "bf16": False, "max_length": 24,
    "gradient_checkpointing": False, "eval_steps": 3,
}  # fmt: skip


def pairs(count):
    """A prompt with a better and a worse answer, each as long as the others, so that ranks weigh alike."""
    from datasets import Dataset

    rows = [{"prompt": words(i, 4) + " ", "chosen": words(3 * i + 1, 6), "rejected": words(5 * i + 2, 6)}
            for i in range(count)]  # fmt: skip
    return Dataset.from_list(rows)


def begin_other(kind, folder, world, ours):
    import trl

    from zcompile.integrations.huggingface import TrainerMixin

    hf.forget_accelerate()
    base = {"dpo": trl.DPOTrainer, "reward": trl.RewardTrainer}[kind]
    config = {"dpo": trl.DPOConfig, "reward": trl.RewardConfig}[kind]
    batch = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 4 // world}
    args = config(str(folder), **CONFIG | batch)
    trainer = type("Ours", (TrainerMixin, base), {}) if ours else base
    models = {"model": hf.tiny_llama(), "ref_model": hf.tiny_llama()}
    if kind == "reward":
        models = {"model": hf.tiny_llama(kind="LlamaForSequenceClassification", num_labels=1)}
    data = {"train_dataset": pairs(32), "eval_dataset": pairs(8), "processing_class": hf.tokenizer()}
    return trainer(**models, args=args, **data)


def rank_trains(rank, world, kind, folder, ours):
    trainer = begin_other(kind, folder, world, ours)
    trainer.train()
    trainer.save_model()
    if not ours:
        return hf.history(trainer), {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert all(hasattr(each, "full_tensor") for each in trainer.model.parameters())
    return hf.history(trainer), hf.whole_state(trainer)


def rank_resumes(rank, world, kind, folder):
    trainer = begin_other(kind, folder, world, True)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return hf.losses_after(trainer, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_trainer_with_the_mixin_trains_as_in_one_process(ranks, tmp_path, kind):
    ((theirs, reference),) = ranks(1).run(rank_trains, kind, str(tmp_path / "theirs"), False)
    ours, values = ranks(2).run(rank_trains, kind, str(tmp_path / "ours"), True)[0]
    hf.same_history(ours, theirs, 3, 1)
    for name, value in values.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-5)
    assert (tmp_path / "ours/model.safetensors").exists()
    rest = ranks(2).run(rank_resumes, kind, str(tmp_path / "ours"))[0]
    assert rest == pytest.approx(theirs["loss"][2:], abs=hf.LOSSES)
