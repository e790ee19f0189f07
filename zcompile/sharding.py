"""From a whole model to shards: who owns which piece, and how a module reads a parameter that it does not have.

[Note: leaf and parameter]
A parameter lives twice in Python, over one storage. `model.parameters()` yields a DTensor, which optimizers, clipping and
checkpoints understand. The module's forward reads through a property, which gathers the *leaf*: a plain tensor over the
same memory. DTensors that went through a compiled graph would cost about 90 us of host time per parameter and step; a
plain tensor costs what any parameter costs. Autograd accumulates into the leaf, and a hook moves the result to the
DTensor's `.grad`.
"""

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile import _C
from zcompile.agreement import Agreement
from zcompile.checks import agree_on_model, check_max_ctas, check_mesh, check_model, signature
from zcompile.hardware import table_of
from zcompile.materialize import materialize
from zcompile.transport import Choice, choose, log, of_all
from zcompile.words import LEAF, MODEL, STATE

gather = torch.ops.zcompile.gather.default


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
            self.leaf.requires_grad_(True).register_post_accumulate_grad_hook(self.deliver)  # refused by a frozen tensor
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
            raise RuntimeError(_replaced(self.name))
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
        self.groups = _groups(mesh, nccl_max_ctas)
        self.runtime = _C.Model(**self.groups, native_reduce=native_reduce)
        self.parameters: dict[str, ShardedParameter] = {}
        self.wanted_transport, self.transport = "", Choice("", "")
        self.hardware = table_of(torch.device(mesh.device_type))
        self.free_bytes = 0
        self.keep_bytes: int | None = None  # what a compile was asked for
        self.accumulates = False
        self.agreement: Agreement | None = None  # where a difference between ranks would hang
        self.at_rest = False  # whether an uncompiled read outside of backward is of the parameter and not of its values

    def choose(self, wanted: str) -> Choice:
        """The transport for `wanted`; see `zcompile.transport.choose`."""
        return choose(wanted, self.mesh, self.new_runtime, self.nccl_max_ctas)

    def use_transport(self, wanted: str) -> None:
        """Change the wire to `wanted`, one of `zcompile.transport.TRANSPORTS`; all ranks together.

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

    def bytes_to_keep(self) -> int:
        """Most bytes of full parameters from micro-step to micro-step; see `zcompile.config.Settings.keep_bytes`."""
        if self.keep_bytes is not None:
            return self.keep_bytes
        world = self.runtime.world
        shards_bytes = sum(-(-math.prod(one.shape) // world) * one.leaf.itemsize for one in self.parameters.values())  # not of this rank
        return max(0, self.free_bytes - 3 * shards_bytes) // 4

    def begin_accumulating(self, keep_bytes: int) -> None:
        """From here on, parameters do not change; what is gathered stays full up to `keep_bytes`."""
        self.accumulates = True
        self.runtime.keep(keep_bytes)

    def end_accumulating(self) -> None:
        """From here on, they may."""
        self.accumulates = False
        self.runtime.stop_keeping()

    def limit_keeping(self, keep_bytes: int | None) -> None:
        """Have `bytes_to_keep` return what a compile is asked for, also for micro-steps that have begun."""
        self.keep_bytes = keep_bytes
        self.runtime.keep_at_most(self.bytes_to_keep())

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
        raise RuntimeError("zcompile: a sharded model cannot be copied; copy it first, then call zcompile.shard on both.")

    def __reduce__(self):
        raise RuntimeError("zcompile: a sharded model cannot be pickled; save model.state_dict() instead.")


def shard(
    model: nn.Module,
    mesh: DeviceMesh | None = None,
    *,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
    nccl_max_ctas: int | None = None,
    native_reduce: bool = False,
) -> nn.Module:
    """Shard every parameter of `model` over the ranks, in place (ZeRO-3, arXiv:1910.02054).

    Afterwards each rank holds rows [r * ceil(n / W), (r + 1) * ceil(n / W)) of every parameter with n rows as a DTensor
    with placement `Shard(0)`, as FSDP2 does; scalars stay whole (`Replicate()`), and so do buffers. Modules gather a
    parameter when they read it, and its gradient is reduced to the mean over ranks. Works in eager; `torch.compile` with
    `backend="zcompile"` plans it. Each rank keeps its slice of its own initial values, as FSDP2 does: seed all ranks
    alike to start from one model.

    Args:
        model: any module, on the mesh's device, on CPU (moved piece by piece) or on the meta device (each module is made
            by its `reset_parameters()`; a full copy of the model never exists on one rank).
        mesh: 1-D (shard), or 2-D (replicate x shard). Default: all ranks of the default process group.
        param_dtype: dtype on the wire and in compute; masters keep theirs. Floating-point inputs of `model` are cast to
            it. Default: that of the masters, which `torch.autocast` narrows.
        reduce_dtype: a narrower dtype for gradients on the wire. The sum is fp32 in any case (fp64 for fp64), in rank
            order.
        ignored_params: parameters that stay as they are.
        nccl_max_ctas: most SMs (thread blocks) that one of NCCL's kernels takes from compute: gathers and reduces, and sums over
            replicas, then go over groups of zcompile's own instead of the mesh's. Default: NCCL's choice. The environment
            variable NCCL_MAX_CTAS limits all groups of a process and takes precedence. Peer to peer, nothing is limited but
            sums over replicas.
        native_reduce: reduce by the reduce-scatter of NCCL (or gloo) where the transport is one of them. It adds up in its own order, in
            the width of the wire, so that numbers depend on the backend, the number of ranks and their links: bf16 gradients are added up in bf16, unless
            `reduce_dtype`, which may then be the wider one, makes them travel as fp32. fp16 sums may overflow. Scalars, sums over replicas, division
            and accumulation stay as they are; peer to peer, everything does.

    Returns:
        `model`, with parameters replaced. Build the optimizer afterwards.

    Raises:
        RuntimeError: no process group, sharded already, an optimizer that holds its parameters exists, or ranks disagree
            on the model.
        ValueError: a mesh that is neither 1-D nor 2-D, mixed devices, an `nccl_max_ctas` that is not positive or not for NCCL.
        TypeError: a parameter or dtype that is not floating-point.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "zcompile.shard needs a process group: call torch.distributed.init_process_group() first "
            "(under torchrun, or with one rank)."
        )
    check_mesh(mesh)
    mesh = mesh or _default_mesh(model)
    ignored = {id(parameter) for parameter in ignored_params}
    error = check_model(model, mesh, ignored, param_dtype, reduce_dtype) or check_max_ctas(mesh, nccl_max_ctas)
    options = f"{param_dtype=!s} {reduce_dtype=!s} {nccl_max_ctas=} {native_reduce=}"
    agree_on_model(mesh, error, [*signature(model, ignored), options])

    state = ShardedModel(mesh, nccl_max_ctas, native_reduce)
    device = _device(mesh)
    done: dict[int, ShardedParameter] = {}  # by id of the original parameter, which `originals` keeps taken
    originals: list[nn.Parameter] = []
    for path, module in list(model.named_modules()):
        own = {name: p for name, p in module._parameters.items() if p is not None and id(p) not in ignored}
        originals += own.values()
        materialize(model, path, module, device, keep=ignored | done.keys())
        _move_buffers(module, device)
        for attribute, original in own.items():
            if id(original) not in done:
                name = f"{path}.{attribute}" if path else attribute
                done[id(original)] = _shard_parameter(state, name, module._parameters[attribute], device, reduce_dtype)
            done[id(original)].owners.append((module, attribute))
            module._parameters[attribute] = done[id(original)].parameter
    install_readers(state, param_dtype, alone=mesh.size() == 1)
    state.use_transport("auto")
    state.measure_memory()
    if param_dtype is not None:
        model.register_forward_pre_hook(functools.partial(_cast_inputs, param_dtype), with_kwargs=True)
    return model


@contextlib.contextmanager
def accumulate(model: nn.Module) -> Iterator[None]:
    """Around the micro-steps of one step: parameters do not change in it, so compiled graphs gather them once.

    What is gathered first stays full until the end, as far as the option `keep_bytes` lets it; over p2p, weights are made ready
    for peers once. Gradients add up as ever, but each time into new memory: what a DTensor in `.grad` was made of before does not
    follow. No number changes, but where several graphs read one parameter, gradients are added in another order. All ranks enter and leave
    it at the same micro-steps. Values that are changed inside are seen at its end, some not before; change them on all ranks or on none.

    Raises:
        RuntimeError: `model` is not sharded; an optimizer steps with its parameters inside.
    """
    state = state_of(model)
    if state.accumulates:  # the outer one lasts longer
        yield
        return
    ours = {id(sharded.parameter) for sharded in state.parameters.values()}

    def refuse(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(parameter) in ours for group in optimizer.param_groups for parameter in group["params"]):
            raise RuntimeError("zcompile: an optimizer steps inside of zcompile.accumulate. Move its step behind the block.")

    state.begin_accumulating(state.bytes_to_keep())
    watching = register_optimizer_step_pre_hook(refuse)
    try:
        yield
    finally:
        watching.remove()
        state.end_accumulating()


def stats(model: nn.Module) -> dict:
    """What went over the wire for `model` since it was sharded or `reset_stats` was called, counted by the runtime.

    Returns:
        `gathered_bytes` and `reduced_bytes`: dtype name -> bytes of full tensors moved on this rank; `gathers` and
        `reduces`: calls; `peak_full_bytes`: most bytes of gathered tensors alive at once (memory that compiled code reuses
        for activations counts until it is freed); `transport`: its name; `transport_reason`: why it was taken;
        `transport_bytes`: device memory that it keeps, which torch's allocator does not count.
    """
    state = state_of(model)
    return state.runtime.stats() | {"transport_reason": state.transport.reason}


def reset_stats(model: nn.Module) -> None:
    """Set every counter of `stats(model)` to zero."""
    state_of(model).runtime.reset_stats()


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


def _default_mesh(model: nn.Module) -> DeviceMesh:
    devices = {parameter.device.type for parameter in model.parameters()} - {"meta"}
    on_gpu = torch.cuda.is_available() and "nccl" in dist.get_backend()
    device_type = "cuda" if on_gpu or "cuda" in devices else "cpu"
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _device(mesh: DeviceMesh) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")


def _groups(mesh: DeviceMesh, nccl_max_ctas: int | None) -> dict:
    """Process groups of the runtime, by name; see `Groups` in csrc/runtime.h."""
    shard_group = mesh.get_group(mesh.ndim - 1)
    on_cpu = mesh.device_type == "cpu"
    everyone = mesh.mesh.flatten().tolist()
    several = mesh.size() > 1

    def limited(group: dist.ProcessGroup) -> dist.ProcessGroup:
        return group if nccl_max_ctas is None or not several else new_group(group, nccl_max_ctas)

    return {
        "gather": limited(shard_group).group_name,
        "reduce": new_group(shard_group, nccl_max_ctas).group_name if several else shard_group.group_name,
        "replicate": limited(mesh.get_group(0)).group_name if mesh.ndim == 2 else "",
        "control": dist.new_group(everyone, backend="gloo", use_local_synchronization=True).group_name if on_cpu and several else "",
        "rank": shard_group.rank(),
        "world": shard_group.size(),
    }


def new_group(like: dist.ProcessGroup, nccl_max_ctas: int | None = None) -> dist.ProcessGroup:
    """Another communicator between the ranks of `like`, which call it together.

    Args:
        nccl_max_ctas: most SMs that one of its kernels takes, for NCCL, whose lower bound is 1 unless NCCL_MIN_CTAS is set.
    """
    how: dict[str, Any] = {}
    if nccl_max_ctas is not None:
        theirs = like._get_backend(torch.device("cuda")).options
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=theirs.is_high_priority_stream)
        options.config.max_ctas = nccl_max_ctas
        options._timeout = theirs._timeout  # new_group warns of a timeout that is given once
        how = {"backend": "nccl", "pg_options": options, "timeout": theirs._timeout}
    return dist.new_group(dist.get_process_group_ranks(like), use_local_synchronization=True, **how)


@torch.no_grad()
def _shard_parameter(state: ShardedModel, name: str, parameter: nn.Parameter, device, reduce_dtype) -> ShardedParameter:
    mesh = state.mesh
    world, rank = mesh.size(mesh.ndim - 1), mesh.get_local_rank(mesh.ndim - 1)
    full = parameter.detach()
    replicated = full.ndim == 0
    if replicated:
        local = full.to(device, copy=True)
        dist.broadcast(local, group=mesh.get_group(mesh.ndim - 1), group_src=0)
    else:
        rows = -(-full.shape[0] // world)
        local = full[rank * rows : (rank + 1) * rows].to(device, copy=True).contiguous()
    if mesh.ndim == 2:
        dist.broadcast(local, group=mesh.get_group(0), group_src=0)
    placements = [Replicate()] * (mesh.ndim - 1) + [Replicate() if replicated else Shard(0)]
    stride = torch.empty(full.shape, device="meta").stride()
    dtensor = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=stride)
    leaf = nn.Parameter(local, requires_grad=parameter.requires_grad)
    setattr(leaf, MODEL, weakref.ref(state))
    numel = full.numel()
    index = state.runtime.add(
        name=name,
        shard=leaf,
        shape=list(full.shape),
        chunk=numel if replicated else rows * (numel // max(full.shape[0], 1)),
        replicated=replicated,
        reduce_dtype=reduce_dtype,
    )
    sharded = ShardedParameter(name, index, nn.Parameter(dtensor, requires_grad=parameter.requires_grad), leaf)
    sharded.parameter.__dict__.update(parameter.__dict__)  # what users hung on it: weight-decay flags and the like
    state.parameters[name] = sharded
    return sharded


def install_readers(state: ShardedModel, param_dtype: torch.dtype | None, alone: bool) -> None:
    """Let the modules of `state` gather what they read; `alone`: the leaves are whole parameters already."""
    by_module: dict[nn.Module, dict[str, tuple[int, ...]]] = {}
    for sharded in state.parameters.values():
        state.bind(sharded)
        for module, attribute in sharded.owners:
            by_module.setdefault(module, {})[attribute] = sharded.shape
    for module, attributes in by_module.items():
        module.__dict__[STATE] = state
        module.__class__ = _sharded_class(type(module), tuple(attributes.items()), param_dtype, alone)


def read_on_paper(module: nn.Module, param_dtype: torch.dtype, seen: dict[int, nn.Parameter]) -> list[tuple[nn.Parameter, str]]:
    """Let `module` read as one of a sharded model does, so that it can be traced without ranks, though not run.

    Args:
        seen: id of a parameter -> its leaf, for parameters that several modules read; is added to.

    Returns:
        The leaves and the names of the attributes that read them.
    """
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    for name, parameter in own.items():
        module.__dict__[LEAF + name] = seen.setdefault(id(parameter), parameter)
    if own:
        shapes = tuple((name, tuple(parameter.shape)) for name, parameter in own.items())
        module.__class__ = _sharded_class(type(module), shapes, param_dtype, alone=False)
    return [(module.__dict__[LEAF + name], name) for name in own]


def remove_readers(state: ShardedModel) -> None:
    """Let the modules of `state` read their own parameters again."""
    for sharded in state.parameters.values():
        sharded.parameter.__dict__.pop("requires_grad_", None)
        for module, attribute in sharded.owners:
            module.__dict__.pop(LEAF + attribute, None)
            if module.__dict__.pop(STATE, None) is not None:
                module.__class__ = type(module).__bases__[0]


@functools.cache
def _sharded_class(base: type, shapes: tuple, param_dtype: torch.dtype | None, alone: bool) -> type:
    """`base` with one property per sharded parameter. Cached, so that equal blocks have one class and share compiled code."""
    namespace = {name: property(_reader(name, list(shape), param_dtype, alone)) for name, shape in shapes}
    namespace |= {"_apply": _apply, "register_parameter": _register_parameter, "__module__": base.__module__}
    return type(base.__name__, (base,), namespace)


def _reader(name: str, shape: list[int], param_dtype: torch.dtype | None, alone: bool):
    leaf_name = LEAF + name

    def read_alone(self):
        leaf = getattr(self, leaf_name)
        return leaf if param_dtype is None else leaf.to(param_dtype)

    def read(self):
        leaf = getattr(self, leaf_name)
        if not torch.compiler.is_compiling():
            if self.__dict__[STATE].at_rest and torch._C._current_graph_task_id() == -1:
                return self._parameters[name]
            leaf.requires_grad_(self._parameters[name].requires_grad)
        return gather(leaf, shape, leaf.dtype if param_dtype is None else param_dtype)

    return read_alone if alone else read


def _apply(self, fn, recurse=True):
    super(type(self), self)._apply(fn, recurse)
    state = self.__dict__[STATE]
    for sharded in state.parameters.values():
        if any(module is self for module, _ in sharded.owners):
            state.refresh(sharded)
    return self


def _register_parameter(self, name, param):
    state = self.__dict__[STATE]
    sharded = next((s for s in state.parameters.values() if (self, name) in s.owners), None)
    if sharded is None or param is sharded.parameter:
        return super(type(self), self).register_parameter(name, param)
    old = sharded.parameter
    same = isinstance(param, DTensor) and (param.shape, param.placements, param.device_mesh) == (
        old.shape,
        old.placements,
        old.device_mesh,
    )
    if not same:
        raise RuntimeError(_replaced(sharded.name))
    sharded.parameter = param
    state.runtime.watch(sharded.index, sharded.masters())
    for module, attribute in sharded.owners:
        module._parameters[attribute] = param
    state.refresh(sharded)


def _replaced(name: str) -> str:
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


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.device != device:
            module._buffers[name] = buffer.to(device)


def _cast_inputs(dtype: torch.dtype, module: nn.Module, args, kwargs):
    def cast(value):
        return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    return torch.utils._pytree.tree_map(cast, (args, kwargs))
