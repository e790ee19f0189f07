"""Classes of sharded modules are pickled and copied as classes; whole sharded models are refused, as before."""

import abc
import copy
import io
import pickle

import pytest
import torch
from torch import nn

import zcompile
from tests.support.fake_ranks import as_rank


class WithMetaclass(nn.Linear, metaclass=abc.ABCMeta):
    """Its metaclass is not `type`."""


@pytest.fixture
def ranks_of_two():
    with as_rank(0, 2):
        yield


@pytest.mark.parametrize("make", [nn.Linear, WithMetaclass])
def test_the_class_of_a_sharded_module_is_pickled(ranks_of_two, make):
    model = zcompile.shard(nn.Sequential(make(4, 4), nn.ReLU()))
    for module in (model, *model):
        made = type(module)
        assert made is not getattr(torch.nn, made.__name__, make)
        for copied in (pickle.loads(pickle.dumps(made)), copy.copy(made), copy.deepcopy(made)):
            assert copied is made
    unsharded = pickle.loads(pickle.dumps(make))
    assert unsharded is make


def test_equal_modules_have_one_class_and_one_pickle(ranks_of_two):
    first, second = (zcompile.shard(nn.Sequential(nn.Linear(4, 4))) for _ in range(2))
    assert type(first[0]) is type(second[0])
    assert pickle.dumps(type(first[0])) == pickle.dumps(type(second[0]))


def test_a_whole_sharded_model_is_neither_pickled_nor_copied(ranks_of_two):
    model = zcompile.shard(nn.Sequential(nn.Linear(4, 4)))
    with pytest.raises((pickle.PicklingError, RuntimeError), match=r"[pP]ickle"):
        torch.save(model, io.BytesIO())
    with pytest.raises((pickle.PicklingError, RuntimeError), match=r"[pP]ickle"):
        pickle.dumps(model)
    with pytest.raises(Exception, match="copied"):
        copy.deepcopy(model)
