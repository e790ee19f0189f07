"""Checks of a Dynamo graph before it is compiled: an unsupported use of a parameter raises an error with its name."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._dynamo.create_parameter_op import tracable_create_parameter
from torch.fx import Graph, GraphModule, Node

from zcompile.graph.ops import GATHER, calls
from zcompile.state.attributes import SHARDED

Gathers = dict[int | None, Node]  # the memory of a gather's result (`_storage_of`) -> the gather

# torch's higher-order ops that may call a function never, once or often.
CONTROL_FLOW_OPS = {"cond", "while_loop", "map", "map_impl", "scan", "associative_scan", "flex_attention"}


def check_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> None:
    """Raise RuntimeError, with parameter and line, if a graph uses a parameter in an unsupported way."""
    placeholders = gm.graph.find_nodes(op="placeholder")
    known = {
        node.name: sharded
        for node, value in zip(placeholders, example_inputs, strict=True)
        if (sharded := getattr(value, SHARDED, lambda: None)()) is not None
    }
    _refuse_components(gm, known)
    names = {name: sharded.name for name, sharded in known.items()}
    for graph in _graphs_in(gm):
        gathers = {_storage_of(node.meta.get("example_value")): node for node in calls(graph, GATHER)}
        if gathers:
            _refuse_lost_writes(graph, gathers, names)
            _refuse_reads_on_other_streams(graph, gathers, names)
    _refuse_reads_in_branches(gm)


def _refuse_components(gm: GraphModule, known: dict[str, Any]) -> None:
    """Raise if a graph gathers a parameter that only eager code can: a tensor subclass, or one gathered in int8."""
    for node in calls(gm.graph, GATHER):
        sharded = known.get(cast(Node, node.args[0]).name)
        if sharded is not None and sharded.extension is not None:
            raise RuntimeError(
                f"zcompile: compiled code reads parameter '{sharded.name}', {sharded.extension.kind} "
                f"(rank {dist.get_rank()}), at\n{node.meta.get('stack_trace', '')}\n"
                "Such a parameter is gathered in eager, when its layer is called. Compile the model or its layers "
                "(model.compile(), layer.compile()), not a function around them, and read it inside of its layer."
            )


def _refuse_lost_writes(graph: Graph, gathers: Gathers, names: dict[str, str]) -> None:
    """Raise if forward writes to a gathered parameter, which is a copy, or makes an nn.Parameter of it.

    Each node over the copy's memory is checked, because a write through `weight.data` increases the `_version` (torch's
    counter of writes) of the tensor that `.data` returns, and not that of `weight`.
    """
    for node in graph.nodes:
        makes_parameter = node.target is tracable_create_parameter
        tensor: Any = (cast(Node, node.args[0]) if makes_parameter else node).meta.get("example_value")
        gather = gathers.get(_storage_of(tensor))
        if gather is None or not (makes_parameter or tensor._version > 0):
            continue
        parameter = f"parameter {_name_of(gather, names)}"
        if makes_parameter:
            raise RuntimeError(
                f"zcompile: forward makes an nn.Parameter of {parameter}, at\n{node.meta.get('stack_trace', '')}\n"
                "The new nn.Parameter's gradient would not reach the parameter. Use the tensor itself."
            )
        raise RuntimeError(
            f"zcompile: forward modifies {parameter} in place, at\n{gather.meta.get('stack_trace', '')}\n"
            "In forward the parameter is an all-gathered copy, so the change would be lost. Compute a new tensor, or "
            "update the DTensor in model.parameters() outside of forward."
        )


def _refuse_reads_on_other_streams(graph: Graph, gathers: Gathers, names: dict[str, str]) -> None:
    """Raise if forward reads a gathered parameter on a stream that it enters, which does not wait for the gather."""
    for node in graph.nodes:
        if not node.meta.get("custom", {}).get("stream"):  # 0: the current stream
            continue
        for read in (node, *node.all_input_nodes):
            if (gather := gathers.get(_storage_of(read.meta.get("example_value")))) is not None:
                raise RuntimeError(
                    f"zcompile: forward reads parameter {_name_of(gather, names)} on a stream that it enters, at\n"
                    f"{node.meta.get('stack_trace', '')}\n"
                    "In compiled code, only the current stream waits until the parameter is gathered. Let the function "
                    "that enters the stream run in eager (torch.compiler.disable), and read the parameter before that "
                    "function is called."
                )


def _name_of(gather: Node, names: dict[str, str]) -> str:
    """Return the quoted name of a gathered parameter; in a subgraph, the name of the subgraph's input."""
    shard = cast(Node, gather.args[0]).name
    return f"'{names.get(shard, shard)}'"


def _storage_of(tensor: Any) -> int | None:
    """Return a number that fake tensors with the same memory share; None if `tensor` has no memory."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # a tensor inside of torch.func's transforms has no storage
        return None


def _refuse_reads_in_branches(gm: GraphModule) -> None:
    """Raise if a function that one of CONTROL_FLOW_OPS calls reads a parameter: ranks may call it unequally often."""
    for node in gm.graph.nodes:
        name = getattr(node.target, "__name__", "")
        if not isinstance(node.target, torch._ops.HigherOrderOperator) or name not in CONTROL_FLOW_OPS:
            continue
        for attribute in (each for each in node.all_input_nodes if each.op == "get_attr"):
            inner = getattr(gm, str(attribute.target), None)
            for read in (read for each in _graphs_in(inner) for read in calls(each, GATHER)):
                raise RuntimeError(
                    f"zcompile: a function that torch's {name} calls reads a parameter of a sharded model, at\n"
                    f"{read.meta.get('stack_trace', '')}\n"
                    "Ranks may call the function different numbers of times, so it cannot all-gather. Read the "
                    "parameter before, as in `weight = self.layer.weight`, and use `weight` inside."
                )


def _graphs_in(value: Any) -> Iterator[Graph]:
    if isinstance(value, torch.nn.Module):
        yield from (each.graph for each in value.modules() if isinstance(each, GraphModule))
