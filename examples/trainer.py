"""Hugging Face's Trainer on a model that zcompile shards: a small Llama learns the bytes of Python's own sources.

    torchrun --nproc-per-node 2 examples/trainer.py --use_cpu True --output_dir out/trainer --max_steps 50
    accelerate launch --num_processes 8 examples/trainer.py --bf16 True --torch_compile_backend zcompile

The import of Trainer is all that is zcompile's. The arguments are those of TrainingArguments: `--eval_strategy steps`,
`--save_steps`, `--resume_from_checkpoint`, on any number of ranks. The whole model is in output_dir at the end.
"""

import functools
import math
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

from zcompile.integrations.huggingface import Trainer

TOKENS = 128  # of a sequence


class Bytes(Dataset):
    """Sequences of bytes, one after the other."""

    def __init__(self, text: bytes):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.text) // TOKENS

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        tokens = self.text[i * TOKENS : (i + 1) * TOKENS].long()
        return {"input_ids": tokens, "labels": tokens}


def build(args: TrainingArguments) -> LlamaForCausalLM:
    """The same on every rank: each keeps its slice of its own values. Or `AutoModelForCausalLM.from_pretrained`."""
    set_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    sources = sorted(Path(functools.__file__).parent.glob("*.py"))
    text = b"".join(path.read_bytes() for path in sources)
    held_out = len(text) // 100
    trainer = Trainer(build(args), args, train_dataset=Bytes(text[held_out:]), eval_dataset=Bytes(text[:held_out]))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    loss = trainer.evaluate()["eval_loss"]
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"loss of held-out text: {loss:.3f} nats a byte (untrained: {math.log(256):.3f})")


if __name__ == "__main__":
    main()
