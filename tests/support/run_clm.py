"""A script as users of Trainer have one: train a causal language model on a text file. It knows nothing of zcompile."""

import math
from dataclasses import dataclass, field
from itertools import chain

import datasets
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
    default_data_collator,
    set_seed,
)


@dataclass
class ScriptArguments:
    model_name_or_path: str
    train_file: str
    validation_file: str
    block_size: int = field(default=32, metadata={"help": "tokens of a sequence"})


def read(script, tokenizer):
    """The two files as token blocks of one length."""

    def tokenize(rows):
        return {"input_ids": tokenizer(rows["text"])["input_ids"]}

    def group(rows):
        tokens = list(chain.from_iterable(rows["input_ids"]))
        blocks = [tokens[i : i + script.block_size] for i in range(0, len(tokens), script.block_size)]
        blocks = [block for block in blocks if len(block) == script.block_size]
        return {"input_ids": blocks, "labels": blocks}

    files = {"train": script.train_file, "validation": script.validation_file}
    raw = {
        name: datasets.Dataset.from_dict({"text": open(path).read().splitlines()})  # noqa: SIM115
        for name, path in files.items()
    }
    tokenized = {name: rows.map(tokenize, batched=True, remove_columns=["text"]) for name, rows in raw.items()}
    return {name: rows.map(group, batched=True) for name, rows in tokenized.items()}


def main():
    script, args = HfArgumentParser((ScriptArguments, TrainingArguments)).parse_args_into_dataclasses()
    set_seed(args.seed)
    tokenizer = AutoTokenizer.from_pretrained(script.model_name_or_path)
    model = AutoModelForCausalLM.from_pretrained(script.model_name_or_path)
    data = read(script, tokenizer)
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        processing_class=tokenizer,
        data_collator=default_data_collator,
    )
    result = trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.log_metrics("train", result.metrics)
    trainer.save_metrics("train", result.metrics)
    trainer.save_state()
    metrics = trainer.evaluate()
    metrics["perplexity"] = math.exp(metrics["eval_loss"])
    trainer.log_metrics("eval", metrics)
    trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
