"""`zcompile.integrations.huggingface.Trainer` beside transformers' own: under FSDP2, and with LoRA in one process."""

import copy

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.tensor import DTensor

import zcompile
from tests.support import huggingface as hf
from tests.support.ranks import slow_case
from zcompile.state.sharded_model import state_of


def arguments(folder, **others):
    from transformers import TrainingArguments

    given = {"max_steps": 6, "gradient_accumulation_steps": 2, "eval_steps": 3, "save_strategy": "no"}
    return TrainingArguments(str(folder), **hf.ARGUMENTS | given | others, average_tokens_across_devices=True)


def begin(folder, **others):
    """A trainer of zcompile's, whose model is sharded when it begins."""
    from zcompile.integrations.huggingface import Trainer

    hf.forget_accelerate()
    args = arguments(folder, **others)
    return Trainer(hf.tiny_llama(), args, train_dataset=hf.Sentences(), eval_dataset=hf.Sentences(12))


def under_fsdp2(folder, **others):
    """transformers' own, with a model that FSDP2 has sharded."""
    from transformers import Trainer

    hf.forget_accelerate()
    args = arguments(folder, **others)
    args.device  # noqa: B018  # the process group
    model = hf.of_transformers(hf.sharded_by_fsdp2(hf.tiny_llama()))
    return Trainer(model, args, train_dataset=hf.Sentences(), eval_dataset=hf.Sentences(12))


@pytest.mark.parametrize("others", [{}, slow_case({"gradient_checkpointing": True})])
def test_trainer_trains_as_fsdp2(rank, world, tmp_path, others):
    theirs = under_fsdp2(f"{tmp_path}/theirs", **others)
    theirs.train()
    ours = begin(f"{tmp_path}/ours", **others)
    ours.train()
    hf.same_history(hf.history(ours), hf.history(theirs), 6, 2)


@pytest.mark.parametrize("bf16", [False, True])
def test_arguments_for_fsdp_shard_and_offload(rank, world, tmp_path, bf16):
    """Bitwise a model that the program shards as FSDP2 would; evaluation, which shards, may come first."""
    curves, dtype = [], torch.bfloat16 if bf16 else None
    for asks in (False, True):
        config = {"fsdp": True, "fsdp_config": {"cpu_offload": True}} if asks else {}
        trainer = begin(f"{tmp_path}/{asks}", bf16=bf16, optim="adamw_torch_fused", **config)
        if not asks:
            zcompile.shard(trainer.model, param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
        trainer.evaluate()
        trainer.train()
        curves.append(hf.history(trainer))
    assert curves[0] == curves[1] and len(curves[0]["loss"]) == 6 and len(curves[0]["eval_loss"]) == 2
    (offload,) = state_of(trainer.model).offloads
    assert offload.kind == ("states" if bf16 else "moments") and offload.has_stepped


@pytest.mark.slow
@pytest.mark.parametrize("steps", [1, 3])
def test_trainer_compiles_with_the_backend_of_its_arguments(rank, world, tmp_path, steps):
    from transformers import AutoModelForCausalLM

    others = {"max_steps": steps, "eval_strategy": "no" if steps == 1 else "steps"}
    curves = {}
    for name, compile_by in (("eager", {}), ("compiled", {"torch_compile": True, "torch_compile_backend": "zcompile"})):
        trainer = begin(f"{tmp_path}/{name}", **others, **compile_by)
        trainer.train()
        trainer.save_model()
        curves[name] = hf.history(trainer)
    assert isinstance(trainer.model, torch._dynamo.OptimizedModule)
    hf.same_history(curves["compiled"], curves["eager"], steps, int(steps > 1))
    torch.distributed.barrier()
    AutoModelForCausalLM.from_pretrained(tmp_path / "compiled")


def rank_evaluates_first(rank, world, folder):
    """Evaluation before training shards, training goes on, and the best checkpoint is loaded at the end."""
    trainer = begin(folder, save_strategy="steps", save_steps=2, eval_steps=2, load_best_model_at_end=True)
    untrained = trainer.evaluate()["eval_loss"]
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    trainer.train()
    losses = hf.history(trainer)["eval_loss"][1:]
    return untrained, losses, trainer.evaluate()["eval_loss"], trainer.predict(hf.Sentences(12)).metrics["test_loss"]


@pytest.mark.slow
def test_evaluation_comes_first_and_the_best_model_last(ranks, tmp_path):
    untrained, losses, best, predicted = ranks(2).run(rank_evaluates_first, str(tmp_path))[0]
    inputs = [hf.Sentences()[i] for i in range(12)]
    batch = {name: torch.stack([each[name] for each in inputs]) for name in inputs[0]}
    assert untrained == pytest.approx(mean_of_batches(hf.tiny_llama(), batch), abs=hf.LOSSES)
    assert best == predicted == pytest.approx(min(losses), abs=hf.LOSSES)


def mean_of_batches(model, batch):
    """Of the tokens of all ranks: batches of four, as two ranks take them."""
    losses = [model(**{name: value[i : i + 4] for name, value in batch.items()}).loss for i in range(0, 12, 4)]
    return torch.stack(losses).mean().item()


REFUSED = {
    "fp16": {"fp16": True},
    "'version': 1": {"fsdp": True, "fsdp_config": {"version": 1}},
    "xla": {"fsdp": True, "fsdp_config": {"xla": True}},
    "auto_find_batch_size": {"auto_find_batch_size": True},
    "torch_compile_backend='inductor'": {"torch_compile": True},
    "save_only_model with load_best_model_at_end": {
        "save_only_model": True, "load_best_model_at_end": True, "save_strategy": "steps", "save_steps": 3,
    },
}  # fmt: skip


def test_what_a_sharded_model_cannot_do_is_refused_by_name(rank, world, tmp_path):
    for text, others in REFUSED.items():
        with pytest.raises(ValueError, match=rf"{text}.*rank {rank}"):
            begin(tmp_path, **others)
    trainer = begin(tmp_path)
    hf.tiny_llama().save_pretrained(f"{tmp_path}/checkpoint-{rank}")  # such as another Trainer writes
    with pytest.raises(ValueError, match=r"has no pytorch_model_fsdp_0.*from_pretrained"):
        trainer.train(resume_from_checkpoint=f"{tmp_path}/checkpoint-{rank}")
    given = torch.optim.SGD(trainer.model.parameters(), lr=0.1)
    hf.forget_accelerate()
    with pytest.raises(RuntimeError, match="optimizers"):
        type(trainer)(hf.tiny_llama(), arguments(tmp_path), train_dataset=hf.Sentences(), eval_dataset=hf.Sentences(12),
                      optimizers=(given, None))  # fmt: skip


def with_lora():
    import peft

    model = hf.tiny_llama()
    torch.manual_seed(0)
    config = peft.LoraConfig(r=3, lora_alpha=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, config)


class Whole(hf.Sentences):
    """Each has as many tokens, so that the mean of ranks is the mean of a batch."""

    def __getitem__(self, i):
        tokens = super().__getitem__(i)["input_ids"]
        return {"input_ids": tokens, "labels": tokens.clone()}


def begin_lora(folder, world, kind=None, **others):
    """Four steps of four sequences each, whatever the number of ranks."""
    from zcompile.integrations.huggingface import Trainer

    hf.forget_accelerate()
    sizes = {"per_device_train_batch_size": 4 // world, "per_device_eval_batch_size": 4 // world}
    given = {"max_steps": 4, "gradient_accumulation_steps": 1, "eval_steps": 2, "save_strategy": "steps"}
    args = arguments(folder, **sizes | given | {"save_steps": 2} | others)
    return (kind or Trainer)(with_lora(), args, train_dataset=Whole(), eval_dataset=Whole(12))


def rank_trains_alone(rank, world, folder):
    """transformers' own Trainer on one process: what it logs, and the adapters."""
    from transformers import Trainer

    trainer = begin_lora(folder, 1, Trainer)
    trainer.train()
    trainer.save_model()
    return hf.history(trainer)


def rank_trains(rank, world, folder, how):
    trainer = begin_lora(folder, world, **how)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items() if "lora_" not in name}
    trainer.train()
    trainer.save_model()
    model = trainer.model
    reduced = zcompile.stats(model)["reduced_bytes"]["float32"]
    trained = sum(each.numel() * 4 for each in model.parameters() if each.requires_grad)
    assert reduced == 4 * trained, (reduced, trained)  # of each step the adapters, and nothing of the base
    for name, value in model.state_dict().items():
        assert "lora_" in name or torch.equal(value.full_tensor(), before[name.removeprefix("_orig_mod.")]), name
    return hf.history(trainer), trainer.evaluate()["eval_loss"]


def rank_resumes(rank, world, folder, how):
    trainer = begin_lora(folder, world, **how)
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2")
    return hf.losses_after(trainer, 2)


COMPILED = {"torch_compile": True, "torch_compile_backend": "zcompile"}


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, COMPILED])
def test_lora_trains_as_in_one_process_and_saves_adapters_alone(ranks, tmp_path, how):
    peft = pytest.importorskip("peft")
    (reference,) = ranks(1).run(rank_trains_alone, str(tmp_path / "theirs"))
    trained, evaluated = ranks(2).run(rank_trains, str(tmp_path / "ours"), how, timeout=600)[0]
    hf.same_history(trained, reference, 4, 2)
    assert evaluated == pytest.approx(reference["eval_loss"][-1], abs=hf.LOSSES)
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
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(hf.tiny_llama()), tmp_path / "ours")
    assert loaded.peft_config["default"].r == 3
    for world in (2, 1):
        rest = ranks(world).run(rank_resumes, str(tmp_path / "ours"), how, timeout=600)[0]
        assert rest == pytest.approx(reference["loss"][2:], abs=hf.LOSSES)


def adapters_in(folder):
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")
