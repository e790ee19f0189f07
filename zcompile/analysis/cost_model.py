"""How long a graph's nodes and transfers take, by roofline and by the tables of `hardware.py`.

Everything here is a function of the graph and the table, so that ranks which compile one graph make one plan.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_aggregate
from torch.utils.flop_counter import flop_registry

from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_ROWS,
    GATHERS,
    REDUCE,
    REDUCES,
    ROWS,
    WAITS,
    aten,
    bytes_of,
    shape_hint,
    sizes_of,
    started,
    value,
)
from zcompile.analysis.hardware import Link
from zcompile.analysis.liveness import Liveness, aliases, fuses

log = logging.getLogger("zcompile")


def is_product(node: Node) -> bool:
    """Whether `node` is a product or an attention, whatever its sizes."""
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and (
        packet in flop_registry or packet.__name__ == "_grouped_mm" or "scaled_dot_product" in packet.__name__
    )


def operations(node: Node) -> int:
    """Floating-point operations of a product or an attention, those that a causal mask leaves out not counted; 0 for others.

    By torch's formulas, but attention by our own: torch's do not know grouped queries, the CPU's kernel or masks.
    """
    if not is_product(node):
        return 0
    packet = node.target.overloadpacket
    if "scaled_dot_product" in packet.__name__:
        return _attention_operations(node)
    if packet.__name__ == "_grouped_mm":
        return _grouped_operations(node)
    formula = flop_registry[packet]

    def shape(argument):
        found = argument.meta["val"] if isinstance(argument, Node) else argument
        return shape_hint(found) if isinstance(found, torch.Tensor) else found

    arguments, keywords = map_aggregate((node.args, node.kwargs), shape)
    result = node.meta["val"]
    out = tuple(map(shape, result)) if isinstance(result, (tuple, list)) else shape(result)
    try:
        return formula(*arguments, **keywords, out_val=out)
    except Exception as error:  # some look at tensors, not shapes; an estimate is no reason to fail
        log.debug("zcompile: %s is taken to compute nothing: %s", node.target, error)
        return 0


def _attention_operations(node: Node) -> int:
    """Two products of queries [b, h, s, d] with keys [b, h', t, d] and values [b, h', t, e]; in backward, five (arXiv:2205.14135)."""
    backward = "backward" in node.target.name()
    query, key, values = (shape_hint(value(one)) for one in node.args[1 if backward else 0 :][:3])
    batch, heads, rows, width = query
    product = 2 * batch * heads * rows * key[-2]
    total = product * (3 * width + 2 * values[-1]) if backward else product * (width + values[-1])
    names = [one.name for one in node.target._schema.arguments]
    causal = dict(zip(names, node.args)) | node.kwargs
    return total // 2 if causal.get("is_causal") else total


def _grouped_operations(node: Node) -> int:
    """Products of groups of rows with a matrix each: rows [m, k], matrices [g, k, n]; or [k, m] and [k, n], cut along k."""
    left, right = (shape_hint(value(one)) for one in node.args[:2])
    if len(left) == len(right) == 2:
        return 2 * left[0] * left[1] * right[1]
    rows = left.numel() // left[-1]
    return 2 * rows * left[-1] * right[-1]


class Costs:
    """Seconds of compute of each node of a graph.

    A product takes what its operations or its bytes take, whichever is more; nodes that fuse, what is read and written
    between kernels ([Note: what fuses] in liveness.py).
    """

    def __init__(self, graph: Graph, link: Link, fused: bool = True):
        self.link = link
        self.liveness = Liveness(graph, fused)
        self.seconds: dict[Node, float] = {}
        self._segment, self._read = -1, set()
        for node in self.liveness.nodes:
            self.seconds[node] = self._seconds(node)

    def _seconds(self, node: Node) -> float:
        if node.op != "call_function" or node.target in GATHERS | REDUCES | WAITS or aliases(node) is not None:
            return 0.0
        hardware = self.link.hardware
        written = sum(sizes_of(node)) if node in self.liveness.written else 0
        if fuses(node):
            transfer = (self._newly_read(node) + written) / hardware.bytes_s
            return transfer + (hardware.kernel_s if written else 0.0)
        read = written if node.target is GATHER_ROWS else sum(sum(sizes_of(source)) for source in node.all_input_nodes)
        seconds = max((read + written) / hardware.bytes_s, hardware.kernel_s)
        if count := operations(node):
            attends = "scaled_dot_product" in node.target.name()
            seconds = max(seconds, count / (hardware.attention if attends else hardware.product_rate(_dtype(node))))
        return seconds

    def _newly_read(self, node: Node) -> int:
        """Bytes that the segment's kernels have not read or written before."""
        segment = self.liveness.segment[node]
        if segment != self._segment:
            self._segment, self._read = segment, set()
        total = 0
        for source in node.all_input_nodes:
            for storage in self.liveness.storages[source]:
                if storage in self._read or self.liveness.segment[storage.maker] == segment and fuses(storage.maker):
                    continue
                self._read.add(storage)
                total += min(storage.nbytes, sum(sizes_of(source)) or storage.nbytes)
        if node.target is aten.embedding.default:  # reads the rows that it returns
            total = min(total, 2 * sum(sizes_of(node)))
        return total


def _dtype(node: Node) -> torch.dtype:
    found = node.meta["val"]
    return found.dtype if isinstance(found, torch.Tensor) else next(one for one in found if one is not None).dtype


@dataclass(frozen=True)
class Transfer:
    """One gather or reduce, alone or of a group, as a simulated step has it; seconds from the graph's beginning."""

    start: Node
    nbytes: int
    begins_s: float
    ends_s: float
    exposed_s: float


@dataclass(frozen=True)
class Timeline:
    """A graph's run in time."""

    transfers: tuple[Transfer, ...]
    compute_s: float
    exposed_s: float  # compute waits for the wire
    slowed_s: float  # compute is slower because the wire is at work
    begins_s: tuple[float, ...]  # of each node, without that

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.slowed_s


def simulate(graph: Graph, costs: Costs, full: Collection[Node] = ()) -> Timeline:
    """Run `graph` on paper: compute in order, and one wire, which serves transfers in the order of their starts; what `full` starts is there."""
    link = costs.link
    now = wire_free = compute = exposed = 0.0
    ends: dict[Node, float] = {}  # of what a start fills
    found: dict[Node, list] = {}  # start -> [nbytes, begins, ends, exposed]
    begun: list[float] = []
    for node in graph.nodes:
        begun.append(now)
        if node.op != "call_function":
            continue
        if node.target in GATHERS | REDUCES:
            if node in full:
                ends[node] = now
                continue
            nbytes, seconds = moved_bytes(node, link), transfer_s(node, link)
            begins = max(now, wire_free)
            wire_free = begins + seconds
            found[node] = [nbytes, begins, wire_free, 0.0]
            for tensor in started(node):
                ends[tensor] = wire_free
            if node.target in (GATHER, REDUCE):
                exposed += wire_free - now
                found[node][3] = wire_free - now
                now = wire_free
        elif node.target in WAITS:
            late = max(0.0, ends[node.args[0]] - now)
            exposed += late
            now += late
            tensor = node.args[0]
            if tensor not in full:
                found[tensor if tensor in found else tensor.args[0]][3] += late
        else:
            now += costs.seconds[node]
            compute += costs.seconds[node]
    hidden = max(0.0, sum(ends_s - begins for _, begins, ends_s, _ in found.values()) - exposed)
    transfers = tuple(Transfer(start, *figures) for start, figures in found.items())
    return Timeline(transfers, compute, exposed, hidden * link.wire.interference, tuple(begun))


def transfer_s(start: Node, link: Link) -> float:
    return (link.gather_s if start.target in GATHERS else link.reduce_s)(moved_bytes(start, link))


def moved_bytes(start: Node, link: Link) -> int:
    """`bytes_of`, but of rows only those that there are, where they travel so."""
    return sum(sizes_of(start.args[0])) if start.target in ROWS and link.wire.transport == "p2p" else bytes_of(start)
