"""The Python blocks of docs/meshes.md and docs/accelerate.md, as a reader would run them."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.huggingface import Sentences, forget_accelerate, tiny_llama
from tests.support.pages import python_blocks
from tests.support.ranks import on_ranks

BLOCKS = python_blocks("docs/meshes.md")


def rank_runs(rank, world, folder, number):
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(BLOCKS[number], names)
    assert all(torch.isfinite(parameter.to_local()).all() for parameter in names["model"].parameters())
    return names["norm"].item()


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs(ranks, tmp_path, number):
    if "transformers" in BLOCKS[number]:
        pytest.importorskip("transformers", "5.20")
    norms = ranks(4).run(rank_runs, str(tmp_path), number)
    assert len(set(norms)) == 1 and norms[0] > 0
    assert (tmp_path / "saved/model.safetensors").exists() == ("save_pretrained" in BLOCKS[number])


ACCELERATE = python_blocks("docs/accelerate.md")


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(ACCELERATE)))
@on_ranks(2)
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
