"""The Python blocks of docs/accelerate.md, as a reader would run them."""

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.huggingface import Sentences, forget_accelerate, tiny_llama
from tests.support.pages import python_blocks
from tests.support.ranks import on_ranks

pytestmark = pytest.mark.slow

BLOCKS = python_blocks("docs/accelerate.md")


@pytest.mark.parametrize("number", range(len(BLOCKS)))
@on_ranks(2)
def test_a_block_of_the_page_runs(rank, world, tmp_path, number):
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
        names["optimizer"] = torch.optim.AdamW(model.parameters()) if "optimizer" in BLOCKS[number] else None
        exec(BLOCKS[number], names | {"loader": DataLoader(Sentences(8), batch_size=2)})
    torch.distributed.barrier()
    assert (tmp_path / "trained/model.safetensors").exists() == ("trained" in BLOCKS[number])
