"""Parameters with FSDP2's all-gather hooks: `fsdp_pre_all_gather`, `fsdp_post_all_gather`.

[Note: components]
A tensor subclass with these hooks decides which tensors are all-gathered. A program may also set the hooks on the local
tensor of a DTensor, after `zcompile.shard` and before the first forward (sharding/late_hooks.py). Before each gather,
`fsdp_pre_all_gather` converts this rank's shard to plain tensors, such as float8 values, or int8 values and their
scales. These are the *components* of the parameter. One transfer gathers all of them, each in its own dtype. From the
components of all ranks, `fsdp_post_all_gather` makes the unsharded parameter. Each later gather moves the memory of its
components into the component tensors of the first gather, then calls `fsdp_post_all_gather` with the existing unsharded
parameter as `out`.

In the runtime, a component is a parameter without a shard (`is_component` in csrc/transport/param.h): each gather
passes the data. The leaf of a tensor subclass has no memory. It only identifies the parameter, also in reduces. Because
hooks are Python, only eager code gathers components, for all parameters of a block or unit together. Parameters that
are gathered in int8 also use components (int8_gather.py).
"""

import abc
import contextlib
import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

from zcompile._C import free_memory, wait_for_gathers

if TYPE_CHECKING:
    from zcompile.state.sharded_parameter import ShardedParameter

PRE, POST = "fsdp_pre_all_gather", "fsdp_post_all_gather"


def subclass_of(parameter: torch.Tensor) -> type | None:
    """Return the tensor subclass of `parameter`, or of its local tensor if it is a DTensor; None for plain tensors."""
    kind = type(part_held_by(parameter))
    return None if kind in (torch.Tensor, nn.Parameter, AsyncCollectiveTensor) else kind


def has_hooks(parameter: torch.Tensor) -> bool:
    """Whether `parameter`, or its local tensor if it is a DTensor, has at least one of FSDP2's all-gather hooks."""
    part = part_held_by(parameter)
    return hasattr(part, PRE) or hasattr(part, POST)


def part_held_by(parameter: Any) -> torch.Tensor:
    """Return a DTensor's own local tensor (a view by `to_local()` may lack the hooks), or else `parameter`."""
    return parameter._local_tensor if isinstance(parameter, DTensor) else parameter


def name_of(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def check_hooks(name: str, part: torch.Tensor, shape: Sequence[int], mesh: DeviceMesh, dim: int) -> Exception | None:
    """Return an error, for all ranks to raise, if all-gather hooks cannot gather a parameter; else None.

    `part`: the tensor with the hooks. `shape`: of the parameter, which is to be sharded along `dim`.
    """
    world = mesh.size(mesh.ndim - 1)
    where = f"zcompile.shard: parameter '{name}' is a {name_of(type(part))} (rank {dist.get_rank()})"
    if not (hasattr(part, PRE) and hasattr(part, POST)):
        missing = POST if hasattr(part, PRE) else PRE
        return TypeError(f"{where}, which has no {missing}. FSDP2's all-gather hooks come in pairs: define both.")
    count = len(inspect.signature(getattr(part, PRE)).parameters)
    if count not in (1, 5):
        return TypeError(
            f"{where}, whose {PRE} takes {count} arguments. Give it those of FSDP2: (mesh), or (mesh, outer_size, "
            "outer_stride, module, mp_policy)."
        )
    if not shape or dim != 0:
        return ValueError(
            f"{where} of shape {tuple(shape)}, to be sharded along dimension {dim}. Parameters with {PRE} are sharded "
            "along the first dimension alone: let shard_placement_fn return Shard(0), or pass it in ignored_params."
        )
    if not part.is_contiguous():
        return ValueError(f"{where} that is not contiguous. Call contiguous() before it becomes a parameter.")
    if shape[0] % world and count == 1:
        return ValueError(
            f"{where} with {shape[0]} rows, which do not divide by {world} ranks. Its {PRE}(mesh) is not told the "
            "size, and so cannot pad. Choose a size that divides, let the hook take outer_size, or keep the parameter "
            "whole on each rank: ignored_params=[...]."
        )
    if mesh.ndim > 1 and not mesh.mesh_dim_names:
        return ValueError(
            f"{where}. Its hooks get the dimension of the mesh that shards it, by name. Give the mesh mesh_dim_names."
        )
    return None


def padded_shard(part: torch.Tensor, world: int, rank: int) -> torch.Tensor:
    """Return the rows of `part` that rank `rank` holds, in memory with room for as many rows as the first rank holds.

    The last ranks may hold no rows. Calls only ops that FSDP2 calls, because a subclass may implement no others.
    """
    chunks = torch.chunk(part, world, dim=0)
    rows = chunks[rank].size(0) if rank < len(chunks) else 0
    padded = part.new_zeros(chunks[0].size())
    if rows > 0:
        padded.narrow(0, 0, rows).copy_(chunks[rank])
    return padded.narrow(0, 0, rows)


def leaf_of(local: torch.Tensor) -> torch.Tensor:
    """Return a leaf for `local`, a tensor subclass. It has no memory, because gathers read components of `local`."""
    leaf = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    free_memory([leaf])
    return leaf


def plain_tensors_of(tensor: Any) -> list[torch.Tensor]:
    """Return the plain tensors inside of `tensor`, a wrapper subclass; `[tensor]` if it is no wrapper subclass."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    return [plain for name in names for plain in plain_tensors_of(getattr(tensor, name))]


@contextlib.contextmanager
def _own_ops() -> Iterator[None]:
    """Run the ops of the `with` block without the surrounding autograd, torch.func transforms and dispatch modes."""
    with torch.inference_mode(False), torch._C._DisableFuncTorch(), torch.no_grad(), _disable_current_modes():
        yield


class Components(NamedTuple):
    """The components of one parameter: those of this rank's shard before a gather, those of all ranks after it."""

    tensors: list[torch.Tensor]  # after the gather, each has the rows of all ranks, in rank order
    metadata: Any  # the second result of `fsdp_pre_all_gather`, to be passed to `fsdp_post_all_gather`


class GatherExtension(abc.ABC):
    """How one parameter is gathered as components; see [Note: components]."""

    kind: str  # description of the parameter, for messages

    def __init__(self) -> None:
        # (shape, dtype) of each component -> the components' indices in the runtime.
        self.known: dict[tuple[tuple[torch.Size, torch.dtype], ...], list[int]] = {}
        self.indices: list[int] = []  # the entry of `known` that the last gather used
        self.gathered: list[torch.Tensor] = []  # components of all ranks, from which the unsharded parameter is made
        self.inner: list[torch.Tensor] = []  # the unsharded parameter's memory that is not in `gathered`

    def before_gather(self, sharded: "ShardedParameter") -> Components:
        """Make this rank's components (the tensors to gather). Add them to the runtime if shapes or dtypes are new."""
        with _own_ops():
            own = self.components_of(sharded)
        kinds = tuple((each.shape, each.dtype) for each in own.tensors)
        if kinds not in self.known:
            self.known[kinds] = [self._add(sharded, each) for each in own.tensors]
        if self.indices is not self.known[kinds]:
            self.indices = self.known[kinds]
            sharded.state.watch(sharded)
        return own

    @abc.abstractmethod
    def components_of(self, sharded: "ShardedParameter") -> Components:
        """Make the components of this rank's shard."""

    def _add(self, sharded: "ShardedParameter", component: torch.Tensor) -> int:
        world, rows = sharded.state.groups.world, component.shape[0] if component.ndim else 1
        return sharded.state.runtime.add(
            name=sharded.name,
            shard=component.new_empty(0),
            shape=[world * rows, *component.shape[1:]],
            chunk=component.numel(),
            replicated=False,
            reduce_dtype=None,
            is_counted=False,
            is_component=True,
        )

    def make(self, sharded: "ShardedParameter", arrived: Components) -> torch.Tensor:
        """Make the unsharded parameter from `arrived`, the gathered components of all ranks. Take over their memory."""
        with _own_ops():
            self.gathered = [torch.empty_like(each) for each in arrived.tensors]
            sharded.state.runtime.fill(self.gathered, arrived.tensors)
            return cut(sharded, self.unsharded_of(sharded, arrived.metadata))

    @abc.abstractmethod
    def unsharded_of(self, sharded: "ShardedParameter", metadata: Any) -> torch.Tensor:
        """Make the unsharded parameter from `self.gathered`; `make` cuts off padding. Set `self.inner`."""

    def refill(self, sharded: "ShardedParameter", arrived: Components, unsharded: torch.Tensor) -> None:
        """Write the components `arrived` of a later gather into `unsharded`, which `make` returned."""
        sharded.state.runtime.fill(self.gathered, arrived.tensors)
        for each in self.inner:
            each.untyped_storage().resize_(each.nbytes)
        with _own_ops(), _unsafe_preserve_version_counter((unsharded, *self.inner)):
            self.write(sharded, arrived.metadata, unsharded)

    @abc.abstractmethod
    def write(self, sharded: "ShardedParameter", metadata: Any, unsharded: torch.Tensor) -> None:
        """Write the values of `self.gathered` into `unsharded`, the result of `unsharded_of`."""

    def memory(self) -> list[torch.Tensor]:
        """Return the tensors that hold the memory of the unsharded parameter."""
        return [*self.gathered, *self.inner]

    def free(self) -> None:
        free_memory(self.gathered)
        for each in self.inner:
            each.untyped_storage().resize_(0)


class HookedGather(GatherExtension):
    """How a parameter with FSDP2's all-gather hooks is gathered. `local` is this rank's shard."""

    def __init__(self, mesh: DeviceMesh, policy: MixedPrecisionPolicy, local: torch.Tensor):
        super().__init__()
        # Hooks get the last dimension of the model's mesh, over which parameters are sharded.
        self.mesh = mesh if mesh.ndim == 1 else mesh[cast(Any, mesh.mesh_dim_names)[-1]]
        self.policy, self.local = policy, local
        self.kind = f"a {name_of(type(local))}"
        self.takes_sizes = len(inspect.signature(getattr(local, PRE)).parameters) > 1

    def components_of(self, sharded: "ShardedParameter") -> Components:
        """Return the components that `fsdp_pre_all_gather` makes of this rank's shard.

        Raises RuntimeError if they are not plain tensors, or lack the padding of rows that ranks do not divide.
        """
        args: tuple[Any, ...] = (self.mesh,)
        if self.takes_sizes:
            module, shape = sharded.owners[0][0], torch.Size(sharded.shape)
            args = self.mesh, shape, _contiguous_stride(shape), module, self.policy
        tensors, metadata = getattr(self.local, PRE)(*args)
        self._check(sharded, tensors := list(tensors))
        return Components(tensors, metadata)

    def _check(self, sharded: "ShardedParameter", tensors: Sequence[Any]) -> None:
        where = f"zcompile: {PRE} of parameter '{sharded.name}' ({name_of(type(self.local))}, rank {dist.get_rank()})"
        if not tensors:
            raise RuntimeError(f"{where} returned nothing to gather. Return at least one plain tensor.")
        for each in tensors:
            if not isinstance(each, torch.Tensor) or subclass_of(each) is not None:
                raise RuntimeError(f"{where} returned a {name_of(type(each))} to gather. Return plain tensors.")
        rows, world = sharded.shape[0], sharded.state.groups.world
        padded = (-(-rows // world), *sharded.shape[1:])
        if rows % world and any(tuple(each.shape) != padded for each in tensors):
            raise RuntimeError(
                f"{where} returned tensors of shapes {[tuple(each.shape) for each in tensors]}. {world} ranks do not "
                f"divide the {rows} rows, so each tensor must have a padded shard's size, {padded}. Pad in the hook, "
                "choose another number of rows, or keep the parameter whole on each rank: ignored_params=[...]."
            )

    def unsharded_of(self, sharded: "ShardedParameter", metadata: Any) -> torch.Tensor:
        made, inner = getattr(self.local, POST)(tuple(self.gathered), metadata, param_dtype_of(sharded))
        gathered = {each.untyped_storage()._cdata for each in self.gathered}
        self.inner = [each for each in inner if each.untyped_storage()._cdata not in gathered]
        return cast(torch.Tensor, made)

    def write(self, sharded: "ShardedParameter", metadata: Any, unsharded: torch.Tensor) -> None:
        getattr(self.local, POST)(tuple(self.gathered), metadata, param_dtype_of(sharded), out=unsharded)

    @torch.no_grad()
    def whole(self, sharded: "ShardedParameter") -> torch.Tensor:
        """All-gather the parameter, and return it unsharded, in new memory. A collective call."""
        own = self.before_gather(sharded)
        arrived = sharded.state.runtime.gather_components(self.indices, own.tensors)
        wait_for_gathers(arrived)
        made, _ = getattr(self.local, POST)(tuple(arrived), own.metadata, param_dtype_of(sharded))
        return cut(sharded, made)


def extension_of(sharded: "ShardedParameter") -> GatherExtension:
    assert sharded.extension is not None
    return sharded.extension


def tensors_of(gathered: Sequence[torch.Tensor | Components]) -> list[torch.Tensor]:
    """Return one flat list of the tensors in `gathered`, which mixes unsharded parameters and `Components`."""
    lists = (each.tensors if isinstance(each, Components) else [each] for each in gathered)
    return [tensor for tensors in lists for tensor in tensors]


def refuse_subclass_grad(name: str, grad: torch.Tensor) -> None:
    """Raise RuntimeError if the gradient `grad` of parameter `name` is not a plain tensor."""
    if (kind := subclass_of(grad)) is not None:
        raise RuntimeError(
            f"zcompile: the gradient of parameter '{name}' is a {name_of(kind)} (rank {dist.get_rank()}), which cannot "
            "be reduced. Let the backward of the tensor subclass return a plain tensor."
        )


def param_dtype_of(sharded: "ShardedParameter") -> torch.dtype:
    return sharded.layout.dtype or sharded.leaf.dtype


def cut(sharded: "ShardedParameter", made: torch.Tensor) -> torch.Tensor:
    """Return a view of the unsharded parameter `made` without the padding of shards."""
    shape = torch.Size(sharded.shape)
    return torch.as_strided(made, shape, _contiguous_stride(shape), storage_offset=0)


def _contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
