"""First contacts: the backend's name, options and DeepSpeed configs that cannot be, the compiled module."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from torch import nn

import zcompile
from tests.support.deepspeed_config import config_of
from tests.support.sharded_ops import check_means
from zcompile import _C
from zcompile.compiler.backend import parse_options
from zcompile.integrations.deepspeed.config import WITHOUT_EFFECT, options_of, without_effect


def test_sharding_needs_a_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        zcompile.shard(nn.Linear(2, 2))


def test_backend_is_found_without_an_import():
    code = "import torch; assert 'zcompile' in torch._dynamo.list_backends(), torch._dynamo.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True)


LIMIT, BUDGET = "'memory_limit' must be a number of bytes, or a size such as '70GiB'", "activation_memory_budget"


@pytest.mark.parametrize(
    "options, message",
    [
        ({"iner": "aot_eager"}, "unknown option 'iner'; known options are inner, inductor"),
        ({"inner": "fast"}, "'inner' must be"),
        ({"inductor": {"shape_padding": True}}, "differ between ranks"),
        ({"inductor": {"max_autotun": True, "cpp.threads": 1}}, "has 'max_autotun', which Inductor does not know"),
        ({"transport": "rdma"}, "'transport' must be one of auto, p2p, nccl, gloo, not 'rdma'"),
        ({"reduce_budget_bytes": -1}, "'reduce_budget_bytes' must be a whole number of bytes"),
        *(({BUDGET: each}, f"'{BUDGET}' must be a number from") for each in (1.5, -0.1, True, "half")),
        *(({"memory_limit": each}, LIMIT) for each in ("much", "70 GiBit", 0, True, 1.5)),
        *(
            ({"skip_passes": each}, "must be a list of narrow_gathers")
            for each in (["dedup_gathers"], "sink_gathers", 3)
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


STUB = ast.parse((Path(zcompile.__file__).parent / "_C.pyi").read_text())
ONLY_A_TYPE = {"Stats"}  # names a dict of the compiled module


def names_in(body):
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.AnnAssign):
            yield node.target.id


def public(names):
    return {name for name in names if not name.startswith("_")}


def test_stub_has_the_names_of_the_module_and_the_methods_of_each_class():
    assert public(names_in(STUB.body)) - ONLY_A_TYPE == public(dir(_C))
    for node in STUB.body:
        if isinstance(node, ast.ClassDef) and node.name not in ONLY_A_TYPE:
            assert public(names_in(node.body)) == public(vars(getattr(_C, node.name))), node.name


def test_the_extension_needs_the_shared_runtime():
    """A second C++ runtime in the process crashes at the first number in an error."""
    assert b"\0libstdc++.so.6\0" in Path(_C.__file__).read_bytes()


def test_means_are_those_of_the_same_arithmetic_op_by_op():
    check_means("cpu")


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
    fields = pytest.importorskip("deepspeed.runtime.zero.config").DeepSpeedZeroConfig.model_fields
    known = set(fields) | {field.alias for field in fields.values()}
    assert set(WITHOUT_EFFECT) - {"communication_data_type"} <= known
