"""The programs in docs run as they stand there."""

import re
from pathlib import Path

import pytest
import torch

import zcompile

DOCS = Path(__file__).resolve().parents[2] / "docs"


def program_of(page: str) -> str:
    """The Python block of a page."""
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    return program


def rank_runs(rank, world, page, folder):
    program = program_of(page).replace('"adapter"', repr(folder))
    names: dict = {}
    exec(compile(program, page, "exec"), names)
    return {name: names.get(name) for name in ("texts", "text", "engine")} | {"loaded": check_adapter(names)}


def check_adapter(names) -> bool:
    """Whether rank 0 has loaded the adapters that all ranks have trained."""
    if "adapters" not in names:
        return False
    model, loaded = names["model"], names.get("loaded")
    with zcompile.unshard(model):
        values = dict(model.named_parameters())
        return loaded is not None and all(
            torch.allclose(values[name], value, atol=1e-6) for name, value in loaded.named_parameters()
        )


def test_adapters_train_and_are_saved(ranks, tmp_path):
    pytest.importorskip("peft")
    first, second = ranks(2).run(rank_runs, "peft.md", str(tmp_path))
    assert first["loaded"] and not second["loaded"]


def test_a_model_generates_and_is_exported(ranks, tmp_path):
    pytest.importorskip("transformers")
    first, second = ranks(2).run(rank_runs, "generation.md", str(tmp_path))
    assert [each["texts"].shape[1] for each in (first, second)] == [4 + 5, 5 + 15]
    assert first["text"].shape[1] == 4 + 8 and second["text"] is None
    assert all(tensor.dtype == torch.bfloat16 for tensor in first["engine"].values()) and not second["engine"]
