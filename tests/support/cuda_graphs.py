"""CUDA graphs in tests: ways to train, and a stand-in without a GPU, whose replay calls the code again."""

import contextlib
import itertools

import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.reference import finish_step, over
from zcompile import _C
from zcompile.compiler import inductor
from zcompile.compiler.cuda_graphs import CapturedCode
from zcompile.state.sharded_model import state_of

STEPS = 12


class CodeOnCpu(CapturedCode):
    """Captures by keeping what the code was called with, and what it returned."""

    def __init__(self, code, *args):
        super().__init__(self.call, *args, make_graph=lambda: GraphOnCpu(self))
        self.original, self.last = code, None

    def call(self, inputs):
        given = [detached(value) for value in inputs]
        results = self.original(inputs)
        self.last = given, [detached(value) for value in results]
        return results


def detached(value):
    """The same memory, and no leaf, which would hold its model."""
    return value.detach() if isinstance(value, torch.Tensor) else value


class GraphOnCpu:
    """Replays what a `CodeOnCpu` called while this was captured."""

    def __init__(self, code):
        self.code, self.is_new = code, True

    @contextlib.contextmanager
    def capture(self):
        yield
        (self.inputs, self.results), self.code.last = self.code.last, None

    def after_last(self):
        """There is one stream."""
        return contextlib.nullcontext()

    def executable(self):
        return 0

    def replay(self):
        if self.is_new:  # the capture has computed
            self.is_new = False
            return
        _C.note_nothing()
        try:
            results = self.code.original(list(self.inputs))
        finally:
            _C.note_again()
        for kept, result in zip(self.results, results, strict=True):
            if isinstance(kept, torch.Tensor) and kept.data_ptr() != result.data_ptr():
                kept.copy_(result)


@contextlib.contextmanager
def graphs_on_cpu():
    """Code that is compiled in the block, for CUDA graphs, is captured by stand-ins."""
    names = {"CapturedCode": CodeOnCpu, "_obstacle_to_capture": lambda gm: ""}
    before = {name: getattr(inductor, name) for name in names}
    for name, value in names.items():
        setattr(inductor, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(inductor, name, value)


class Noisy(nn.Module):
    """Layers with dropout and running means; its loss and its activations are results."""

    def __init__(self, widths=(16, 16, 16)):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(first, then) for first, then in itertools.pairwise((16, *widths)))
        self.norm, self.dropout = nn.BatchNorm1d(widths[-1]), nn.Dropout(0.1)

    def forward(self, x):
        for layer in self.layers:
            x = self.dropout(torch.relu(layer(x)))
        x = self.norm(x)
        return x.square().mean(), x


class Branch(nn.Module):
    """A graph break, so two graphs of which the second reads results of the first."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        x = self.second(x.relu()) + x
        return x.square().mean(), x


class Pieces(Branch):
    """Three graphs. The third reads a result of the first, and so does the second."""

    def forward(self, x):
        x = self.first(x)
        torch._dynamo.graph_break()
        y = self.second(x.relu().square()).relu()
        torch._dynamo.graph_break()
        return (y * x).square().mean(), x


def wide():
    """Parameters that copy engines move; at 2 ranks, the own piece of one has a copy of its own."""
    return Noisy((2049, 2051, 515, 16))


def sharded(device, captured=True, make=Noisy, transport=None, **inductor):
    """`transport`: one of the runtime's names, if it is not to be chosen. `inductor`: further options of Inductor."""
    torch.manual_seed(0)
    model = zcompile.shard(make().to(device))
    if transport:
        over(transport, model)
    # Reductions over dynamic sizes would be tuned, and then add up in another order than those of the model beside it.
    options = {"cuda_graphs": captured, "inductor": {"deterministic": True, **inductor}}
    model.compile(backend="zcompile", options=options)
    return model


def batches(device, rank):
    """A function: (step, rows) -> a batch of this rank."""
    seeded = lambda step: torch.Generator().manual_seed(99 * step + rank)
    return lambda step, rows=4: torch.randn(rows, 16, generator=seeded(step)).to(device)


def counts(model):
    """Graphs and replays."""
    found = zcompile.stats(model)["cuda_graphs"]
    return found["graphs"], found["replays"]


def trained(device, rank, captured, train, make=Noisy, transport=None, steps=STEPS):
    """What `train(model, optimizer, batch, step)` returned in each step, the parameters, and what the runtime noted."""
    torch._dynamo.reset()  # it remembers which sizes changed
    captures = graphs_on_cpu() if device == "cpu" else contextlib.nullcontext()
    keeps = train is kept_graph  # Inductor's cache has code of these models that writes to donated buffers
    with captures, torch._functorch.config.patch(donated_buffer=not keeps):
        model = sharded(device, captured, make, transport, size_asserts=not keeps)  # a part of the cache's key
        runtime = state_of(model).runtime
        before = runtime.order_digests()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        torch.manual_seed(1)
        results = [train(model, optimizer, batches(device, rank), step) for step in range(steps)]
    noted = zcompile.stats(model)
    for name in ("peak_unsharded_bytes", "transport_bytes", "transport_reason", "cuda_graphs", "compiled"):
        del noted[name]
    started = [new[0] - old[0] for new, old in zip(runtime.order_digests(), before, strict=True)]
    order = [text for _, _, text in runtime.order() if text][-min([*started, 60]) :]
    return model, results, [*(p.to_local() for p in model.parameters()), *model.buffers()], noted, started, order


def same_as_uncaptured(device, rank, train, make=Noisy, transport=None, steps=STEPS):
    """Training with graphs equals training without, bit by bit. Returns the model with graphs."""
    model, *ours = trained(device, rank, True, train, make, transport, steps)
    _, *theirs = trained(device, rank, False, train, make, transport, steps)
    torch.testing.assert_close(ours[:2], theirs[:2], rtol=0, atol=0, equal_nan=True)
    assert ours[2:] == theirs[2:], (ours[2:], theirs[2:])
    return model


def plain(model, optimizer, batch, step):
    return finish_step(optimizer, model(batch(step))[0])


def clipped_by_schedule(model, optimizer, batch, step):
    optimizer.param_groups[0]["lr"] = 1e-2 / (step + 1)
    loss, _ = model(batch(step))
    loss.backward()
    norm = zcompile.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad(set_to_none=step % 3 > 0)
    return loss.detach(), norm


def two_backwards(model, optimizer, batch, step):
    model(batch(100 + step))[0].backward()
    return finish_step(optimizer, model(batch(step))[0])


def in_accumulate(model, optimizer, batch, step):
    with zcompile.accumulate(model):
        for i in range(2):
            model(batch(100 * i + step))[0].backward()
    optimizer.step()
    optimizer.zero_grad()


def in_accumulate_at_times(model, optimizer, batch, step):
    if step % 4 == 1:
        in_accumulate(model, optimizer, batch, step)
    return plain(model, optimizer, batch, step)


def two_lengths(model, optimizer, batch, step):
    model(batch(100 + step, rows=4 + 2 * step % 5))[0].backward()
    return finish_step(optimizer, model(batch(step, rows=4 + step % 3))[0])


def without_gradients(model, optimizer, batch, step):
    with torch.no_grad():
        loss, hidden = model(batch(step))
        return loss, hidden.square().sum()


def two_forwards_first(model, optimizer, batch, step):
    first, second = model(batch(step)), model(batch(100 + step))
    finish_step(optimizer, first[0] + second[1].mean())
    return first[1].detach(), second[0].detach()


def results_that_last(model, optimizer, batch, step, kept=[]):  # noqa: B006  from step to step
    loss, hidden = model(batch(step))
    kept.append((loss.detach(), hidden.detach()[:, 1:]))
    finish_step(optimizer, loss)
    return [kept.pop() for _ in range(STEPS)] if step == STEPS - 1 else None


def evaluated_in_between(model, optimizer, batch, step):
    loss, _ = model(batch(step))
    model.eval()
    with torch.no_grad():
        value, _ = model(batch(100 + step))
    model.train()
    finish_step(optimizer, loss)
    return value


def frozen_later(model, optimizer, batch, step):
    model.layers[0].weight.requires_grad_(step < 5 or step > 8)
    return plain(model, optimizer, batch, step)


def kept_graph(model, optimizer, batch, step):
    loss, _ = model(batch(step))
    if step % 4 == 3:
        loss.backward(retain_graph=True)
    return finish_step(optimizer, loss)


def transport_changed(model, optimizer, batch, step):
    if step == 6:  # to another of the same kind: nothing that was captured or observed is of it
        name = zcompile.stats(model)["transport"]
        over(name if "p2p" in name else "c10d", model)
    return plain(model, optimizer, batch, step)


def lengths_of_one_rank(model, optimizer, batch, step):
    """Rank 0 replays one graph; the others capture one for each length, and run some steps uncaptured."""
    return finish_step(optimizer, model(batch(step, rows=4 + step % 3 * min(dist.get_rank(), 1)))[0])


def same_batch_for_a_while(model, optimizer, batch, step, made={}):  # noqa: B006  the same tensor in several steps
    return finish_step(optimizer, model(made.setdefault((step // 5, id(model)), batch(step // 5)))[0])


TRAINERS = [
    clipped_by_schedule, two_backwards, in_accumulate, two_forwards_first, results_that_last, evaluated_in_between,
    in_accumulate_at_times, two_lengths,
    frozen_later, kept_graph, transport_changed, lengths_of_one_rank, same_batch_for_a_while,
]  # fmt: skip
