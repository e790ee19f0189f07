"""The engines that are compared. Each trains the same model on the same batches, and knows nothing of how it is measured."""

import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import register_parametrization
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zcompile
from zcompile.options import Settings
from zcompile.planning.explain import Explanation
from zcompile.profile.models import BadInput, blocks_of

PRECISIONS = {
    "fp32": "all in fp32",
    "bf16": "compute in bf16 from fp32 weights, as each engine does that",
    "autocast": "torch.autocast with bf16; in DeepSpeed, fp32 partitions under torch_autocast",
}

RATE_STEPS = 20  # without a rise of the rate, losses jump at first, and runs that differ by rounding part


@dataclass(frozen=True)
class Training:
    """What all engines have in common."""

    precision: str  # of PRECISIONS
    learning_rate: float  # reached after RATE_STEPS
    micro_steps: int


class Engine:
    """A model in training. Subclasses make `model`; the optimizer is AdamW, fused."""

    wire_is_traced = True  # whether torch.profiler sees all that it sends

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        self.training = training
        self.options = options
        self.model = self.prepare(model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=training.learning_rate, fused=True)
        self.steps = 0

    def prepare(self, model: nn.Module) -> nn.Module:
        raise NotImplementedError

    def step(self, batches: list[Any]) -> torch.Tensor:
        """One step over the micro-batches; this rank's mean loss, []."""
        losses = self.accumulate(batches, 1 / len(batches))
        self.update()
        return torch.stack(losses).sum()

    def accumulate(self, batches: list[Any], share: float) -> list[torch.Tensor]:
        return [self.micro_step(batch, share) for batch in batches]

    def update(self) -> None:
        self.raise_rate(self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def raise_rate(self, optimizer: Any) -> None:
        self.steps += 1
        for group in optimizer.param_groups:
            group["lr"] = self.training.learning_rate * min(1.0, self.steps / RATE_STEPS)

    def micro_step(self, batch: Any, share: float) -> torch.Tensor:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocasts()):
            loss = self.model(self.in_width(batch)) * share
        loss.backward()
        return loss.detach()

    def in_width(self, batch: Any) -> Any:
        """The batch as the model takes it: most engines cast floating-point inputs themselves."""
        return batch

    def autocasts(self) -> bool:
        return self.training.precision == "autocast"

    def extra_bytes(self) -> int:
        """Device memory that torch's allocator does not count."""
        return 0

    def wire_bytes(self) -> int | None:
        """Bytes of full parameters and gradients that this rank gathered and reduced since it was made, if the engine counts them."""
        return None

    def explain(self, batch: Any) -> Explanation | None:
        """The plan of a micro-step, if there is one; all ranks call it."""
        return None


class Eager(Engine):
    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        super().__init__(model, training, options)
        zcompile.fuse_optimizer(self.model, self.optimizer)

    def prepare(self, model):
        return zcompile.shard(model, param_dtype=torch.bfloat16 if self.training.precision == "bf16" else None)

    def extra_bytes(self) -> int:
        return zcompile.stats(self.model)["transport_bytes"]

    def wire_bytes(self) -> int:
        return _counted(self.model)


class Zcompile(Eager):
    def prepare(self, model):
        model = super().prepare(model)
        model.compile(backend="zcompile", options=self.options)
        return model

    def accumulate(self, batches, share):
        if len(batches) == 1 or self.options.get("microbatch_cache_bytes") == 0:
            return super().accumulate(batches, share)
        with zcompile.accumulate(self.model):
            return super().accumulate(batches, share)

    def explain(self, batch: Any) -> Explanation:
        device = next(self.model.parameters()).device.type
        with torch.autocast(device, torch.bfloat16, enabled=self.autocasts()):
            return zcompile.explain(self.model, batch, options=self.options)


class Limit(Engine):
    """Compute alone: whole weights in the width of compute, no communication, and Adam on a rank's share of fp32 state."""

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        super().__init__(model, training, options)
        share = sum(parameter.numel() for parameter in self.model.parameters()) // dist.get_world_size()
        state = nn.Parameter(
            torch.randn(share, device=next(self.model.parameters()).device)
        )  # on zeros, Adam takes another time
        state.grad = torch.randn_like(state)
        self.state = torch.optim.AdamW([state], lr=training.learning_rate, fused=True)

    def prepare(self, model):
        if self.training.precision == "bf16":
            for parameter in model.parameters():
                parameter.data = parameter.data.bfloat16()
        model.compile()
        return model

    def in_width(self, batch):
        return _narrow(batch) if self.training.precision == "bf16" else batch

    def update(self):
        self.state.step()
        self.model.zero_grad()


class Ddp(Engine):
    def prepare(self, model):
        return DistributedDataParallel(model, gradient_as_bucket_view=True)

    def accumulate(self, batches, share):
        with self.model.no_sync():  # gradients are summed over ranks once
            losses = super().accumulate(batches[:-1], share)
        return losses + super().accumulate(batches[-1:], share)

    def autocasts(self) -> bool:
        return self.training.precision != "fp32"  # it has no other way


class Fsdp2(Engine):
    def prepare(self, model):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        policy = policy if self.training.precision == "bf16" else MixedPrecisionPolicy()
        for block in blocks_of(model):
            if block is not model:
                fully_shard(block, mp_policy=policy)
        return fully_shard(model, mp_policy=policy)


class Fsdp2Compile(Fsdp2):
    """Each block compiled, as its users do."""

    def prepare(self, model):
        for block in blocks_of(model):
            block.compile()
        return super().prepare(model)


class SimpleFsdp(Engine):
    """Gathers are what reading a parameter computes, so that one graph has them all (arXiv:2411.00284); their order is Inductor's."""

    def prepare(self, model):
        mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
        whole = Whole(torch.bfloat16 if self.training.precision == "bf16" else None)
        sharded: dict[nn.Parameter, nn.Parameter] = {}  # tied ones stay so
        for module in list(model.modules()):
            for name, parameter in list(module.named_parameters(recurse=False)):
                if parameter not in sharded:
                    placement = Shard(0) if parameter.ndim else Replicate()
                    sharded[parameter] = nn.Parameter(distribute_tensor(parameter.data, mesh, [placement]))
                setattr(module, name, sharded[parameter])
                register_parametrization(module, name, whole, unsafe=True)
        model.compile()
        return model

    def in_width(self, batch):
        return _narrow(batch) if self.training.precision == "bf16" else batch


class Whole(nn.Module):
    """The parametrization: a shard gathered in the width of compute. Backward gathers again."""

    def __init__(self, dtype: torch.dtype | None):
        super().__init__()
        self.dtype = dtype

    def forward(self, shard: DTensor) -> torch.Tensor:
        return checkpoint(self.gather, shard, use_reentrant=False, context_fn=_gather_again)

    def gather(self, shard: DTensor) -> torch.Tensor:
        return shard.redistribute(placements=[Replicate()], forward_dtype=self.dtype).to_local(
            grad_placements=[Partial("avg")]
        )


def _gather_again():
    return create_selective_checkpoint_contexts(lambda *_, **__: CheckpointPolicy.MUST_RECOMPUTE)


class Zero3(Engine):
    """DeepSpeed's stage 3."""

    def config(self) -> dict[str, Any]:
        """What is its own in DeepSpeed's configuration."""
        return {}

    def __init__(self, model: nn.Module, training: Training, options: Mapping[str, Any]):
        import deepspeed

        self.training = training
        self.options = options
        self.model = model
        self.steps = 0
        optimizer = {
            "lr": training.learning_rate,
            "weight_decay": 1e-2,
            "torch_adam": True,
            "fused": True,
        }  # decay: torch's
        config = self.config() | {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": training.micro_steps,
            "gradient_clipping": 0.0,  # the other engines do not clip
            "bf16": {"enabled": training.precision == "bf16"},
            "torch_autocast": {"enabled": self.autocasts(), "dtype": "bfloat16"},
            "zero_optimization": {"stage": 3},
            "optimizer": {"type": "AdamW", "params": optimizer},
        }
        self.engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
        if "compile" in config or "zcompile" in config:
            self.engine.compile()

    def step(self, batches):
        self.raise_rate(self.engine.optimizer)
        losses = []
        for batch in batches:
            loss = self.engine(_narrow(batch) if self.training.precision == "bf16" else batch)
            self.engine.backward(loss)
            self.engine.step()
            losses.append(loss.detach().float())
        return torch.stack(losses).mean()


class DeepCompile(Zero3):
    wire_is_traced = False  # it has a communicator of its own

    def config(self):
        return {"compile": {"deepcompile": True}}


class Zero3Zcompile(Zero3):
    def config(self):
        return {"zcompile": {"enabled": True, **self.options}}

    def taken(self) -> bool:
        return self.engine.zcompile.state is not None

    def extra_bytes(self) -> int:
        return zcompile.stats(self.engine.module)["transport_bytes"] if self.taken() else 0

    def wire_bytes(self) -> int | None:
        return _counted(self.engine.module) if self.taken() else None


def _counted(model: nn.Module) -> int:
    counts = zcompile.stats(model)
    return sum(counts["gathered_bytes"].values()) + sum(counts["reduced_bytes"].values())


def _narrow(batch: Any) -> Any:
    """The batch with its floating-point tensors in bf16."""
    return tree_map_only(torch.Tensor, lambda one: one.bfloat16() if one.is_floating_point() else one, batch)


def _needs_cuda(device: str) -> str | None:
    return "needs CUDA" if device != "cuda" else None


def _needs_deepspeed(device: str) -> str | None:
    return None if importlib.util.find_spec("deepspeed") else "DeepSpeed is not installed"


def _needs_deepspeed_and_cuda(device: str) -> str | None:
    return _needs_cuda(device) or _needs_deepspeed(device)


@dataclass(frozen=True)
class Entry:
    make: Callable[[nn.Module, Training, Mapping[str, Any]], Engine]
    about: str
    missing: Callable[[str], str | None] = lambda device: None  # why it cannot run on this kind of device
    takes_options: bool = False  # those of the backend


ENGINES = {
    "zcompile": Entry(
        Zcompile, "zcompile.shard, torch.compile(backend='zcompile') and fuse_optimizer", takes_options=True
    ),
    "limit": Entry(Limit, "compute alone, Adam on 1/W of the state: no engine can be faster"),
    "eager": Entry(Eager, "zcompile.shard and fuse_optimizer, not compiled"),
    "fsdp2": Entry(Fsdp2, "fully_shard of each block"),
    "fsdp2+compile": Entry(Fsdp2Compile, "fully_shard and torch.compile of each block"),
    "ddp": Entry(Ddp, "DistributedDataParallel: nothing is sharded"),
    "simplefsdp": Entry(SimpleFsdp, "parametrized gathers in one graph, torch.compile"),
    "zero3": Entry(Zero3, "DeepSpeed ZeRO-3", _needs_deepspeed),
    "deepcompile": Entry(DeepCompile, "DeepSpeed ZeRO-3 with its compiler", _needs_deepspeed_and_cuda),
    "zero3+zcompile": Entry(
        Zero3Zcompile, "DeepSpeed ZeRO-3 with zcompile's flag", _needs_deepspeed, takes_options=True
    ),
}


def find(name: str) -> tuple[Entry, dict[str, Any]]:
    """The engine of a name such as "fsdp2" or "zcompile:transport=nccl:save_for_backward_bytes=0", and the backend's options in it.

    Raises:
        BadInput: no such engine, or it does not take such options.
    """
    kind, *settings = re.split(r":(?=\w+(?:=|$))", name)  # not within JSON
    if kind not in ENGINES:
        raise BadInput(f"no engine {kind!r}; there are {', '.join(ENGINES)}")
    options = dict(map(_option, settings))
    if options and not ENGINES[kind].takes_options:
        raise BadInput(f"engine {kind!r} takes no options")
    try:
        Settings.parse(options)
    except ValueError as error:
        raise BadInput(f"engine {name!r}: {error}") from error
    return ENGINES[kind], options


def names_of(text: str) -> list[str]:
    """The engines of a list such as 'fsdp2,zcompile:skip_passes=["regather","bucket"]'."""
    return list(ENGINES) if text == "all" else list(dict.fromkeys(re.split(r",(?![^\[{]*[\]}])", text)))


def file_name(engine: str) -> str:
    """A name for files: compilers are called by a shell's rules."""
    return re.sub(r"[^A-Za-z0-9+=._-]+", "-", engine)


def _option(setting: str) -> tuple[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals:
        raise BadInput(f"an option of an engine reads key=value, not {setting!r}")
    try:
        return key, json.loads(text)
    except json.JSONDecodeError:
        return key, text
