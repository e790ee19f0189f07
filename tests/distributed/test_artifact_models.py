"""Models of Hugging Face, dense and mixtures, train from a file as from a compile, bit by bit."""

import pytest
import torch
from torch._dynamo.utils import counters

import zcompile
from tests.support.architectures import hugging_face
from tests.support.artifacts import STEPS, cache_in, train
from tests.support.meshes import as_rank
from tests.support.models import batch
from zcompile.artifact.aot import lacking
from zcompile.artifact.program import make
from zcompile.compiler.backend import parse_options

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


def sharded(name):
    torch.manual_seed(0)
    return zcompile.shard(hugging_face(name))


def call_of(step, rank):
    tokens = batch(step, rank)
    return {"input_ids": tokens, "labels": tokens, "use_cache": False}


def rank_trains(rank, world, name, folder, path):
    """Losses and gradients, from the file at `path`, or without one if it is None."""
    counters.clear()
    with cache_in(folder):
        model = sharded(name)
        if path is None:
            model.compile(backend="zcompile", fullgraph=True)
        else:
            zcompile.compile(model, artifact=path, require=True)
        seen = train(model, rank, lambda model, step, rank: model(**call_of(step, rank)).loss)
    return seen, bool(counters["stats"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "qwen3_moe", "deepseek_v3"])
def test_a_model_of_hugging_face_trains_from_a_file(ranks, tmp_path, name):
    path, cache = tmp_path / "model.zc", tmp_path / "cache"
    with cache_in(cache), as_rank(0, 2):
        path.write_bytes(make(sharded(name), parse_options(None), None, (), call_of(0, 0)))
    loaded = ranks(2).run(rank_trains, name, tmp_path / "empty", path)
    compiled = ranks(2).run(rank_trains, name, cache, None)
    for (seen, traced), (expected, traced_otherwise) in zip(loaded, compiled, strict=True):
        assert seen == expected and len(seen) > STEPS
        assert traced_otherwise and not traced
