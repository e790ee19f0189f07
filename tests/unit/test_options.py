"""Options that cannot be are refused when they are parsed."""

import pytest

from zcompile.compiler.backend import parse_options


def assert_refused(options, message):
    with pytest.raises(ValueError, match=message):
        parse_options(options)


def test_an_unknown_option_is_refused():
    assert_refused({"iner": "aot_eager"}, "unknown option 'iner'; known options are inner, inductor")


def test_an_unknown_inner_compiler_is_refused():
    assert_refused({"inner": "fast"}, "'inner' must be")


def test_an_inductor_option_that_would_differ_between_ranks_is_refused():
    assert_refused({"inductor": {"shape_padding": True}}, "differs between ranks")
    parse_options({"inductor": {"shape_padding": True, "force_shape_pad": True}})


def test_an_option_that_inductor_does_not_know_is_refused():
    message = "'inductor' has 'max_autotun', which Inductor does not know"
    assert_refused({"inductor": {"max_autotun": True, "cpp.threads": 1}}, message)


def test_an_unknown_transport_is_refused():
    assert_refused({"transport": "rdma"}, "'transport' must be one of auto, p2p, nccl, gloo, not 'rdma'")


def test_a_negative_budget_is_refused():
    assert_refused({"reduce_budget_bytes": -1}, "'reduce_budget_bytes' must be a whole number of bytes")


@pytest.mark.parametrize("skip_passes", [["dedup_gathers"], "sink_gathers", 3])
def test_only_a_list_of_optional_passes_can_be_skipped(skip_passes):
    assert_refused({"skip_passes": skip_passes}, "'skip_passes' must be a list of narrow_gathers")
