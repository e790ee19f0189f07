"""A sharded model is freed with its last reference, and what outlives it stays usable or says what is wrong."""

import contextlib
import gc
import threading
import time
import weakref

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import zcompile
from tests.support.mixtures import EXPERTS, WIDTH, MixtureModel, StackedExperts
from tests.support.models import Chain, mean_square
from tests.support.process import no_collector, status
from tests.support.raising import Fault
from tests.support.ranks import Ranks, on_ranks, slow_case
from tests.support.reference import close, compiled, losses_of, pair
from tests.support.time_limits import scaled
from tests.support.unit_chains import Chain as UnitChain
from tests.support.unit_chains import Part, chain_loss, inputs, make_chain, with_units
from zcompile.compiler.backend import compile_graph
from zcompile.state.sharded_model import state_of

ops = torch.ops.zcompile


def make_model(blocks=3, width=16):
    return Chain(*(layer for _ in range(blocks) for layer in (nn.Linear(width, width), nn.LayerNorm(width))))


loss_of = mean_square(4, 16)


def train_step(model, rank):
    losses_of(model, loss_of, rank, 1, torch.optim.SGD(model.parameters(), lr=0.1))


def references(model):
    state = state_of(model)
    things = {"state": state, "runtime": state.runtime}
    things |= {f"module {name}": module for name, module in model.named_modules()}
    things |= {f"parameter {name}": parameter for name, parameter in model.named_parameters()}
    things |= {f"leaf {name}": sharded.leaf for name, sharded in state.parameters.items()}
    return {name: weakref.ref(thing) for name, thing in things.items()}


def alive(weak):
    """What is left of a model. The thread that compares ranks holds the runtime while it does, once a second."""
    deadline = time.monotonic() + scaled(10)
    while (left := [name for name, reference in weak.items() if reference() is not None]) == ["runtime"]:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return left


@pytest.mark.parametrize("in_circles", [False, True])
def test_a_model_is_freed_with_its_last_reference(rank, world, in_circles):
    """Or by the garbage collector, if attributes of modules and parameters make circles."""
    with no_collector():
        model = zcompile.shard(make_model())
        for each in [*model.modules(), *model.parameters()] if in_circles else ():
            each.root = [model]
        train_step(model, rank)
        weak = references(model)
        model = each = None
        if in_circles:
            gc.collect()
        assert not alive(weak), alive(weak)


@pytest.mark.parametrize("inner, limit", [("aot_eager", None), ("aot_eager", "1 GB"), ("inductor", "1 GB")])
def test_compiled_code_does_not_hold_a_model(rank, world, inner, limit):
    options, codes = {"inner": inner, "memory_limit": limit}, []
    model = zcompile.shard(make_model(blocks=1))
    model.compile(backend=lambda *graph: codes.append(compile_graph(*graph, options=options)) or codes[-1])
    train_step(model, rank)
    weak = references(model)
    del model
    gc.collect()
    assert codes and not alive(weak), alive(weak)


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_a_loss_that_outlives_its_model_gives_gradients(rank, world, prepare):
    reference, model = pair(make_model, prepare)
    train_step(model, rank)  # gathers of later steps begin from the optimizer's parameters
    reference.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    parameters, weak = dict(model.named_parameters()), references(model)
    loss = loss_of(model, 0, rank)
    del model
    gc.collect()
    loss.backward()
    (sum(loss_of(reference, 0, other) for other in range(world)) / world).backward()
    for name, theirs in reference.named_parameters():
        close(parameters[name].grad, theirs.grad, 2e-5, name)
    del loss, parameters
    torch._dynamo.reset()
    gc.collect()
    assert not alive(weak), alive(weak)


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_outlives_its_model_and_does_not_hold_it(rank, world, fused):
    model = zcompile.shard(make_model())
    optimizer = (torch.optim.AdamW if fused else torch.optim.Adam)(model.parameters(), lr=0.1, fused=fused)
    if fused:
        zcompile.fuse_optimizer(model, optimizer)
    loss_of(model, 0, rank).backward()
    optimizer.step()
    loss_of(model, 0, rank).backward()
    parameters, weak = list(model.parameters()), references(model)
    before = [parameter.to_local().clone() for parameter in parameters]
    del model
    gc.collect()
    left = alive(weak)
    assert all(name.startswith("parameter") for name in left), left
    optimizer.step()
    optimizer.zero_grad()
    assert all(not torch.equal(a, b.to_local()) for a, b in zip(before, parameters, strict=True) if a.numel())


def test_a_shard_of_a_freed_model_is_refused(rank, world):
    model = zcompile.shard(nn.Linear(8, 8))
    leaf = model.__dict__["_zcompile_leaf_weight"].detach()
    started = ops.gather_start(leaf, [8, 8], torch.float32)
    weak = references(model)
    del model
    gc.collect()
    assert not alive(weak), alive(weak)
    with pytest.raises(RuntimeError, match="or its model was freed"):
        ops.gather_wait(started)
    with pytest.raises(RuntimeError, match="Was the model freed"):
        ops.gather(leaf, [8, 8], torch.float32)


def test_a_model_is_freed_in_another_thread(rank, world):
    """The last reference goes in a thread while this one runs another model's step."""
    other = zcompile.shard(make_model())
    for _ in range(5):
        model = zcompile.shard(make_model())
        train_step(model, rank)
        weak, box = references(model), [model]
        del model
        thread = threading.Thread(target=box.clear)
        thread.start()
        train_step(other, rank)
        thread.join()
        gc.collect()
        assert not alive(weak), alive(weak)


def rank_makes_many(rank, world, few, many, prepare):
    """(resident bytes, threads) when `few` and `many` models were made, trained a step and deleted."""
    counts = []
    for i in range(1, many + 1):
        model = prepare(make_model(2, 64))
        mean_square(4, 64)(model, 0, rank).backward()
        torch.optim.AdamW(model.parameters()).step()
        del model
        torch._dynamo.reset()
        gc.collect()
        if i in (few, many):
            counts.append((1024 * status("VmRSS"), status("Threads")))
    return counts


def growth(ranks, few, many, prepare):
    """Resident bytes that the models from the `few`th to the `many`th left, on the rank where they are most."""
    grown = []
    counts = ranks(2).run(rank_makes_many, few, many, prepare, timeout=600)
    for (before, threads_before), (after, threads_after) in counts:
        assert threads_after <= threads_before
        grown.append(after - before)
    return max(grown)


@pytest.mark.parametrize("few, many", [(10, 30), slow_case(50, 200)])
def test_models_that_come_and_go_take_no_memory_and_no_threads(ranks, few, many):
    """Each model has 68 kB of parameters and as much again in optimizer states, and has 40 kB of Python objects."""
    assert growth(ranks, few, many, zcompile.shard) < (many - few) * 10_000 + 4_000_000


def unsharded(model):
    model.compile(backend="aot_eager")
    return model


@pytest.fixture
def own_ranks():
    """Ranks that a test alone has, with the environment that it gives them."""
    own = Ranks(2)
    yield own
    own.stop()


@pytest.mark.slow
def test_compiled_models_that_come_and_go_take_what_dynamo_keeps(monkeypatch, own_ranks):
    """Dynamo keeps guards and a log of each compile: guards of sharded models watch 29 living objects, others 13."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    theirs, ours = (growth(lambda world: own_ranks, 50, 200, prepare) for prepare in (unsharded, compiled))
    assert ours < 3 * theirs + 4_000_000


def rank_records_collectives(rank, world, many):
    """How many of `many` models' graphs are alive."""
    for _ in range(many):
        train_step(compiled(make_model(1)), rank)
        torch._dynamo.reset()
        gc.collect()
    return sum(isinstance(thing, torch.fx.GraphModule) for thing in gc.get_objects())


@pytest.mark.parametrize("recorded", [0, slow_case(2000)])
def test_nothing_holds_graphs_of_models_that_are_gone(monkeypatch, own_ranks, recorded):
    """Nor does torch's flight recorder, which holds the code that called each of the last collectives."""
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", str(recorded))
    assert own_ranks.run(rank_records_collectives, 3) == [0, 0]


SAVES = {"its input": torch.sin, "its result": torch.exp}  # what the op saves for backward


class Watched(Part):
    """Remembers, without holding them, an activation and an unsharded parameter of each forward."""

    def __init__(self, op, raises):
        super().__init__()
        self.op, self.raises, self.seen, self.unsharded = op, raises, [], None

    def forward(self, x):
        hidden = self.op(x @ self.a)
        self.seen.append(weakref.ref(hidden))
        self.unsharded = weakref.ref(self.a)
        assert self.unsharded().untyped_storage().nbytes() > 0
        if self.raises:
            raise Fault
        return hidden @ self.b


def nothing_is_left(model):
    """Nor is the model, when it is dropped. `model` is a list of it alone."""
    gc.collect()
    (part,) = model[0].parts
    assert part.seen and all(each() is None for each in part.seen)
    assert part.unsharded().untyped_storage().nbytes() == 0
    leaves = [weakref.ref(each.leaf) for each in state_of(model[0]).units.parameters.values()] + [part.unsharded]
    del part
    model.clear()
    gc.collect()
    assert leaves and all(each() is None for each in leaves)


@pytest.mark.parametrize("saves", [slow_case("its input"), "its result"])
@pytest.mark.parametrize("raises", [False, True])
def test_a_forward_that_is_dropped_or_raises_leaves_no_memory(rank, world, saves, raises):
    model = [with_units(UnitChain(Watched(SAVES[saves], raises)))]
    for _ in range(2):
        with pytest.raises(Fault) if raises else contextlib.nullcontext():
            assert chain_loss(model[0], 0, rank).requires_grad
    nothing_is_left(model)


@pytest.mark.parametrize("after", [slow_case("nothing"), "a forward", slow_case("a backward")])
def test_a_model_with_units_is_freed_with_its_last_reference(rank, world, after):
    """Without the garbage collector."""
    model = with_units(make_chain(2))
    if after != "nothing":
        loss = chain_loss(model, 0, rank)
        if after == "a backward":
            loss.backward()
        del loss
    with no_collector():
        seen = weakref.ref(model.parts[0].a)
        del model
        assert seen() is None


def test_frozen_units_are_freed_during_backward(rank, world):
    model = with_units(make_chain(8))
    for part in model.parts:
        part.requires_grad_(False)
    for _ in range(2):
        chain_loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    chain_loss(model, 0, rank).backward()
    unit = sum(parameter.numel() for parameter in model.parts[0].parameters()) * 4
    dense = sum(parameter.numel() for name, parameter in model.named_parameters() if "parts" not in name) * 4
    peak = zcompile.stats(model)["peak_unsharded_bytes"]
    assert peak <= 3 * unit + dense, (peak, unit, dense)


@pytest.mark.slow
def test_calls_without_backward_leave_no_hooks_and_no_gather_ahead(rank, world):
    model, x = with_units(UnitChain(Part(), Part())), inputs(0, rank).requires_grad_()
    model.register_forward_hook(lambda module, args, result: (result, *args))
    for _ in range(4):
        model(x)
    with torch.no_grad():
        model.parts[0](x)
    assert not x._backward_hooks and not state_of(model).unit_order.forward.ahead


class NotesCasts(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and made.dtype == torch.bfloat16:
            self.storages.append(StorageWeakRef(made.untyped_storage()))
        return made


@on_ranks(1)
def test_one_rank_keeps_no_copy_of_a_unit_for_each_expert(rank, world):
    """One rank has whole parameters, which it casts."""
    model = zcompile.shard(MixtureModel(StackedExperts), param_dtype=torch.bfloat16, units=[StackedExperts])
    with NotesCasts() as casts:
        loss = model(torch.randn(6, WIDTH), list(range(EXPERTS))).square().mean()
    alive = sum(not storage.expired() for storage in casts.storages)
    dense = sum("experts" not in name for name, _ in model.named_parameters())
    assert alive <= dense + 1, (alive, dense)  # and the input
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
