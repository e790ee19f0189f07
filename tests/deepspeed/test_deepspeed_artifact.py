"""With the flag, `"artifact"` takes compiled code from a file, as `zcompile.compile` does."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from tests.support.artifacts import cache_in
from tests.support.deepspeed import assert_taken_over, make_engine
from zcompile.artifact.aot import lacking
from zcompile.integrations.deepspeed.config import options_of

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x):
        return self.b(self.a(x).relu()).square().mean()


def rank_trains(rank, world, folder, path):
    counters.clear()
    flag = {"inner": "inductor"} | ({} if path is None else {"artifact": str(path)})
    with cache_in(folder):
        engine, losses = make_engine(flag, Small()), []
        for step in range(4):
            loss = engine(torch.randn(2, 5, generator=torch.Generator().manual_seed(10 * step + rank)))
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


@pytest.mark.parametrize(
    "block, reason",
    [({"artifact": 3}, "must be the path of a file"), ({"artifact": "a.zc", "inner": "aot_eager"}, "inner='inductor'")],
)
def test_blocks_that_cannot_work_are_refused(block, reason):
    config = {"zero_optimization": {"stage": 3, "zcompile": {"enabled": True, **block}}}
    with pytest.raises(ValueError, match=reason):
        options_of(config)
