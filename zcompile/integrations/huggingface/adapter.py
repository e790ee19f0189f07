"""Plugins for accelerate that describe sharding and compiling, and the check of accelerate's settings."""

import os
from typing import Any

import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin, TorchDynamoPlugin

BACKEND = "zcompile"


class ShardedPlugin(FullyShardedDataParallelPlugin):
    """accelerate's FSDP2 plugin. Only `state_dict_type` has an effect: the format in which `save_state` writes models.

    Other fields have fixed values, so that accelerate reads none from the environment.
    """

    def __init__(self, state_dict_type: str = "SHARDED_STATE_DICT") -> None:
        super().__init__(
            fsdp_version=2,
            reshard_after_forward=True,
            auto_wrap_policy="no_wrap",
            cpu_offload=False,
            activation_checkpointing=False,
            activation_checkpointing_offload=False,
            state_dict_type=os.environ.get("FSDP_STATE_DICT_TYPE", state_dict_type),
        )


def settings_of(plugin: FullyShardedDataParallelPlugin, mixed_precision: str) -> tuple[dict[str, Any], str | None]:
    """Return the options of `zcompile.shard`, and `offload` of `fuse_optimizer`, that accelerate's FSDP2 plugin sets.

    Raises:
        ValueError: the plugin is for FSDP1, or sets a field that zcompile lacks.
    """
    refused = {
        "fsdp_version=1": plugin.fsdp_version != 2,
        "reshard_after_forward=False": plugin.reshard_after_forward is False,
        "ignored_modules": bool(plugin.ignored_modules),
        "activation_checkpointing": plugin.activation_checkpointing,
        "activation_checkpointing_offload": getattr(plugin, "activation_checkpointing_offload", False),
    }
    if names := [name for name, is_set in refused.items() if is_set]:
        raise ValueError(
            f"zcompile: Accelerator does not support {', '.join(names)} of fsdp_plugin. Set fsdp_version=2, and leave "
            "the other fields out. For activation checkpointing, call model.gradient_checkpointing_enable(). For "
            "ignored modules, call zcompile.shard(model, ignored_params=...) before Accelerator.prepare or "
            "Trainer.train."
        )
    if mixed_precision != "no":
        plugin.set_mixed_precision(mixed_precision)  # sets a policy if there is none, as accelerate does on GPUs
    policy = plugin.mixed_precision_policy
    dtypes = "param_dtype", "reduce_dtype", "output_dtype", "cast_forward_inputs"
    options = {name: getattr(policy, name) for name in dtypes} if policy is not None else {}
    if not plugin.cpu_offload:
        return options, None
    return options, "states" if options.get("param_dtype") is not None else "moments"


class CompilePlugin(TorchDynamoPlugin):
    """accelerate's plugin for `torch.compile`, with the backend "zcompile", which accelerate's own plugin refuses.

    Args:
        backend: "zcompile", "no", or None for the environment variable ACCELERATE_DYNAMO_BACKEND.
        mode: a mode of Inductor, as in `torch.compile`.
        options: options of zcompile's backend.
        fullgraph: whether a graph break is an error.
        dynamic: as in `torch.compile`.

    Raises:
        ValueError: another backend, or both `mode` and `options`.
    """

    def __init__(
        self,
        backend: str | None = BACKEND,
        mode: str | None = None,
        options: dict[str, Any] | None = None,
        fullgraph: bool | None = None,
        dynamic: bool | None = None,
    ) -> None:
        wanted = (backend or os.environ.get("ACCELERATE_DYNAMO_BACKEND", "no")).lower()
        if wanted not in (BACKEND, "no"):
            raise ValueError(
                f"zcompile: the compile backend is {wanted!r}. A model that zcompile shards is compiled by "
                f"{BACKEND!r}, or not at all ('no'): pass torch_compile_backend='{BACKEND}' to TrainingArguments, or "
                f"dynamo_backend='{BACKEND}' to Accelerator."
            )
        # accelerate only checks whether the backend is NO, and does not know "zcompile".
        name = "NO" if wanted == "no" else "INDUCTOR"
        super().__init__(
            backend=DynamoBackend(name),
            mode=mode,
            options=options,
            fullgraph=fullgraph,
            dynamic=dynamic,
            use_regional_compilation=False,
        )
        chosen = mode or os.environ.get("ACCELERATE_DYNAMO_MODE", "default")
        self.mode: str | None = None if chosen == "default" else chosen  # torch refuses a mode beside options
        if self.mode is not None and options:
            raise ValueError("zcompile: CompilePlugin has both a mode and options. Leave one of them out.")

    def to_kwargs(self) -> dict[str, Any]:
        kwargs = {"fullgraph": self.fullgraph, "dynamic": self.dynamic, "mode": self.mode, "options": self.options}
        return {"backend": BACKEND} | {name: value for name, value in kwargs.items() if value is not None}


def compile_plugin_of(plugin: TorchDynamoPlugin | None, backend: str | None) -> CompilePlugin:
    """Make the `CompilePlugin` of the two arguments of `accelerate.Accelerator`."""
    if plugin is not None and backend is not None:
        raise ValueError("zcompile: Accelerator has both dynamo_plugin and dynamo_backend. Leave one of them out.")
    if isinstance(plugin, CompilePlugin):
        return plugin
    if plugin is not None:
        return CompilePlugin(plugin.backend.value)
    return CompilePlugin(getattr(backend, "value", backend))


def refuse_settings(accelerator: Accelerator) -> None:
    """Raise ValueError for settings of `accelerator` that zcompile does not support."""
    state = accelerator.state
    rank = f"(rank {accelerator.process_index})"
    kind = state.distributed_type
    if os.environ.get("ACCELERATE_USE_FSDP", "false").lower() == "true":  # accelerate ignores it on CPUs
        kind = DistributedType.FSDP
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.FSDP):
        raise ValueError(
            f"zcompile: this program also asks accelerate for {kind.value} {rank}, but zcompile shards the "
            "model. Take fsdp, deepspeed and megatron_lm out of the program's arguments and of the file of "
            "`accelerate config`. To train by DeepSpeed and zcompile, use accelerate's own Accelerator, with a "
            "zcompile block in the DeepSpeed config."
        )
    if accelerator.parallelism_config is not None:
        raise ValueError(
            f"zcompile: parallelism_config is not supported {rank}. Shard the model yourself over a mesh, "
            "zcompile.shard(model, mesh), and leave parallelism_config out."
        )
    if accelerator.mixed_precision not in ("no", "bf16"):
        raise ValueError(
            f"zcompile: mixed_precision={accelerator.mixed_precision!r} is not supported {rank}. Use 'bf16' or 'no'."
        )
    world = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"zcompile: {world} ranks were started, but accelerate counts {accelerator.num_processes} "
            f"{rank}. On CPUs, pass Accelerator(cpu=True), TrainingArguments(use_cpu=True) or `accelerate launch "
            "--cpu`."
        )
