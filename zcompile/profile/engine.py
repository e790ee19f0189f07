"""The base class of the engines, such as FSDP2, that `zcompile profile` compares."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from zcompile.explanation.explanation import Explanation

PRECISIONS = {
    "fp32": "all in fp32",
    "bf16": "compute in bf16 from fp32 weights, by each engine's own casts",
    "autocast": "torch.autocast with bf16; in DeepSpeed, fp32 partitions under torch_autocast",
}

# Number of steps in which the learning rate rises linearly. Without this rise, losses jump at first, and engines
# whose results differ only by rounding diverge.
RATE_STEPS = 20


@dataclass(frozen=True)
class Training:
    """Settings of training that all engines share."""

    precision: str  # a key of PRECISIONS
    learning_rate: float  # reached after RATE_STEPS
    microbatches: int  # per step


class Engine:
    """Trains a model with fused AdamW. Subclasses shard or compile the model; worker.py measures the steps."""

    wire_is_traced = True  # whether torch.profiler records all of its transfers
    casts_inputs = True  # whether the engine casts floating-point inputs itself

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        self.training = training
        self.options = options
        self.settings: list[str] = []  # for the report: settings that are no defaults, or that this torch lacks
        self.device = next(model.parameters()).device.type  # of compute; parameters may be on another
        self.model = self.prepare(model)
        self.optimizer = self.make_optimizer()
        self.steps = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        """Prepare an unsharded fp32 model for training: shard and compile it, for example. Return the model to call."""
        raise NotImplementedError

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.adamw(self.model.parameters())

    def adamw(self, parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=self.training.learning_rate, fused=True)

    def ran_with(self) -> list[str]:
        """Return lines for the report: the engine's settings. Subclasses add counts over the steps that have run."""
        return self.settings

    def step(self, batches: list[Any]) -> torch.Tensor:
        """Train one step on the microbatches `batches`. Return this rank's mean loss, a scalar tensor."""
        self.raise_rate()  # before backward, in which an optimizer with `step_in_backward` steps
        losses = self.accumulate(batches, 1 / len(batches))
        self.update()
        return torch.stack(losses).sum()

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        """Run forward and backward of each microbatch in `batches`. Return the losses, each multiplied by `share`."""
        return [self.forward_backward(batch, share) for batch in batches]

    def update(self) -> None:
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
        """Cast a batch to bf16 if the precision is bf16 and the engine does not cast inputs itself."""
        if self.casts_inputs or self.training.precision != "bf16":
            return batch
        return tree_map_only(torch.Tensor, lambda each: each.bfloat16() if each.is_floating_point() else each, batch)

    def autocasts(self) -> bool:
        return self.training.precision == "autocast"

    def extra_bytes(self) -> int:
        """Return the number of bytes of device memory that the engine uses and torch's allocator does not count."""
        return 0

    def wire_bytes(self) -> int | None:
        """Return the unsharded bytes that this rank gathered and reduced so far; None if the engine does not count."""
        return None

    def explain(self, batch: Any) -> Explanation | None:
        """Return the result of `zcompile.explain` for a microbatch; None if the engine is not zcompile. Collective."""
        return None
