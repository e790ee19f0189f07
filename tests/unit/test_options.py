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
            ({"skip_passes": names}, "'skip_passes' must be a list of narrow_gathers")
            for names in (["dedup_gathers"], "sink_gathers", 3)
        ),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parse_options(options)


def test_inductor_may_pad_shapes_alike_on_all_ranks():
    parse_options({"inductor": {"shape_padding": True, "force_shape_pad": True}})
