"""What users of FSDP2 rely on: frozen parameters, parameters that are not reduced, functional_call."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call

import zcompile
from tests.support.compiling import OPTIONS, by_blocks, wrapped
from tests.support.models import Block, Transformer
from tests.support.ranks import slow
from tests.support.reference import close, compiled, lm_loss, pair, train_beside

in_units = functools.partial(zcompile.shard, units=[Block])
ways = pytest.mark.parametrize(
    "prepare", [compiled, wrapped, *(pytest.param(each, marks=slow) for each in (zcompile.shard, by_blocks, in_units))]
)


@ways
@pytest.mark.parametrize("by_attribute", [False, True])
def test_requires_grad_is_followed(rank, world, prepare, by_attribute):
    def freeze(model, frozen=True):
        for name, parameter in model.named_parameters():
            trains = (".0." in name) != frozen or "mix" in name
            if by_attribute:
                parameter.requires_grad = trains
            else:
                parameter.requires_grad_(trains)
        return model

    def alternate(model, reference, step):
        freeze(model, step % 2 == 0), freeze(reference, step % 2 == 0)

    train_beside(rank, world, prepare, make=lambda: freeze(Transformer()), steps=4, after_step=alternate)


def test_a_parameter_thawed_before_the_first_compile_trains(rank, world):
    frozen = Transformer().requires_grad_(False)
    model = compiled(frozen)
    model.head.weight.requires_grad = True
    lm_loss(model, 0, rank).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is not None] == ["embed.weight"]


def test_a_compiled_function_that_misses_an_attribute_says_so(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    function = torch.compile(lambda x: model(x).sum(), **OPTIONS)
    function(torch.ones(1, 3)).backward()
    model.weight.requires_grad = False
    message = (
        rf"requires_grad of parameter 'weight' was set as an attribute .rank {rank}.*parameter.requires_grad_.False."
    )
    with pytest.raises(RuntimeError, match=message):
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
    expected = (
        "'extra.weight', 'extra.bias'" if late else "'b.weight', 'extra.weight', 'extra.bias'"
    ) + " are not reduced"
    texts = [text for _ in range(3) for text in messages_of_backward(model)]
    assert len(texts) == 1 and f"gradients of {expected} (rank {rank})" in texts[0], texts


@ways
def test_functional_call_takes_dtensors_and_gives_them_gradients(rank, world, prepare):
    (reference, model), (other, theirs) = pair(Transformer, prepare), pair(Transformer, prepare)
    with torch.no_grad():
        for each in (other, theirs):
            torch._foreach_mul_(list(each.parameters()), 1.5)
    lm_loss(model, 0, rank)  # compiles
    given = {name: parameter.detach().requires_grad_() for name, parameter in theirs.named_parameters()}

    class Call:
        def __init__(self, model, given):
            self.model, self.given = model, given

        def __call__(self, tokens):
            return functional_call(self.model, self.given, (tokens,))

        def parameters(self):
            return iter(self.given.values())

    loss = lm_loss(Call(model, given), 1, rank)
    torch.testing.assert_close(loss, lm_loss(other, 1, rank))
    loss.backward()
    (sum(lm_loss(other, 1, each) for each in range(world)) / world).backward()
    for ours, expected in zip(given.values(), other.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        close(ours.grad, expected.grad, 2e-5, "gradient")
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(lm_loss(model, 0, rank), lm_loss(reference, 0, rank))


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
    reference, model = pair(lambda: AddsBiasItself(3, 5), zcompile.shard)
    x = torch.ones(2, 3)
    torch.testing.assert_close(model(x), reference(x))
