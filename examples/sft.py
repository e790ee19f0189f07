"""TRL's SFTTrainer on a model that zcompile shards: a small Llama learns to add, from prompts and completions.

    torchrun --nproc-per-node 2 examples/sft.py --use_cpu True --bf16 False --output_dir out/sft --max_steps 100
    accelerate launch --num_processes 8 examples/sft.py --torch_compile_backend zcompile

The import of SFTTrainer is all that is zcompile's. The arguments are those of SFTConfig.
"""

from datasets import Dataset
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig

from zcompile.integrations.huggingface import SFTTrainer

SPECIAL = ["<pad>", "<s>", "</s>"]
CHARACTERS = "0123456789+="


def character_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each character."""
    ids = {token: i for i, token in enumerate([*SPECIAL, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<pad>"
    )


def sums(first: int, last: int) -> Dataset:
    """Every sum of a number of this range and one below 100. Only completions count in the loss."""
    pairs = [(a, b) for a in range(first, last) for b in range(100)]
    return Dataset.from_list([{"prompt": f"{a}+{b}=", "completion": str(a + b)} for a, b in pairs])


def main() -> None:
    (args,) = HfArgumentParser(SFTConfig).parse_args_into_dataclasses()
    tokenizer = character_tokenizer()
    set_seed(args.seed)  # the same on every rank: each keeps its slice of its own values
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=32,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    trainer = SFTTrainer(
        LlamaForCausalLM(config),
        args,
        train_dataset=sums(0, 40),
        eval_dataset=sums(40, 44),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    metrics = trainer.evaluate()
    trainer.save_model()
    if trainer.is_world_process_zero():
        print(f"sums of 40 to 43, never seen: loss {metrics['eval_loss']:.3f}")


if __name__ == "__main__":
    main()
