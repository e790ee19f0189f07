"""TRL's other trainers through `zcompile.integrations.huggingface.TrainerMixin`, beside TRL's own in one process."""

import pytest
import torch

from tests.support.huggingface import LOSSES, VOCABULARY, forget_accelerate, history, tiny_llama, tokenizer

pytest.importorskip("trl")
pytestmark = pytest.mark.slow
CONFIG = {
    "learning_rate": 1e-2, "max_steps": 3, "logging_steps": 1, "max_grad_norm": 0.5, "report_to": [], "seed": 1,
    "save_strategy": "steps", "save_steps": 2, "disable_tqdm": True, "use_cpu": True, "bf16": False, "max_length": 24,
    "gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 3,
}  # fmt: skip


def words(i, count):
    return " ".join(f"w{(i * i + 7 * k) % 59}" for k in range(count))


def pairs(count):
    """A prompt with a better and a worse answer, each as long as the others, so that ranks weigh alike."""
    from datasets import Dataset

    rows = [{"prompt": words(i, 4) + " ", "chosen": words(3 * i + 1, 6), "rejected": words(5 * i + 2, 6)}
            for i in range(count)]  # fmt: skip
    return Dataset.from_list(rows)


def scorer():
    """A Llama that gives a text one number."""
    from transformers import LlamaConfig, LlamaForSequenceClassification

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY - 1, hidden_size=18, intermediate_size=30, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=6, max_position_embeddings=32, use_cache=False, pad_token_id=0, num_labels=1,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return LlamaForSequenceClassification(config)


def begin(kind, folder, world, ours, **others):
    import trl

    from zcompile.integrations.huggingface import TrainerMixin

    forget_accelerate()
    torch._dynamo.reset()
    base = {"dpo": trl.DPOTrainer, "reward": trl.RewardTrainer}[kind]
    config = {"dpo": trl.DPOConfig, "reward": trl.RewardConfig}[kind]
    batch = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 4 // world}
    args = config(str(folder), **CONFIG, **batch, **others)
    trainer = type("Ours", (TrainerMixin, base), {}) if ours else base
    models = {"model": tiny_llama(), "ref_model": tiny_llama()} if kind == "dpo" else {"model": scorer()}
    data = {"train_dataset": pairs(32), "eval_dataset": pairs(8), "processing_class": tokenizer()}
    return trainer(**models, args=args, **data)


def rank_trains(rank, world, kind, folder, ours, how):
    trainer = begin(kind, folder, world, ours, **how)
    trainer.train()
    trainer.save_model()
    if not ours:
        return history(trainer), {name: value.clone() for name, value in trainer.model.state_dict().items()}
    assert all(hasattr(each, "full_tensor") for each in trainer.model.parameters())
    values = trainer.accelerator.get_state_dict(trainer.model)
    return history(trainer), {name: value.clone() for name, value in values.items()}


def rank_resumes(rank, world, kind, folder, how):
    trainer = begin(kind, folder, world, True, **how)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return [each["loss"] for each in trainer.state.log_history if each.get("step", 0) > 2 and "loss" in each]


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_a_trainer_with_the_mixin_trains_as_in_one_process(ranks, tmp_path, kind):
    how = {}
    ((theirs, reference),) = ranks(1).run(rank_trains, kind, str(tmp_path / "theirs"), False, how)
    ours, values = ranks(2).run(rank_trains, kind, str(tmp_path / "ours"), True, how)[0]
    assert len(theirs["loss"]) == 3 and len(theirs["eval_loss"]) == 1
    for name in theirs:
        assert ours[name] == pytest.approx(theirs[name], abs=LOSSES, rel=LOSSES), name
    for name, value in values.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-5)
    assert (tmp_path / "ours/model.safetensors").exists()
    rest = ranks(2).run(rank_resumes, kind, str(tmp_path / "ours"), how)[0]
    assert rest == pytest.approx(theirs["loss"][2:], abs=LOSSES)
