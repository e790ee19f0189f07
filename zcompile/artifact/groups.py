"""Which ranks share compiled code, and how this code names their process groups.

[Note: collectives in a file]
Under expert parallelism, the model itself calls collectives, and Inductor writes the names of their process groups into
the code that it generates. These names may differ between ranks. So a file has a *place* instead of a name: the mesh of
a parameter, and a dimension of this mesh. A rank that loads the file replaces each place by its own group's name.

[Note: positions]
Forwards read some parameters as DTensors over an *inner mesh*: the last dimensions of the parameter's mesh, such as
"tp". A rank's *position* is its coordinates in the inner meshes. Compiled code depends on the position, because ranks
take different slices of a tensor, and the last slice may be smaller. So a file has a program for each position. Ranks
that differ only along other dimensions, such as "dp", run the same program.
"""

import ast
import itertools
from collections.abc import Iterable, Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.artifact.file_format import ArtifactError
from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.state.sharded_parameter import ShardedParameter

Groups = Mapping[str, str]  # name of a process group on this rank -> its place: a mesh and a dimension
COLLECTIVES = "torch.ops._c10d_functional."


def meshes_of(state: ShardedModel) -> Iterator[tuple[ShardedParameter, DeviceMesh]]:
    """Yield each parameter with the mesh of all ranks that hold a part of it."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            parameter = sharded.parameter  # not a DTensor under DeepSpeed
            yield sharded, parameter.device_mesh if isinstance(parameter, DTensor) else each.mesh


def span_of(state: ShardedModel) -> DeviceMesh:
    """Return the largest of the parameters' meshes. The ranks of this mesh share one artifact."""
    return max(dict.fromkeys([state.mesh, *(mesh for _, mesh in meshes_of(state))]), key=lambda mesh: mesh.size())


def inner_meshes(state: ShardedModel) -> dict[DeviceMesh, DeviceMesh]:
    """Map meshes of parameters, such as (dp, tp), to the inner mesh over which forwards read DTensors, such as (tp)."""
    return {mesh: inner.mesh for sharded, mesh in meshes_of(state) if (inner := sharded.layout.inner) is not None}


def positions_of(state: ShardedModel) -> dict[int, str]:
    """Return each rank's coordinates in the inner meshes, those of tensor or expert parallelism, such as "tp 1"."""
    positions: dict[int, dict[str, int]] = {rank: {} for rank in span_of(state).mesh.flatten().tolist()}
    for mesh, inner in inner_meshes(state).items():
        for rank, place in zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, mesh.shape)), strict=True):
            names = inner.mesh_dim_names or ()
            positions[rank].update(zip(names, place[mesh.ndim - inner.ndim :], strict=True))
    return {rank: ", ".join(f"{name} {at}" for name, at in each.items()) for rank, each in positions.items()}


def makers_of(state: ShardedModel) -> list[int]:
    """Return the ranks that compile: the first at each position; see [Note: positions]."""
    positions = positions_of(state)
    first = {position: rank for rank, position in reversed(positions.items())}
    return [rank for rank, position in positions.items() if first[position] == rank]


def refuse_meshes(state: ShardedModel, used: Iterable[DeviceMesh] = ()) -> None:
    """Raise ArtifactError if ranks cannot share an artifact. `used` are the meshes that the traced forward reads."""
    span, inner = span_of(state), inner_meshes(state)
    ranks = set(span.mesh.flatten().tolist())
    for sharded, mesh in meshes_of(state):
        has = set(mesh.mesh.flatten().tolist())
        if not has <= ranks or (mesh in inner and has != ranks):
            raise ArtifactError(
                f"zcompile: no artifact can hold the model: parameter '{sharded.name}' is on the ranks {sorted(has)}, "
                f"and other parameters are on the ranks {sorted(ranks)}. Compile without an artifact."
            )
    for mesh in used:
        if mesh not in inner.values():
            raise ArtifactError(
                f"zcompile: no artifact can hold the model: its forward uses the mesh {mesh.mesh_dim_names} and "
                "reads no DTensor over this mesh. So compiled code may have this rank's coordinates as constants, "
                "wrong on other ranks. Pass the process group to forward instead of the mesh."
            )


def groups_of(model: nn.Module) -> Groups:
    """Map the name of each process group of the parameters' meshes to its place; see [Note: collectives in a file]."""
    groups: dict[str, str] = {}
    for i, mesh in enumerate(dict.fromkeys(mesh for _, mesh in meshes_of(state_of(model)))):
        for dimension, group in enumerate(mesh.get_all_groups()):
            groups.setdefault(group.group_name, f"zcompile: dimension {dimension} of mesh {i}")
    return groups


def with_places(code: str, groups: Groups) -> str:
    """In Inductor's code, replace the group's name in each collective by its place, a text equal on all ranks."""
    saved = code
    for call in ast.walk(ast.parse(code)):
        op = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and op.startswith(COLLECTIVES) and ".wait_tensor" not in op:
            group = ast.literal_eval(call.args[-1])
            if group not in groups:  # `program.make` adds the remedy
                raise RuntimeError(f"a collective is over group {group!r}, and no parameter's mesh has this group")
            text = str(ast.get_source_segment(code, call))
            saved = saved.replace(text, text.replace(repr(group), repr(groups[group])))
    return saved


def with_names(code: str, groups: Groups) -> str:
    """Replace each text that `with_places` wrote for a process group by the name of this rank's group."""
    for name, place in groups.items():
        code = code.replace(repr(place), repr(name))
    return code
