"""The Python blocks of docs/accelerate.md, as a reader would run them."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.huggingface import Sentences, forget_accelerate, tiny_llama
from tests.support.pages import python_blocks

pytestmark = pytest.mark.slow

BLOCKS = python_blocks("docs/accelerate.md")


def rank_runs(rank, world, folder, number):
    from transformers import TrainingArguments

    from zcompile.integrations.huggingface import Trainer

    forget_accelerate()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_USE_CPU", "true")
        patch.chdir(folder)
        arguments = {"use_cpu": True, "max_steps": 2, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments("out", **arguments)
        args.device  # noqa: B018  # the process group
        model = tiny_llama()
        names = {"model": model, "args": args, "dataset": Sentences(8), "Trainer": Trainer}
        names["optimizer"] = torch.optim.AdamW(model.parameters()) if "optimizer" in BLOCKS[number] else None
        exec(BLOCKS[number], names | {"loader": DataLoader(Sentences(8), batch_size=2)})


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_a_block_of_the_page_runs(ranks, tmp_path, number):
    ranks(2).run(rank_runs, str(tmp_path), number)
    trained = "trained" in BLOCKS[number]
    assert (tmp_path / "trained/model.safetensors").exists() == trained
