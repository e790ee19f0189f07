"""Hugging Face's `Trainer`, for models that zcompile shards."""

import os
from typing import TYPE_CHECKING, Any, cast

import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from torch import nn
from transformers.trainer_utils import get_last_checkpoint

from zcompile.integrations.huggingface.accelerator import Accelerator
from zcompile.integrations.huggingface.adapter import BACKEND, CompilePlugin

if TYPE_CHECKING:
    _Base = transformers.Trainer
else:
    _Base = object


class TrainerMixin(_Base):
    """Lets a subclass of `transformers.Trainer` shard its model with zcompile: `class Mine(TrainerMixin, Theirs)`.

    The model is sharded when training or evaluation begins, unless the program has sharded it by `zcompile.shard`.
    `TrainingArguments(torch_compile=True, torch_compile_backend="zcompile")` compiles it. With `fsdp`, zcompile's
    `Accelerator` gets `fsdp_config` as its `fsdp_plugin`. With `optim="adamw_torch_fused"`, `cpu_offload` keeps
    AdamW's states in host memory. Checkpoints hold one shard per rank, which any number of ranks can load, and the
    unsharded model in Hugging Face's format, which rank 0 writes.

    Raises:
        ValueError: `fsdp_config` is for FSDP1 or XLA, or has a setting that zcompile lacks; or arguments ask for
            DeepSpeed, fp16, another compile backend, `auto_find_batch_size`, or `save_only_model` with
            `load_best_model_at_end`.
    """

    def create_accelerator_and_postprocess(self) -> None:
        """Run Trainer's method, then make its accelerator one that shards."""
        args = self.args
        _refuse_arguments(args)
        settings, args.fsdp_plugin_args = args.fsdp_plugin_args, None  # else accelerate would use FSDP, on GPUs
        fsdp_plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
        plugin = CompilePlugin(args.torch_compile_backend or "no", args.torch_compile_mode)
        backend, args.torch_compile_backend = args.torch_compile_backend, "no"  # accelerate does not know "zcompile"
        try:
            super().create_accelerator_and_postprocess()
        finally:
            args.torch_compile_backend, args.fsdp_plugin_args = backend, settings
        self.accelerator = Accelerator.adopt(self.accelerator, plugin, fsdp_plugin)
        self.is_fsdp_enabled = True

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Check the checkpoint, then run Trainer's `train`.

        Raises:
            ValueError: neither a trainer of zcompile nor FSDP2 wrote the checkpoint.
        """
        if resume_from_checkpoint:
            _check_checkpoint(resume_from_checkpoint, self.args.output_dir)
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        self.accelerator.shard_once(cast(nn.Module, self.model))
        return super().evaluation_loop(*args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Let rank 0 write the unsharded model in Hugging Face's format. A collective call."""
        plugin = self.accelerator.state.fsdp_plugin
        state_dict_type = plugin.state_dict_type
        plugin.set_state_dict_type("FULL_STATE_DICT")
        try:
            super().save_model(output_dir, _internal_call)
        finally:
            plugin.set_state_dict_type(state_dict_type.name)


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` that shards its model with zcompile; see `TrainerMixin`."""


def _refuse_arguments(args: transformers.TrainingArguments) -> None:
    """Raise ValueError for arguments that zcompile does not support."""
    of_fsdp = cast(dict[str, Any], args.fsdp_config or {})
    refused = {
        "fsdp_config={'xla': True}": bool(of_fsdp.get("xla")),
        "fsdp_config={'version': 1}": bool(args.fsdp) and of_fsdp.get("version", 2) != 2,
        "deepspeed": bool(args.deepspeed),
        "fp16": args.fp16,
        "fp16_full_eval": args.fp16_full_eval,
        "bf16_full_eval": args.bf16_full_eval,
        "auto_find_batch_size": args.auto_find_batch_size,
        "save_only_model with load_best_model_at_end": args.save_only_model and args.load_best_model_at_end,
    }
    for name, asked in refused.items():
        if asked:
            raise ValueError(
                f"zcompile: TrainingArguments has {name} (rank {args.process_index}), which is not "
                "supported for a model that zcompile shards. Leave it out."
            )
    if args.torch_compile and args.torch_compile_backend != BACKEND:
        raise ValueError(
            f"zcompile: TrainingArguments has torch_compile_backend={args.torch_compile_backend!r} (rank "
            f"{args.process_index}). A model that zcompile shards is compiled by torch_compile_backend='{BACKEND}'."
        )


def _check_checkpoint(checkpoint: str | bool, output_dir: str | None) -> None:
    folder = get_last_checkpoint(output_dir or "") if isinstance(checkpoint, bool) else checkpoint
    if folder is None or not os.path.isdir(folder):
        return  # Trainer raises its own error
    written = ("pytorch_model_fsdp_0", "pytorch_model_fsdp.bin")
    if not any(os.path.exists(os.path.join(folder, name)) for name in written):
        raise ValueError(
            f"zcompile: checkpoint {folder} has no pytorch_model_fsdp_0: a trainer with neither zcompile nor FSDP2 "
            "wrote it, or one with save_only_model. To begin from its weights, load the model with from_pretrained."
        )
