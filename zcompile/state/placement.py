"""The mesh and the dimension along which each parameter is sharded, and the form in which modules read it.

[Note: domains]
The parameters that are sharded over the same mesh form a *domain*, with its own `ShardedModel`, runtime and process
groups. Under expert parallelism, a model has two domains: fewer ranks hold the same experts than hold the same dense
layers, so experts are sharded over another mesh. Domain 0 is that of the mesh of `zcompile.shard`. The others are
numbered in the order of their first parameters, which is the same on all ranks. Each gather or reduce op in a graph has
its domain's number as an argument, so that no compiler pass puts parameters of two domains into one transfer.

A parameter may be a DTensor before `zcompile.shard`, because tensor or expert parallelism has sharded it. That
DTensor's mesh is called *inner*. zcompile shards this rank's local tensor. Modules read a DTensor over the inner mesh.
"""

import weakref
from collections.abc import Callable, Container, Hashable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard

from zcompile.options import TRAINABLE
from zcompile.state.gather_extension import check_hooks, padded_shard, part_held_by, subclass_of

MOST_INNER = 2  # a parameter that is a DTensor before `zcompile.shard` may have at most so many placements


@dataclass(frozen=True)
class Placement:
    """The dimension and mesh along which a parameter is sharded: a result of `shard_placement_fn` in `zcompile.shard`.

    Attributes:
        shard: the tensor dimension along which the parameter is sharded. The size of a dimension other than the first
            must be a multiple of the number of shards.
        mesh: a 1-D (shard) or 2-D (replicate x shard) mesh. Default: the mesh of `zcompile.shard`.
        local: for a parameter that is a DTensor before `zcompile.shard`: whether modules read its local tensor instead
            of a DTensor. Code that distributes tokens to experts itself needs True.
    """

    shard: Shard = Shard(0)  # noqa: RUF009  it is immutable
    mesh: DeviceMesh | None = None
    local: bool = False


PlacementFunction = Callable[[nn.Parameter], Any]  # returns None, a Shard, a Placement, or FSDP2's ShardPlacementResult
Placements = list[tuple[nn.Parameter, Placement]]  # for each sharded parameter, in the order of model.parameters()


def check_mesh(mesh: DeviceMesh) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"zcompile.shard: mesh must be a torch DeviceMesh, not {type(mesh).__name__}.")
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"zcompile.shard: a mesh of {mesh.ndim} dimensions is not supported. Pass a 1-D mesh (shard) or a 2-D mesh "
            "(replicate x shard), e.g. a slice of yours: mesh['replicate', 'shard']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(f"zcompile.shard: rank {dist.get_rank()} is not in {mesh}. Call it on ranks of the mesh only.")


def placements_of(
    model: nn.Module, mesh: DeviceMesh, choose: PlacementFunction | None, ignored: Container[int]
) -> tuple[Placements, Exception | None]:
    """Return the placements of the parameters of `model` up to the first that cannot be sharded, and its error or None.

    Args:
        mesh: the mesh for parameters whose placement has no mesh.
        ignored: ids of parameters that are not sharded.
    """
    placements: Placements = []
    for name, parameter in model.named_parameters():
        if id(parameter) in ignored:
            continue
        try:
            placement = placement_of(parameter, choose)
            if placement.mesh is not None:
                check_mesh(placement.mesh)
        except Exception as error:
            return placements, error
        refused = check_placement(name, parameter, placement, placement.mesh or mesh)
        if refused is not None:
            return placements, refused
        placements.append((parameter, placement))
    return placements, None


def placement_of(parameter: nn.Parameter, choose: PlacementFunction | None) -> Placement:
    """Return the result of `choose` for `parameter` as a `Placement`. Raises TypeError for other types of results."""
    chosen = None if choose is None else choose(parameter)
    if chosen is None:
        return Placement()
    if isinstance(chosen, Shard):
        return Placement(_positive(chosen, parameter))
    if isinstance(chosen, Placement):
        return Placement(_positive(chosen.shard, parameter), chosen.mesh, chosen.local)
    if hasattr(chosen, "mesh_info"):  # of FSDP2, since torch 2.14
        return Placement(_positive(chosen.placement or Shard(0), parameter), chosen.mesh_info.mesh)
    raise TypeError(
        "zcompile.shard: shard_placement_fn must return None, a Shard, a zcompile.Placement or FSDP2's "
        f"ShardPlacementResult, not {type(chosen).__name__}."
    )


def _positive(shard: Shard, parameter: nn.Parameter) -> Shard:
    return shard if shard.dim >= 0 else Shard(shard.dim + parameter.ndim)


@dataclass(frozen=True)
class Inner:
    """Arguments of `DTensor.from_local`, which makes a DTensor over the inner mesh (of tensor or expert parallelism).

    `Inner`s compare `mesh_id`, because a mesh equals another one even if the process groups of one were destroyed. A
    pickle has `mesh_key` instead of the mesh, so that another process unpickles an `Inner` over its own mesh.
    """

    mesh: DeviceMesh = field(compare=False)
    mesh_id: int
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def __reduce__(self) -> tuple[Any, ...]:
        return inner_over, (mesh_key(self.mesh), self.placements, self.shape, self.stride)


_meshes: "weakref.WeakValueDictionary[Hashable, DeviceMesh]" = weakref.WeakValueDictionary()  # see `remember_mesh`


def mesh_key(mesh: DeviceMesh) -> Hashable:
    """Return a key of the mesh that is the same on all of its ranks, and in another process."""
    return mesh.device_type, mesh.mesh_dim_names, tuple(mesh.shape), mesh._flatten_rank_map


def remember_mesh(mesh: DeviceMesh) -> None:
    """Let code unpickled from now on use `mesh` for the `mesh_key` in its pickle: process groups are not pickled."""
    _meshes[mesh_key(mesh)] = mesh


def inner_over(key: Hashable, placements: tuple[Any, ...], shape: torch.Size, stride: tuple[int, ...]) -> Inner:
    """Unpickle an `Inner`, over the mesh with this `key` that was last passed to `remember_mesh`."""
    mesh = remembered_mesh(key)
    return Inner(mesh, id(mesh), placements, shape, stride)


def remembered_mesh(key: Hashable) -> DeviceMesh:
    """Return the mesh with this `key`. Raises RuntimeError if no model of this process reads DTensors over it."""
    if key not in _meshes:
        raise RuntimeError(
            f"zcompile: compiled code from an artifact uses a DTensor over the mesh {key}, but no module of this "
            "process reads a parameter over this mesh. Redistribute the DTensor to a parameter's mesh, or compile "
            "without an artifact."
        )
    return _meshes[key]


@dataclass(frozen=True)
class Layout:
    """How the runtime moves a parameter, and how modules read it."""

    # Shape of the all-gathered tensor. If `dim` is 0: that of the parameter, or of its local tensor under tensor or
    # expert parallelism. If not: (number of shards, *shape of a shard).
    shape: tuple[int, ...]
    dim: int = 0  # the tensor dimension along which the parameter is sharded
    inner: Inner | None = None  # not None if modules read a DTensor (tensor or expert parallelism)
    domain: int = 0  # number of the parameter's domain; see [Note: domains]
    dtype: torch.dtype | None = None  # the dtype of gathers; None for the parameter's dtype at the time of the gather
    local: bool = False  # the parameter was a DTensor, and modules read its local tensor
    is_extended: bool = False  # the parameter is gathered as components; see gather_extension.py

    @property
    def is_plain(self) -> bool:
        """Whether modules read the gathered tensor as it is."""
        return self.dim == 0 and self.inner is None and not self.is_extended

    def as_read(self, gathered: torch.Tensor) -> torch.Tensor:
        """Convert the all-gathered tensor to the parameter that modules read. Dynamo traces this method."""
        return self.as_parameter(self.as_part(gathered))

    def as_part(self, gathered: torch.Tensor) -> torch.Tensor:
        """Convert the all-gathered tensor to the parameter, or to its local tensor if modules read a DTensor."""
        return gathered.movedim(0, self.dim).flatten(self.dim, self.dim + 1) if self.dim > 0 else gathered

    def as_parameter(self, part: torch.Tensor) -> torch.Tensor:
        inner = self.inner
        if inner is None:
            return part
        return DTensor.from_local(
            part, inner.mesh, inner.placements, run_check=False, shape=inner.shape, stride=inner.stride
        )

    def gathered_grad(self, grad: Any, world: int) -> torch.Tensor:
        """Convert `grad`, the gradient of `as_read(gathered)`, to that of `gathered`, which has `world` shards."""
        if self.inner is not None:
            if grad.placements != self.inner.placements:  # as the backward of `DTensor.from_local` does
                grad = grad.redistribute(placements=self.inner.placements)
            grad = grad.to_local()
        if self.dim > 0:
            grad = grad.unflatten(self.dim, (world, -1)).movedim(self.dim, 0).contiguous()
        return cast(torch.Tensor, grad)


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local().contiguous() if isinstance(parameter, DTensor) else parameter


def layout_for(
    parameter: torch.Tensor,
    placement: Placement,
    world: int,
    domain: int,
    param_dtype: torch.dtype | None,
    meshes: dict[DeviceMesh, DeviceMesh],
    is_extended: bool = False,
) -> Layout:
    """Return the layout of `parameter`, which `world` ranks shard.

    Args:
        param_dtype: the dtype of gathers. Parameters that cannot train, such as integers, keep their own dtype.
        meshes: the inner meshes (of parameters that were DTensors before `shard`, as under TP), each mapped to the
            first mesh that equals it. This call adds that of `parameter`. Equal meshes become one object, so equal
            layers have equal layouts. Then `shard` gives them one class, and they share compiled code.
        is_extended: whether `parameter`, a plain tensor, has the hook `fsdp_pre_all_gather`. Then the tensors that the
            hook returns are gathered in its place. Tensor subclasses with the hook do not need this argument.
    """
    part, dim = part_of(parameter.detach()), placement.shard.dim
    shape = tuple(part.shape)
    if dim > 0:
        shape = (world, *shape[:dim], shape[dim] // world, *shape[dim + 1 :])
    inner = None
    if isinstance(parameter, DTensor) and not placement.local:
        mesh = meshes.setdefault(parameter.device_mesh, parameter.device_mesh)
        remember_mesh(mesh)
        inner = Inner(mesh, id(mesh), parameter.placements, parameter.shape, parameter.stride())
    dtype = param_dtype if part.dtype in TRAINABLE else None
    return Layout(shape, dim, inner, domain, dtype, placement.local, is_extended or subclass_of(part) is not None)


def local_shard(part: torch.Tensor, dim: int, world: int, rank: int) -> torch.Tensor:
    """Return rank `rank`'s shard of `part`, a view if `part` is a plain tensor. Last shards may be shorter or empty."""
    if subclass_of(part) is not None:
        return padded_shard(part, world, rank)
    if part.ndim == 0:
        return part
    length = -(-part.shape[dim] // world)
    begin = min(rank * length, part.shape[dim])
    return part.narrow(dim, begin, min(length, part.shape[dim] - begin))


def mesh_over_hosts(mesh: DeviceMesh) -> DeviceMesh:
    """Return `mesh`, of dimensions (host, gpu), transposed to (gpu, host), over the same process groups.

    On the result, `[Shard(0), Shard(0)]` shards a parameter among the GPUs of a host, then each shard among hosts. On
    `mesh`, the same layout needs `_StridedShard`, which torch cannot convert to a full tensor if shards differ in size.
    """
    names = mesh.mesh_dim_names or ("host", "gpu")  # torch asks for names here
    return DeviceMesh.from_group(
        [mesh.get_group(1), mesh.get_group(0)],
        mesh.device_type,
        mesh=mesh.mesh.T.clone(memory_format=torch.contiguous_format),  # strides descend, also with one host
        mesh_dim_names=names[::-1],
    )


def as_dtensor(
    parameter: torch.Tensor, local: torch.Tensor, mesh: DeviceMesh, dim: int, over_hosts: bool = False
) -> DTensor:
    """Return the DTensor over `local`, this rank's shard of `parameter`.

    The last dimension of `mesh` shards. If `mesh` has two dimensions, the first replicates, or also shards if
    `over_hosts`. If `parameter` is a DTensor, its mesh dimensions come after those of `mesh`, as under FSDP2. If one of
    its mesh dimensions also shards `dim`, it has cut the tensor before `mesh` does, which `_StridedShard` expresses.
    """
    shape = parameter.shape
    cut = Shard(dim) if shape else Replicate()
    ours: list[Any] = [cut if over_hosts else Replicate()] * (mesh.ndim - 1) + [cut]
    if not isinstance(parameter, DTensor):
        meta = TensorMeta(shape, torch.empty(shape, device="meta").stride(), parameter.dtype)
        return DTensor(local, DTensorSpec(mesh, tuple(ours), tensor_meta=meta), requires_grad=False)
    cuts = parameter._spec.num_shards_map[dim] if shape else 1
    if cuts > 1:
        ours[-1] = _StridedShard(dim, split_factor=cuts)
    meta = TensorMeta(shape, parameter.stride(), parameter.dtype)
    whole_mesh = DeviceMesh._concatenate([mesh, parameter.device_mesh])
    spec = DTensorSpec(whole_mesh, (*ours, *parameter.placements), tensor_meta=meta)
    return DTensor(local, spec, requires_grad=False)


def check_placement(name: str, parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> Exception | None:
    """Return an error, for all ranks to raise together, if `parameter` cannot be sharded over `mesh`; else None."""
    where, dim = f"zcompile.shard: parameter '{name}' (rank {dist.get_rank()})", placement.shard.dim
    size = mesh.size(mesh.ndim - 1)
    part = part_held_by(parameter)
    if subclass_of(part) is not None and (refused := check_hooks(name, part, part.shape, mesh, dim)) is not None:
        return refused
    if not isinstance(parameter, DTensor):
        if placement.local:
            return ValueError(f"{where} is no DTensor, so Placement(local=True) has no meaning. Leave local out.")
        return _check_dim(where, parameter.shape, dim, size)
    inner, placements = parameter.device_mesh, parameter.placements
    if set(inner.mesh_dim_names or ()) & set(mesh.mesh_dim_names or ()) or not inner.mesh_dim_names:
        return RuntimeError(
            f"{where} is a DTensor over {inner.mesh_dim_names or 'a mesh without names'} already, which overlaps the "
            f"mesh {mesh.mesh_dim_names or 'of all ranks'} that it is to be sharded over. Make one mesh with named "
            "dimensions, and pass zcompile.shard the ones that the DTensor does not use, such as "
            "mesh=world_mesh['dp']. Do not combine with fully_shard."
        )
    if not mesh.mesh_dim_names:
        return RuntimeError(
            f"{where} is a DTensor over {inner.mesh_dim_names}. Pass zcompile.shard a mesh of the same root that has "
            "named dimensions, such as mesh=world_mesh['dp']."
        )
    # Compares the root meshes by their ranks, not as objects: torch may give a DTensor an equal mesh made earlier.
    if mesh._flatten_rank_map != inner._flatten_rank_map:
        return RuntimeError(
            f"{where} is a DTensor over {inner.mesh_dim_names}, a slice of a mesh with other ranks than that of "
            f"{mesh.mesh_dim_names}. Slice both meshes from the result of one init_device_mesh."
        )
    if len(placements) > MOST_INNER:
        return ValueError(f"{where} has {len(placements)} placements. Use at most {MOST_INNER} before zcompile.shard.")
    if any(each.is_partial() for each in placements):
        return ValueError(f"{where} has the placements {placements}. Redistribute it: a partial sum has no shards.")
    return _check_dim(where, part_of(parameter.detach()).shape, dim, size)


def _check_dim(where: str, shape: torch.Size, dim: int, size: int) -> Exception | None:
    if dim == 0:
        return None
    if dim >= len(shape):
        return ValueError(
            f"{where} of shape {tuple(shape)} has no dimension {dim}. Let shard_placement_fn return an existing one."
        )
    if shape[dim] % size:
        return ValueError(
            f"{where} has shape {tuple(shape)}: dimension {dim} does not divide by {size} ranks, as every dimension "
            "but the first must. Let shard_placement_fn return Shard(0) for this parameter."
        )
    return None


def is_spread(parameter: nn.Parameter, placement: Placement, mesh: DeviceMesh) -> bool:
    """Whether `parameter` is a DTensor already, or is sharded otherwise than by rows over `mesh`."""
    return placement.mesh not in (None, mesh) or placement.shard.dim > 0 or isinstance(parameter, DTensor)


def spread_parameter(unit: nn.Module, placements: Placements, mesh: DeviceMesh) -> str | None:
    """Return the name of a parameter of `unit` that is not sharded by rows over `mesh`, as units require; or None."""
    spread = {id(parameter) for parameter, placement in placements if is_spread(parameter, placement, mesh)}
    return next((name for name, parameter in unit.named_parameters() if id(parameter) in spread), None)
