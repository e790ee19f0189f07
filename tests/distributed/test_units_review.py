"""Findings of a review of units: each function names what should hold."""

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


class Part(nn.Module):
    """Two parameters; `body` of a subclass says what is done with them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(6, 6) / 3), nn.Parameter(torch.randn(6, 6) / 3)

    def forward(self, x):
        return torch.tanh(x @ self.a) @ self.b


class Chain(nn.Module):
    """Parts between linear layers."""

    def __init__(self, *parts):
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.parts = nn.ModuleList(parts)
        self.denses = nn.ModuleList(nn.Linear(6, 6) for _ in parts)

    def forward(self, x, skip=()):
        x = self.first(x)
        for i, (part, dense) in enumerate(zip(self.parts, self.denses)):
            if i not in skip:
                x = x + part(x)
            x = dense(x)
        return x


def data(step, rank):
    torch.manual_seed(100 * step + rank)
    return torch.randn(3 + rank, 6)


def chain_loss(model, step, rank, **how):
    return model(data(step, rank), **how).square().mean()


def units_of(model, **how):
    with without_agreement():
        return zcompile.shard(model, **{"units": list(model.parts), **how})


def pair(make, **how):
    torch.manual_seed(0)
    reference = make()
    torch.manual_seed(0)
    return reference, units_of(make(), **how)


def parts(count=3, kind=Part):
    return lambda: Chain(*(kind() for _ in range(count)))


def beside(rank, world, make=parts(), loss=chain_loss, steps=3, **how):
    return train_beside(rank, world, units_of, make=make, loss=loss, steps=steps, **how)


# --- silently wrong numbers ------------------------------------------------------------------------------------------


def rank_stale_ahead(rank, world):
    """A part is called under no_grad, parameters change, the next part is called."""
    reference, model = pair(parts())
    x = data(0, 0)
    with torch.no_grad():
        model.parts[0](x)
        for each in (model, reference):
            for parameter in each.parameters():
                parameter.mul_(2)
        close(model.parts[1](x), reference.parts[1](x), 1e-5, "result")


def test_a_gather_ahead_is_not_used_after_parameters_changed(ranks):
    ranks(2).run(rank_stale_ahead)


def rank_backward_raised(rank, world):
    """Two forwards, the backward of the first raises in the user's hook, that of the second is done."""
    reference, model = pair(parts())
    first, second = chain_loss(model, 0, rank), chain_loss(model, 1, rank)

    def fail(grad):
        raise ValueError("mine")

    handle = first.register_hook(lambda grad: grad)
    y = model(data(2, rank))
    z = y * 1
    z.register_hook(fail)
    handle.remove()

    class Fail(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ValueError("mine")

    inner = Fail.apply(torch.ones(1, requires_grad=True))
    failing = model(data(2, rank)) + 0
    x = data(2, rank).requires_grad_()
    x2 = x * 1
    x2.register_hook(fail)
    failing = model(x2).square().mean() + inner.sum() * 0
    with pytest.raises(ValueError, match="mine"):
        failing.backward()
    for parameter in model.parameters():
        parameter.grad = None
    second.backward()
    (sum(chain_loss(reference, 1, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


def test_a_backward_after_one_that_raised_delivers_all_gradients(ranks):
    ranks(2).run(rank_backward_raised)


def rank_result_needs_no_grad(rank, world):
    class Counting(Part):
        def forward(self, x):
            return super().forward(x), x.detach().abs().sum(0)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Counting()])
            self.register_buffer("load", torch.zeros(6))

        def forward(self, x):
            out, load = self.parts[0](x)
            self.load += load
            return out

    model = units_of(Model())
    for step in range(3):
        assert not model.load.requires_grad
        model(data(step, rank)).sum().backward()


def test_a_result_that_needs_no_gradient_stays_so(ranks):
    ranks(2).run(rank_result_needs_no_grad)


def rank_lost_write_without_grad(rank, world):
    class Writing(Part):
        def forward(self, x):
            with torch.no_grad():
                self.a.mul_(0.5)
            return super().forward(x)

    plain, unit = zcompile.shard(Chain(Writing())), units_of(Chain(Writing()))
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="modified in place"):
            plain(data(0, rank)), plain(data(0, rank))
        with pytest.raises(RuntimeError, match="modified in place"):
            unit(data(0, rank)), unit(data(0, rank))


def test_a_write_under_no_grad_is_refused(ranks):
    ranks(2).run(rank_lost_write_without_grad)


class AsComplex(Part):
    def forward(self, x):
        w = torch.view_as_complex(self.a.view(6, 3, 2))
        return torch.view_as_real((x.to(torch.complex64) @ w).square()).flatten(1) @ self.b


def rank_complex(rank, world):
    beside(rank, world, make=parts(2, AsComplex))


def test_a_parameter_may_be_read_as_complex(ranks):
    ranks(2).run(rank_complex)


class Returning(Part):
    def forward(self, x):
        return x


class EditingModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.parts = nn.Linear(6, 6), nn.ModuleList([Returning()])

    def forward(self, x):
        x = self.first(x)
        y = self.parts[0](x)
        y.mul_(2)
        return x.sin() + y


def rank_returns_input(rank, world):
    beside(rank, world, make=EditingModel, steps=1)


def test_a_unit_may_return_its_input_that_is_then_edited(ranks):
    ranks(2).run(rank_returns_input)


def rank_hooks_with_collectives(rank, world):
    """Each gradient is divided by its norm over all ranks."""

    def scale(grad):
        norm = grad.norm()
        return grad / (norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    torch.manual_seed(0)
    reference = MixtureModel()
    torch.manual_seed(0)
    model = sharded(MixtureModel())
    for each in model.parameters():
        each.register_hook(scale)
    routed_loss(model, 0, rank).backward()
    (sum(routed_loss(reference, 0, other) for other in range(world)) / world).backward()
    for parameter in reference.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad / parameter.grad.norm()
    same_grads(model, reference)


def test_gradient_hooks_may_have_collectives(ranks):
    ranks(2).run(rank_hooks_with_collectives, timeout=60)


def rank_two_models(rank, world):
    """The loss has two models; a rank skips a part of one."""
    torch.manual_seed(0)
    reference = nn.ModuleList([parts()(), parts()()])
    torch.manual_seed(0)
    model = nn.ModuleList([parts()(), parts()()])
    mesh = short_mesh(20)
    for each in model:
        units_of(each, mesh=mesh)

    def loss(models, rank):
        return sum(
            chain_loss(each, i, rank, skip=(0,) if i == 1 and rank == 1 else ()) for i, each in enumerate(models)
        )

    loss(model, rank).backward()
    (sum(loss(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


def test_two_models_may_have_one_backward_in_which_a_rank_skips_a_unit(ranks):
    ranks(2).run(rank_two_models, timeout=60)


def rank_skips_in_other_order(rank, world):
    """The units are called in another order than they are registered in."""

    class Reversed(Chain):
        def forward(self, x, skip=()):
            x = self.first(x)
            for i in reversed(range(len(self.parts))):
                if i not in skip:
                    x = x + self.parts[i](x)
                x = self.denses[i](x)
            return x

    def loss(model, step, rank):
        return chain_loss(model, step, rank, skip=(1,) if rank == 1 else ())

    torch.manual_seed(0)
    reference = Reversed(Part(), Part(), Part())
    torch.manual_seed(0)
    model = units_of(Reversed(Part(), Part(), Part()), mesh=short_mesh(20))
    close(loss(model, 0, rank), loss(reference, 0, rank), 1e-5, "loss")


def test_a_rank_may_skip_in_a_first_step_that_has_another_order(ranks):
    ranks(2).run(rank_skips_in_other_order, timeout=60)


def rank_freezes_by_attribute(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(20))
    for step in range(2):
        for each in (reference, model):
            each.parts[1].a.requires_grad = step == 0
            each.zero_grad()
        loss = lambda m, r: chain_loss(m, step, r, skip=(1,) if step == 1 and r == 1 else ())  # noqa: E731
        loss(model, rank).backward()
        (sum(loss(reference, other) for other in range(world)) / world).backward()
        same_grads(model, reference)


def test_a_rank_may_skip_a_unit_that_was_frozen_by_attribute(ranks):
    ranks(2).run(rank_freezes_by_attribute, timeout=60)


# --- hangs -----------------------------------------------------------------------------------------------------------


def rank_skips_two(rank, world, budget):
    reference, model = pair(parts(4), mesh=short_mesh(15))
    if budget is not None:
        state_of(model).unit_order.budget_bytes = budget
    skip = (1, 2) if budget is None else (1,)
    for step in range(2):
        loss = lambda m, r: chain_loss(m, step, r, skip=skip if r == 1 else ())  # noqa: E731
        loss(model, rank).backward()
        (sum(loss(reference, other) for other in range(world)) / world).backward()
        same_grads(model, reference)


@pytest.mark.parametrize("budget", [None, 0])
def test_a_rank_may_skip(ranks, budget):
    """Two units in succession; or one that is not gathered ahead."""
    ranks(2).run(rank_skips_two, budget, timeout=60)


def rank_two_backwards_skip(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(15))

    def run(m, r):
        out = m(data(0, r), skip=(1,) if r == 1 else ())
        return out.square().mean(), out.sin().mean()

    one, two = run(model, rank)
    one.backward(retain_graph=True)
    two.backward()
    (sum(sum(run(reference, other)) for other in range(world)) / world).backward()
    same_grads(model, reference)


def test_a_rank_may_skip_where_a_graph_has_two_backwards(ranks):
    ranks(2).run(rank_two_backwards_skip, timeout=60)


@dataclasses.dataclass
class Output:
    value: torch.Tensor


class ReturnsObject(Chain):
    def forward(self, x, skip=()):
        return Output(super().forward(x, skip))


def rank_returns_object(rank, world):
    reference, model = pair(lambda: ReturnsObject(Part(), Part(), Part()), mesh=short_mesh(15))

    def run(m, r):
        return m(data(0, r), skip=(1,) if r == 1 else ()).value.square().mean()

    run(model, rank).backward()
    (sum(run(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


def test_a_rank_may_skip_where_the_model_returns_an_object(ranks):
    ranks(2).run(rank_returns_object, timeout=60)


def rank_checkpoints_all(rank, world, reentrant):
    reference, model = pair(parts(), mesh=short_mesh(15))

    def run(m, r):
        x = data(0, r).requires_grad_()
        return checkpoint(lambda x: m(x, skip=(1,) if r == 1 else ()), x, use_reentrant=reentrant).square().mean()

    run(model, rank).backward()
    (sum(run(reference, other) for other in range(world)) / world).backward()
    same_grads(model, reference)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_rank_may_skip_where_the_whole_model_is_checkpointed(ranks, reentrant):
    ranks(2).run(rank_checkpoints_all, reentrant, timeout=60)


def rank_unshards(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(15))
    with zcompile.unshard(model), torch.no_grad():
        if rank == 0:
            close(model(data(0, 0)), reference(data(0, 0)), 1e-5, "result")


def test_one_rank_may_call_a_model_that_is_whole(ranks):
    ranks(2).run(rank_unshards, timeout=60)


def rank_unshards_a_unit(rank, world):
    reference, model = pair(parts(), mesh=short_mesh(15))
    with zcompile.unshard(model.parts[1]), torch.no_grad():
        close(model(data(0, 0)), reference(data(0, 0)), 1e-5, "result")


def test_all_ranks_may_call_a_model_with_a_whole_unit(ranks):
    ranks(2).run(rank_unshards_a_unit, timeout=60)


# --- memory ----------------------------------------------------------------------------------------------------------


def rank_leaks(rank, world):
    class Out(Part):
        def forward(self, x):
            hidden = torch.exp(x @ self.a)  # saves its result
            seen.append(weakref.ref(hidden))
            return hidden @ self.b

    seen = []
    model = units_of(Chain(Out()))
    loss = chain_loss(model, 0, rank)
    del loss
    gc.collect()
    assert seen[-1]() is None, "an activation outlives a loss that was dropped"
    parameter = weakref.ref(model.parts[0].__dict__["_zcompile_leaf_a"])
    del model
    assert parameter() is None


def test_a_dropped_forward_is_freed(ranks):
    ranks(2).run(rank_leaks)


def rank_holds_frozen(rank, world):
    model = units_of(Chain(*(Part() for _ in range(8))))
    for part in model.parts:
        part.requires_grad_(False)
    one, dense = 2 * 36 * 4, 9 * (36 + 6) * 4
    for _ in range(2):
        chain_loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    chain_loss(model, 0, rank).backward()
    peak = zcompile.stats(model)["peak_unsharded_bytes"]
    assert peak <= 3 * one + dense, (peak, one, dense)


def test_frozen_units_are_freed_in_backward(ranks):
    ranks(2).run(rank_holds_frozen)


def rank_frees(rank, world, how):
    model = units_of(Chain(Part(), Part()))
    if how != "unused":
        loss = chain_loss(model, 0, rank)
        if how == "backward":
            loss.backward()
        del loss
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(model.parts[0].a)
        del model
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("how", ["unused", "forward", "backward"])
def test_a_model_is_freed(ranks, how):
    ranks(2).run(rank_frees, how)


# --- crashes ---------------------------------------------------------------------------------------------------------


def rank_changes_dtype(rank, world, units):
    torch.manual_seed(0)
    reference = parts()()
    torch.manual_seed(0)
    model = units_of(parts()(), units=None or ([] if not units else [Part]))
    reference.double(), model.double()
    with torch.no_grad():
        close(model(data(0, 0).double()), reference(data(0, 0).double()), 1e-12, "result")


@pytest.mark.parametrize("units", [False, True])
def test_a_model_may_change_its_dtype(ranks, units):
    ranks(2).run(rank_changes_dtype, units)


def rank_has_list_as_unit(rank, world):
    with pytest.raises((ValueError, TypeError)):
        zcompile.shard(parts()(), units=[nn.ModuleList])


def test_a_unit_without_a_forward_is_refused(ranks):
    ranks(2).run(rank_has_list_as_unit)


class UsesSparse(Part):
    def forward(self, x):
        return torch.sparse.mm(torch.eye(len(x)).to_sparse(), torch.tanh(x @ self.a)) @ self.b


class UsesVmap(Part):
    def forward(self, x):
        return torch.vmap(lambda w: torch.tanh(x @ w))(torch.stack([self.a, self.b])).sum(0)


class UsesFunc(Part):
    def forward(self, x):
        return torch.func.grad(lambda x: torch.tanh(x @ self.a).square().sum())(x) @ self.b


class SumsParameters(Part):
    def forward(self, x):
        return x + (self.a + self.b).sum()


class SameGradient(Part):
    def forward(self, x):
        return x @ (self.a + self.b).T


class Scalars(Part):
    def __init__(self):
        super().__init__()
        self.s, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.randn(1, 6))
        self.double_one = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.half_one = nn.Parameter(torch.randn(5).bfloat16())

    def forward(self, x):
        x = super().forward(x) * self.s + self.one
        return (x * self.double_one.sum() + self.half_one.float().sum()).float()


class SparseEmbedding(Part):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, sparse=True)

    def forward(self, x):
        return super().forward(x) + self.table(x.argmax(-1))


class PaddedEmbedding(SparseEmbedding):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 6, padding_idx=2, max_norm=None)


class Recurrent(Part):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 6, 2)

    def forward(self, x):
        return super().forward(self.lstm(x)[0])


class Normalized(Part):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(6).eval()

    def forward(self, x):
        return super().forward(self.norm(x))


class Parametrized(Part):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))

    def forward(self, x):
        return self.linear(super().forward(x))


class Itself(Part):
    def forward(self, x, depth=2):
        return x if depth == 0 else self(super().forward(x), depth - 1)


KINDS = [UsesSparse, UsesVmap, UsesFunc, SumsParameters, SameGradient, Scalars, SparseEmbedding, PaddedEmbedding]
KINDS += [Recurrent, Normalized, Parametrized, Itself]


def rank_trains_kind(rank, world, kind):
    beside(rank, world, make=parts(2, globals()[kind]), steps=2)


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_a_unit_of_a_kind(ranks, kind):
    ranks(2).run(rank_trains_kind, kind, timeout=60)
