"""TRL's other trainers through `zcompile.integrations.huggingface.TrainerMixin`, beside TRL's own in one process."""

import pytest
import torch

from tests.support.huggingface import (
    ARGUMENTS,
    LOSSES,
    forget_accelerate,
    history,
    losses_after,
    tiny_llama,
    tokenizer,
    whole_state,
)

pytest.importorskip("trl")
pytestmark = pytest.mark.slow
CONFIG = ARGUMENTS | {
    "max_steps": 3, "save_strategy": "steps", "save_steps": 2, "bf16": False, "max_length": 24,
    "gradient_checkpointing": False, "eval_steps": 3,
}  # fmt: skip


def words(i, count):
    return " ".join(f"w{(i * i + 7 * k) % 59}" for k in range(count))


def pairs(count):
    """A prompt with a better and a worse answer, each as long as the others, so that ranks weigh alike."""
    from datasets import Dataset

    rows = [{"prompt": words(i, 4) + " ", "chosen": words(3 * i + 1, 6), "rejected": words(5 * i + 2, 6)}
            for i in range(count)]  # fmt: skip
    return Dataset.from_list(rows)


def begin(kind, folder, world, ours):
    import trl

    from zcompile.integrations.huggingface import TrainerMixin

    forget_accelerate()
    torch._dynamo.reset()
    base = {"dpo": trl.DPOTrainer, "reward": trl.RewardTrainer}[kind]
    config = {"dpo": trl.DPOConfig, "reward": trl.RewardConfig}[kind]
    batch = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 4 // world}
    args = config(str(folder), **CONFIG | batch)
    trainer = type("Ours", (TrainerMixin, base), {}) if ours else base
    models = (
        {"model": tiny_llama(), "ref_model": tiny_llama()}
        if kind == "dpo"
        else {"model": tiny_llama(kind="LlamaForSequenceClassification", num_labels=1)}
    )
    data = {"train_dataset": pairs(32), "eval_dataset": pairs(8), "processing_class": tokenizer()}
    return trainer(**models, args=args, **data)


def rank_trains(rank, world, kind, folder, ours):
    trainer = begin(kind, folder, world, ours)
    trainer.train()
    trainer.save_model()
    if not ours:
        return history(trainer), {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert all(hasattr(each, "full_tensor") for each in trainer.model.parameters())
    return history(trainer), whole_state(trainer)


def rank_resumes(rank, world, kind, folder):
    trainer = begin(kind, folder, world, True)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return losses_after(trainer, 2)


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_trainer_with_the_mixin_trains_as_in_one_process(ranks, tmp_path, kind):
    ((theirs, reference),) = ranks(1).run(rank_trains, kind, str(tmp_path / "theirs"), False)
    ours, values = ranks(2).run(rank_trains, kind, str(tmp_path / "ours"), True)[0]
    assert len(theirs["loss"]) == 3 and len(theirs["eval_loss"]) == 1
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], abs=LOSSES, rel=LOSSES), name
    for name, value in values.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-5)
    assert (tmp_path / "ours/model.safetensors").exists()
    rest = ranks(2).run(rank_resumes, kind, str(tmp_path / "ours"))[0]
    assert rest == pytest.approx(theirs["loss"][2:], abs=LOSSES)
