"""accelerate, Trainer and TRL with models that zcompile shards: each class here stands in for the one of its name.

Each is imported when it is first asked for, with the library that it needs.

[Note: accelerate's FSDP2 mode]
accelerate has no interface for other ways to shard. What it does for FSDP2 is right for every model of DTensors:
checkpoints by `torch.distributed.checkpoint`, a whole state dict on rank 0. So `Accelerator` says that it is of that
mode, and does by itself what calls methods of FSDP2's modules: `prepare` and `no_sync`. Trainer, in turn, asks the
accelerator for its mode. accelerate has the mode on GPUs only; here it is there on CPUs, too.

What is used beside public methods of the three libraries is listed in docs/private-apis.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zcompile.integrations.huggingface.accelerator import Accelerator
    from zcompile.integrations.huggingface.adapter import CompilePlugin
    from zcompile.integrations.huggingface.plans import distribute
    from zcompile.integrations.huggingface.sft_trainer import SFTTrainer
    from zcompile.integrations.huggingface.trainer import Trainer, TrainerMixin

__all__ = ["Accelerator", "CompilePlugin", "SFTTrainer", "Trainer", "TrainerMixin", "distribute"]

_MODULES = {
    "Accelerator": "accelerator",
    "CompilePlugin": "adapter",
    "distribute": "plans",
    "SFTTrainer": "sft_trainer",
    "Trainer": "trainer",
    "TrainerMixin": "trainer",
}


def __getattr__(name: str) -> Any:
    """The class of that name, whose module is imported now."""
    if name in _MODULES:
        return getattr(importlib.import_module(f"zcompile.integrations.huggingface.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
