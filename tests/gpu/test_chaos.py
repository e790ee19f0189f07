"""As tests/distributed/test_chaos.py, over NCCL; ranks may share a GPU."""

import pytest

from tests.support import chaos

TIMEOUT_S = 12.0


@pytest.mark.parametrize("seed", range(15))
def test_a_rank_that_fails_gives_a_right_result_or_an_error_on_all(seed):
    fault = chaos.Fault.of(seed, TIMEOUT_S, "cuda")
    answers, seconds = chaos.run(fault)
    chaos.check(fault, answers, seconds)
