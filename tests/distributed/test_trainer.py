"""`zcompile.huggingface.Trainer` beside transformers' own with the model under FSDP2."""

import pytest
import torch

from tests.support.huggingface import LOSSES, Sentences, forget_accelerate, sharded_by_fsdp2, tiny_llama


def arguments(folder, **others):
    from transformers import TrainingArguments

    given = {
        "learning_rate": 1e-2, "max_steps": 6, "logging_steps": 1, "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "eval_strategy": "steps", "eval_steps": 3,
        "report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True, "seed": 1,
        "per_device_eval_batch_size": 2, "average_tokens_across_devices": True,
    }  # fmt: skip
    return TrainingArguments(str(folder), **{**given, **others})


def begin(folder, **others):
    """A trainer of zcompile's, whose model is sharded when it begins."""
    from zcompile.huggingface import Trainer

    forget_accelerate()
    torch._dynamo.reset()
    args = arguments(folder, **others)
    return Trainer(tiny_llama(), args, train_dataset=Sentences(), eval_dataset=Sentences(12))


def under_fsdp2(folder, **others):
    """transformers' own, with a model that FSDP2 has sharded: as one that `from_pretrained` shards at load time."""
    from transformers import Trainer
    from transformers.distributed import DistributedConfig

    forget_accelerate()
    args = arguments(folder, **others)
    args.device  # noqa: B018  # the process group
    model = sharded_by_fsdp2(tiny_llama())
    model._is_distributed_loading_by_transformers = True
    model.config.distributed_config = DistributedConfig()
    return Trainer(model, args, train_dataset=Sentences(), eval_dataset=Sentences(12))


def history(trainer):
    """Losses, norms and losses of evaluations that were logged."""
    logged = trainer.state.log_history
    return {name: [each[name] for each in logged if name in each] for name in ("loss", "grad_norm", "eval_loss")}


def rank_trains_as_fsdp2(rank, world, folder, others):
    theirs = under_fsdp2(f"{folder}/theirs", **others)
    theirs.train()
    ours = begin(f"{folder}/ours", **others)
    ours.train()
    reference = history(theirs)
    assert len(reference["loss"]) == 6 and len(reference["eval_loss"]) == 2, reference
    for name, values in history(ours).items():
        assert values == pytest.approx(reference[name], abs=LOSSES, rel=LOSSES), (name, values, reference[name])


@pytest.mark.parametrize("others", [{}, {"gradient_checkpointing": True}])
def test_trainer_trains_as_fsdp2(ranks, tmp_path, others):
    ranks(2).run(rank_trains_as_fsdp2, str(tmp_path), others)


def rank_saves(rank, world, folder):
    """Six steps with a checkpoint behind the third, and what was trained."""
    trainer = begin(folder, save_strategy="steps", save_steps=3, **of_four_sequences(world))
    trainer.train()
    trainer.save_model(f"{folder}/whole")
    parameters = trainer.accelerator.get_state_dict(trainer.model)
    return history(trainer)["loss"][3:], {name: value.clone() for name, value in parameters.items()}


def rank_resumes(rank, world, folder):
    trainer = begin(folder, **of_four_sequences(world))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    return [each["loss"] for each in trainer.state.log_history if each.get("step", 0) > 3 and "loss" in each]


def of_four_sequences(world):
    """A step has the same sequences, whatever the number of ranks."""
    return {"per_device_train_batch_size": 4 // world, "gradient_accumulation_steps": 1, "eval_strategy": "no"}


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.matrix)])
def test_a_checkpoint_goes_on_at_another_number_of_ranks(ranks, tmp_path, world):
    (losses, _), _ = ranks(2).run(rank_saves, str(tmp_path))
    assert len(losses) == 3
    assert ranks(world).run(rank_resumes, str(tmp_path))[0] == pytest.approx(losses, abs=LOSSES)


def test_saved_models_load_without_zcompile(ranks, tmp_path):
    from transformers import AutoModelForCausalLM

    (_, trained), _ = ranks(2).run(rank_saves, str(tmp_path))
    for folder in ("whole", "checkpoint-6"):
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / folder).state_dict()
        assert saved.keys() == trained.keys()
        for name, value in saved.items():
            assert torch.equal(value, trained[name]), name


def rank_compiles(rank, world, folder):
    import zcompile

    eager = begin(f"{folder}/eager", max_steps=3)
    eager.train()
    others = {"torch_compile": True, "torch_compile_backend": "zcompile"}
    compiled = begin(f"{folder}/compiled", max_steps=3, **others)
    compiled.train()
    for name, values in history(compiled).items():
        assert values == pytest.approx(history(eager)[name], abs=LOSSES, rel=LOSSES), name
    assert compiled.args.torch_compile_backend == "zcompile"
    stats = zcompile.stats(compiled.accelerator.unwrap_model(compiled.model, keep_torch_compile=False))
    compiled.save_model(f"{folder}/whole")
    return stats, isinstance(compiled.model, torch._dynamo.OptimizedModule)


def test_trainer_compiles_with_the_backend_of_its_arguments(ranks, tmp_path, inductor_cache):
    (stats, is_compiled), _ = ranks(2).run(rank_compiles, str(tmp_path))
    print(stats)
    assert is_compiled and (tmp_path / "whole/model.safetensors").exists()
