"""A write to a gathered copy is lost: it raises once, names the parameter, and leaves it usable."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.models import Chain
from tests.support.ranks import on_ranks


class Writes(nn.Linear):
    """Writes to what it gathered in forward, if it is told to."""

    writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@on_ranks(2)
def test_a_lost_write_raises_once_and_changes_nothing(rank, world, inner):
    model = zcompile.shard(Chain(Writes(3, 4), nn.Linear(4, 2)))
    call = model if inner == "eager" else torch.compile(model, backend="zcompile", options={"inner": inner})
    x = torch.ones(1, 3)
    before = call(x).detach()
    model[0].writes = True
    with pytest.raises(RuntimeError, match=f"'0[.]weight' was modified in place .* on rank {rank}"):
        model(x)
    model[0].writes = False
    for _ in range(2):
        after = call(x)
        assert torch.equal(before, after)
        after.sum().backward()
    model[0].writes = True
    with pytest.raises(RuntimeError, match=r"'0[.]weight' was modified in place"):  # again, and again once
        model(x)
