"""A model that loads its compiled code from a file computes what a compile computes, and compiles nothing."""

import contextlib
import os
import subprocess

import pytest
from torch._dynamo.utils import counters

import zcompile
from tests.support.artifacts import cache_in, compiler_counts, make_file, sharded, train


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A cache folder that all compiles of this file share, those on ranks too."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        with cache_in(folder):
            yield folder


@pytest.fixture(scope="module")
def file(cache, tmp_path_factory):
    """For two ranks, made by a process that is one of them and sees no other."""
    path = tmp_path_factory.mktemp("artifact") / "model.zc"
    make_file(path, 2)
    return path


@contextlib.contextmanager
def nothing_started():
    """Whoever starts a process fails."""

    def fail(*args, **kwargs):
        raise AssertionError(f"a process was started: {args}")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((subprocess.Popen, "__init__"), (os, "fork"), (os, "posix_spawn")):
            patch.setattr(module, name, fail)
        yield


def rank_loads(rank, world, path, folder, autocast, how):
    """From the file, in an empty cache folder."""
    os.environ.pop("TORCHINDUCTOR_VEC_ISA_OK", None)
    counters.clear()
    with cache_in(folder), nothing_started():
        model = zcompile.compile(sharded(**how), artifact=path, require=True)
        seen = train(model, rank, autocast)
    return seen, compiler_counts(), zcompile.stats(model)["compiled"]


def rank_compiles(rank, world, folder, autocast, how):
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    with cache_in(folder):
        model = sharded(**how)
        model.compile(backend="zcompile", fullgraph=True)
        seen = train(model, rank, autocast)
    return seen, zcompile.stats(model)["compiled"]


def check(pool, path, cache, tmp_path, autocast=False, **how):
    loaded = pool.run(rank_loads, path, tmp_path / "empty", autocast, how)
    compiled = pool.run(rank_compiles, cache, autocast, how)
    for (seen, counts, by), (expected, expected_by) in zip(loaded, compiled, strict=True):
        assert seen == expected
        assert counts == {}
        assert by == f"loaded from {path}"
        assert expected_by == "compiled by this process"


def test_training_from_a_file_is_bitwise_that_of_a_compile_and_compiles_nothing(ranks, cache, file, tmp_path):
    check(ranks(2), file, cache, tmp_path)
