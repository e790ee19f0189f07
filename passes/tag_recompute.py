import operator
from collections.abc import Sequence
from typing import cast

import torch
from torch._guards import TracingContext
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from zcompile.costs.formulas.products import is_matmul
from zcompile.graph.liveness import aliases
from zcompile.graph.ops import (
    GATHER,
    args_of,
    aten,
    backward_nodes,
    calls,
    chain,
    is_user_collective,
    named_args,
    readers,
    result_bytes,
    value,
)
from zcompile.graph.segments import Segment
from zcompile.options import TRAINABLE

TORCHS = ("aten", "prims", "inductor_prims")  # namespaces of ops whose schemas declare all their effects
SAVED_READER = "zcompile_saved_reader"  # a key in `meta` of readers that `tag_recompute`, not the user, tagged
LOOKUPS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.take.default}


def tag_recompute(graph: Graph, saves_readers: bool = True) -> None:
    """Tag every gather, with the views and casts of its result, to run again in backward.

    Why: otherwise, torch's partitioner would save views of a gathered parameter, which keep all of it unsharded.

    How: the tag is that of activation checkpointing, in `meta["recompute"]`. Nodes that dequantize a parameter get it
    too, because the dequantized weight has more bytes than the gathered one. Forward's readers of a parameter that
    backward does not read, such as a bias, are tagged to be saved. Without this tag, the partitioner would decide by
    activation sizes whether backward runs the reader again and so gathers the bias, and ranks with different batches
    could gather different parameters. Users' own tags of readers stay.

    Args:
        saves_readers: whether to tag readers to be saved. If false, remove such tags of an earlier run, because an
            activation memory budget lets torch's partitioner decide which nodes run again.
    """
    for node in graph.nodes if not saves_readers else ():
        if node.meta.pop(SAVED_READER, False):
            del node.meta["recompute"]
    backward = backward_nodes(graph)
    of_quantized = set(_dequantized(graph))
    for gather in calls(graph, GATHER):
        links = chain(gather)
        if gather in of_quantized:
            for link in links:
                links += [user for user in link.users if user in of_quantized and user not in links]
        for link in links:
            link.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            link.meta.pop("ac_graph_id", None)
        calls_reading = [reader for _, reader in readers(links) if reader.op == "call_function"]
        if not saves_readers or any(reader in backward for reader in calls_reading):
            continue
        for reader in calls_reading:
            if "recompute" not in reader.meta:
                reader.meta.update({"recompute": CheckpointPolicy.MUST_SAVE, SAVED_READER: True})


def save_stateful(graph: Graph) -> bool:
    """Tag random nodes and custom ops to be saved for backward. Return whether the graph has such a node.

    Why: under an activation memory budget, torch's partitioner may run a node again in backward, where it would draw
    other random numbers, or find its state changed. Nodes that activation checkpointing runs again keep their tags,
    because checkpointing restores the state of the random number generator.
    """
    again = CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE
    backward = backward_nodes(graph)
    found = [
        node
        for node in graph.nodes
        if (_is_random(node) or _is_custom(node)) and node not in backward and node.meta.get("recompute") not in again
    ]
    for node in found:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return bool(found)


def save_readers_of_written(graph: Graph) -> None:
    """Tag readers of inputs that forward writes to, such as buffers, to be saved: backward would read new values."""
    for node in _readers_of_written(graph):
        node.meta.setdefault("recompute", CheckpointPolicy.MUST_SAVE)


def recompute_segments(segments: Sequence[Segment], stride: int) -> None:
    """Tag the nodes of `segments` to run again in backward, and save every `stride`-th cut.

    Segments and cuts are explained in graph/segments.py. Users' tags stay. Nodes that cannot safely run again are not
    tagged: random nodes; custom ops and collectives, which may have effects or state; nodes that write to their
    arguments; nodes whose result has a data-dependent size, because other nodes refer to the size; and readers of
    inputs that forward writes to, because backward would read the new value.
    """
    changed = _readers_of_written(segments[0][0][0].graph) if segments else set()
    for i, (nodes, cut) in enumerate(segments):
        saved = {node for node in cut if i % stride == 0 and not _has_own_tag(node)}
        again = [node for node in nodes if node not in saved and node not in changed and _may_run_again(node)]
        for node in again:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        for node in saved:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _may_run_again(node: Node) -> bool:
    if node.target is operator.getitem:  # runs again if the node that returns the tuple does
        return _may_run_again(args_of(node)[0])
    if _has_own_tag(node) or _is_random(node) or "unbacked_bindings" in node.meta or not result_bytes(node):
        return False
    target = node.target
    return isinstance(target, OpOverload) and target.namespace in TORCHS and not target._schema.is_mutable


def _is_custom(node: Node) -> bool:
    """Whether `node` calls an op that is neither torch's nor zcompile's, such as a custom or higher-order op."""
    if node.target is operator.getitem:
        return _is_custom(args_of(node)[0])
    known = (*TORCHS, "zcompile", "_c10d_functional", "_c10d_functional_autograd")
    return node.op == "call_function" and getattr(node.target, "namespace", "") not in known


def _readers_of_written(graph: Graph) -> set[Node]:
    """Return the nodes that read, directly or through views, inputs that forward writes to, such as buffers."""
    context, inputs = TracingContext.try_get(), graph.find_nodes(op="placeholder")
    metadata = None if context is None else context.fw_metadata
    written = {inputs[i] for i in metadata.mutated_inp_runtime_indices} if metadata is not None else set()
    written |= {args_of(node)[0] for node in calls(graph, aten.copy_.default)}
    readers_of: set[Node] = set()
    for node in graph.nodes if written else ():
        if node.target is not aten.copy_.default and not written.isdisjoint(node.all_input_nodes):
            (written if aliases(node) else readers_of).add(node)
    return readers_of


def _has_own_tag(node: Node) -> bool:
    """Whether `node` has a tag that must stay: any but `tag_recompute`'s tag for saved readers of parameters."""
    return "recompute" in node.meta and not node.meta.get(SAVED_READER)


def _is_random(node: Node) -> bool:
    """Whether `node` draws random numbers. Attention ops have torch's tag for this, but draw only with dropout."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    options = {argument.name for argument in cast(torch._ops.OpOverload, node.target)._schema.arguments}
    return "dropout_p" not in options or named_args(node).get("dropout_p", 0.0) != 0.0


def _dequantized(graph: Graph) -> list[Node]:
    """Return gathers of quantized parameters (of dtypes without gradients), and the nodes that dequantize them.

    A node dequantizes if all of its inputs are computed from parameters alone, and at least one of these parameters is
    quantized. A table in which it looks up packed values may be any tensor. Matmuls and random nodes do not count.
    """
    found: dict[Node, bool] = {  # nodes computed from parameters alone -> whether one of these parameters is quantized
        gather: value(gather).dtype not in TRAINABLE for gather in calls(graph, GATHER)
    }
    for node in graph.nodes:
        if node.op != "call_function" or node in found or is_matmul(node) or is_user_collective(node):
            continue
        sources = node.all_input_nodes
        if node.target in LOOKUPS:
            sources = [source for source in sources if source is not node.args[0] or source in found]
        if sources and not _is_random(node) and all(source in found for source in sources):
            found[node] = any(found[source] for source in sources)
    return [node for node, is_quantized in found.items() if is_quantized]
