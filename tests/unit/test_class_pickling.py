"""Classes and parameters of sharded modules are pickled and copied; whole models and moved parameters are refused."""

import abc
import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import zcompile
from tests.support.meshes import as_rank


class WithMetaclass(nn.Linear, metaclass=abc.ABCMeta):
    """Its metaclass is not `type`."""


@pytest.fixture(autouse=True)
def ranks_of_two():
    with as_rank(0, 2):
        yield


@pytest.mark.parametrize("make", [nn.Linear, WithMetaclass])
def test_the_class_of_a_sharded_module_is_pickled(make):
    model = zcompile.shard(nn.Sequential(make(4, 4), nn.LayerNorm(4)))
    for module in (model, *model):
        made = type(module)
        assert made is not getattr(torch.nn, made.__name__, make)
        for copied in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
            assert copied is made
    unsharded = pickle.loads(pickle.dumps(make))
    assert unsharded is make


def test_equal_modules_have_one_class_and_one_pickle():
    first, second = (zcompile.shard(nn.Sequential(nn.Linear(4, 4))) for _ in range(2))
    assert type(first[0]) is type(second[0])
    assert pickle.dumps(type(first[0])) == pickle.dumps(type(second[0]))
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    layers = [parallelize_module(nn.Linear(4, 4), mesh["tp"], ColwiseParallel()) for _ in range(2)]
    spread = zcompile.shard(nn.Sequential(*layers), mesh["dp"])
    assert type(spread[0]) is type(spread[1])  # over slices that are two objects


def test_a_whole_sharded_model_is_neither_pickled_nor_copied():
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4)))
    for save in (pickle.dumps, lambda model: torch.save(model, io.BytesIO())):
        with pytest.raises((pickle.PicklingError, RuntimeError), match=r"[pP]ickle"):
            save(model)
    with pytest.raises(Exception, match="copied"):
        copy.deepcopy(model)


REGISTERED = {}


class Registered(nn.Module):
    """Registers its subclasses by name, as programs do that build models from a configuration."""

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        REGISTERED[cls.__name__] = cls


class Net(Registered):
    def __init__(self, width=4):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, x):
        return self.layers(x)


def test_a_class_of_sharded_modules_is_not_registered():
    model = zcompile.shard(Net())
    assert type(model) is not Net and list(REGISTERED.values()) == [Net]
    assert type(model).__name__ == "Net" and isinstance(model, Net)  # transformers writes the name to config.json


def test_a_call_of_the_class_makes_an_unsharded_module():
    model = zcompile.shard(Net())
    other = type(model)(width=6)
    assert type(other) is Net and other(torch.ones(1, 6)).shape == (1, 2)
    assert type(model.layers[:2]) is nn.Sequential  # which its slices call


@pytest.mark.parametrize("copied", ["torch.save", "pickle", "deepcopy"])
def test_parameters_and_optimizers_are_copied_without_their_model(copied):
    model = zcompile.shard(Net())
    mine = dict(model.named_parameters())
    optimizer = torch.optim.SGD(mine.values(), lr=0.1, momentum=0.9)
    if copied == "torch.save":
        file = io.BytesIO()
        torch.save(mine, file)
        file.seek(0)
        theirs = torch.load(file)
    elif copied == "pickle":
        theirs = pickle.loads(pickle.dumps(mine))
        assert len(pickle.loads(pickle.dumps(optimizer)).param_groups[0]["params"]) == len(mine)
    else:
        theirs = copy.deepcopy(mine)
    for name, parameter in mine.items():
        other = theirs[name]
        assert isinstance(other, nn.Parameter) and torch.equal(other.to_local(), parameter.to_local())
        assert other.requires_grad_(False) is other and parameter.requires_grad
        assert parameter.requires_grad_(False) is parameter and not parameter.requires_grad


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


EDITS = {
    "prune": lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
    "parametrize": lambda layer: parametrize.register_parametrization(layer, "weight", Twice()),
    "parametrized weight norm": parametrizations.weight_norm,
    "weight norm": weight_norm,
    "spectral norm": spectral_norm,
    "del": lambda layer: delattr(layer, "weight"),
    "another name": lambda layer: setattr(layer, "alias", layer.weight),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_parameter_stays_in_its_place(edit):
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match=r"parameter '0[.]weight' .* zcompile.shard .*rank 0.*prune"):
        EDITS[edit](model[0])
    if "norm" not in edit:  # which take it out of the module first
        assert list(dict(model.named_parameters())) == ["0.weight", "0.bias"]
        assert model(torch.ones(1, 4)).shape == (1, 4)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_refused(make):
    model = nn.Sequential(make(4, 4, sparse=True), nn.ReLU())
    with pytest.raises(ValueError, match=r"'0[.]weight' .rank 0. has sparse gradients, .* Set sparse=False"):
        zcompile.shard(model)
    model[0].sparse = False
    zcompile.shard(model)(torch.zeros(2, 1, dtype=torch.int64)).sum().backward()
    torch.optim.Adam(model.parameters()).step()
    zcompile.shard(nn.Sequential(make(4, 4, sparse=True).requires_grad_(False)))
    other = make(4, 4, sparse=True)
    zcompile.shard(nn.Sequential(nn.Linear(4, 4), other), ignored_params=[other.weight])


def test_lazy_modules_are_refused_until_their_first_forward():
    model = nn.Sequential(nn.LazyLinear(4))
    with pytest.raises(TypeError, match=r"parameter '0[.]weight' .*no shape yet.*forward"):
        zcompile.shard(model)
    model(torch.ones(1, 3))
    zcompile.shard(model)
