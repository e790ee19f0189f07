"""Engines of `zcompile profile` that use DeepSpeed: ZeRO stage 3 alone, with DeepSpeed's compiler, with zcompile."""

from typing import Any, ClassVar

import torch
from torch import nn

import zcompile
from zcompile.profile.engine import Engine
from zcompile.profile.zcompile_engines import counted_bytes


class Zero3(Engine):
    casts_inputs = False
    added_config: ClassVar[dict[str, Any]] = {}  # merged into DeepSpeed's configuration

    def zero_options(self) -> dict[str, Any]:
        return {}

    def prepare(self, model: nn.Module) -> nn.Module:
        import deepspeed

        optimizer = {
            "lr": self.training.learning_rate,
            "weight_decay": 1e-2,  # torch's default
            "torch_adam": True,
            "fused": True,
        }
        config = self.added_config | {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.training.microbatches,
            "gradient_clipping": 0.0,  # the other engines do not clip
            "bf16": {"enabled": self.training.precision == "bf16"},
            "torch_autocast": {"enabled": self.autocasts(), "dtype": "bfloat16"},
            "zero_optimization": {"stage": 3, **self.zero_options()},
            "optimizer": {"type": "AdamW", "params": optimizer},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        if "compile" in config or self.zero_options():
            self.engine.compile()
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def step(self, batches: list[Any]) -> torch.Tensor:
        self.raise_rate()
        losses = []
        for batch in batches:
            loss = self.engine(self.cast_input(batch))
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()


class DeepCompile(Zero3):
    wire_is_traced = False  # DeepCompile has a communicator of its own
    added_config: ClassVar[dict[str, Any]] = {"compile": {"deepcompile": True}}


class Zero3Zcompile(Zero3):
    def zero_options(self) -> dict[str, Any]:
        return {"zcompile": {"enabled": True, **self.options}}

    def taken(self) -> bool:
        """Return whether zcompile runs the training; if not, DeepSpeed fell back to its own stage 3."""
        return self.engine.zcompile.state is not None

    def extra_bytes(self) -> int:
        return zcompile.stats(self.engine.module)["transport_bytes"] if self.taken() else 0

    def wire_bytes(self) -> int | None:
        return counted_bytes(self.engine.module) if self.taken() else None
