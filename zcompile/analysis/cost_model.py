"""How long a graph's nodes and transfers take: compute by the roofline model, transfers by the tables of `hardware.py`.

Sources: S. Williams, A. Waterman, D. Patterson, Roofline: An insightful visual performance model for multicore
architectures, 2009; counts of operations from `torch.utils.flop_counter`, and for attention from arXiv:2205.14135.

Everything here is a function of the graph and the table. So ranks that compile one graph make one plan.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_ROWS,
    GATHERS,
    REDUCE,
    REDUCES,
    ROW_REDUCES,
    WAITS,
    args_of,
    aten,
    result_bytes,
    shape_hint,
    started_tensors,
    transfer_bytes,
    value,
)
from zcompile.analysis.hardware import Link
from zcompile.analysis.liveness import Liveness, Storage, aliases, fuses

log = logging.getLogger("zcompile")


def is_matmul(node: Node) -> bool:
    """Whether `node` is a matmul, a convolution or an attention, of whatever sizes: what torch counts operations of."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and (
        packet in flop_registry or packet.__name__ == "_grouped_mm" or "scaled_dot_product" in packet.__name__
    )


def flops(node: Node) -> int:
    """Floating-point operations of a matmul, a convolution or an attention; 0 for other nodes. Dynamic sizes as traced.

    Torch's formulas give them, except for attention and grouped matmuls. Torch's formula for attention knows neither
    grouped queries nor the CPU's kernel nor causal masks.
    """
    if not is_matmul(node):
        return 0
    packet = cast(OpOverload, node.target).overloadpacket
    if "scaled_dot_product" in packet.__name__:
        return _attention_flops(node)
    if packet.__name__ == "_grouped_mm":
        return _grouped_matmul_flops(node)
    formula = flop_registry[packet]

    def shape(argument: Any) -> Any:
        fake = argument.meta["val"] if isinstance(argument, Node) else argument
        return shape_hint(fake) if isinstance(fake, torch.Tensor) else fake

    args: Any = map_aggregate(node.args, shape)
    kwargs: Any = map_aggregate(node.kwargs, shape)
    result = node.meta["val"]
    out_shape = tuple(map(shape, result)) if isinstance(result, (tuple, list)) else shape(result)
    try:
        return formula(*args, **kwargs, out_val=out_shape)
    except Exception as error:  # some formulas look at tensors, not shapes; an estimate is no reason to fail
        log.debug("zcompile: %s is taken to compute nothing: %s", node.target, error)
        return 0


def _attention_flops(node: Node) -> int:
    """Operations of attention, without those that a causal mask leaves out.

    Queries [b, h, s, d], keys [b, h', t, d] and values [b, h', t, e] have two matmuls. The backward of flash attention
    has five, since it computes the scores again (arXiv:2205.14135).
    """
    target = cast(OpOverload, node.target)
    is_backward = "backward" in target.name()
    query, key, values = (shape_hint(value(source)) for source in args_of(node)[1 if is_backward else 0 :][:3])
    batch, heads, rows, width = query
    flops_per_column = 2 * batch * heads * rows * key[-2]
    columns = 3 * width + 2 * values[-1] if is_backward else width + values[-1]
    names = [arg.name for arg in target._schema.arguments]
    given = dict(zip(names, node.args)) | node.kwargs
    return flops_per_column * columns // (2 if given.get("is_causal") else 1)


def _grouped_matmul_flops(node: Node) -> int:
    """Operations of matmuls of groups of rows with a matrix each.

    Rows [m, k] with matrices [g, k, n]; or, for gradients of the matrices, [m, k] with [k, n], where groups divide k.
    """
    left, right = (shape_hint(value(source)) for source in args_of(node)[:2])
    if len(left) == len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    rows = left.numel() // left[-1]
    return 2 * rows * left[-1] * right[-1]


class Costs:
    """Seconds of compute of each node of a graph.

    A matmul takes the time of its operations or of its bytes, whichever is more. Nodes that fuse take the time of the
    bytes that their kernels read and write ([Note: what fuses] in liveness.py). Transfers, waits and views take none.

    Args:
        link: gives the hardware's rates.
        fused: whether pointwise nodes fuse, as under Inductor.

    Attributes:
        liveness: of the same graph, with the same `fused`.
        seconds: node -> its compute time in seconds.
    """

    def __init__(self, graph: Graph, link: Link, fused: bool = True):
        self.link = link
        self.liveness = Liveness(graph, fused)
        self.seconds: dict[Node, float] = {}
        self._segment = -1
        self._read: set[Storage] = set()  # by the kernels of that segment
        for node in self.liveness.nodes:
            self.seconds[node] = self._seconds_of(node)

    def _seconds_of(self, node: Node) -> float:
        if node.op != "call_function" or node.target in GATHERS | REDUCES | WAITS or aliases(node) is not None:
            return 0.0
        hardware = self.link.hardware
        written_bytes = sum(result_bytes(node)) if node in self.liveness.written else 0
        if fuses(node):
            memory_s = (self._newly_read_bytes(node) + written_bytes) / hardware.bytes_s
            return memory_s + (hardware.kernel_s if written_bytes else 0.0)
        if node.target is GATHER_ROWS:
            read_bytes = written_bytes
        else:
            read_bytes = sum(sum(result_bytes(source)) for source in node.all_input_nodes)
        seconds = max((read_bytes + written_bytes) / hardware.bytes_s, hardware.kernel_s)
        if count := flops(node):
            is_attention = "scaled_dot_product" in cast(OpOverload, node.target).name()
            flops_s = hardware.attention_flops_s if is_attention else hardware.matmul_rate(_dtype(node))
            seconds = max(seconds, count / flops_s)
        return seconds

    def _newly_read_bytes(self, node: Node) -> int:
        """Bytes that `node` reads and that kernels of its segment have neither read nor written before."""
        segment = self.liveness.segment[node]
        if segment != self._segment:
            self._segment, self._read = segment, set()
        total = 0
        for source in node.all_input_nodes:
            for storage in self.liveness.storages[source]:
                is_made_here = self.liveness.segment[storage.maker] == segment and fuses(storage.maker)
                if storage in self._read or is_made_here:
                    continue
                self._read.add(storage)
                total += min(storage.nbytes, sum(result_bytes(source)) or storage.nbytes)
        if node.target is aten.embedding.default:  # reads only the rows that it returns
            total = min(total, 2 * sum(result_bytes(node)))
        return total


def _dtype(node: Node) -> torch.dtype:
    """Of the result, or of its first tensor."""
    result = node.meta["val"]
    if isinstance(result, torch.Tensor):
        return result.dtype
    return next(tensor for tensor in result if tensor is not None).dtype


@dataclass(frozen=True)
class Transfer:
    """One gather or reduce, alone or of a group, in a simulated step. Times are seconds since the graph's beginning.

    Attributes:
        start: the node that begins it.
        nbytes: by `wire_bytes`.
        exposed_s: how long compute waits for it.
    """

    start: Node
    nbytes: int
    begins_s: float
    ends_s: float
    exposed_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated run of a graph.

    Attributes:
        transfers: in the order of their starts.
        compute_s: seconds of compute alone.
        exposed_s: seconds in which compute waits for the wire.
        slowed_s: seconds that compute loses because the wire takes memory bandwidth, power or SMs meanwhile.
        begins_s: when each node begins, in graph order, `slowed_s` left out.
    """

    transfers: tuple[Transfer, ...]
    compute_s: float
    exposed_s: float
    slowed_s: float
    begins_s: tuple[float, ...]

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.slowed_s


@dataclass
class _Running:
    """A transfer while it is simulated; fields as in `Transfer`."""

    nbytes: int
    begins_s: float
    ends_s: float
    exposed_s: float


def simulate(graph: Graph, costs: Costs, cached: Collection[Node] = ()) -> Timeline:
    """Run `graph` without a device: nodes compute in order, and one wire serves transfers in the order of their starts.

    Args:
        cached: starts that find their parameter unsharded, and transfer nothing.
    """
    link = costs.link
    now_s = wire_free_s = compute_s = exposed_s = 0.0
    ends_s: dict[Node, float] = {}  # tensor of a start -> when it has arrived
    running: dict[Node, _Running] = {}  # by start
    begins_s: list[float] = []
    for node in graph.nodes:
        begins_s.append(now_s)
        if node.op != "call_function":
            continue
        if node.target in GATHERS | REDUCES:
            if node in cached:
                ends_s[node] = now_s
                continue
            transfer = _Running(wire_bytes(node, link), max(now_s, wire_free_s), 0.0, 0.0)
            wire_free_s = transfer.ends_s = transfer.begins_s + transfer_s(node, link)
            running[node] = transfer
            for tensor in started_tensors(node):
                ends_s[tensor] = wire_free_s
            if node.target in (GATHER, REDUCE):  # not split: compute waits at once
                exposed_s += wire_free_s - now_s
                transfer.exposed_s = wire_free_s - now_s
                now_s = wire_free_s
        elif node.target in WAITS:
            tensor = args_of(node)[0]
            waited_s = max(0.0, ends_s[tensor] - now_s)
            exposed_s += waited_s
            now_s += waited_s
            if tensor not in cached:
                start = tensor if tensor in running else args_of(tensor)[0]
                running[start].exposed_s += waited_s
        else:
            now_s += costs.seconds[node]
            compute_s += costs.seconds[node]
    hidden_s = max(0.0, sum(transfer.ends_s - transfer.begins_s for transfer in running.values()) - exposed_s)
    transfers = tuple(Transfer(start, **vars(transfer)) for start, transfer in running.items())
    return Timeline(transfers, compute_s, exposed_s, hidden_s * link.wire.interference, tuple(begins_s))


def transfer_s(start: Node, link: Link) -> float:
    """Seconds that the transfer of a gather, a reduce, or a start of either takes alone on the wire."""
    return (link.gather_s if start.target in GATHERS else link.reduce_s)(wire_bytes(start, link))


def wire_bytes(start: Node, link: Link) -> int:
    """`transfer_bytes`, but a reduce of rows over "p2p" counts the bytes of its rows: there, rows travel as rows."""
    if start.target in ROW_REDUCES and link.wire.transport == "p2p":
        return sum(result_bytes(args_of(start)[0]))
    return transfer_bytes(start)
