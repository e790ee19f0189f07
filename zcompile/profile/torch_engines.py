"""Engines of torch alone: FSDP2, DDP, SimpleFSDP, one rank without sharding, and the limit that no engine can pass."""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zcompile.profile.engine import Engine, Training, in_bf16


class Limit(Engine):
    """Compute alone: unsharded weights in compute dtype, no communication, and Adam on a rank's share of fp32 state."""

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        super().__init__(model, training, options)
        share = sum(parameter.numel() for parameter in self.model.parameters()) // dist.get_world_size()
        # Not zeros, on which Adam takes another time.
        state = nn.Parameter(torch.randn(share, device=next(self.model.parameters()).device))
        state.grad = torch.randn_like(state)
        self.state = torch.optim.AdamW([state], lr=training.learning_rate, fused=True)

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.training.precision == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        model.compile()
        return model

    def cast_input(self, batch: Any) -> Any:
        return in_bf16(batch) if self.training.precision == "bf16" else batch

    def update(self) -> None:
        self.state.step()
        self.model.zero_grad()


class MainParameters(Engine):
    """One rank and nothing sharded: the model compiled whole, with bf16 copies of fp32 main parameters.

    What other engines can be compared with on one rank: unlike `Limit`, it takes steps that train the model.
    """

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        if dist.get_world_size() != 1:
            raise ValueError("the engine 'compiled' trains one rank on its own: take --ranks 1, or 'ddp'")
        super().__init__(model, training, options)

    def prepare(self, model: nn.Module) -> nn.Module:
        self.copies = list(model.parameters())
        self.main = self.copies
        if self.training.precision == "bf16":
            self.main = [nn.Parameter(copy.detach().clone()) for copy in self.copies]
            for copy in self.copies:
                copy.data = copy.data.bfloat16()
        model.compile()
        return model

    def parameters_to_train(self) -> list[nn.Parameter]:
        return self.main

    def cast_input(self, batch: Any) -> Any:
        return in_bf16(batch) if self.training.precision == "bf16" else batch

    def update(self) -> None:
        has_copies = self.main is not self.copies
        if has_copies:
            for main, copy in zip(self.main, self.copies):
                main.grad = None if copy.grad is None else copy.grad.float()
                copy.grad = None
        super().update()
        if has_copies:
            with torch.no_grad():
                torch._foreach_copy_(list[torch.Tensor](self.copies), list[torch.Tensor](self.main))


class Ddp(Engine):
    def prepare(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():  # gradients are summed over ranks once
            losses = super().accumulate(batches[:-1], share)
        return losses + super().accumulate(batches[-1:], share)

    def autocasts(self) -> bool:
        return self.training.precision != "fp32"  # it has no other way


class Fsdp2(Engine):
    def prepare(self, model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = policy if self.training.precision == "bf16" else MixedPrecisionPolicy()
        for block in blocks_of(model):
            if block is not model:
                fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        return model


class Fsdp2Compile(Fsdp2):
    """FSDP2 with each block compiled, as its users do."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            block.compile()
        return super().prepare(model)


class SimpleFsdp(Engine):
    """Reading a parameter computes a gather, so that one graph has all gathers (arXiv:2411.00284).

    Inductor orders them.
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        unsharded = Unsharded(torch.bfloat16 if self.training.precision == "bf16" else None)
        sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay so
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in sharded:
                    placement = Shard(0) if parameter.ndim else Replicate()
                    sharded[parameter] = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
                setattr(module, name, sharded[parameter])
                register_parametrization(module, name, unsharded, unsafe=True)
        self.compile(model)
        return model

    def compile(self, model: nn.Module) -> None:
        """Compile the sharded model. Subclasses have settings of their own."""
        model.compile()

    def cast_input(self, batch: Any) -> Any:
        return in_bf16(batch) if self.training.precision == "bf16" else batch


class Unsharded(nn.Module):
    """The parametrization that gathers a shard in compute dtype. Backward gathers it again."""

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype

    def forward(self, shard: DTensor) -> torch.Tensor:
        return checkpoint(self.gather, shard, use_reentrant=False, context_fn=_gather_again)

    def gather(self, shard: DTensor) -> torch.Tensor:
        return shard.redistribute(placements=[Replicate()], forward_dtype=self.dtype).to_local(
            grad_placements=[Partial("avg")]
        )


def _gather_again() -> tuple[Any, Any]:
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 shards and compiles one by one: members of the outermost lists and sequences, else the model."""

    def inside(module: nn.Module) -> list[nn.Module]:
        blocks: list[nn.Module] = []
        for child in module.children():
            blocks += list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else inside(child)
        return [block for block in blocks if any(True for _ in block.parameters())]

    return inside(model) or [model]
