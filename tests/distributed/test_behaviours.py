"""What users of FSDP2 rely on: frozen parameters, those that are not reduced, functional_call, hooks on parameters."""

import contextlib
import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import zcompile
from tests.support import mixtures as units
from tests.support import reference as ref
from tests.support.compiling import OPTIONS, by_blocks, wrapped
from tests.support.mixtures import MixtureModel, routed_loss
from tests.support.models import Block, Transformer
from tests.support.ranks import slow_case

in_units = functools.partial(zcompile.shard, units=[Block])
ways = pytest.mark.parametrize(
    "prepare", [ref.compiled, wrapped, *map(slow_case, (zcompile.shard, by_blocks, in_units))]
)


@ways
@pytest.mark.parametrize("by_attribute", [False, True])
def test_requires_grad_is_followed(rank, world, prepare, by_attribute):
    def freeze(model, frozen=True):
        for name, parameter in model.named_parameters():
            trains = (".0." in name) != frozen or "mix" in name
            setattr(parameter, "requires_grad", trains) if by_attribute else parameter.requires_grad_(trains)
        return model

    alternate = lambda model, reference, step: [freeze(each, step % 2 == 0) for each in (model, reference)]
    ref.train_beside(rank, world, prepare, make=lambda: freeze(Transformer()), steps=4, after_step=alternate)


def test_a_parameter_thawed_before_the_first_compile_trains(rank, world):
    model = ref.compiled(Transformer().requires_grad_(False))
    model.head.weight.requires_grad = True
    ref.lm_loss(model, 0, rank).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["embed.weight"]


def test_a_compiled_function_that_misses_an_attribute_says_so(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    function = torch.compile(lambda x: model(x).sum(), **OPTIONS)
    function(torch.ones(1, 3)).backward()
    model.weight.requires_grad = False
    message = f"requires_grad of parameter 'weight' was set as an attribute .rank {rank}.*"
    with pytest.raises(RuntimeError, match=message + "parameter.requires_grad_.False."):
        function(torch.ones(1, 3))
    model.weight.grad = None
    model.weight.requires_grad_(False)
    function(torch.ones(1, 3)).backward()
    assert model.weight.grad is None and model.bias.grad is not None


class Extended(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.extra = None

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        return x if self.extra is None else self.extra(x)


def messages_of_backward(model):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(torch.ones(2, 4)).sum().backward()
    return [str(warning.message) for warning in caught if "not reduced" in str(warning.message)]


@pytest.mark.parametrize("late", [False, True])
def test_parameters_that_are_not_reduced_are_warned_of_once(rank, world, late):
    """And where there is none, nothing is."""
    assert messages_of_backward(zcompile.shard(Extended())) == []
    model = Extended()
    model.b.bias.requires_grad = False
    zcompile.shard(model, ignored_params=list(model.b.parameters()))
    if late:
        model.b.weight.requires_grad = False
        for _ in range(2):  # adapters may come after an evaluation, or after training
            assert messages_of_backward(model) == []
    model.extra = nn.Linear(4, 4)
    expected = ("" if late else "'b.weight', ") + f"'extra.weight', 'extra.bias' are not reduced (rank {rank})"
    texts = [text for _ in range(3) for text in messages_of_backward(model)]
    assert len(texts) == 1 and f"gradients of {expected}" in texts[0], texts


@ways
def test_functional_call_takes_dtensors_and_gives_them_gradients(rank, world, prepare):
    (reference, model), (other, theirs) = ref.pair(Transformer, prepare), ref.pair(Transformer, prepare)
    with torch.no_grad():
        for each in (other, theirs):
            torch._foreach_mul_(list(each.parameters()), 1.5)
    ref.lm_loss(model, 0, rank)  # compiles
    given = {name: parameter.detach().requires_grad_() for name, parameter in theirs.named_parameters()}

    class Call:
        def __init__(self, model, given):
            self.model, self.given = model, given

        def __call__(self, tokens):
            return functional_call(self.model, self.given, (tokens,))

        def parameters(self):
            return iter(self.given.values())

    loss = ref.lm_loss(Call(model, given), 1, rank)
    torch.testing.assert_close(loss, ref.lm_loss(other, 1, rank))
    loss.backward()
    (sum(ref.lm_loss(other, 1, each) for each in range(world)) / world).backward()
    for ours, expected in zip(given.values(), other.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        ref.close(ours.grad, expected.grad, 2e-5, "gradient")
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(ref.lm_loss(model, 0, rank), ref.lm_loss(reference, 0, rank))


@pytest.mark.parametrize("factor", [None, 1.0])
def test_functional_call_has_gradients_of_gradients(rank, world, factor):
    prepare = functools.partial(zcompile.shard, gradient_divide_factor=factor)
    reference, model = ref.pair(lambda: nn.Sequential(nn.Linear(3, 3), nn.Tanh()), prepare)
    given = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    x, divisor, results = torch.arange(6.0 * world).view(world, 2, 3).cos(), factor or world, []
    losses = functional_call(model, given, (x[rank],)).sum(), sum(map(torch.sum, map(reference, x))) / divisor
    for loss, parameters in zip(losses, (list(given.values()), list(reference.parameters())), strict=True):
        grads = torch.autograd.grad(loss, parameters, create_graph=factor is None)
        if factor is None:  # gradients of gradients divide once more, so only means of them are defined
            grads = torch.autograd.grad(ref.full(sum(grad.square().sum() for grad in grads)), parameters)
        results.append(grads)
    for ours, theirs in zip(*results, strict=True):
        ref.close(ours, theirs, ref.FP32, "gradient")


def test_functional_call_refuses_other_tensors_by_name(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    x = torch.ones(1, 3)
    plain = {"weight": torch.zeros(4, 3)}
    other = {"weight": zcompile.shard(nn.Linear(3, 6)).weight}
    for given, what in ((plain, "a plain tensor of shape .4, 3."), (other, "a DTensor of shape .6, 3.")):
        with pytest.raises(RuntimeError, match=f"parameter 'weight' was replaced .* .rank {rank}. by {what}"):
            functional_call(model, given, (x,))
    with zcompile.unshard(model):
        functional_call(model, {name: p.detach() for name, p in model.named_parameters()}, (x,))
    model(x).sum().backward()


def test_a_derivative_by_the_dtensors_is_an_error(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
        torch.autograd.grad(model(torch.ones(1, 3)).sum(), list(model.parameters()))


class AddsBiasItself(nn.Linear):
    """Its product has no bias for a while, as in transformers' rowwise layers."""

    def forward(self, x):
        bias, self._parameters["bias"] = self._parameters["bias"], None
        try:
            product = super().forward(x)
        finally:
            self._parameters["bias"] = bias
        return product + self.bias


def test_a_parameter_that_is_none_for_a_while_reads_as_none(rank, world):
    reference, model = ref.pair(lambda: AddsBiasItself(3, 5), zcompile.shard)
    x = torch.ones(2, 3)
    torch.testing.assert_close(model(x), reference(x))


def two_losses(model, step, rank):
    return routed_loss(model, step, rank) + routed_loss(model, step + 1, rank)


CASES = [(Transformer, ref.lm_loss, zcompile.shard), (Transformer, ref.lm_loss, ref.compiled)]


@pytest.mark.parametrize(
    "make, loss, prepare",
    [*CASES, (MixtureModel, two_losses, units.sharded)],  # ranks use other parameters, and one none uses
)
@pytest.mark.parametrize("before", [False, True])
def test_hooks_fire_once_with_the_gradient(rank, world, make, loss, prepare, before):
    """Each hook fires once per backward, with what the unsharded model's sees; removed ones do not."""
    calls = {"ours": [], "theirs": []}

    def register(model, key):
        handles = []
        for name, parameter in model.named_parameters():

            def note(grad, name=name):
                calls[key].append((name, "hook", grad.detach().clone()))

            def note_accumulated(parameter, name=name):
                calls[key].append((name, "accumulated", parameter.grad.detach().clone()))

            handles += [parameter.register_hook(note), parameter.register_post_accumulate_grad_hook(note_accumulated)]
        return handles

    reference, model = ref.pair(make, lambda model: model)
    handles = register(model, "ours") if before else []
    model = prepare(model)
    handles = handles or register(model, "ours")
    register(reference, "theirs")
    for step in range(2):  # the second accumulates
        ref.backward_beside(rank, world, model, reference, loss, step)
        ours, theirs = ({call[:2]: call[2] for call in calls[key]} for key in ("ours", "theirs"))
        assert len(calls["ours"]) == len(ours) and ours.keys() == theirs.keys()
        for key, grad in ours.items():
            assert isinstance(grad, DTensor)
            ref.close(grad, theirs[key], ref.FP32, f"{key}")
        names = [call[:2] for call in calls["ours"]]
        assert all(names.index((name, "hook")) < names.index((name, "accumulated")) for name, _ in names)
        calls["ours"].clear(), calls["theirs"].clear()
    for handle in handles:
        handle.remove()
    loss(model, 0, rank).backward()
    assert not calls["ours"]


def step_now(optimizer, parameter):
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    "make, loss, prepare",
    [*CASES, slow_case(Transformer, ref.lm_loss, by_blocks), slow_case(MixtureModel, routed_loss, units.sharded)],
)
def test_an_optimizer_in_backward_trains_as_unsharded(rank, world, make, loss, prepare):
    """torch's tutorial: https://docs.pytorch.org/tutorials/intermediate/optimizer_step_in_backward_tutorial.html"""
    reference, model = ref.pair(make, prepare)
    for parameter in (*model.parameters(), *reference.parameters()):
        parameter.register_post_accumulate_grad_hook(functools.partial(step_now, ref.sgd([parameter])))
    for step in range(3):
        ref.backward_beside(rank, world, model, reference, loss, step)
    assert all(parameter.grad is None for parameter in model.parameters())
    ref.same_parameters(model, reference)


def clip_each(model):
    """A hook that is not linear: what it makes of a sum is not the sum of what it makes of the parts."""
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))


@pytest.mark.parametrize(("accumulate", "late"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("prepare", [slow_case(zcompile.shard), ref.compiled])
def test_a_hook_replaces_the_gradient_of_each_microbatch(rank, world, prepare, accumulate, late):
    reference, model = ref.pair(Transformer, prepare)
    with zcompile.accumulate(model) if accumulate else contextlib.nullcontext():
        for microbatch in range(3):
            if microbatch == (1 if late else 0):
                clip_each(model), clip_each(reference)
            ref.backward_beside(rank, world, model, reference, ref.lm_loss, microbatch)
    ref.same_grads(model, reference)


def test_a_hook_that_returns_something_else_is_refused(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    for hook, message in (
        (lambda grad: grad.full_tensor(), "a hook on parameter 'weight' returned a plain tensor of shape .4, 3."),
        (lambda grad: 1, "a hook on parameter 'weight' returned a int"),
    ):
        handle = model.weight.register_hook(hook)
        with pytest.raises(RuntimeError, match=message):
            model(torch.ones(1, 3)).sum().backward()
        handle.remove()
    model.bias.register_post_accumulate_grad_hook(lambda parameter: 1)
    with pytest.raises(RuntimeError, match="hook on parameter 'bias' must return None"):
        model(torch.ones(1, 3)).sum().backward()


def test_gradients_that_hooks_keep_stay_and_hooks_of_a_frozen_parameter_do_not_fire(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    calls = []
    model.weight.register_hook(calls.append)
    for _ in range(2):  # the second adds to `.grad`
        model(torch.ones(1, 3)).sum().backward()
    assert torch.equal(*(ref.full(grad) for grad in calls))
    calls.clear()
    model.weight.requires_grad, model.weight.grad = False, None
    model(torch.ones(1, 3)).sum().backward()
    assert not calls and model.weight.grad is None
