"""A mixture under expert parallelism trains from a file, which one process made without the other ranks."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import Shard

import zcompile
from tests.support.artifacts import cache_in, compiler_counts, train
from tests.support.meshes import as_rank
from tests.support.parallel import WIDTH, Mixture, expert_parallel, token_loss
from zcompile.artifact.aot import lacking
from zcompile.artifact.program import make
from zcompile.compiler.backend import parse_options
from zcompile.state.sharded_model import state_of

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())

INPUTS = (torch.randn(2, 6, WIDTH),)


def mixture(inner="eager"):
    torch.manual_seed(0)
    return expert_parallel("cpu", inner, Mixture(1), shard=Shard(0), local=True)


def rank_loads(rank, world, path, folder):
    counters.clear()
    with cache_in(folder):
        model = zcompile.compile(mixture(), artifact=path, require=True)
        seen = train(model, rank, token_loss, 3)
        assert zcompile.stats(model)["compiled"] == f"loaded from {path}" and not compiler_counts()
        experts, dp = model.blocks[0].experts, state_of(model).mesh.get_group()
        experts.group = dp
        with pytest.raises(RuntimeError, match="a process group, was replaced"):
            token_loss(model, 0, rank)
        with pytest.raises(RuntimeError, match=r"made with another .*process group at zcompile: dimension 1 of mesh 1"):
            other = mixture()
            other.blocks[0].experts.group = dp
            token_loss(zcompile.compile(other, artifact=path, require=True), 0, rank)
    return seen


def rank_compiles(rank, world):
    return train(mixture("inductor"), rank, token_loss, 3)


@pytest.mark.slow
def test_a_mixture_trains_from_a_file_as_from_a_compile(ranks, inductor_cache, tmp_path):
    """Of four ranks, no other has the groups of the process that made the file."""
    path = tmp_path / "model.zc"
    with as_rank(1, 4):
        path.write_bytes(make(mixture(), parse_options({}), None, INPUTS, {}))
    assert ranks(4).run(rank_loads, path, tmp_path / "empty") == ranks(4).run(rank_compiles)
