"""Options that cannot be are refused when they are parsed."""

import pytest

from zcompile.compiler.backend import parse_options


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
