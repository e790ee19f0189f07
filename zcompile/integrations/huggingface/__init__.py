"""Classes that shard with zcompile, named like the classes of accelerate, transformers and TRL that they replace.

A class, and the library that it needs, is imported at the first use of the class.

[Note: accelerate's FSDP2 mode]
accelerate has no interface for other ways to shard, but its code for FSDP2 can save, load and unshard any model of
DTensors. So zcompile's `Accelerator` reports FSDP2 as its mode, from which Trainer reads it, and overrides the methods
that would call methods of FSDP2's modules: `prepare` and `no_sync`. accelerate has this mode on GPUs only, zcompile's
`Accelerator` also on CPUs.

docs/private-apis.md lists the private names of the three libraries that are used here.
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
    if name in _MODULES:
        return getattr(importlib.import_module(f"zcompile.integrations.huggingface.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
