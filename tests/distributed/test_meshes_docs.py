"""The Python blocks of docs/meshes.md, as a reader would run them."""

import pytest
import torch

from tests.support.pages import python_blocks

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
