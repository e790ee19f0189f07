"""Names of process groups in saved code: each rank has its own."""

import pytest

from zcompile.artifact.groups import with_names, with_places
from zcompile.artifact.program import asks_for_rank

CODE = """\
buf1 = torch.ops._c10d_functional.all_to_all_single.default(buf0, [24, 24], [24, 24], '3')
torch.ops._c10d_functional.wait_tensor.default(buf1)
buf2 = torch.ops._c10d_functional.all_reduce.default(buf1, 'sum', '5'); name = '3'
"""


def test_a_rank_that_loads_code_puts_in_the_names_of_its_groups():
    saved = with_places(CODE, {"3": "mesh 0", "5": "mesh 10"})
    loaded = with_names(saved, {"7": "mesh 0", "5": "mesh 10"})
    assert loaded == CODE.replace("24], '3'", "24], '7'")  # and not where it is no group


def test_collectives_over_unknown_groups_are_refused():
    with pytest.raises(RuntimeError, match="over process group '5', of no mesh"):
        with_places(CODE, {"3": "mesh 0"})


def test_functions_that_ask_for_the_rank_are_found():
    assert not asks_for_rank([("torch.distributed.distributed_c10d", 1, 4000, "")])
    assert "get_local_rank()" in asks_for_rank([("transformers.distributed.expert_parallel", 1, 300, "")])
