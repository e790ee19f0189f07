"""Meshes and process groups in saved code: each rank has others, so a file has their places in the model's meshes.

[Note: collectives in a file]
Under expert parallelism, a graph has collectives of the model's own, and Inductor writes the name of a process group
into its code. The name may differ between ranks. A file has a place instead: the mesh of a parameter and a dimension.
A rank that loads the file puts in the name of its own group at that place.

[Note: positions]
Under tensor parallelism, code may depend on this rank's coordinates along the *inner* meshes, over which modules read
DTensors: a redistribution takes this rank's slice, and the last rank may have fewer rows. So a file has one program for
each position in the inner meshes, and a rank loads the one for its own. Code depends on no other coordinate: it is the
same on all ranks that share shards.
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

Groups = Mapping[str, str]  # the name of a group on this rank -> its place
COLLECTIVES = "torch.ops._c10d_functional."


def meshes_of(state: ShardedModel) -> Iterator[tuple[ShardedParameter, DeviceMesh]]:
    """Each parameter with the mesh of all ranks that have a part of it."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            parameter = sharded.parameter  # DeepSpeed's are no DTensors
            yield sharded, parameter.device_mesh if isinstance(parameter, DTensor) else each.mesh


def span_of(state: ShardedModel) -> DeviceMesh:
    """The mesh of a parameter with the most ranks; these have one file."""
    return max(dict.fromkeys([state.mesh, *(mesh for _, mesh in meshes_of(state))]), key=lambda mesh: mesh.size())


def inner_meshes(state: ShardedModel) -> dict[DeviceMesh, DeviceMesh]:
    """Of the mesh of each parameter that modules read as a DTensor: its last dimensions, the inner mesh."""
    return {mesh: inner.mesh for sharded, mesh in meshes_of(state) if (inner := sharded.layout.inner) is not None}


def positions_of(state: ShardedModel) -> dict[int, str]:
    """The position of each rank, as text; see [Note: positions]."""
    positions: dict[int, dict[str, int]] = {rank: {} for rank in span_of(state).mesh.flatten().tolist()}
    for mesh, inner in inner_meshes(state).items():
        for rank, place in zip(mesh.mesh.flatten().tolist(), itertools.product(*map(range, mesh.shape)), strict=True):
            names = inner.mesh_dim_names or ()
            positions[rank].update(zip(names, place[mesh.ndim - inner.ndim :], strict=True))
    return {rank: ", ".join(f"{name} {at}" for name, at in each.items()) for rank, each in positions.items()}


def makers_of(state: ShardedModel) -> list[int]:
    """The first rank of each position; these compile. In the order of the mesh that `span_of` returns."""
    positions = positions_of(state)
    first = {position: rank for rank, position in reversed(positions.items())}
    return [rank for rank, position in positions.items() if first[position] == rank]


def refuse_meshes(state: ShardedModel, used: Iterable[DeviceMesh] = ()) -> None:
    """Refuse meshes whose ranks cannot share a file.

    Args:
        used: the meshes that the traced code used.

    Raises:
        ArtifactError: names the parameter.
    """
    span, inner = span_of(state), inner_meshes(state)
    ranks = set(span.mesh.flatten().tolist())
    for sharded, mesh in meshes_of(state):
        has = set(mesh.mesh.flatten().tolist())
        if not has <= ranks or (mesh in inner and has != ranks):
            raise ArtifactError(
                f"zcompile: no artifact can hold the model: parameter '{sharded.name}' is on the ranks {sorted(has)}, "
                f"and other parameters on {sorted(ranks)}. Compile without an artifact."
            )
    for mesh in used:
        if mesh not in inner.values():
            raise ArtifactError(
                f"zcompile: no artifact can hold the model: its forward uses the mesh {mesh.mesh_dim_names}, over "
                "which it reads no DTensor, so code may depend on the rank. Pass the process group instead."
            )


def groups_of(model: nn.Module) -> Groups:
    """The groups of the meshes of the parameters of `model`: alike on all ranks, but for their names."""
    groups: dict[str, str] = {}
    for i, mesh in enumerate(dict.fromkeys(mesh for _, mesh in meshes_of(state_of(model)))):
        for dimension, group in enumerate(mesh.get_all_groups()):
            groups.setdefault(group.group_name, f"zcompile: dimension {dimension} of mesh {i}")
    return groups


def with_places(code: str, groups: Groups) -> str:
    """Code of Inductor with places for the names of groups, which are the last arguments of collectives."""
    saved = code
    for call in ast.walk(ast.parse(code)):
        op = ast.unparse(call.func) if isinstance(call, ast.Call) else ""
        if isinstance(call, ast.Call) and op.startswith(COLLECTIVES) and ".wait_tensor" not in op:
            group = ast.literal_eval(call.args[-1])
            if group not in groups:
                raise RuntimeError(f"it has a collective over process group {group!r}, of no mesh of its parameters.")
            text = str(ast.get_source_segment(code, call))
            saved = saved.replace(text, text.replace(repr(group), repr(groups[group])))
    return saved


def with_names(code: str, groups: Groups) -> str:
    """The reverse of `with_places`, on the rank that runs the code."""
    for name, place in groups.items():
        code = code.replace(repr(place), repr(name))
    return code
