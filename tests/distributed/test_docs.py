"""Code blocks of README.md and docs/guide.md run as they stand, each by its language; programs of other pages do."""

import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.utils.data import DataLoader

import zcompile
from tests.support.artifacts import cache_in
from tests.support.huggingface import Sentences, forget_accelerate, tiny_llama
from tests.support.pages import ROOT, Block, blocks_of, check_commands, check_config, python_blocks
from tests.support.ranks import on_ranks
from tests.support.reference import same_parameters
from zcompile.artifact.aot import lacking
from zcompile.costs.formulas import registry

PAGES = ("README.md", "docs/guide.md")
BLOCKS = [block for page in PAGES for block in blocks_of(page)]
STEPS, VOCABULARY = 4, 13


@dataclass
class Output:
    """What the model's forward returns, in part, as models of transformers do."""

    loss: torch.Tensor
    logits: torch.Tensor


class LanguageModel(nn.Module):
    """Small, and called and saved as the models of transformers are."""

    def __init__(self, vocabulary: int = VOCABULARY):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(vocabulary, 6), nn.LayerNorm(6), nn.Linear(6, vocabulary)

    def forward(self, input_ids, labels=None):
        logits = self.head(self.norm(self.embed(input_ids)).tanh())
        targets = input_ids if labels is None else labels
        return Output(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits)

    def save_pretrained(self, folder, state_dict):
        torch.save(state_dict, folder)


def batches_of(rank: int) -> list[dict[str, torch.Tensor]]:
    """The batches of a rank: two sequences of five tokens each."""
    generator = torch.Generator().manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (STEPS, 2, 5), generator=generator)
    return [{"input_ids": each, "labels": each} for each in tokens]


def names_for(block: Block, rank: int, folder: Path) -> dict[str, Any]:
    """What the reader of a block has: a model, sharded unless the block shards it, its optimizer, and data."""
    model = LanguageModel(16 if "float8" in block.text else VOCABULARY)  # rows that divide by the ranks
    names = {"torch": torch, "zcompile": zcompile, "model": model, "build": LanguageModel, "folder": folder / "saved"}
    if not re.search(r"zcompile\.shard\((model|build)", block.text):
        names["optimizer"] = torch.optim.AdamW(zcompile.shard(model).parameters())
    batches = batches_of(rank)
    return names | {"batches": batches, "steps": [batches[:2], batches[2:]], "tokens": batches[0]["input_ids"]}


@contextlib.contextmanager
def as_a_program(folder: Path):
    """In `folder`, without GPUs, with a program's process group made already, and with an op `lib.product`."""
    with pytest.MonkeyPatch.context() as patch, torch.library._scoped_library("lib", "DEF") as library:
        library.define("product(Tensor a, Tensor b) -> Tensor")
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(nn.Module, "cuda", lambda module: module)
        patch.setattr(torch.distributed, "init_process_group", lambda: None)
        patch.setattr(torch.distributed, "destroy_process_group", lambda: None)
        patch.chdir(folder)
        yield
    registry._registered.clear()


def rank_runs_block(rank, world, block, folder, cache):
    with cache_in(cache), as_a_program(folder):
        names = names_for(block, rank, folder)
        exec(compile(block.text, str(block), "exec"), names)
        CHECKS[block.page, block.heading](names, rank, world)
        assert [op for op, _ in registry.registered_costs()] == ["lib::product"] * ("product_cost" in names)


def trained_on_one_rank(world, microbatches=1):
    """A model after steps on `microbatches` batches of each rank, with clipping."""
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters())
    batches = list(zip(*(batches_of(each) for each in range(world)), strict=True))
    for step in range(0, len(batches), microbatches):
        alike = [batch for group in batches[step : step + microbatches] for batch in group]
        (sum(model(**batch).loss for batch in alike) / len(alike)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return model


def check_quick_start(names, rank, world):
    """The last loss of each rank is that of the model unsharded, trained on the batches of all ranks."""
    torch.manual_seed(0)
    model, steps = names["NextByte"](), names["step"] + 1
    optimizer = torch.optim.AdamW(model.parameters(), lr=names["optimizer"].param_groups[0]["lr"])
    generators = [torch.Generator().manual_seed(each) for each in range(world)]
    for _ in range(steps):
        batches = [torch.randint(256, (256,), generator=generator) for generator in generators]
        losses = [model(inputs, (3 * inputs + 1) % 256) for inputs in batches]
        (sum(losses) / world).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert names["loss"].item() == pytest.approx(losses[rank].item(), rel=0.01)  # the program computes in bf16
    assert zcompile.stats(names["model"])["compiled"] == "compiled by this process"


def check_precision(names, rank, world):
    """Norms travel in fp32, others in bf16, and are read by what computes in that."""
    model = names["model"]
    model(**names["batches"][0]).loss.backward()
    wide = 2 * sum(each.nbytes for each in model.norm.parameters())  # the root block: gathered for forward alone
    assert zcompile.stats(model)["gathered_bytes"]["float32"] in (wide, wide // 2)


def check_float8(names, rank, world):
    """The head's weight travels as float8, in each forward: the root block stays until backward."""
    model = names["model"]
    assert zcompile.stats(model)["gathered_bytes"]["float8_e4m3fn"] == STEPS * model.head.weight.numel()


def check_int8(names, rank, world):
    model = names["model"]
    model(names["tokens"])
    assert zcompile.stats(model)["gathered_bytes"]["int8"] >= model.head.weight.numel()


def check_checkpoint(names, rank, world):
    model = names["model"]
    same_parameters(model, LanguageModel())
    if "dcp" in names:
        assert (names["folder"] / ".metadata").exists()
        return
    with torch.no_grad():
        torch._foreach_zero_(list(model.parameters()))
    saved = torch.load(names["folder"]) if rank == 0 else {}
    names["set_model_state_dict"](model, saved, options=names["scatter"])
    same_parameters(model, LanguageModel())


def check_artifact(names, rank, world):
    model = names["model"]
    model(**names["batches"][0]).loss.backward()
    assert zcompile.stats(model)["compiled"] == "loaded: rank 0 compiled it, because model.zc was not there"
    assert Path("model.zc").exists()


def check_microbatches(names, rank, world):
    same_parameters(names["model"], trained_on_one_rank(world, microbatches=2))


def check_hosts(names, rank, world):
    """Two hosts with a rank each: a step's gather has brought half of the model."""
    model = names["model"]
    check_microbatches(names, rank, world)
    shards = [parameter.shape[0] // 2 * parameter[0].numel() for parameter in LanguageModel().parameters()]
    zcompile.reset_stats(model)
    model(**names["batches"][0]).loss.backward()
    received = zcompile.stats(model)
    assert received["host_shard_bytes"] == 0 and received["replica_bytes"] >= 4 * sum(shards)


def check_memory_limit(names, rank, world):
    """The model trains, under a limit that it does not reach."""
    names["model"](**names["batches"][0]).loss.backward()
    assert all(parameter.grad is not None for parameter in names["model"].parameters())


CHECKS: dict[tuple[str, str], Callable[[dict[str, Any], int, int], None]] = {
    ("README.md", "Quick start"): check_quick_start,
    ("docs/guide.md", "Precision"): check_precision,
    ("docs/guide.md", "Float8, and other tensor subclasses"): check_float8,
    ("docs/guide.md", "Int8 gathers"): check_int8,
    ("docs/guide.md", "Checkpoints"): check_checkpoint,
    ("docs/guide.md", "Is it faster, and why"): lambda *_: None,  # a block prints the plan, another registers a cost
    ("docs/guide.md", "Compile once"): check_artifact,
    ("docs/guide.md", "Microbatches"): check_microbatches,
    ("docs/guide.md", "A limit of memory"): check_memory_limit,
    ("docs/guide.md", "Several hosts"): check_hosts,
}


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_block_runs(ranks, tmp_path, inductor_cache, block):
    if block.language == "python":
        if "huggingface" in block.text:
            pytest.importorskip("transformers")
        if "torchao" in block.text:
            pytest.importorskip("torchao")
        if "artifact=" in block.text and lacking():
            pytest.skip(lacking())
        ranks(2).run(rank_runs_block, block, tmp_path, inductor_cache)
    elif block.language == "json":
        check_config(block.text)
    else:
        assert block.language == "sh", "say here how a block of this language is run"
        check_commands(block.text)


def rank_runs(rank, world, page, folder):
    (program,) = python_blocks(page)
    names = {"torch": torch, "zcompile": zcompile, "rank": rank, "build": tiny_llama, "batches": batches_of(rank)}
    exec(compile(program.replace('"adapter"', repr(folder)), page, "exec"), names)
    return {name: names.get(name) for name in ("texts", "text", "engine")} | {"loaded": check_adapter(names)}


def check_adapter(names) -> bool:
    """Whether rank 0 has loaded the adapters that all ranks have trained."""
    if "adapters" not in names:
        return False
    model, loaded = names["model"], names.get("loaded")
    with zcompile.unshard(model):
        values = dict(model.named_parameters())
        pairs = [] if loaded is None else [(values[name], value) for name, value in loaded.named_parameters()]
        return bool(pairs) and all(torch.allclose(*each, atol=1e-6) for each in pairs)


def test_adapters_train_and_are_saved(ranks, tmp_path):
    pytest.importorskip("peft")
    first, second = ranks(2).run(rank_runs, "docs/peft.md", str(tmp_path))
    assert first["loaded"] and not second["loaded"]


def test_a_model_generates_and_is_exported(ranks, tmp_path):
    pytest.importorskip("transformers")
    first, second = ranks(2).run(rank_runs, "docs/generation.md", str(tmp_path))
    assert [each["texts"].shape[1] for each in (first, second)] == [4 + 5, 5 + 15]
    assert first["text"].shape[1] == 4 + 8 and second["text"] is None
    assert all(tensor.dtype == torch.bfloat16 for tensor in first["engine"].values()) and not second["engine"]


MESHES = python_blocks("docs/meshes.md")


def rank_runs_on_meshes(rank, world, folder, number):
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(MESHES[0], names)
        exec(MESHES[number], names)
    assert all(torch.isfinite(parameter.to_local()).all() for parameter in names["model"].parameters())
    return names["norm"].item()


@pytest.mark.parametrize("number", range(1, len(MESHES)))
def test_a_block_of_docs_meshes_runs(ranks, tmp_path, number):
    if "transformers" in MESHES[number]:
        pytest.importorskip("transformers", "5.20")
    norms = ranks(4).run(rank_runs_on_meshes, str(tmp_path), number)
    assert len(set(norms)) == 1 and norms[0] > 0
    assert (tmp_path / "saved/model.safetensors").exists() == ("save_pretrained" in MESHES[number])


ACCELERATE = python_blocks("docs/accelerate.md")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ACCELERATE)))
def test_a_block_of_docs_accelerate_runs(rank, world, tmp_path, number):
    from transformers import TrainingArguments

    from zcompile.integrations.huggingface import Trainer

    forget_accelerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.chdir(tmp_path)
        arguments = {"use_cpu": True, "max_steps": 2, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments("out", **arguments)
        args.device  # noqa: B018  # the process group
        model = tiny_llama()
        names = {"model": model, "args": args, "dataset": Sentences(8), "Trainer": Trainer}
        names["optimizer"] = torch.optim.AdamW(model.parameters()) if "optimizer" in ACCELERATE[number] else None
        exec(ACCELERATE[number], names | {"loader": DataLoader(Sentences(8), batch_size=2)})
    torch.distributed.barrier()
    assert (tmp_path / "trained/model.safetensors").exists() == ("trained" in ACCELERATE[number])


RECIPES = ROOT / "docs/recipes.md"
RECIPE_BLOCKS = python_blocks("docs/recipes.md")


def run_blocks(*words):
    """The names that the first block, and those blocks that hold one of `words`, leave behind."""
    names: dict = {}
    chosen = [block for block in RECIPE_BLOCKS[1:] if any(word in block for word in words)]
    assert len(chosen) == len(words)
    for block in (RECIPE_BLOCKS[0], *chosen):
        exec(compile(block, RECIPES.name, "exec"), names)
    return names


def recipe_unsharded(names, optimizer_class, steps):
    """The same training of the model on one rank: the model, its last loss, and its parameters after each step."""
    model, values = names["build"](), []
    optimizer = optimizer_class(model.parameters(), lr=1e-2)
    after = lambda: values.append([parameter.detach().clone() for parameter in model.parameters()])
    return model, names["train"](model, optimizer, steps=steps, after=after), values


def test_the_recipe_averages(rank, world):
    names = run_blocks("average")
    _, _, values = recipe_unsharded(names, torch.optim.AdamW, 3)
    expected = list(names["build"]().parameters())
    for after in values:
        expected = [old.detach().lerp(new, 0.1) for old, new in zip(expected, after)]
    for ours, theirs in zip(names["average"].parameters(), expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
        assert not ours.requires_grad
    assert names["average"](torch.ones(8, 64)).isfinite().all()


def test_the_recipe_of_torchtitan_runs(rank, world):
    names = run_blocks("titan")
    assert zcompile.stats(names["titan"])["gathered_bytes"]["bfloat16"] > 0
    assert all(parameter.dtype == torch.float32 for parameter in names["titan"].parameters())
    same_parameters(names["titan"], recipe_unsharded(names, torch.optim.AdamW, 3)[0], 0.05)  # it computes in bf16


def test_the_recipe_orthogonalizes(rank, world):
    names = run_blocks("muon_model")
    model = names["build"]()
    optimizers = [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2),
    ]
    names["train"](model, *optimizers)
    same_parameters(names["muon_model"], model, 1e-3)  # Muon multiplies in bf16
    _, states = get_state_dict(names["muon_model"], names["muon"])
    assert all(state["momentum_buffer"].full_tensor().any() for state in states["state"].values())


def test_the_recipe_steps_whole(rank, world):
    names = run_blocks("muon_model", "adafactor_model")
    model, _, _ = recipe_unsharded(names, torch.optim.Adafactor, 3)
    same_parameters(names["adafactor_model"], model)
    assert len(names["adafactor"].inner) == 2  # of four parameters


@pytest.mark.slow
@on_ranks(2, timeout=600, needs="torchao")
def test_torchao_keeps_states_of_shards_in_8_bits(rank, world):
    from torchao.optim import AdamW8bit

    names = run_blocks("AdamW8bit")
    _, loss, _ = recipe_unsharded(names, AdamW8bit, 2)
    torch.testing.assert_close(names["loss_8bit"], loss, rtol=1e-5, atol=0)
    states = [value for state in names["optimizer_8bit"].state.values() for value in state.values()]
    local = [getattr(value, "_local_tensor", value) for value in states]
    assert any(type(value).__name__ == "OptimState8bit" for value in local)
