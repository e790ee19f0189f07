"""DeepSpeed configs that zcompile refuses, and configs that do not ask for it. Needs no DeepSpeed."""

import pytest
from torch import nn

from tests.support.deepspeed_config import config_of
from zcompile.deepspeed.config import options_of


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"zcompile": {"enabled": True, "iner": "x"}}, "unknown option 'iner'; known options are inner"),
        ({"zcompile": True}, "write"),
        ({"zero_optimization": {"stage": 3, "zcompile": {"enabled": True}}}, "at its top and in"),
        ({"zero_optimization": {"stage": 2}}, "asks for stage 2"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 'Remove "offload_param"'),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "zero_quantized_weights"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
        ({"compile": {"deepcompile": True}}, "deepcompile"),
    ],
)
def test_configs_that_cannot_work_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        options_of(config_of({}, **config))


def test_pipelines_are_refused():
    class PipelineModule(nn.Module):
        """Stands in for DeepSpeed's, which wants a launcher's environment to be made."""

    with pytest.raises(ValueError, match="pipeline"):
        options_of(config_of({}), PipelineModule())


def test_without_the_flag_there_are_no_options():
    assert options_of(config_of(None)) is None
    assert options_of(config_of({"enabled": False}, zero_optimization={"stage": 1})) is None


def test_the_block_may_stand_in_zero_optimization():
    config = config_of(None)
    config["zero_optimization"]["zcompile"] = {"enabled": True, "inner": "aot_eager"}
    assert options_of(config) == {"inner": "aot_eager"}
