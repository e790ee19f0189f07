"""A rank that fails anywhere leads to a right result, or to an error on all ranks in time: see tests/support/chaos.py.

`make chaos` runs a hundred seeds; CI five.
"""

import os

import pytest

from tests.support import chaos
from tests.support.time_limits import scaled

TIMEOUT_S = scaled(6.0)


@pytest.mark.parametrize("seed", range(int(os.environ.get("ZCOMPILE_CHAOS_SEEDS", "5"))))
def test_a_rank_that_fails_gives_a_right_result_or_an_error_on_all(seed):
    fault = chaos.Fault.of(seed, TIMEOUT_S)
    answers, seconds = chaos.run(fault)
    chaos.check(fault, answers, seconds)
