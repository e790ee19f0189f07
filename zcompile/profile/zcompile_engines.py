"""Engines of `zcompile profile` that train with zcompile, eager and compiled."""

from typing import Any

import torch
from torch import nn

import zcompile
from zcompile.explanation.explanation import Explanation
from zcompile.profile.engine import Engine
from zcompile.profile.torch_engines import blocks_of
from zcompile.state.sharded_model import state_of


class Eager(Engine):
    def prepare(self, model: nn.Module) -> nn.Module:
        param_dtype = torch.bfloat16 if self.training.precision == "bf16" else None
        gather_dtype = torch.int8 if "gather_dtype" in self.options else None
        units = self.units_of(model)
        model = zcompile.shard(model, param_dtype=param_dtype, units=units, gather_dtype=gather_dtype)
        state_of(model).use_transport(self.options.get("transport", "auto"))
        return model

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        if len(batches) == 1 or self.options.get("microbatch_cache_bytes") == 0:
            return super().accumulate(batches, share)
        with zcompile.accumulate(self.model):
            return super().accumulate(batches, share)

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        options = {key: self.options[key] for key in ("offload", "step_in_backward") if key in self.options}
        return zcompile.fuse_optimizer(self.model, optimizer, **options)

    @property
    def settings_of_backend(self) -> dict[str, Any]:
        others = "offload", "step_in_backward", "gather_dtype"
        return {name: value for name, value in self.options.items() if name not in others}

    def units_of(self, model: nn.Module) -> list[nn.Module] | None:
        return None

    def extra_bytes(self) -> int:
        return zcompile.stats(self.model)["transport_bytes"]

    def wire_bytes(self) -> int:
        return counted_bytes(self.model)

    def ran_with(self) -> list[str]:
        counts = zcompile.stats(self.model)["cuda_graphs"]
        if not counts["graphs"] and not counts["uncaptured"]:
            return self.settings
        left_out = ", ".join(f"{calls} of {reason}" for reason, calls in counts["uncaptured"].items())
        return [
            *self.settings,
            f"{counts['graphs']} CUDA graphs, {counts['replays']} replays, {counts['pool_bytes'] / 2**30:.2f} GiB of "
            f"memory for graphs; calls that were not captured: {left_out or 'none'}",
        ]


class EagerUnits(Eager):
    """Eager training in which each block, a module that the engine "fsdp2" wraps, is all-gathered in one transfer."""

    def units_of(self, model: nn.Module) -> list[nn.Module] | None:
        return [block for block in blocks_of(model) if block is not model] or None


class EagerCompile(Eager):
    """Each block compiled by Inductor, as FSDP2's users compile them."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            block.compile()
        return super().prepare(model)


class Blocks(Eager):
    """Each block compiled by zcompile, the rest eager."""

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        for block in blocks_of(model):
            block.compile(backend="zcompile", options=self.settings_of_backend)
        return model


class Zcompile(Eager):
    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        model.compile(backend="zcompile", options=self.settings_of_backend)
        return model

    def explain(self, batch: Any) -> Explanation | None:
        if "offload" in self.options:  # predictions assume that moments are on the GPU
            return None
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocasts()):
            return zcompile.explain(self.model, batch, options=self.settings_of_backend)


def counted_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters and gradients that this rank has gathered and reduced so far."""
    counts = zcompile.stats(model)
    return sum(counts["gathered_bytes"].values()) + sum(counts["reduced_bytes"].values())
