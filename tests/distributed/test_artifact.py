"""A model that loads its compiled code from a file computes what a compile computes, and compiles nothing."""

import contextlib
import hashlib
import os
import subprocess
import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.distributed.tensor import Shard
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import zcompile
from tests.support import parallel
from tests.support.artifacts import Broken, cache_in, compiler_counts, loss_of, make_file, sharded, train
from tests.support.meshes import as_rank
from tests.support.ranks import slow_case
from zcompile.artifact.aot import lacking
from zcompile.artifact.file_format import decode
from zcompile.artifact.program import make
from zcompile.compiler.backend import parse_options
from zcompile.state.sharded_model import state_of

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """For two ranks, made by a process that is one of them and sees no other."""
    path = tmp_path_factory.mktemp("artifact") / "model.zc"
    make_file(path, 2)
    return path


@contextlib.contextmanager
def nothing_started():
    def fail(*args, **kwargs):
        raise AssertionError(f"a process was started: {args}")

    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((subprocess.Popen, "__init__"), (os, "fork"), (os, "posix_spawn")):
            patch.setattr(module, name, fail)
        yield


def rank_loads(rank, world, path, folder, autocast, how):
    """From the file, in an empty cache folder."""
    counters.clear()
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    probes = torch._inductor.config.patch({"cpp.vec_isa_ok": None})  # as without the variable of these tests
    with cache_in(folder), probes, nothing_started():
        model = zcompile.compile(sharded(**how), artifact=path, require=True, sha256=pin)
        seen = train(model, rank, autocast=autocast)
    return seen, compiler_counts(), zcompile.stats(model)["compiled"]


def rank_compiles(rank, world, folder, autocast, how):
    with cache_in(folder):
        model = sharded(**how)
        model.compile(backend="zcompile", fullgraph=True)
        seen = train(model, rank, autocast=autocast)
    return seen, zcompile.stats(model)["compiled"]


KINDS = {  # (model, loss, ranks that have one batch, ranks that compile)
    "whole": (sharded, loss_of, 1, "rank 0"),
    "blocks": (parallel.three_blocks, parallel.whole_loss, 1, "rank 0"),
    "parallel": (parallel.sequence_parallel, parallel.whole_loss, 2, "ranks 0, 1"),  # one for each half of the layers
}


def rank_compiles_once(rank, world, folder, path, kind):
    """Twice with an artifact: what was made of it, what trained, whether this rank compiled."""
    results, (make_model, loss, alike, _) = [], KINDS[kind]
    with cache_in(folder):
        for _ in range(2):
            torch.manual_seed(0)
            counters.clear()
            _clear_sharding_prop_cache()  # or else DTensors have the first model's mesh, which is equal
            model = make_model()
            zcompile.compile(model, artifact=path, blocks=model.blocks if kind == "blocks" else ())
            seen = train(model, rank // alike, loss)
            results.append((zcompile.stats(model)["compiled"], seen, "graph_break" in counters or "stats" in counters))
    return results


@pytest.mark.parametrize("kind, world", [("whole", 2), ("blocks", 2), slow_case("parallel", 4)])
def test_where_there_is_no_file_one_rank_of_each_position_compiles(ranks, inductor_cache, tmp_path, kind, world):
    path, makers = tmp_path / "new" / "model.zc", KINDS[kind][3]
    expected = ranks(2).run(rank_compiles, inductor_cache, False, {}) if kind == "whole" else None
    for rank, results in enumerate(ranks(world).run(rank_compiles_once, inductor_cache, path, kind)):
        (first, trained, traced), (second, again, traced_again) = results
        assert first == f"loaded: {makers} compiled it, because {path} was not there"
        assert second == f"loaded from {path}"
        assert trained == again == (expected[rank][0] if expected else again)
        assert traced == (str(rank) in makers) and not traced_again
    assert len(decode(path.read_bytes(), "model.zc").facts["programs"]) == (2 if kind == "parallel" else 1)


@pytest.mark.parametrize("owner", [0, 1])
def test_a_rank_without_the_file_gets_it_from_another(rank, world, inductor_cache, file, owner):
    model = zcompile.compile(sharded(), artifact=file if rank == owner else "/nowhere/model.zc", require=True)
    seen = train(model, rank)
    assert zcompile.stats(model)["compiled"].startswith("loaded from")
    assert seen == rank_compiles(rank, world, inductor_cache, False, {})[0]


def rank_has_damaged_file(rank, world, folder, paths, require):
    with cache_in(folder), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = zcompile.compile(sharded(), artifact=paths[rank], require=require)
        try:
            return train(model, rank), zcompile.stats(model)["compiled"], [str(each.message) for each in caught]
        except RuntimeError as error:
            return str(error)


def damaged(path, folder):
    copy = folder / "damaged.zc"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    copy.write_bytes(data)
    return copy


def test_a_file_that_is_damaged_on_one_rank_is_an_error_on_all(ranks, inductor_cache, file, tmp_path):
    for error in ranks(2).run(rank_has_damaged_file, inductor_cache, [file, damaged(file, tmp_path)], True):
        assert "is required and cannot be used. Rank 1:" in error and "do not match its checksum" in error


def test_a_file_that_is_damaged_on_one_rank_lets_all_compile_with_one_warning(ranks, inductor_cache, file, tmp_path):
    paths = [file, damaged(file, tmp_path)]
    expected = ranks(2).run(rank_compiles, inductor_cache, False, {})
    results = ranks(2).run(rank_has_damaged_file, inductor_cache, paths, False)
    for (seen, by, _), (trained, _) in zip(results, expected, strict=True):
        assert seen == trained
        assert by.startswith("compiled by this process: Rank 1:") and "do not match its checksum" in by
    told = [[text for text in texts if "every rank compiles" in text] for _, _, texts in results]
    assert [len(texts) for texts in told] == [1, 0]


def test_a_model_with_graph_breaks_is_compiled_by_every_rank(rank, world, tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = zcompile.compile(sharded(Broken), artifact=tmp_path / "model.zc")
        train(model, rank)
    how = zcompile.stats(model)["compiled"]
    assert how.startswith("compiled by this process") and "graph breaks" in how
    assert sum("every rank compiles" in str(each.message) for each in caught) == (rank == 0)
    assert not list(tmp_path.iterdir())


NARROW = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
CASES = [slow_case(1, False, {}), slow_case(4, False, {}), slow_case(2, True, {}), slow_case(2, False, NARROW)]


@pytest.mark.parametrize("world, autocast, how", [(2, False, {}), *CASES])
def test_training_from_a_file_is_bitwise_that_of_a_compile(ranks, inductor_cache, tmp_path, world, autocast, how):
    path, pool = tmp_path / "model.zc", ranks(world)
    make_file(path, world, autocast=autocast, **how)
    loaded = pool.run(rank_loads, path, tmp_path / "empty", autocast, how)
    compiled = pool.run(rank_compiles, inductor_cache, autocast, how)
    for (seen, counts, by), (expected, expected_by) in zip(loaded, compiled, strict=True):
        assert seen == expected
        assert (counts, by, expected_by) == ({}, f"loaded from {path}", "compiled by this process")


INPUTS = (torch.randn(2, 6, parallel.WIDTH),)


def mixture(inner="eager"):
    torch.manual_seed(0)
    return parallel.expert_parallel("cpu", inner, parallel.Mixture(1), shard=Shard(0), local=True)


def rank_loads_mixture(rank, world, path, folder):
    counters.clear()
    with cache_in(folder):
        model = zcompile.compile(mixture(), artifact=path, require=True)
        seen = train(model, rank, parallel.token_loss, 3)
        assert zcompile.stats(model)["compiled"] == f"loaded from {path}" and not compiler_counts()
        experts, dp = model.blocks[0].experts, state_of(model).mesh.get_group()
        experts.group = dp
        with pytest.raises(RuntimeError, match="a process group, was replaced"):
            parallel.token_loss(model, 0, rank)
        with pytest.raises(RuntimeError, match=r"is no longer process group at zcompile: dimension 1 of mesh 1"):
            other = mixture()
            other.blocks[0].experts.group = dp
            parallel.token_loss(zcompile.compile(other, artifact=path, require=True), 0, rank)
    return seen


def rank_compiles_mixture(rank, world):
    return train(mixture("inductor"), rank, parallel.token_loss, 3)


@pytest.mark.slow
def test_a_mixture_trains_from_a_file_as_from_a_compile(ranks, inductor_cache, tmp_path):
    """Of four ranks, no other has the groups of the process that made the file."""
    path = tmp_path / "model.zc"
    with as_rank(1, 4):
        path.write_bytes(make(mixture(), parse_options({}), None, INPUTS, {}))
    assert ranks(4).run(rank_loads_mixture, path, tmp_path / "empty") == ranks(4).run(rank_compiles_mixture)
