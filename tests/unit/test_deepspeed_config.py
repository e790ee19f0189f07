"""DeepSpeed configs that zcompile refuses, and configs that do not ask for it. Needs no DeepSpeed."""

import pytest
from torch import nn

from tests.support.deepspeed_config import config_of
from zcompile.integrations.deepspeed.config import WITHOUT_EFFECT, options_of, without_effect


@pytest.mark.parametrize(
    "config, reason",
    [
        ({"zcompile": {"enabled": True}}, "at its top. Move it into"),
        ({"zero_optimization": {"stage": 2}}, "asks for stage 2"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, 'Remove "offload_param"'),
        ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "zero_hpz_partition_size"),
        ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, 'Remove "zero_quantized_gradients"'),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "mics_shard_size"),
        ({"compile": {"deepcompile": True}}, "deepcompile"),
    ],
)
def test_configs_that_cannot_work_are_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        options_of(config_of({}, **config))


@pytest.mark.parametrize(
    "block, reason",
    [
        ({"enabled": True, "iner": "x"}, "unknown option 'iner'; known options are inner"),
        ({"enabled": True, "artifact": 3}, "must be the path of a file"),
        ({"enabled": True, "artifact": "a.zc", "inner": "aot_eager"}, "inner='inductor'|needs torch 2.13"),
        (True, "write"),
    ],
)
def test_blocks_that_are_wrong_are_refused(block, reason):
    with pytest.raises(ValueError, match=reason):
        options_of({"zero_optimization": {"stage": 3, "zcompile": block}})


def test_pipelines_are_refused():
    class PipelineModule(nn.Module):
        """Stands in for DeepSpeed's, which wants a launcher's environment to be made."""

    with pytest.raises(ValueError, match="pipeline"):
        options_of(config_of({}), PipelineModule())


def test_without_the_flag_there_are_no_options():
    assert options_of(config_of(None)) is None
    assert options_of(config_of({"enabled": False}, zero_optimization={"stage": 1})) is None


def test_options_without_effect_are_named_with_what_to_set_instead():
    zero = {"stage": 3, "stage3_max_live_parameters": 10**9, "overlap_comm": True, "reduce_bucket_size": "auto"}
    told = without_effect({"zero_optimization": zero, "communication_data_type": "fp32"})
    assert told == (
        "stage3_max_live_parameters, overlap_comm, communication_data_type: no effect; set gather_budget_bytes for "
        "stage3_max_live_parameters"
    )
    assert without_effect({"zero_optimization": {"stage": 3}}) == ""


def test_options_without_effect_are_deepspeeds():
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    fields = config.DeepSpeedZeroConfig.model_fields
    known = set(fields) | {field.alias for field in fields.values()}
    assert set(WITHOUT_EFFECT) - {"communication_data_type"} <= known
