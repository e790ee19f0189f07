"""Engines of `zcompile profile` that use torch alone: FSDP2, DDP, SimpleFSDP, one rank, and a limit of the step time.

Engines named "tuned" use the fastest settings that this version of torch has. `Engine.settings` lists them.
"""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from zcompile.profile.engine import Engine

ZERO_CTA_POLICY = {"NCCL_CTA_POLICY": "2"}  # copy engines gather between buffers in symmetric memory
PREFETCHED_BLOCKS = 2
INPUT_BUFFERS = 2  # of reduce-scatters
# Settings of torch._inductor.config.aten_distributed_optimizations.
OVERLAP = (
    "enable_overlap_scheduling",
    "collective_bucketing",
    "insert_overlap_deps",
    "enable_low_contention_collectives",
)


class Limit(Engine):
    """A lower limit of step times: compute on unsharded weights, no communication, AdamW on a rank's share of state."""

    casts_inputs = False

    def prepare(self, model: nn.Module) -> nn.Module:
        if self.training.precision == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        model.compile()
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        parameters = list(self.model.parameters())
        share = sum(parameter.numel() for parameter in parameters) // dist.get_world_size()
        state = nn.Parameter(torch.randn(share, device=parameters[0].device))  # not zeros, which change Adam's time
        state.grad = torch.randn_like(state)
        return self.adamw([state])

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()


class MainParameters(Engine):
    """One rank without sharding: the whole model compiled, with bf16 copies of the fp32 parameters.

    This is the baseline for other engines on one rank, because it trains the model, unlike `Limit`.
    """

    casts_inputs = False
    mode: str | None = None  # of torch.compile

    def prepare(self, model: nn.Module) -> nn.Module:
        if dist.get_world_size() != 1:
            raise ValueError("the engine 'compiled' trains one rank on its own: take --ranks 1, or 'ddp'")
        self.copies: list[torch.Tensor] = list(model.parameters())
        self.main = self.copies
        if self.training.precision == "bf16":
            self.main = [nn.Parameter(copy.detach().clone()) for copy in self.copies]
            for copy in self.copies:
                copy.data = copy.data.bfloat16()
        model.compile(mode=self.mode)
        return model

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.adamw(self.main)

    def update(self) -> None:
        if self.main is self.copies:
            return super().update()
        for main, copy in zip(self.main, self.copies):
            main.grad = None if copy.grad is None else copy.grad.float()
            copy.grad = None
        super().update()
        with torch.no_grad():
            torch._foreach_copy_(self.copies, self.main)


class CompiledGraphs(MainParameters):
    mode = "reduce-overhead"


class Ddp(Engine):
    def prepare(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        assert isinstance(self.model, DistributedDataParallel)
        with self.model.no_sync():  # only the last backward all-reduces
            losses = super().accumulate(batches[:-1], share)
        return losses + super().accumulate(batches[-1:], share)

    def autocasts(self) -> bool:
        return self.training.precision != "fp32"  # DDP does not cast otherwise


class Fsdp2(Engine):
    def prepare(self, model: nn.Module) -> nn.Module:
        is_bf16 = self.training.precision == "bf16"
        reduce_dtype = torch.float32 if is_bf16 else None
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if is_bf16 else None,
            reduce_dtype=torch.bfloat16 if "reduce_dtype" in self.options else reduce_dtype,
        )
        offload = OffloadPolicy()
        if "offload" in self.options:
            offload = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        for block in blocks_of(model):
            if block is not model:
                fully_shard(block, mp_policy=policy, offload_policy=offload)
        fully_shard(model, mp_policy=policy, offload_policy=offload)
        return model

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        assert isinstance(self.model, FSDPModule)
        if "gradient_sync" not in self.options:  # as zcompile, which reduces each microbatch's gradients
            return super().accumulate(batches, share)
        self.model.set_requires_gradient_sync(False)
        losses = super().accumulate(batches[:-1], share)
        self.model.set_requires_gradient_sync(True)
        return losses + super().accumulate(batches[-1:], share)


class Fsdp2Compile(Fsdp2):
    """FSDP2 with each block compiled, as its users compile it."""

    def prepare(self, model: nn.Module) -> nn.Module:
        for block in blocks_of(model):
            block.compile()
        return super().prepare(model)


class Fsdp2Tuned(Fsdp2Compile):
    """FSDP2 with compiled blocks and all settings that may make it faster.

    All-gathers use symmetric memory. Reduce-scatters use a communicator of their own and two input buffers. Forward and
    backward prefetch two blocks each. The last block is not resharded after its forward.
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        blocks: list[FSDPModule] = [block for block in blocks_of(model) if isinstance(block, FSDPModule)]
        has_links = torch.cuda.is_available() and 1 < dist.get_world_size() <= torch.cuda.device_count()
        if has_links and os.environ.get("NCCL_CTA_POLICY") == "2":
            self._set(blocks, "set_symm_mem_for_comm")
        elif has_links:
            self.settings.append("without symmetric memory: NCCL_CTA_POLICY=2 was not set")
        self._set([model], "set_separate_reduce_scatter_group", True)
        self._set([model], "set_reduce_scatter_max_input_buffers", INPUT_BUFFERS)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + PREFETCHED_BLOCKS])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - PREFETCHED_BLOCKS) : i][::-1])
        blocks[-1].set_reshard_after_forward(False)
        self.settings.append(f"{PREFETCHED_BLOCKS} blocks prefetched each way, the last block kept for backward")
        return model

    def _set(self, modules: Sequence[Any], name: str, *args: Any) -> None:
        """Call FSDP2's setter `name` on each module, if this version of torch has it."""
        if not hasattr(FSDPModule, name):
            self.settings.append(f"{name}: not in torch {torch.__version__}")
            return
        for module in modules:
            getattr(module, name)(*args)
        self.settings.append(f"{name}({', '.join(map(str, args))})")


class SimpleFsdp(Engine):
    """SimpleFSDP (arXiv:2411.00284): each read of a parameter is an all-gather in the graph, ordered by Inductor."""

    casts_inputs = False

    def prepare(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        unsharded = Unsharded(torch.bfloat16 if self.training.precision == "bf16" else None)
        sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied
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
        model.compile()


class SimpleFsdpTuned(SimpleFsdp):
    """SimpleFSDP with Inductor's overlap scheduler, collective bucketing, and collectives that leave SMs free."""

    def compile(self, model: nn.Module) -> None:
        known = torch._inductor.config.get_config_copy()
        options: dict[str, Any] = {"reorder_for_compute_comm_overlap": False}
        for name in OVERLAP:
            key = f"aten_distributed_optimizations.{name}"
            if key not in known:
                self.settings.append(f"{name}: not in torch {torch.__version__}")
            elif importlib.util.find_spec("triton") is None:  # the scheduler times kernels and asks Triton for devices
                self.settings.append(f"{name}: needs Triton")
            elif name == "enable_low_contention_collectives" and not torch.cuda.is_available():
                self.settings.append(f"{name}: needs CUDA")
            else:
                options[key] = True
                self.settings.append(name)
        model.compile(options=options)


class Unsharded(nn.Module):
    """The parametrization that all-gathers a parameter's shard in compute dtype, and again in backward."""

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
    """Return the modules to wrap one by one: members of outermost `ModuleList`s and `Sequential`s, else the model."""

    def inside(module: nn.Module) -> list[nn.Module]:
        blocks: list[nn.Module] = []
        for child in module.children():
            blocks += list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else inside(child)
        return [block for block in blocks if any(True for _ in block.parameters())]

    return inside(model) or [model]
