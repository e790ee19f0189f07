"""A rank that fails leads to a right result or an error on all ranks in time: tests/support/chaos.py, `make chaos`."""

import os

import pytest

from tests.support import chaos
from tests.support.ranks import slow_case
from tests.support.time_limits import scaled

TIMEOUT_S = scaled(6.0)
SEEDS = int(os.environ.get("ZCOMPILE_CHAOS_SEEDS", "5"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_rank_that_fails_gives_a_right_result_or_an_error_on_all(seed):
    fault = chaos.Fault.of(seed, TIMEOUT_S)
    answers, seconds = chaos.run(fault)
    chaos.check(fault, answers, seconds)


@pytest.mark.parametrize("seed", [0, *map(slow_case, range(1, max(SEEDS, 8)))])
def test_a_rank_that_fails_in_a_replay_gives_one_of_them_too(seed):
    """The graphs are stand-ins, over gloo."""
    fault = chaos.Fault.of(seed, TIMEOUT_S, captured=True)
    chaos.check(fault, *chaos.run(fault))
