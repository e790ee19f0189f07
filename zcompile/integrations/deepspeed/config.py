"""Reads the "zcompile" block of a DeepSpeed config, and refuses other settings that zcompile does not support."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from zcompile.artifact.model import check_artifact
from zcompile.compiler.backend import parse_options

NO_CUDA_GRAPHS = "leave CUDA graphs out: with DeepSpeed, a replay would skip code that computes gradient norms."


def options_of(config: Mapping[str, Any], model: nn.Module | None = None) -> Mapping[str, Any] | None:
    """Return the options of zcompile's backend in a DeepSpeed config; None if it has no enabled "zcompile" block.

    The block is in "zero_optimization" ([Note: a config that nothing acts on] in flag.py). The result may have one
    more entry: "artifact", the path of a file with compiled code.

    Raises:
        ValueError: an option is unknown or has a wrong value, or zcompile does not support another setting of the
            config, or `model`. The text names the setting to remove.
    """
    if "zcompile" in config:
        raise ValueError(
            'zcompile: the DeepSpeed config has "zcompile" at its top. Move it into "zero_optimization". There, a '
            "program that does not import zcompile gets an error. At the top, DeepSpeed would ignore it."
        )
    zero = config.get("zero_optimization")
    block = zero.get("zcompile") if isinstance(zero, Mapping) else None
    if block is None:
        return None
    if not isinstance(block, Mapping) or not isinstance(block.get("enabled", False), bool):
        raise ValueError(f'zcompile: the DeepSpeed config has "zcompile": {block!r}; write {{"enabled": true, ...}}.')
    options = {name: value for name, value in block.items() if name not in ("enabled", "artifact")}
    settings = parse_options(options)
    if settings.cuda_graphs:
        raise ValueError(f'zcompile: "cuda_graphs" in the DeepSpeed config: {NO_CUDA_GRAPHS}')
    if (path := block.get("artifact")) is not None:
        if not isinstance(path, str):
            raise ValueError(f'zcompile: "artifact" in the DeepSpeed config must be the path of a file, not {path!r}.')
        check_artifact(settings)
        options["artifact"] = path
    if not block.get("enabled", False):
        return None
    reason = _conflict_in(config)
    if any(base.__name__ == "PipelineModule" for base in type(model).__mro__):
        reason = "it does not support pipeline modules. Train without pipeline parallelism"
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
    """Return a sentence that names the options of `config` without effect, and options to set instead; "" if none.

    Options with the value "auto" are not named, because the Hugging Face Trainer writes that value, not a user.
    """
    given = {**(config.get("zero_optimization") or {}), **config}
    ignored = [name for name in WITHOUT_EFFECT if given.get(name, "auto") != "auto"]
    if not ignored:
        return ""
    instead = [f"{WITHOUT_EFFECT[name]} for {name}" for name in ignored if WITHOUT_EFFECT[name]]
    return f"{', '.join(ignored)}: no effect" + (f"; set {', '.join(instead)}" if instead else "")


def _conflict_in(config: Mapping[str, Any]) -> str:
    """Return why zcompile does not support a setting of `config`, and the remedy; "" if it supports all settings."""
    zero = config.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if stage != 3:
        return (
            f"it works with ZeRO stage 3 only, and this config asks for stage {stage}. "
            'Set "zero_optimization": {"stage": 3}'
        )
    if (zero.get("offload_param") or {}).get("device", "none") != "none":
        return 'it gathers from device memory, so parameters stay there. Remove "offload_param"'
    if zero.get("zero_hpz_partition_size", 1) > 1:
        return (
            "it does not support secondary partitions, from which ranks of one host gather (without DeepSpeed, "
            'zcompile.shard(model, mesh, states="global") has them). Remove "zero_hpz_partition_size"'
        )
    for name in ("zero_quantized_gradients", "zero_quantized_nontrainable_weights"):
        if zero.get(name):
            return f'it quantizes only gathers ("zero_quantized_weights"). Remove "{name}"'
    if zero.get("zero_quantized_weights") and "artifact" in zero["zcompile"]:
        return 'with "zero_quantized_weights", gathers run in eager code, which no artifact holds. Remove "artifact"'
    if zero.get("mics_shard_size", -1) > 0:
        return 'it does not support MiCS, which shards over fewer ranks. Remove "mics_shard_size"'
    if (config.get("compile") or {}).get("deepcompile"):
        return 'DeepCompile would schedule the same gathers. Remove "deepcompile" from "compile"'
    if zero.get("zenflow"):
        return 'ZenFlow changes gradients in hooks that zcompile removes. Remove "zenflow"'
    if config.get("sequence_parallel_size", 1) > 1:
        return 'it does not support sequence parallelism. Remove "sequence_parallel_size"'
    return ""
