"""The shards of one model, and each parameter in its two forms.

[Note: leaf and parameter]
A parameter lives twice in Python, over one storage. `model.parameters()` yields a DTensor, which optimizers, clipping and
checkpoints understand. The module's forward reads through a property, which gathers the *leaf*: a plain tensor over the
same memory. DTensors that went through a compiled graph would cost about 90 us of host time per parameter and step; a
plain tensor costs what any parameter costs. Autograd accumulates into the leaf, and a hook moves the result to the
DTensor's `.grad`.
"""

import math
import os
import weakref
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile import _C
from zcompile.analysis.hardware import table_of
from zcompile.sharding.attributes import LEAF, MODEL, STATE
from zcompile.sharding.process_groups import groups_of
from zcompile.sharding.rank_agreement import Agreement
from zcompile.sharding.select_transport import Choice, choose, log, of_all


@dataclass(eq=False)
class ShardedParameter:
    """One parameter of a sharded model and what its modules need to read it."""

    name: str
    index: int
    parameter: nn.Parameter  # the DTensor that users see
    leaf: nn.Parameter  # the plain local shard that graphs see
    owners: list[tuple[nn.Module, str]] = field(default_factory=list)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the full parameter."""
        return tuple(self.parameter.shape)

    def local(self) -> torch.Tensor:
        """This rank's piece, in the memory that the optimizer changes."""
        with torch.no_grad():
            return self.parameter.to_local()

    def masters(self) -> list[torch.Tensor]:
        """Tensors through which users may write to the shard."""
        return [self.parameter, self.local()]

    def bind(self) -> None:
        """Make the leaf what the owning modules read, and let gradients flow from it to the DTensor."""
        trains = self.parameter.requires_grad
        if self.leaf.is_floating_point():
            self.leaf.requires_grad_(True).register_post_accumulate_grad_hook(
                self.deliver
            )  # refused by a frozen tensor
            self.leaf.requires_grad_(trains)
        self.parameter.requires_grad_ = self.require_grad
        for module, attribute in self.owners:
            module.__dict__[LEAF + attribute] = self.leaf
        module, self.attribute = self.owners[0]
        self.home = module._parameters

    def require_grad(self, requires_grad: bool = True) -> nn.Parameter:
        """Stands in for the DTensor's `requires_grad_`: compiled graphs guard on the leaf."""
        self.leaf.requires_grad = self.parameter.requires_grad = requires_grad
        return self.parameter

    def deliver(self, leaf: torch.Tensor) -> None:
        """Move the leaf's gradient to the DTensor, adding to what is there, as autograd would."""
        grad, leaf.grad = leaf.grad, None
        if grad is None:  # a compiled graph that found the parameter to have no effect
            return
        parameter = self.parameter
        if self.home.get(self.attribute) is not parameter:
            raise RuntimeError(replaced_message(self.name))
        if not parameter.requires_grad:
            return
        before = parameter.grad
        if before is None:
            parameter.grad = DTensor(self.added(None, grad), parameter._spec, requires_grad=False)
        else:
            before._local_tensor = self.added(before._local_tensor, grad)
        self.let_accumulate(parameter.grad._local_tensor, parameter)

    def let_accumulate(self, gradient: torch.Tensor, owner: nn.Parameter | None = None) -> None:
        """Inside of `accumulate`, the next reduce may add to `gradient`, as long as `owner` has it."""
        state = model_of(self.leaf)
        if state.accumulates:
            state.runtime.accumulate_onto(self.index, gradient, owner=owner)

    def added(self, before: torch.Tensor | None, grad: torch.Tensor) -> torch.Tensor:
        """What has accumulated with `grad`, which just arrived; `before` is what had until now.

        Inside of `accumulate`, the reduce that made `grad` may have added what had accumulated when it started. That is `before`,
        unless a hook, or another backward inside of this one, changed the gradient since.
        """
        state = model_of(self.leaf)
        if not state.accumulates:
            return grad if before is None else before.add_(grad)
        runtime = state.runtime
        base = runtime.take_base(self.index)
        if base is not None:
            if before is None:
                grad.sub_(base)
            elif before.data_ptr() != base.data_ptr():
                grad.add_(before - base)
        elif before is not None:
            grad = before + grad if runtime.has_base(self.index) else before.add_(grad)
        return grad


class ShardedModel:
    """The shards of one model; every module that owns one holds a reference."""

    def __init__(self, mesh: DeviceMesh, nccl_max_ctas: int | None = None, native_reduce: bool = False):
        self.mesh = mesh
        self.nccl_max_ctas = nccl_max_ctas
        self.groups = groups_of(mesh, nccl_max_ctas)
        self.runtime = _C.Model(**self.groups, native_reduce=native_reduce)
        self.parameters: dict[str, ShardedParameter] = {}
        self.wanted_transport, self.transport = "", Choice("", "")
        self.hardware = table_of(torch.device(mesh.device_type))
        self.free_bytes = 0
        self.microbatch_cache_bytes: int | None = None  # what a compile was asked for
        self.accumulates = False
        self.agreement: Agreement | None = None  # where a difference between ranks would hang
        self.at_rest = False  # whether an uncompiled read outside of backward is of the parameter and not of its values

    def choose(self, wanted: str) -> Choice:
        """The transport for `wanted`; see `zcompile.sharding.select_transport.choose`."""
        return choose(wanted, self.mesh, self.new_runtime, self.nccl_max_ctas)

    def use_transport(self, wanted: str) -> None:
        """Change the wire to `wanted`, one of `zcompile.sharding.select_transport.TRANSPORTS`; all ranks together.

        Raises:
            ValueError: not known, or not possible here.
        """
        if wanted == self.wanted_transport:
            return
        choice = self.choose(wanted)
        if choice.transport != self.transport.transport:
            self.runtime.use_transport("p2p" if choice.transport == "p2p" else "c10d")
        self.wanted_transport, self.transport = wanted, choice
        self.agreement = self.new_agreement() if choice.transport == "nccl" and self.runtime.world > 1 else None
        log.info("zcompile: transport %s: %s", *choice)

    def new_runtime(self) -> _C.Model:
        """An empty one over the same process groups, to measure on."""
        return _C.Model(**self.groups)

    def new_agreement(self) -> Agreement:
        """For the ranks that share the shards, over NCCL: ranks on gloo agree at run time, and peers by the words for which they wait."""
        return Agreement(f"zcompile/{self.groups['reduce']}", self.groups["rank"], self.groups["world"])

    def measure_memory(self) -> None:
        """Note what is free for training, on the rank that has least; all ranks together.

        Rounded down to a power of two: what is free differs a little from run to run, and plans that differ miss every cache.
        """
        if self.mesh.device_type == "cuda":
            free = torch.cuda.mem_get_info()[0]
        else:
            free = _available_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", self.mesh.size()))
        self.free_bytes = 1 << (max(1, min(of_all(self.mesh, free))).bit_length() - 1)

    def microbatch_cache_limit(self) -> int:
        """Most bytes of full parameters from micro-step to micro-step; see `zcompile.options.Settings.microbatch_cache_bytes`."""
        if self.microbatch_cache_bytes is not None:
            return self.microbatch_cache_bytes
        world = self.runtime.world
        shards_bytes = sum(
            -(-math.prod(one.shape) // world) * one.leaf.itemsize for one in self.parameters.values()
        )  # not of this rank
        return max(0, self.free_bytes - 3 * shards_bytes) // 4

    def begin_accumulating(self, microbatch_cache_bytes: int) -> None:
        """From here on, parameters do not change; what is gathered stays full up to `microbatch_cache_bytes`."""
        self.accumulates = True
        self.runtime.begin_caching(microbatch_cache_bytes)

    def end_accumulating(self) -> None:
        """From here on, they may."""
        self.accumulates = False
        self.runtime.end_caching()

    def limit_microbatch_cache(self, microbatch_cache_bytes: int | None) -> None:
        """Have `microbatch_cache_limit` return what a compile is asked for, also for micro-steps that have begun."""
        self.microbatch_cache_bytes = microbatch_cache_bytes
        self.runtime.limit_cache(self.microbatch_cache_limit())

    def bind(self, sharded: ShardedParameter) -> None:
        """Let modules read the leaf, and the runtime see writes to the parameter."""
        sharded.bind()
        self.runtime.watch(sharded.index, sharded.masters())

    def refresh(self, sharded: ShardedParameter) -> None:
        """Follow a parameter whose storage was exchanged by `module.to()`, `load_state_dict(assign=True)` and the like."""
        local = sharded.local()
        if local.untyped_storage().data_ptr() == sharded.leaf.untyped_storage().data_ptr() and local.numel() > 0:
            return
        sharded.leaf = nn.Parameter(local, requires_grad=sharded.parameter.requires_grad)
        setattr(sharded.leaf, MODEL, weakref.ref(self))
        self.runtime.replace(sharded.index, sharded.leaf)
        self.bind(sharded)

    def __deepcopy__(self, memo):
        raise RuntimeError(
            "zcompile: a sharded model cannot be copied; copy it first, then call zcompile.shard on both."
        )

    def __reduce__(self):
        raise RuntimeError("zcompile: a sharded model cannot be pickled; save model.state_dict() instead.")


def model_of(leaf: object) -> ShardedModel | None:
    """The sharded model that `leaf`, an input of a compiled graph, is a shard of; None if it is something else."""
    reference = getattr(leaf, MODEL, None)
    return None if reference is None else reference()


def state_of(model: nn.Module) -> ShardedModel:
    """Raises:
    RuntimeError: `model` is not sharded.
    """
    for module in model.modules():
        if STATE in module.__dict__:
            return module.__dict__[STATE]
    raise RuntimeError("this model has no sharded parameter: call zcompile.shard(model) first.")


def replaced_message(name: str) -> str:
    return (
        f"zcompile: parameter '{name}' was replaced after zcompile.shard (rank {dist.get_rank()}). Copy values into the "
        "DTensor in model.parameters() under torch.no_grad(), use load_state_dict, or replace it before zcompile.shard."
    )


def _available_bytes() -> int:
    """Memory that processes of this machine could still take."""
    try:
        with open("/proc/meminfo") as lines:
            return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
