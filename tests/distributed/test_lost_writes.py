"""A write to a gathered copy is lost: it raises once, names the parameter, and leaves it usable."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zcompile
from tests.support.models import Chain
from tests.support.reference import compiled


class Writes(nn.Linear):
    writes = False

    def forward(self, x):
        if self.writes:
            with torch.no_grad():
                self.weight.mul_(2)
        return super().forward(x)


@pytest.mark.parametrize("shape", [(2,), (2, 1)])  # errors have global ranks, not those of a mesh dimension
@pytest.mark.parametrize("inner, units", [("eager", []), ("eager", [Writes]), ("aot_eager", [])])
def test_a_lost_write_raises_once_and_changes_nothing(rank, world, inner, units, shape):
    model = zcompile.shard(Chain(Writes(3, 4), nn.Linear(4, 2)), init_device_mesh("cpu", shape), units=units)
    call = model if inner == "eager" else torch.compile(model, backend="zcompile", options={"inner": inner})
    before = call(x := torch.ones(1, 3)).detach()
    model[0].writes = True
    with pytest.raises(RuntimeError, match=f"'0[.]weight' was modified in place .* on rank {rank}"):
        model(x)
    model[0].writes = False
    for _ in range(2):
        after = call(x)
        assert torch.equal(before, after)
        after.sum().backward()
    model[0].writes = True
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"'0[.]weight' was modified in place"):  # again, once
        model(x)


class WritesToTheFirst(nn.Linear):
    """Writes to the first of two copies that it gathers, after it gathered the second."""

    def forward(self, x):
        first = self.weight
        y = nn.functional.linear(x, self.weight, self.bias)
        with torch.no_grad():
            first.zero_()
        return y


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_write_to_a_copy_that_was_gathered_again_raises(rank, world, inner):
    model = zcompile.shard(Chain(WritesToTheFirst(3, 4), nn.Linear(4, 2)))
    call = model if inner == "eager" else torch.compile(model, backend="zcompile", options={"inner": inner})
    with pytest.raises(RuntimeError, match=r"parameter '0[.]weight' .*in place"):
        for _ in range(2):
            call(torch.ones(1, 3))


@pytest.mark.parametrize("write", ["in place", "by an optimizer"])
def test_a_parameter_that_changes_before_backward_is_an_error(rank, world, write):
    """Compiled code gathers it again in backward; torch refuses this for a saved tensor, too."""
    model = compiled(Chain(nn.Linear(3, 4), nn.Linear(4, 2)), options={"save_for_backward_bytes": 0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    first, second = model(torch.ones(1, 3)).sum(), model(torch.ones(1, 3)).sum()
    second.backward()
    if write == "in place":
        with torch.no_grad():
            model[1].weight.mul_(2)
    else:
        optimizer.step()
    with pytest.raises(RuntimeError, match=rf"'1[.]weight' was modified between forward and backward on rank {rank}"):
        first.backward()
    optimizer.zero_grad()
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()


class OnAnotherStream(nn.Linear):
    """Reads a view of its weight on a stream that forward enters: Dynamo marks the nodes inside as this mark does."""

    def forward(self, x):
        weight = self.weight
        return self.product(x, weight.t())

    def product(self, x, weight):
        with torch.fx.traceback.annotate({"stream": 1}):
            return torch.relu(x) @ weight


def test_a_read_on_a_stream_that_forward_enters_is_refused(rank, world):
    """Only the current stream waits until a parameter is gathered. The remedy is run, too."""
    model = Chain(OnAnotherStream(3, 4), nn.Linear(4, 2))
    x = torch.ones(1, 3)
    expected = model(x)
    zcompile.shard(model)
    call = torch.compile(model, backend="zcompile", options={"inner": "aot_eager"})
    with pytest.raises(RuntimeError, match=r"parameter '0[.]weight' on a stream") as raised:
        call(x)
    assert "torch.relu(x) @ weight" in str(raised.value)
    model[0].product = torch.compiler.disable(model[0].product)
    assert torch.equal(call(x), expected)


def test_an_exported_parameter_raises_and_its_copy_does_not(rank, world):
    model, seen = zcompile.shard(nn.Sequential(nn.Linear(600, 600))), []
    handle = model[0].register_forward_hook(lambda each, *_: seen.append(each.weight.detach().clone().numpy()))
    model(torch.ones(1, 600))
    assert (model[0].weight.full_tensor().detach().numpy() == seen[0]).all()
    handle.remove()
    model[0].register_forward_hook(lambda each, *_: seen.append(each.weight.detach().numpy()))
    with pytest.raises(RuntimeError, match=rf"parameter '0[.]weight' to NumPy on rank {rank}"):
        model(torch.ones(1, 600))
