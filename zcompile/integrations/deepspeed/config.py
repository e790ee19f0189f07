"""The "zcompile" block of a DeepSpeed config, and what else in a config zcompile refuses to work with."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from zcompile.artifact.model import check_artifact
from zcompile.compiler.backend import parse_options

NO_CUDA_GRAPHS = "the DeepSpeed flag has no CUDA graphs yet: its norms are computed by what a replay would skip."


def options_of(config: Mapping[str, Any], model: nn.Module | None = None) -> Mapping[str, Any] | None:
    """The backend's options in a DeepSpeed config; None if the block is not there or not enabled.

    One entry of them is not the backend's: "artifact", the file that `zcompile.compile` would be given.
    The block stands in "zero_optimization" ([Note: a config that nothing acts on] in flag.py).

    Raises:
        ValueError: an option is unknown or wrong, or zcompile cannot work with another part of the config or with
            `model`. The message says what to remove.
    """
    if "zcompile" in config:
        raise ValueError(
            'zcompile: the DeepSpeed config has "zcompile" at its top. Move it into "zero_optimization". At '
            "the top, DeepSpeed would ignore it without a word in a program that does not import zcompile."
        )
    zero = config.get("zero_optimization")
    block = zero.get("zcompile") if isinstance(zero, Mapping) else None
    if block is None:
        return None
    if not isinstance(block, Mapping) or not isinstance(block.get("enabled", False), bool):
        raise ValueError('zcompile: write "zcompile": {"enabled": true, ...} in "zero_optimization" of the config.')
    options = {name: value for name, value in block.items() if name not in ("enabled", "artifact")}
    settings = parse_options(options)
    if settings.cuda_graphs:
        raise ValueError(f"zcompile: {NO_CUDA_GRAPHS}")
    if (path := block.get("artifact")) is not None:
        if not isinstance(path, str):
            raise ValueError(f'zcompile: "artifact" in the DeepSpeed config must be the path of a file, not {path!r}.')
        check_artifact(settings)
        options["artifact"] = path
    if not block.get("enabled", False):
        return None
    reason = _conflict_in(config)
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        reason = "it does not run pipeline modules. Train without pipeline parallelism"
    if reason:
        raise ValueError(f'zcompile: {reason}, or set "zcompile": {{"enabled": false}}.')
    return options


# Options of ZeRO-3 that have no effect -> the option of zcompile to set instead; None if there is nothing to set.
WITHOUT_EFFECT = {
    "stage3_prefetch_bucket_size": None,
    "stage3_max_reuse_distance": "save_for_backward_bytes",
    "stage3_max_live_parameters": "gather_budget_bytes",
    "stage3_param_persistence_threshold": None,
    "overlap_comm": None,
    "contiguous_gradients": None,
    "reduce_scatter": None,
    "reduce_bucket_size": "bucket_bytes",
    "allgather_bucket_size": "bucket_bytes",
    "communication_data_type": None,
}


def without_effect(config: Mapping[str, Any]) -> str:
    """A sentence that names options of `config` that have no effect, and what to set instead; empty if there are none.

    Those that are "auto", as the Hugging Face Trainer writes them, nobody chose.
    """
    given = {**(config.get("zero_optimization") or {}), **config}
    ignored = [name for name in WITHOUT_EFFECT if given.get(name, "auto") != "auto"]
    if not ignored:
        return ""
    instead = [f"{WITHOUT_EFFECT[name]} for {name}" for name in ignored if WITHOUT_EFFECT[name]]
    return f"{', '.join(ignored)}: no effect" + (f"; set {', '.join(instead)}" if instead else "")


def _conflict_in(config: Mapping[str, Any]) -> str:
    """What in the config cannot work together with zcompile, and what to remove; empty if nothing."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage != 3:
        return (
            f"it works with ZeRO stage 3, and this config asks for stage {stage}. "
            'Set "zero_optimization": {"stage": 3}'
        )
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        return 'its gathers read partitions on the device. Remove "offload_param"'
    if zero.get("zero_hpz_partition_size", 1) > 1:
        # Rank r has part r of each parameter, so the parts of one rank of each host are no slice of it.
        return (
            "it has no secondary partitions: DeepSpeed cuts parameters so that they could not be gathered inside of a "
            'host. zcompile.shard(model, mesh, states="global") does the same, without DeepSpeed. Remove '
            '"zero_hpz_partition_size"'
        )
    for name in ("zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if zero.get(name):
            return f'it quantizes gathers alone (zero_quantized_weights). Remove "{name}"'
    if zero.get("zero_quantized_weights") and "artifact" in zero["zcompile"]:
        return 'int8 gathers run in eager code, which no artifact holds. Remove "artifact"'
    if zero.get("mics_shard_size", -1) > 0:
        return 'MiCS partitions over a part of the ranks. Remove "mics_shard_size"'
    if (config.get("compile") or {}).get("deepcompile"):
        return 'DeepCompile would plan the same gathers. Remove "deepcompile" from "compile"'
    if zero.get("zenflow"):
        return 'ZenFlow changes gradients in hooks that zcompile removes. Remove "zenflow"'
    if config.get("sequence_parallel_size", 1) > 1:
        return 'it does not know sequence parallelism. Remove "sequence_parallel_size"'
    return ""
