"""A tiny Llama, its data, and the same program under FSDP2: for tests of accelerate, Trainer and TRL."""

import os
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard

os.environ.setdefault("HF_HUB_OFFLINE", "1")

VOCABULARY = 64
ARGUMENTS = {
    "learning_rate": 1e-2, "logging_steps": 1, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
    "max_grad_norm": 0.5, "eval_strategy": "steps", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 1,
}  # fmt: skip
LOSSES = 1e-5  # of two fp32 runs that add up in another order


def tiny_llama(layers: int = 2, kind: str = "LlamaForCausalLM", **how: Any):
    """The same on every rank. One rank of two has a shard with fewer rows, and rows of 3 norms do not divide by 4."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY - 1, hidden_size=18, intermediate_size=30, num_hidden_layers=layers,
        num_attention_heads=3, num_key_value_heads=1, head_dim=6, max_position_embeddings=32, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, **how,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


class Sentences(torch.utils.data.Dataset):
    """Sentences of 12 tokens, drawn by their number; every third ends early, so losses count other tokens."""

    def __init__(self, count: int = 64):
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if not 0 <= i < self.count:
            raise IndexError(i)
        tokens = torch.randint(3, VOCABULARY - 1, (12,), generator=torch.Generator().manual_seed(i))
        labels = tokens.clone()
        if i % 3 == 0:
            labels[7:] = -100
        return {"input_ids": tokens, "labels": labels}


def tokenizer():
    """One that knows the words w0 to w58, made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 5))]
    words_to_ids = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    made = Tokenizer(words_to_ids)
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def history(trainer) -> dict[str, list[float]]:
    """Losses, norms and losses of evaluations that a trainer has logged."""
    logged = trainer.state.log_history
    return {name: [each[name] for each in logged if name in each] for name in ("loss", "grad_norm", "eval_loss")}


def same_history(ours, theirs, steps: int, evaluations: int) -> None:
    """Two of `history` of so many steps and evaluations."""
    assert len(theirs["loss"]) == steps and len(theirs["eval_loss"]) == evaluations, theirs
    for name, values in ours.items():
        assert values == pytest.approx(theirs[name], abs=LOSSES, rel=LOSSES), (name, values, theirs[name])


def losses_after(trainer, step: int) -> list[float]:
    return [each["loss"] for each in trainer.state.log_history if each.get("step", 0) > step and "loss" in each]


def whole_state(trainer) -> dict[str, torch.Tensor]:
    """What a trainer has trained."""
    return {name: value.clone() for name, value in trainer.accelerator.get_state_dict(trainer.model).items()}


def of_transformers(model):
    """`model`, which FSDP2 has sharded, as one that `from_pretrained` has: transformers' Trainer takes it."""
    from transformers.distributed import DistributedConfig

    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = DistributedConfig()
    return model


def forget_accelerate() -> None:
    """Let accelerate, and Dynamo, begin anew in a process that other tests have used."""
    from accelerate.state import AcceleratorState, GradientState

    torch._dynamo.reset()

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    for name in ("ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_DYNAMO_BACKEND"):
        os.environ.pop(name, None)


def sharded_by_fsdp2(model):
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)
