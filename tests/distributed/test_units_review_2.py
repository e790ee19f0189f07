"""Second part of a review of units."""

import contextlib
import dataclasses
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.distributed.test_units import compiled, routed_loss, sharded
from tests.support.meshes import short_mesh, without_agreement
from tests.support.mixtures import WIDTH, Expert, Experts, MixtureModel, StackedExperts
from tests.support.reference import close, same_grads, train_beside
from zcompile.sharding.model_state import state_of

from tests.distributed.test_units_review import Chain, Output, Part, chain_loss, data, pair, parts, units_of, beside


def rank_calls_unequally(rank, world):
    """Rank 0 calls a unit twice in a forward, rank 1 once; the next unit has equal sizes."""

    class Repeating(Chain):
        def forward(self, x, times=1):
            x = self.first(x)
            for i, (part, dense) in enumerate(zip(self.parts, self.denses)):
                for _ in range(times if i == 0 else 1):
                    x = x + part(x)
                x = dense(x)
            return x

    reference, model = pair(lambda: Repeating(Part(), Part(), Part()), mesh=short_mesh(10))
    try:
        ours = chain_loss(model, 0, rank, times=2 - rank)
    except RuntimeError:
        return
    close(ours, chain_loss(reference, 0, rank, times=2 - rank), 1e-5, "loss")
    ours.backward()
    (sum(chain_loss(reference, 0, r, times=2 - r) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_unequal_numbers_of_calls_are_an_error_or_right(ranks):
    ranks(2).run(rank_calls_unequally, timeout=60)


def rank_calls_twice(rank, world):
    class Twice(Chain):
        def forward(self, x):
            x = self.first(x)
            for part, dense in zip(self.parts, self.denses):
                x = dense(x + part(x + part(x)))
            return x

    beside(rank, world, make=lambda: Twice(Part(), Part()))


def test_a_unit_called_twice(ranks):
    ranks(2).run(rank_calls_twice)


def rank_hooks(rank, world, forwards):
    """Hooks are called once for each backward, with the whole gradient, also for what only another rank used."""
    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    model = sharded(MixtureModel())
    seen, steps = {}, {}
    for name, each in model.named_parameters():
        each.register_hook(
            lambda grad, name=name: seen.setdefault(name, []).append(grad.full_tensor().clone() if False else grad)
        )
        each.register_post_accumulate_grad_hook(
            lambda p, name=name: steps.setdefault(name, []).append(p.grad is not None)
        )
    loss = lambda m, r: sum(routed_loss(m, i, r) for i in range(forwards))  # noqa: E731
    loss(model, rank).backward()
    (sum(loss(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)
    for name, parameter in reference.named_parameters():
        calls = 0 if parameter.grad is None else 1
        assert len(seen.get(name, [])) == len(steps.get(name, [])) == calls, (name, calls, seen.get(name))
        if calls:
            close(seen[name][0], parameter.grad, 2e-5, name)


@pytest.mark.parametrize("forwards", [1, 2])
def test_hooks_are_called_once(ranks, forwards):
    ranks(2).run(rank_hooks, forwards)


def rank_optimizes_in_backward(rank, world):
    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    model = sharded(MixtureModel())
    for each in (model, reference):
        for p in each.parameters():
            optimizer = torch.optim.SGD([p], lr=0.05)
            p.register_post_accumulate_grad_hook(lambda p, o=optimizer: (o.step(), o.zero_grad()) and None)
    for step in range(3):
        routed_loss(model, step, rank).backward()
        (sum(routed_loss(reference, step, other) for other in range(world)) / world).backward()
    for (name, a), b in zip(model.named_parameters(), reference.parameters()):
        close(a, b, 2e-5, name)


def test_an_optimizer_may_step_in_backward(ranks):
    ranks(2).run(rank_optimizes_in_backward, timeout=60)


def rank_clips(rank, world):
    def loss(model, step, rank):
        return routed_loss(model, step, rank)

    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    model = sharded(MixtureModel())
    loss(model, 0, rank).backward()
    (sum(loss(reference, 0, other) for other in range(world)) / world).backward()
    ours = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    theirs = torch.nn.utils.clip_grad_norm_(reference.parameters(), 1e-3)
    close(ours, theirs, 2e-5, "norm")
    same_grads(model, reference)


def test_gradients_are_clipped(ranks):
    ranks(2).run(rank_clips, timeout=60)


def rank_accumulates_two_forwards(rank, world, units, skips):
    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    model = sharded(MixtureModel(), units=[Experts]) if units else zcompile.shard(MixtureModel())
    for step in range(2):
        with zcompile.accumulate(model):
            for microbatch in range(3):
                at = 10 * step + 2 * microbatch
                skip = (1,) if skips and rank == 1 and microbatch == 1 else ()
                (routed_loss(model, at, rank, skip_experts=skip) + routed_loss(model, at + 1, rank)).backward()
        for microbatch in range(3):
            at = 10 * step + 2 * microbatch
            total = 0
            for other in range(world):
                skip = (1,) if skips and other == 1 and microbatch == 1 else ()
                total = (
                    total + routed_loss(reference, at, other, skip_experts=skip) + routed_loss(reference, at + 1, other)
                )
            (total / world).backward()
        same_grads(model, reference)
        model.zero_grad(), reference.zero_grad()


@pytest.mark.parametrize("how", [(True, True), (True, False), (False, False)])
def test_two_forwards_accumulate_in_a_block(ranks, how):
    ranks(2).run(rank_accumulates_two_forwards, *how, timeout=60)


def rank_functional(rank, world):
    reference, model = pair(parts())
    x = data(0, rank)
    given = {name: torch.nn.Parameter(p.detach() * 2) for name, p in model.named_parameters() if name == "parts.1.a"}
    theirs = {"parts.1.a": torch.nn.Parameter(reference.parts[1].a.detach() * 2)}
    torch.func.functional_call(model, given, (x,)).square().mean().backward()
    losses = [torch.func.functional_call(reference, theirs, (data(0, r),)).square().mean() for r in range(world)]
    (sum(losses) / world).backward()
    close(given["parts.1.a"].grad, theirs["parts.1.a"].grad, 1e-5, "given")
    same_grads(model, reference)


def test_functional_call_gives_a_parameter_of_a_unit(ranks):
    ranks(2).run(rank_functional, timeout=60)


def rank_compiles_around(rank, world, skips):
    reference, model = pair(parts(), mesh=short_mesh(30))

    @torch.compile(backend="zcompile", options={"inner": "aot_eager"})
    def loss(x, skip):
        return model(x, skip).square().mean()

    for step in range(3):
        skip = (1,) if skips and rank == 1 else ()
        loss(data(step, rank), skip).backward()
        (
            sum(chain_loss(reference, step, r, skip=(1,) if skips and r == 1 else ()) for r in range(world)) / world
        ).backward()
        same_grads(model, reference)


@pytest.mark.parametrize("skips", [False, True])
def test_a_compiled_function_calls_a_model_with_units(ranks, skips):
    ranks(2).run(rank_compiles_around, skips, timeout=100)


def rank_compiles_unit(rank, world, before):
    def prepare(model):
        if before:
            for layer in model.layers:
                layer.experts.compile(backend="aot_eager")
        sharded(model)
        if not before:
            for layer in model.layers:
                layer.experts.compile(backend="zcompile", options={"inner": "aot_eager"})
        return model

    train_beside(rank, world, prepare, make=lambda: MixtureModel(StackedExperts), loss=routed_loss, steps=3)


@pytest.mark.parametrize("before", [False, True])
def test_a_unit_is_compiled_itself(ranks, before):
    ranks(2).run(rank_compiles_unit, before, timeout=100)


def rank_saves_on_cpu(rank, world, inner):
    from torch.autograd.graph import save_on_cpu

    def prepare(model):
        if inner:
            for each in model.modules():
                if isinstance(each, Expert):
                    import functools

                    each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False)
        return sharded(model, mesh=short_mesh(20))

    def loss(model, step, rank):
        with save_on_cpu():
            return routed_loss(model, step, rank)

    train_beside(rank, world, prepare, make=MixtureModel, loss=loss, steps=2)


@pytest.mark.parametrize("inner", [False, True])
def test_saved_on_cpu(ranks, inner):
    ranks(2).run(rank_saves_on_cpu, inner, timeout=60)


def rank_checkpoints(rank, world, how):
    import functools

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    extra = {}
    if "selective" in how:
        extra["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)

    def prepare(model):
        if "nested" in how:
            for each in model.modules():
                if isinstance(each, Expert):
                    each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False)
        if "inside" in how:
            for each in model.modules():
                if isinstance(each, Expert):
                    each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False, **extra)
        else:
            for layer in model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False, **extra)
        return sharded(model, mesh=short_mesh(20))

    train_beside(rank, world, prepare, make=MixtureModel, loss=routed_loss, steps=3)


@pytest.mark.parametrize("how", ["selective", "selective inside", "nested"])
def test_checkpoints(ranks, how):
    ranks(2).run(rank_checkpoints, how, timeout=60)


def rank_frozen_checkpoint(rank, world, how):
    """Frozen experts whose input needs a gradient, with checkpoints."""
    import functools

    def freeze(model):
        for name, p in model.named_parameters():
            if "experts" in name:
                p.requires_grad_(False)
        return model

    def prepare(model):
        if how != "outside":
            for each in model.modules():
                if isinstance(each, Expert):
                    each.forward = functools.partial(checkpoint, each.forward, use_reentrant=False)
        if how != "inside":
            for layer in model.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)
        return freeze(sharded(model, mesh=short_mesh(20)))

    train_beside(rank, world, prepare, make=lambda: freeze(MixtureModel()), loss=routed_loss, steps=3)


@pytest.mark.parametrize("how", ["outside", "inside", "nested"])
def test_frozen_units_with_checkpoints(ranks, how):
    ranks(2).run(rank_frozen_checkpoint, how, timeout=60)


def rank_penalizes(rank, world):
    reference, model = pair(parts())

    def run(m, r):
        x = data(0, r).requires_grad_()
        (g,) = torch.autograd.grad(m(x).square().mean(), x, create_graph=True)
        return g.square().sum()

    try:
        run(model, rank).backward()
    except RuntimeError as error:
        assert "create_graph" in str(error), error
        return
    (sum(run(reference, r) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_a_gradient_penalty_is_right_or_refused(ranks):
    ranks(2).run(rank_penalizes, timeout=60)


def rank_input_gradient(rank, world, how):
    reference, model = pair(parts())
    x, y = data(0, rank).requires_grad_(), data(0, rank).requires_grad_()
    loss, theirs = model(x).square().mean(), reference(y).square().mean()
    if how == "grad":
        close(torch.autograd.grad(loss, x)[0], torch.autograd.grad(theirs, y)[0], 1e-5, "grad")
    else:
        loss.backward(inputs=[x])
        theirs.backward(inputs=[y])
        close(x.grad, y.grad, 1e-5, "grad")
    assert all(p.grad is None for p in model.parameters())
    chain_loss(model, 1, rank).backward()
    (sum(chain_loss(reference, 1, r) for r in range(world)) / world).backward()
    same_grads(model, reference)


@pytest.mark.parametrize("how", ["grad", "inputs"])
def test_gradients_of_inputs(ranks, how):
    ranks(2).run(rank_input_gradient, how, timeout=60)


def rank_fails_alone(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(5))

    class Mine(Exception):
        pass

    def fail(module, args):
        if rank == 1:
            raise Mine

    denses = model.parts[1]
    forward = Part.forward

    def failing(self, x):
        if self is denses and rank == 1:
            raise Mine
        return forward(self, x)

    Part.forward = failing
    try:
        with pytest.raises((Mine, RuntimeError)) as caught:
            for step in range(2):
                chain_loss(model, step, rank).backward()
    finally:
        Part.forward = forward
    return str(caught.value)


def test_one_rank_raises_in_a_unit(ranks):
    print(ranks(2).run(rank_fails_alone, timeout=60))


def rank_ignores_the_result(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(5))
    out = model(data(0, rank)).square().mean()
    with pytest.raises(RuntimeError) as caught:
        loss = out if rank == 0 else torch.ones(1, requires_grad=True).sum()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    return str(caught.value)


def test_one_rank_has_a_loss_without_the_model(ranks):
    print(ranks(2).run(rank_ignores_the_result, timeout=60))


class Structured(Part):
    def forward(self, x):
        import collections

        Both = collections.namedtuple("Both", "out more")
        out = super().forward(x)
        return Both(out, {"n": None, "i": x.argmax(-1), "w": self.a, "v": self.b[0], "o": Output(out * 2)})


class StructuredModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(6, 6), nn.ModuleList([Structured(), Structured()])

    def forward(self, x):
        x = self.first(x)
        for part in self.parts:
            both = part(x)
            more = both.more
            assert more["n"] is None and more["i"].dtype == torch.int64
            x = both.out + more["w"].sum() + more["v"] * 2 + more["o"].value + x
            both.out.add_(1)
        return x


def rank_structured(rank, world):
    beside(rank, world, make=StructuredModel)


def test_structured_results(ranks):
    ranks(2).run(rank_structured, timeout=60)


def rank_edits_saved(rank, world):
    class Saving(Part):
        def forward(self, x):
            out = torch.exp(x @ self.a)
            return out

    model = units_of(Chain(Saving()))
    out = model.parts[0](data(0, rank))
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        out.sum().backward()


def test_an_edit_of_what_a_unit_saved_is_an_error(ranks):
    ranks(2).run(rank_edits_saved, timeout=60)


def rank_backward_in_a_thread(rank, world):
    import threading

    reference, model = pair(parts())
    loss = chain_loss(model, 0, rank, skip=(1,) if rank else ())
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()
    (sum(chain_loss(reference, 0, r, skip=(1,) if r else ()) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_backward_in_a_thread(ranks):
    ranks(2).run(rank_backward_in_a_thread, timeout=60)


def rank_first_of_two(rank, world):
    reference, model = pair(parts())
    losses = [chain_loss(model, i, rank, skip=(i,) if rank else ()) for i in range(2)]
    losses[0].backward()
    (sum(chain_loss(reference, 0, r, skip=(0,) if r else ()) for r in range(world)) / world).backward()
    same_grads(model, reference)
    del losses
    model.zero_grad(), reference.zero_grad()
    chain_loss(model, 2, rank).backward()
    (sum(chain_loss(reference, 2, r) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_backward_of_the_first_of_two_forwards(ranks):
    ranks(2).run(rank_first_of_two, timeout=60)


def rank_holds_ahead(rank, world):
    model = units_of(parts()())
    with torch.no_grad():
        model.parts[0](data(0, rank))
    order = state_of(model).unit_order
    assert not order.forward.ahead


def test_nothing_stays_unsharded_after_a_part_was_called(ranks):
    ranks(2).run(rank_holds_ahead, timeout=60)


def rank_reads_in_pre_hook(rank, world):
    """A pre-hook of a unit, and its parent, read parameters of it that depend on the rank."""
    model = sharded(MixtureModel(), mesh=short_mesh(10))
    seen = []
    for layer in model.layers:
        layer.experts.register_forward_pre_hook(lambda m, args: seen.append(m.experts[rank].up.weight.detach().clone()))
    expected = (
        [[e.up.weight.full_tensor() for e in layer.experts.experts][rank] for layer in model.layers] if False else None
    )
    whole = [[e.up.weight.full_tensor() for e in layer.experts.experts] for layer in model.layers]
    try:
        routed_loss(model, 0, rank)
    except RuntimeError as error:
        return str(error)
    for got, layer in zip(seen, whole):
        close(got, layer[rank], 1e-6, "weight")


def test_a_pre_hook_that_reads_other_parameters_on_each_rank_is_right_or_refused(ranks):
    print(ranks(2).run(rank_reads_in_pre_hook, timeout=60))


def rank_retains(rank, world):
    model = units_of(Chain(*(Part() for _ in range(6))))
    for _ in range(2):
        chain_loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    chain_loss(model, 0, rank).backward(retain_graph=True)
    one, dense = 2 * 36 * 4, 7 * (36 + 6) * 4
    peak = zcompile.stats(model)["peak_unsharded_bytes"]
    assert peak <= 3 * one + dense, (peak, one, dense)


def test_a_backward_that_retains_the_graph_frees_units(ranks):
    ranks(2).run(rank_retains, timeout=60)


def rank_retains_and_changes(rank, world):
    """As eager reads do: parameters that change between two backwards of one graph are an error, or plainly new."""
    reference, model = pair(parts(), units=[Part])
    plain = zcompile.shard(
        parts()(),
    )
    results = []
    for each in (plain, model):
        loss = chain_loss(each, 0, rank)
        loss.backward(retain_graph=True)
        with torch.no_grad():
            for p in each.parameters():
                p.mul_(2)
        try:
            loss.backward()
            results.append("ran")
        except RuntimeError as error:
            results.append(str(error)[:80])
    return results


def test_change_between_two_backwards(ranks):
    print(ranks(2).run(rank_retains_and_changes, timeout=60))


def rank_autocast_memory(rank, world):
    model = units_of(Chain(*(Part() for _ in range(4))))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(data(0, rank)).float().square().mean()
    sizes, seen = [], set()

    def walk(fn):
        if fn is None or fn in seen:
            return
        seen.add(fn)
        for attribute in dir(fn):
            if attribute.startswith("_saved_"):
                value = getattr(fn, attribute)
                if isinstance(value, torch.Tensor) and value.shape == (6, 6):
                    sizes.append((fn.name(), value.dtype))
        for following, _ in fn.next_functions:
            walk(following)

    walk(loss.grad_fn)
    return sizes


def rank_times(rank, world):
    import time

    class Sixteen(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Experts(16)])

        def forward(self, x):
            out = x
            for expert in self.parts[0].experts if False else [self.parts[0]]:
                out = expert(out, torch.arange(len(x)).remainder(16)[:, None], torch.ones(len(x), 1))
            return out

    result = {}
    for name, units in (("plain", []), ("units", [Experts])):
        model = units_of(Sixteen(), units=units)
        x = torch.randn(32, WIDTH)
        for i in range(30):
            if i == 10:
                begin = time.perf_counter()
            model(x).square().mean().backward()
        result[name] = round((time.perf_counter() - begin) / 20 * 1e3, 2)
    reference = Sixteen()
    begin = time.perf_counter()
    for i in range(20):
        reference(x).square().mean().backward()
    result["unsharded"] = round((time.perf_counter() - begin) / 20 * 1e3, 2)
    return result


def test_times(ranks):
    print(ranks(2).run(rank_times, timeout=100))


def rank_compiled_leaks(rank, world):
    """An exception inside of a unit leaves nothing."""

    class Failing(Part):
        def forward(self, x):
            hidden = torch.exp(x @ self.a)
            seen.append(weakref.ref(hidden))
            seen.append(weakref.ref(self.a))
            raise ValueError("mine")

    seen = []
    model = units_of(Chain(Failing()))
    for _ in range(2):
        with pytest.raises(ValueError, match="mine"):
            chain_loss(model, 0, rank)
    gc.collect()
    assert [each() is None for each in seen] == [True] * 4
    gone = weakref.ref(model.parts[0].a)
    del model
    gc.collect()
    assert gone() is None


def test_an_exception_in_a_unit_leaves_no_memory(ranks):
    ranks(2).run(rank_compiled_leaks, timeout=60)


def rank_leaks_activations(rank, world, how):
    """`how`: what the unit computes; the loss is dropped without a backward."""

    class Out(Part):
        def forward(self, x):
            hidden = x @ self.a
            hidden = torch.exp(hidden) if "exp" in how else torch.sin(hidden)
            seen.append(weakref.ref(hidden))
            seen.append(weakref.ref(self.a))
            if "raises" in how:
                raise ValueError("mine")
            return hidden @ self.b

    seen = []
    model = units_of(Chain(Out()))
    try:
        chain_loss(model, 0, rank)
    except ValueError:
        pass
    gc.collect()
    alive = [each() is not None for each in seen]
    leaf = weakref.ref(model.parts[0].__dict__["_zcompile_leaf_a"])
    del model
    gc.collect()
    assert (alive, leaf() is not None) == ([False, False], False), (alive, leaf() is not None)


@pytest.mark.parametrize("how", ["sin", "exp", "sin raises", "exp raises"])
def test_nothing_of_a_dropped_forward_stays(ranks, how):
    ranks(2).run(rank_leaks_activations, how, timeout=60)


def rank_autocasts(rank, world):
    """Under autocast nothing unsharded is kept for backward."""
    kept = []
    model = units_of(Chain(*(Part() for _ in range(4))))
    for part in model.parts:
        part.register_forward_hook(lambda module, args, out: kept.append(out))
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(data(0, rank)).float().square().mean()
    gc.collect()
    alive = [
        t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (6, 6) and t.dtype == torch.bfloat16
    ]
    assert len(alive) == 0, len(alive)
    loss.backward()


def test_autocast_keeps_no_unsharded_copy(ranks):
    ranks(2).run(rank_autocasts, timeout=60)


class LeafModel(Chain):
    def forward(self, x):
        self.kept = x
        return super().forward(x), x


def rank_returns_a_leaf(rank, world):
    """The model returns a leaf of the user's; its hooks do not pile up."""
    torch.manual_seed(0)
    model = units_of(LeafModel(Part(), Part()))
    x = data(0, rank).requires_grad_()
    for _ in range(4):
        model(x)  # evaluated with grad mode on, no backward
    assert len(x._backward_hooks or {}) <= 1, len(x._backward_hooks)


def test_hooks_on_a_returned_leaf_do_not_pile_up(ranks):
    ranks(2).run(rank_returns_a_leaf, timeout=60)


def rank_mixes_plain_reads(rank, world):
    """A parent reads a parameter of a unit outside of its forward, alike on all ranks."""

    class Reading(Chain):
        def forward(self, x):
            out = super().forward(x)
            return out @ self.parts[0].a + self.parts[1].b.sum()

    beside(rank, world, make=lambda: Reading(Part(), Part()))


def test_a_parent_reads_a_parameter_of_a_unit(ranks):
    ranks(2).run(rank_mixes_plain_reads, timeout=60)


def rank_dropout(rank, world):
    """Dropout inside a checkpointed unit: random state is kept."""
    import functools

    class Dropping(Part):
        def forward(self, x):
            return nn.functional.dropout(super().forward(x), 0.5)

    def prepare(model):
        return units_of(model)

    def make():
        model = Chain(Dropping(), Dropping())
        for part in model.parts:
            part.forward = functools.partial(checkpoint, part.forward, use_reentrant=False)
        return model

    def loss(model, step, rank):
        x = data(step, rank)
        torch.manual_seed(step * 7 + rank)
        return model(x).square().mean()

    train_beside(rank, world, prepare, make=make, loss=loss, steps=2)


def test_dropout_in_a_checkpointed_unit(ranks):
    ranks(2).run(rank_dropout, timeout=60)


def rank_loads(rank, world):
    reference, model = pair(parts())
    state = {
        name: nn.Parameter(p.detach().clone() * 2) if False else p.detach().clone() * 2
        for name, p in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    with torch.no_grad():
        for p in reference.parameters():
            p.mul_(2)
    for step in range(2):
        chain_loss(model, step, rank).backward()
        (sum(chain_loss(reference, step, r) for r in range(world)) / world).backward()
        same_grads(model, reference)


def test_load_state_dict_assigns(ranks):
    ranks(2).run(rank_loads, timeout=60)


def rank_toggles(rank, world, how):
    reference, model = pair(parts())
    for step in range(4):
        for each in (reference, model):
            each.zero_grad()
            for p in (each.parts[1].a, each.parts[1].b):
                if how == "method":
                    p.requires_grad_(step % 2 == 0)
                else:
                    p.requires_grad = step % 2 == 0
        chain_loss(model, step, rank).backward()
        (sum(chain_loss(reference, step, r) for r in range(world)) / world).backward()
        same_grads(model, reference)


@pytest.mark.parametrize("how", ["method", "attribute"])
def test_requires_grad_toggles(ranks, how):
    ranks(2).run(rank_toggles, how, timeout=60)


def rank_unshards_outside(rank, world):
    reference, model = pair(parts())
    with zcompile.unshard(model.parts[1], writeback=True):
        with torch.no_grad():
            for p in model.parts[1].parameters():
                p.mul_(2)
    with torch.no_grad():
        for p in reference.parts[1].parameters():
            p.mul_(2)
    chain_loss(model, 0, rank).backward()
    (sum(chain_loss(reference, 0, r) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_unshard_writes_back_to_a_unit(ranks):
    ranks(2).run(rank_unshards_outside, timeout=60)


def rank_backward_in_forward(rank, world):
    """Forces inside of the model's forward: the gradient of an energy for positions."""

    class Forces(Chain):
        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (g,) = torch.autograd.grad(super().forward(x).square().sum(), x)
            return g

    reference, model = pair(lambda: Forces(Part(), Part(), Part()))
    for _ in range(2):
        close(model(data(0, rank)), reference(data(0, rank)), 1e-5, "forces")


def test_a_backward_inside_of_the_forward(ranks):
    ranks(2).run(rank_backward_in_forward, timeout=60)


def rank_teacher(rank, world):
    """A sharded teacher with units is called inside of the student's forward; a rank skips a unit of the student."""

    class Student(Chain):
        def forward(self, x, teacher, skip=()):
            x = self.first(x)
            for i, (part, dense) in enumerate(zip(self.parts, self.denses)):
                if i not in skip:
                    x = x + part(x)
                with torch.no_grad():
                    x = x + teacher[0](x) if i == 1 else x
                x = dense(x)
            return x

    torch.manual_seed(0)
    reference, theirs = Student(Part(), Part(), Part()), parts()()
    torch.manual_seed(0)
    model, ours = Student(Part(), Part(), Part()), parts()()
    mesh = short_mesh(20)
    units_of(model, mesh=mesh), units_of(ours, mesh=mesh)
    out = model(data(0, rank), [ours], skip=(1,) if rank else ())
    close(out, reference(data(0, rank), [theirs], skip=(1,) if rank else ()), 1e-5, "result")


def test_a_teacher_inside_of_a_student(ranks):
    ranks(2).run(rank_teacher, timeout=60)


def rank_unfreezes(rank, world):
    """A unit is frozen in the first steps, from which the order is taken; then it trains, and a rank skips it."""
    reference, model = pair(parts(), mesh=short_mesh(20))
    for step in range(4):
        for each in (reference, model):
            each.zero_grad()
            for p in each.parts[1].parameters():
                p.requires_grad_(step == 3)
        loss = lambda m, r: chain_loss(m, step, r, skip=(1,) if step == 3 and r == 1 else ())  # noqa: E731
        loss(model, rank).backward()
        (sum(loss(reference, r) for r in range(world)) / world).backward()
        same_grads(model, reference)


def test_a_rank_may_skip_a_unit_that_was_frozen_once(ranks):
    ranks(2).run(rank_unfreezes, timeout=60)


def rank_has_own_forward(rank, world):
    """A unit whose instance has a forward of its own, as a checkpoint wrapper or an accelerate hook sets it."""
    import functools

    def prepare(model):
        for layer in model.layers:
            layer.experts.forward = functools.partial(checkpoint, layer.experts.forward, use_reentrant=False)
        return sharded(model, mesh=short_mesh(20))

    try:
        train_beside(rank, world, prepare, make=MixtureModel, loss=routed_loss, steps=2)
    except ValueError as error:  # refused
        return str(error)


def test_a_unit_with_a_forward_of_its_own_is_right_or_refused(ranks):
    print(ranks(2).run(rank_has_own_forward, timeout=60))


def rank_hooks_alike(rank, world):
    """As test_gradient_hooks_may_have_collectives, where all ranks use the same experts."""

    def scale(grad):
        norm = grad.norm()
        return grad / (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    reference, model = pair(parts())
    for each in model.parameters():
        each.register_hook(scale)
    chain_loss(model, 0, rank).backward()
    (sum(chain_loss(reference, 0, other) for other in range(world)) / world).backward()
    for parameter in reference.parameters():
        parameter.grad = parameter.grad / parameter.grad.norm()
    same_grads(model, reference)


def test_gradient_hooks_with_collectives_where_ranks_are_alike(ranks):
    ranks(2).run(rank_hooks_alike, timeout=60)


def rank_skips_some(rank, world, how):
    """Which units a rank may skip."""
    reference, model = pair(parts(5), mesh=short_mesh(12))
    skip = {"first": (0,), "last": (4,), "every other": (1, 3), "last two": (3, 4), "all": (0, 1, 2, 3, 4)}[how]
    for step in range(2):
        loss = lambda m, r: chain_loss(m, step, r, skip=skip if r == 1 else ())  # noqa: E731
        loss(model, rank).backward()
        (sum(loss(reference, other) for other in range(world)) / world).backward()
        same_grads(model, reference)


@pytest.mark.parametrize("how", ["first", "last", "every other", "last two", "all"])
def test_skipped(ranks, how):
    ranks(2).run(rank_skips_some, how, timeout=60)


def rank_returns_views(rank, world):
    """A unit returns a view of its input, which is then edited."""

    class Viewing(Part):
        def forward(self, x):
            return x.view(-1, 2, 3)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.parts = nn.Linear(6, 6), nn.ModuleList([Viewing()])

        def forward(self, x):
            x = self.first(x)
            y = self.parts[0](x)
            y.mul_(2)
            return x.sin() + y.flatten(1)

    beside(rank, world, make=Model, steps=1)


def test_a_unit_may_return_a_view_of_its_input_that_is_then_edited(ranks):
    ranks(2).run(rank_returns_views, timeout=60)


def rank_pre_hook_silent(rank, world):
    """Two units of one model, called alone and interleaved with changes of parameters in training steps."""
    reference, model = pair(parts())
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    for step in range(3):
        ours, theirs = model.parts[step](data(step, rank)), [reference.parts[step](data(step, r)) for r in range(world)]
        close(ours, theirs[rank], 1e-5, "result")
        ours.square().mean().backward()
        (sum(each.square().mean() for each in theirs) / world).backward()
        same_grads(model, reference)
        for o in optimizers:
            o.step(), o.zero_grad()


def test_parts_trained_in_turn(ranks):
    ranks(2).run(rank_pre_hook_silent, timeout=60)


def rank_lists_after_errors(rank, world):
    """A rank's forward raises in each of several places; all ranks drop the batch alike."""
    reference, model = pair(parts())
    for place in range(3):

        def fail(module, args):
            raise ValueError("mine")

        handle = model.denses[place].register_forward_pre_hook(fail)
        with pytest.raises(ValueError):
            chain_loss(model, 0, rank)
        handle.remove()
        model.zero_grad(), reference.zero_grad()
        loss = lambda m, r: chain_loss(m, place, r, skip=(place,) if r else ())  # noqa: E731
        loss(model, rank).backward()
        (sum(loss(reference, r) for r in range(world)) / world).backward()
        same_grads(model, reference)


def test_steps_after_forwards_that_raised(ranks):
    ranks(2).run(rank_lists_after_errors, timeout=60)


def rank_warms_up(rank, world):
    """Validation before training, under no_grad and inference_mode; a rank skips."""
    reference, model = pair(parts())
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            close(
                model(data(0, rank), skip=(1,) if rank else ()),
                reference(data(0, rank), skip=(1,) if rank else ()),
                1e-5,
                "eval",
            )
    chain_loss(model, 0, rank).backward()
    (sum(chain_loss(reference, 0, r) for r in range(world)) / world).backward()
    same_grads(model, reference)


def test_inference_before_training(ranks):
    ranks(2).run(rank_warms_up, timeout=60)


def rank_chains(rank, world):
    """The model is applied to its own result; a rank skips in each."""
    reference, model = pair(parts())

    def loss(m, r):
        out = m(data(0, r), skip=(1,) if r else ())
        out = m(out, skip=(2,) if r else ())
        return m(out, skip=(0,) if not r else ()).square().mean()

    for _ in range(2):
        model.zero_grad(), reference.zero_grad()
        loss(model, rank).backward()
        (sum(loss(reference, r) for r in range(world)) / world).backward()
        same_grads(model, reference)


def test_a_model_applied_to_its_result(ranks):
    ranks(2).run(rank_chains, timeout=60)
