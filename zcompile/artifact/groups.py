"""Process groups in code that is saved: each rank has other groups, so a file names their places in the model's meshes.

[Note: collectives in a file]
Under expert parallelism, a graph has collectives of the model's own, and Inductor writes the name of a process group
into its code. The name may differ between ranks. A file has a place instead: the mesh of a parameter and a dimension.
A rank that loads the file puts in the name of its own group at that place. Beside names, code may have been traced with
this rank's number as a constant. That cannot be seen in it, so functions of the model that ask for it are refused.
"""

import ast
import functools
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.state.sharded_parameter import ShardedParameter

Groups = Mapping[str, str]  # the name of a group on this rank -> its place
COLLECTIVES = "torch.ops._c10d_functional"
ASKS_FOR_RANK = re.compile(r"\bget_(local_|group_|node_local_)?rank\b|\bget_coordinate\b|\.rank\(\)|\bRANK\b")


def groups_of(model: nn.Module) -> dict[str, str]:
    """The groups of the meshes of the parameters of `model`: alike on all ranks, but for their names."""
    states = models_of(state_of(model))
    meshes = dict.fromkeys(_mesh_of(state, each) for state in states for each in state.parameters.values())
    groups: dict[str, str] = {}
    for i, mesh in enumerate(meshes):
        for dimension in range(mesh.ndim):
            groups.setdefault(mesh.get_group(dimension).group_name, f"zcompile: dimension {dimension} of mesh {i}")
    return groups


def _mesh_of(state: ShardedModel, sharded: ShardedParameter) -> DeviceMesh:
    """All ranks that have a part of the parameter. DeepSpeed's parameters are no DTensors."""
    parameter = sharded.parameter
    return parameter.device_mesh if isinstance(parameter, DTensor) else state.mesh


def lacking(state: ShardedModel) -> str:
    """Why no file can be for a model with these meshes; empty if one can."""
    for each in models_of(state):
        for sharded in each.parameters.values():
            if sharded.layout.inner is not None:
                return (
                    f"parameter '{sharded.name}' is read as a DTensor over {sharded.layout.inner.mesh.mesh_dim_names}, "
                    "whose code has this rank's place in it; parameters with Placement(local=True) can be saved"
                )
            mesh = _mesh_of(each, sharded)
            ranks = {rank for i in range(mesh.ndim) for rank in dist.get_process_group_ranks(mesh.get_group(i))}
            if not ranks <= set(state.mesh.mesh.flatten().tolist()):
                return f"parameter '{sharded.name}' has ranks that the mesh {state.mesh.mesh_dim_names} does not have"
    return ""


def with_places(code: str, groups: Groups) -> str:
    """Code of Inductor with places for the names of groups.

    Raises:
        RuntimeError: a collective is over another group.
    """
    lines = code.splitlines(keepends=True)
    for name in sorted(_names_in(code), key=lambda node: (node.lineno, node.col_offset), reverse=True):
        if name.value not in groups:
            raise RuntimeError(f"it has a collective over process group {name.value!r}, of no mesh of its parameters.")
        line = lines[name.lineno - 1]
        lines[name.lineno - 1] = line[: name.col_offset] + repr(groups[name.value]) + line[name.end_col_offset :]
    return "".join(lines)


def with_names(code: str, groups: Groups) -> str:
    """The reverse of `with_places`, on the rank that runs the code."""
    for name, place in groups.items():
        code = code.replace(repr(place), repr(name))
    return code


def _names_in(code: str) -> Iterable[Any]:
    """The last argument of each collective in `code`, a constant."""
    if COLLECTIVES not in code:
        return
    for node in ast.walk(ast.parse(code)):
        op = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Call) and op.startswith(COLLECTIVES) and ".wait_tensor" not in op:
            yield node.args[-1]


@functools.cache
def source_lines(module: str) -> list[str]:
    """The source of a module, which is imported."""
    return inspect.getsourcelines(importlib.import_module(module))[0]


def asks_for_rank(sources: Iterable[tuple[str, int, int, str]]) -> str:
    """The first line of the model's traced functions that asks for this rank's number; empty if none does.

    Args:
        sources: of `zcompile.artifact.aot.Made`.
    """
    for module, first, end, _ in sources:
        if module.split(".")[0] in ("torch", "zcompile"):
            continue
        for i, line in enumerate(source_lines(module)[first - 1 : end - 1]):
            if ASKS_FOR_RANK.search(line):
                return f"line {first + i} of module {module}, `{line.strip()}`"
    return ""
