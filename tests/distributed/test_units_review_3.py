"""What plain reads do where units fail."""

import pytest
import torch

import zcompile
from tests.distributed import test_units_review as one
from tests.distributed.test_units import routed_loss
from tests.support.mixtures import MixtureModel
from tests.support.reference import close, same_grads, train_beside


def rank_plain_kind(rank, world, kind):
    make = one.parts(2, getattr(one, kind))
    train_beside(rank, world, zcompile.shard, make=make, loss=one.chain_loss, steps=2)


@pytest.mark.parametrize("kind", ["UsesFunc", "SparseEmbedding"])
def test_plain_kind(ranks, kind):
    ranks(2).run(rank_plain_kind, kind, timeout=60)


def rank_plain_hooks(rank, world):
    reference, model = one.parts()(), None
    torch.manual_seed(0)
    model = zcompile.shard(one.parts()())
    calls = {}
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: calls.setdefault(name, []).append(g) and None)
    (one.chain_loss(model, 0, rank) + one.chain_loss(model, 1, rank)).backward()
    assert all(len(each) == 1 for each in calls.values()), {k: len(v) for k, v in calls.items()}


def test_plain_hooks(ranks):
    ranks(2).run(rank_plain_hooks, timeout=60)
