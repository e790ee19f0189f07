"""What all engines that are compared have in common."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zcompile.explanation.explanation import Explanation

PRECISIONS = {
    "fp32": "all in fp32",
    "bf16": "compute in bf16 from fp32 weights, as each engine does that",
    "autocast": "torch.autocast with bf16; in DeepSpeed, fp32 partitions under torch_autocast",
}

# Steps over which the rate rises. Without a rise losses jump at first, and runs that differ by rounding part.
RATE_STEPS = 20


@dataclass(frozen=True)
class Training:
    """How all engines train."""

    precision: str  # of PRECISIONS
    learning_rate: float  # reached after RATE_STEPS
    microbatches: int  # of a step


class Engine:
    """A model in training with fused AdamW. It knows nothing of how it is measured. Subclasses prepare the model."""

    wire_is_traced = True  # whether torch.profiler sees all that it sends
    casts_inputs = True  # whether the engine casts floating-point inputs itself

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        self.training = training
        self.options = options
        self.settings: list[str] = []  # beside torch's defaults, and what this torch lacks of them; reports show it
        self.device = next(model.parameters()).device.type  # that computes; parameters may lie on another
        self.model = self.prepare(model)
        self.optimizer = self.make_optimizer()
        self.steps = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard, compile, or whatever the engine does to a whole model in fp32."""
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.adamw(self.model.parameters())

    def adamw(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.training.learning_rate, fused=True)

    def ran_with(self) -> list[str]:
        """Settings, and counts of the steps so far, for the report."""
        return self.settings

    def step(self, batches: list[Any]) -> torch.Tensor:
        """One step over the microbatches. Returns this rank's mean loss, []."""
        losses = self.accumulate(batches, 1 / len(batches))
        self.update()
        return torch.stack(losses).sum()

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        """Forward and backward of each microbatch, whose losses count `share` times. Returns these losses."""
        return [self.forward_backward(batch, share) for batch in batches]

    def update(self) -> None:
        self.raise_rate()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def raise_rate(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.training.learning_rate * min(1.0, self.steps / RATE_STEPS)

    def forward_backward(self, batch: Any, share: float) -> torch.Tensor:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocasts()):
            loss = self.model(self.cast_input(batch)) * share
        loss.backward()
        return loss.detach()

    def cast_input(self, batch: Any) -> Any:
        """The batch as the model takes it."""
        if self.casts_inputs or self.training.precision != "bf16":
            return batch
        return tree_map_only(torch.Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, batch)

    def autocasts(self) -> bool:
        return self.training.precision == "autocast"

    def extra_bytes(self) -> int:
        """Device memory that torch's allocator does not count."""
        return 0

    def wire_bytes(self) -> int | None:
        """Bytes of unsharded parameters and gradients that this rank gathered and reduced so far.

        None if the engine does not count them.
        """
        return None

    def explain(self, batch: Any) -> Explanation | None:
        """The plan of a microbatch, or None if the engine has no plan. All ranks must call it."""
        return None
