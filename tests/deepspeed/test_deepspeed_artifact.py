"""With the flag, `"artifact"` takes compiled code from a file, as `zcompile.compile` does."""

import pytest
from torch import nn
from torch._dynamo.utils import counters

from tests.support.artifacts import cache_in
from tests.support.deepspeed import assert_taken_over, make_engine
from tests.support.models import normal
from zcompile.artifact.aot import lacking

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


def rank_trains(rank, world, folder, path):
    counters.clear()
    flag = {"inner": "inductor"} | ({} if path is None else {"artifact": str(path)})
    with cache_in(folder):
        engine, losses = make_engine(flag, nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))), []
        for step in range(4):
            loss = engine(normal(step, rank, 2, 5)).square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        assert_taken_over(engine)
        compiled = engine.zcompile.state.provenance.compiled
        engine.destroy()
    return losses, compiled, bool(counters["stats"])


@pytest.mark.slow
def test_an_engine_loads_what_an_earlier_one_compiled(ranks, inductor_cache, tmp_path):
    path, cache = tmp_path / "model.zc", inductor_cache
    expected = ranks(2).run(rank_trains, cache, None)
    first = ranks(2).run(rank_trains, cache, path)
    second = ranks(2).run(rank_trains, tmp_path / "empty", path)
    for (losses, by, _), (one, by_one, _), (two, by_two, traced) in zip(expected, first, second, strict=True):
        assert losses == one == two
        assert (by, by_two, traced) == ("compiled by this process", f"loaded from {path}", False)
        assert by_one == f"loaded: rank 0 compiled it, because {path} was not there"
