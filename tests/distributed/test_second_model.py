"""Models of one class share compiled code; what their options ask for holds for each of them."""

import pytest
import torch
from torch import nn

import zcompile
from tests.support.models import Chain
from tests.support.ranks import on_ranks
from tests.support.reference import compiled
from zcompile.compiler import backend
from zcompile.state.sharded_model import state_of


def layers():
    return Chain(nn.Linear(6, 6), nn.Linear(6, 6))


@on_ranks(2)
def test_a_second_model_of_a_class_gets_its_options(rank, world):
    """Options of a model whose class was compiled before with the same options."""
    for _ in range(2):
        model = compiled(layers(), options={"microbatch_cache_bytes": 12345, "transport": "gloo"})
        model(torch.ones(2, 6)).sum().backward()
        assert state_of(model).microbatches.cache_bytes == 12345
        assert state_of(model).wanted_transport == "gloo"


@on_ranks(2)
def test_other_options_of_a_second_model_of_a_class_act(rank, world):
    """Other options compile again."""
    buckets = []
    for bucket_bytes in (0, 1 << 20):
        model = compiled(layers(), options={"bucket_bytes": bucket_bytes})
        with torch.profiler.profile() as profiler:
            model(torch.ones(2, 6))
        names = {event.name.split(" (")[0] for event in profiler.events() if event.name.startswith("zcompile::gather ")}
        buckets.append(names)
    assert buckets[0] != buckets[1]


@on_ranks(2)
def test_the_program_of_a_second_model_of_a_class_is_compared(rank, world):
    first, second = (zcompile.shard(layers()) for _ in range(2))
    checked = []

    class Recorded:
        def check(self, lines):
            checked.append(lines)

    for model in (first, second):
        state_of(model).agreement = Recorded()
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
        for _ in range(2):
            model(torch.ones(2, 6))
    assert len(checked) == 2 and checked[0] == checked[1]
    assert "reads '0.weight' [6, 6] torch.float32" in checked[0][0].text


@pytest.mark.parametrize(
    "how",
    [{"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"inductor": {"triton.cudagraphs": True}}}],
)
def test_cuda_graphs_are_refused(how):
    model = torch.compile(nn.Linear(2, 2), backend="zcompile", **how)
    what = f" .mode '{how['mode']}'.*max-autotune-no-cudagraphs" if "mode" in how else ""
    with pytest.raises(Exception, match=f"CUDA graphs are not supported{what}"):
        model(torch.ones(1, 2))


def test_programs_say_nothing_of_folders(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    line = f'  File "{tmp_path}/package/model.py", line 3, in forward'
    assert backend._without_folder(line) == 'File "package/model.py", line 3, in forward'
    assert backend._without_folder('File "/elsewhere/model.py", line 3, in f') == 'File "model.py", line 3, in f'
    assert backend._without_folder("return self.weight * x") == "return self.weight * x"
