"""Eager forwards read parameters in all ways that users know, and train as the unsharded model does."""

import pytest

from tests.support.blocks import shard_in_blocks
from tests.support.ranks import on_ranks
from tests.support.reads import WAYS
from tests.support.reads_matrix import BF16, TOLERANCE, as_root, as_units, difference

slow = pytest.mark.slow


@pytest.mark.parametrize("prepare", [as_root, shard_in_blocks, as_units])
@pytest.mark.parametrize("state", ["train", "frozen", pytest.param("no_grad", marks=slow)])
@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(3, marks=slow)])
@on_ranks(timeout=300)
def test_a_forward_may_read_its_parameters_in_any_way(rank, world, state, prepare):
    wrong = {}
    for way in WAYS:
        try:
            found = difference(rank, world, prepare, way, state)
        except Exception as error:
            wrong[way] = f"{type(error).__name__}: {str(error)[:200]}"
        else:
            if found > (BF16 if way == "autocast" else TOLERANCE):
                wrong[way] = found
    assert not wrong, wrong
