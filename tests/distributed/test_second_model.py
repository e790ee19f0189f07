"""Models of one class share compiled code; what their options ask for holds for each of them."""

import functools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import zcompile
from tests.support.models import Chain, mean_square
from tests.support.ranks import TORCH
from tests.support.reference import compiled, pair, same_backward
from zcompile.compiler import backend
from zcompile.state.sharded_model import state_of

ACTIVATION = nn.GELU()
layers = lambda: Chain(nn.Linear(6, 6), nn.Linear(6, 6))


def test_a_second_model_of_a_class_gets_its_options(rank, world):
    """Options of a model whose class was compiled before with the same options."""
    for _ in range(2):
        model = compiled(layers(), options={"microbatch_cache_bytes": 12345, "transport": "gloo"})
        model(torch.ones(2, 6)).sum().backward()
        assert state_of(model).microbatches.cache_bytes == 12345
        assert state_of(model).wanted_transport == "gloo"


def test_other_options_of_a_second_model_of_a_class_act(rank, world):
    buckets = []
    for bucket_bytes in (0, 1 << 20):
        model = compiled(layers(), options={"bucket_bytes": bucket_bytes})
        with torch.profiler.profile() as profiler:
            model(torch.ones(2, 6))
        names = {event.name.split(" (")[0] for event in profiler.events() if event.name.startswith("zcompile::gather ")}
        buckets.append(names)
    assert buckets[0] != buckets[1]


def test_the_program_of_a_second_model_of_a_class_is_compared(rank, world):
    first, second = (zcompile.shard(layers()) for _ in range(2))
    checked = []
    for model in (first, second):
        state_of(model).agreement = SimpleNamespace(check=checked.append)
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
        for _ in range(2):
            model(torch.ones(2, 6))
    assert len(checked) == 2 and checked[0] == checked[1]
    assert "reads '0.weight' [6, 6] torch.float32" in checked[0][0].text


def test_programs_say_nothing_of_folders(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    line = f'  File "{tmp_path}/package/model.py", line 3, in forward'
    assert backend._without_folder(line) == 'File "package/model.py", line 3, in forward'
    assert backend._without_folder('File "/elsewhere/model.py", line 3, in f') == 'File "model.py", line 3, in f'
    assert backend._without_folder("return self.weight * x") == "return self.weight * x"


class Teaches(nn.Module):
    """Calls two sharded models, one of which is no module of this one."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.held = student, [teacher]

    def forward(self, x):
        return (self.student(x) - self.held[0](x)).square().mean()


# A compiled module of torch does not follow `requires_grad` of a module in a list of its own either.
@pytest.mark.parametrize(
    "compiles", [False, pytest.param(True, marks=pytest.mark.skipif(TORCH < (2, 13), reason="guards of torch 2.11"))]
)
@pytest.mark.parametrize("student_is_sharded", [False, True])
def test_a_model_that_another_one_calls_follows_its_parameters(rank, world, compiles, student_is_sharded):
    """After copies into them, and after they are frozen and trained in turns."""
    losses, grads = [], []
    for shard in (zcompile.shard, lambda model: model):
        torch.manual_seed(0)
        student, teacher = layers(), shard(layers())
        both = shard(Teaches(student, teacher)) if student_is_sharded else Teaches(shard(student), teacher)
        if compiles and shard is zcompile.shard:
            both.compile(backend="zcompile", options={"inner": "aot_eager"})
        losses.append([]), grads.append([])
        for step in range(4):
            teacher.requires_grad_(step % 2 == 1)
            loss = both(torch.full((2, 6), 1.0 + step))
            loss.backward()
            losses[-1].append(loss.item())
            grads[-1].append([each.grad is not None for each in teacher.parameters()])
            torch.optim.SGD(both.parameters(), lr=0.1).step()
            both.zero_grad(), teacher.zero_grad()
            with torch.no_grad():
                for mine, other in zip(teacher.parameters(), student.parameters(), strict=True):
                    mine.lerp_(other, 0.5)
    assert losses[0] == pytest.approx(losses[1], rel=1e-5) and grads[0] == grads[1]


def test_models_may_share_an_activation(rank, world):
    """As of a default argument. A call of it by an unsharded model, on one rank, starts no collective."""
    make = lambda: nn.Sequential(nn.Linear(600, 600), ACTIVATION, nn.Linear(600, 600))
    (first, expected), (second, _), probe = pair(make, zcompile.shard), pair(make, zcompile.shard), make()
    for _ in range(2):
        same_backward(rank, world, expected, first, mean_square(2, 600))
        if rank == 0:
            probe(torch.ones(2, 600))
    torch.testing.assert_close(second(torch.ones(2, 600)), first(torch.ones(2, 600)))


def test_scripts_must_have_no_parameters(rank, world):
    make = lambda script: nn.Sequential(nn.Linear(6, 6), torch.jit.script(script), nn.Linear(6, 6))
    reference, model = pair(functools.partial(make, nn.ReLU()), zcompile.shard)
    torch.testing.assert_close(model(torch.ones(2, 6)), reference(torch.ones(2, 6)))
    with pytest.raises(TypeError, match=rf"module '1' is a TorchScript module with parameters \(rank {rank}\)"):
        zcompile.shard(make(nn.Linear(6, 6)))
