"""What a user meets first: the backend's name, a model before any process group, and options that cannot be."""

import subprocess
import sys

import pytest
from torch import nn

import zcompile
from zcompile.compiler.backend import parse_options


def test_sharding_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        zcompile.shard(nn.Linear(2, 2))


def test_backend_is_found_without_an_import():
    code = "import torch; assert 'zcompile' in torch._dynamo.list_backends(), torch._dynamo.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"iner": "aot_eager"}, "unknown option 'iner'; known options are inner, inductor"),
        ({"inner": "fast"}, "'inner' must be"),
        ({"inductor": {"shape_padding": True}}, "differs between ranks"),
        (
            {"inductor": {"max_autotun": True, "cpp.threads": 1}},
            "'inductor' has 'max_autotun', which Inductor does not know",
        ),
        ({"transport": "rdma"}, "'transport' must be one of auto, p2p, nccl, gloo, not 'rdma'"),
        ({"reduce_budget_bytes": -1}, "'reduce_budget_bytes' must be a whole number of bytes"),
        *(
            ({"activation_memory_budget": budget}, "'activation_memory_budget' must be a number from")
            for budget in (1.5, -0.1, True, "half")
        ),
        *(
            ({"memory_limit": limit}, "'memory_limit' must be a number of bytes, or a size such as '70GiB'")
            for limit in ("much", "70 GiBit", 0, True, 1.5)
        ),
        *(
            ({"skip_passes": names}, "'skip_passes' must be a list of narrow_gathers")
            for names in (["dedup_gathers"], "sink_gathers", 3)
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parse_options(options)


@pytest.mark.parametrize("given, nbytes", [("70GiB", 70 << 30), ("1.5 GB", 1_500_000_000), ("4096", 4096), (7, 7)])
def test_a_limit_of_memory_may_have_a_unit(given, nbytes):
    assert parse_options({"memory_limit": given}).memory_limit == nbytes


def test_inductor_may_pad_shapes_alike_on_all_ranks():
    parse_options({"inductor": {"shape_padding": True, "force_shape_pad": True}})
