"""Process groups in saved code: each rank has other groups, so a file has their places in the model's meshes.

[Note: collectives in a file]
Under expert parallelism, a graph has collectives of the model's own, and Inductor writes the name of a process group
into its code. The name may differ between ranks. A file has a place instead: the mesh of a parameter and a dimension.
A rank that loads the file puts in the name of its own group at that place.
"""

import ast
from collections.abc import Iterator, Mapping

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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
