"""The programs in docs/recipes.md run as they stand there, one after the other."""

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import zcompile
from tests.support.pages import ROOT, python_blocks
from tests.support.ranks import on_ranks
from tests.support.reference import same_parameters

PAGE = ROOT / "docs/recipes.md"
BLOCKS = python_blocks("docs/recipes.md")


def run_blocks(*words):
    """The names that the first block, and those blocks that hold one of `words`, leave behind."""
    names: dict = {}
    chosen = [block for block in BLOCKS[1:] if any(word in block for word in words)]
    assert len(chosen) == len(words)
    for block in (BLOCKS[0], *chosen):
        exec(compile(block, PAGE.name, "exec"), names)
    return names


def unsharded(names, optimizer_class, steps):
    """The same training of the model on one rank, and its losses."""
    model = names["build"]()
    optimizer, losses, values = optimizer_class(model.parameters(), lr=1e-2), [], []
    for step in range(steps):
        loss = model(names["batch"](step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        values.append([parameter.detach().clone() for parameter in model.parameters()])
    return model, losses, values


def rank_averages(rank, world):
    names = run_blocks("average")
    _, _, values = unsharded(names, torch.optim.AdamW, 3)
    expected = list(names["build"]().parameters())
    for after in values:
        expected = [old.detach().lerp(new, 0.1) for old, new in zip(expected, after)]
    for ours, theirs in zip(names["average"].parameters(), expected, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
        assert not ours.requires_grad
    assert names["evaluated"].isfinite()


def rank_runs_others(rank, world):
    names = run_blocks("titan", "get_model_state_dict")
    assert zcompile.stats(names["titan"])["gathered_bytes"]["bfloat16"] > 0
    assert all(parameter.dtype == torch.float32 for parameter in names["titan"].parameters())
    assert bool(names["whole"]) == (rank == 0) and names["norm"] > 0
    model, _, _ = unsharded(names, torch.optim.AdamW, 1)
    for name, value in names["whole"].items():
        assert value.shape == model.state_dict()[name].shape


def rank_orthogonalizes(rank, world):
    names = run_blocks("class DistributedMuon", "muon_model")
    model = names["build"]()
    optimizers = [
        torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=0.02),
        torch.optim.AdamW([p for p in model.parameters() if p.ndim != 2], lr=1e-2),
    ]
    for step in range(3):
        model(names["batch"](step)).square().mean().backward()
        for each in optimizers:
            each.step()
            each.zero_grad()
    same_parameters(names["muon_model"], model, 1e-3)  # Muon multiplies in bf16
    _, states = get_state_dict(names["muon_model"], names["muon"])
    assert all(state["momentum_buffer"].full_tensor().any() for state in states["state"].values())


def rank_steps_whole(rank, world):
    names = run_blocks("class StepsWhole", "adafactor_model")
    model, _, _ = unsharded(names, torch.optim.Adafactor, 3)
    same_parameters(names["adafactor_model"], model)
    assert len(names["adafactor"].inner) == 2  # of four parameters


@pytest.mark.parametrize("program", [rank_averages, rank_runs_others, rank_orthogonalizes, rank_steps_whole])
def test_a_recipe_runs(ranks, program):
    ranks(2).run(program)


@pytest.mark.slow
@on_ranks(2, timeout=600, needs="torchao")
def test_torchao_keeps_states_of_shards_in_8_bits(rank, world):
    from torchao.optim import AdamW8bit

    names = run_blocks("AdamW8bit")
    _, losses, _ = unsharded(names, AdamW8bit, 2)
    assert names["losses_8bit"] == pytest.approx(losses, rel=1e-5)
    states = [value for state in names["optimizer_8bit"].state.values() for value in state.values()]
    local = [getattr(value, "_local_tensor", value) for value in states]
    assert any(type(value).__name__ == "OptimState8bit" for value in local)


def test_the_page_is_short():
    assert len(PAGE.read_text().splitlines()) <= 225
