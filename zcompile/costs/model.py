"""How long a graph's nodes and transfers take: compute by the roofline model, transfers by the tables of `hardware.py`.

Times depend only on the graph, the hardware table and the formulas that users registered. So ranks that compile the
same graph make the same plan.
"""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from zcompile.costs.formulas.collectives import collective_bytes, collective_s, is_collective_wait
from zcompile.costs.formulas.lookup import find_work
from zcompile.costs.formulas.memory_ops import READ_BY_ITEM, read_bytes_at
from zcompile.costs.formulas.work import Work, sizes_of
from zcompile.costs.hardware import Link
from zcompile.costs.unbacked_sizes import note_unbacked_sizes
from zcompile.graph.liveness import Liveness, Storage, aliases, fuses
from zcompile.graph.ops import (
    GATHER,
    GATHER_ROWS,
    GATHERS,
    REDUCE,
    REDUCES,
    ROW_REDUCES,
    WAITS,
    args_of,
    aten,
    is_user_collective,
    result_bytes,
    transfer_bytes,
)


class Costs:
    """Seconds of compute of each node of a graph.

    A matmul takes the time of its operations or of its bytes, whichever is more. Nodes that fuse take the time of the
    bytes that their kernels read and write ([Note: what fuses] in liveness.py). Transfers, waits and views take none.
    """

    def __init__(self, graph: Graph, link: Link, fused: bool = True):
        self.link = link
        note_unbacked_sizes(graph)
        self.liveness = Liveness(graph, fused)
        self.seconds: dict[Node, float] = {}  # of compute
        self.without_formula: dict[str, float] = {}  # op without a cost formula -> seconds of its calls, by bytes
        self._segment = -1
        self._read: set[Storage] = set()  # read by nodes of `_segment` that fuse
        for node in self.liveness.nodes:
            self.seconds[node] = self._seconds_of(node)

    def _seconds_of(self, node: Node) -> float:
        if node.target in GATHERS:
            return self.link.dequantize_s(transfer_bytes(node))
        if node.op != "call_function" or node.target in REDUCES | WAITS:
            return 0.0
        if is_user_collective(node) or is_collective_wait(node):  # on the wire; see `simulate`
            return 0.0
        hardware = self.link.hardware
        work, name = find_work(node)
        if work is None and not name and aliases(node) is not None:
            return 0.0
        written_bytes = sum(result_bytes(node)) if node in self.liveness.written else 0
        if work is None and not name and fuses(node):
            memory_s = (self._newly_read_bytes(node) + written_bytes) / hardware.bytes_s
            return memory_s + (hardware.kernel_s if written_bytes else 0.0)
        if node.target is GATHER_ROWS:
            read_bytes = written_bytes
        else:
            read_bytes = sum(sum(result_bytes(source)) for source in node.all_input_nodes)
        seconds = (work or Work()).on(hardware, _dtype(node), read_bytes + written_bytes)
        if name:
            self.without_formula[name] = self.without_formula.get(name, 0.0) + seconds
        return seconds

    def _newly_read_bytes(self, node: Node) -> int:
        """Return the bytes that `node` reads, but no earlier fusing node of its `Liveness.segment` read or wrote."""
        segment = self.liveness.segment[node]
        if segment != self._segment:
            self._segment, self._read = segment, set()
        total = 0
        for source in node.all_input_nodes:
            for storage in self.liveness.storages[source]:
                is_made_here = self.liveness.segment[storage.maker] == segment and fuses(storage.maker)
                if storage in self._read or is_made_here:
                    continue
                source_bytes = min(storage.nbytes, sum(result_bytes(source)) or storage.nbytes)
                if source is node.args[0] and (is_by_item := READ_BY_ITEM.get(node.target)) is not None:
                    sizes, out = sizes_of(source), sizes_of(node)
                    total += min(source_bytes, read_bytes_at(sizes, out, is_by_item))
                    continue  # other nodes may read the rest of the storage, so it does not count as read
                self._read.add(storage)
                total += source_bytes
        if node.target is aten.embedding.default:  # reads only the rows that it returns
            total = min(total, sum(result_bytes(node)) + sum(result_bytes(args_of(node)[1])))
        return total


def _dtype(node: Node) -> torch.dtype:
    """Return the dtype of the first floating-point tensor that `node` reads or returns, else of the first tensor."""
    fakes = [source.meta.get("val") for source in node.all_input_nodes] + [node.meta.get("val")]
    dtypes = [fake.dtype for fake in fakes if isinstance(fake, torch.Tensor)]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), dtypes[0] if dtypes else torch.float32)


@dataclass
class Transfer:
    """A gather, a reduce or the model's own collective in a simulated step."""

    start: Node
    nbytes: int  # from `wire_bytes`
    begins_s: float  # seconds since the graph's beginning, as `ends_s`
    ends_s: float
    exposed_s: float = 0.0  # seconds that compute waits for it


@dataclass(frozen=True)
class Timeline:
    """A simulated run of a graph, which takes `compute_s + exposed_s + slowed_s`."""

    transfers: tuple[Transfer, ...]  # in the order of their starts
    compute_s: float  # seconds of compute, as if nothing travelled beside it
    exposed_s: float  # seconds in which compute waits for the wire
    slowed_s: float  # seconds that compute loses because the wire takes memory bandwidth, power or SMs meanwhile

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exposed_s + self.slowed_s


def simulate(graph: Graph, costs: Costs, cached: Collection[Node] = ()) -> Timeline:
    """Predict a run of `graph`: nodes compute in order, and one wire serves transfers in the order of their starts.

    Gathers in `cached` find their parameter unsharded, and transfer nothing. Sums over hosts follow reduces, on another
    network.
    """
    link = costs.link
    now_s = wire_free_s = wire_s = network_free_s = compute_s = exposed_s = 0.0
    transfers: dict[Node, Transfer] = {}  # by start
    for node in graph.nodes:
        if node.op != "call_function" or node in cached:
            continue
        now_s += costs.seconds[node]
        compute_s += costs.seconds[node]
        is_collective = is_user_collective(node)
        if is_collective or node.target in GATHERS | REDUCES:
            nbytes = collective_bytes(node) if is_collective else wire_bytes(node, link)
            begin_s = max(now_s, wire_free_s)
            wire_free_s = ends_s = begin_s + (collective_s(node, link) if is_collective else transfer_s(node, link))
            wire_s += wire_free_s - begin_s
            if link.sums_in_reduces and node.target in REDUCES:
                ends_s = network_free_s = max(ends_s, network_free_s) + link.sum_over_hosts_s(transfer_bytes(node))
            transfers[node] = Transfer(node, nbytes, begin_s, ends_s)
        if node.target in (GATHER, REDUCE):  # not split: compute waits at once
            waited_for = node
        elif node.target in WAITS or is_collective_wait(node):
            waited_for = _started_by(node, transfers)
        else:
            continue
        if waited_for is not None:
            waited_s = max(0.0, transfers[waited_for].ends_s - now_s)
            exposed_s += waited_s
            now_s += waited_s
            transfers[waited_for].exposed_s += waited_s
    hidden_s = max(0.0, wire_s - exposed_s)
    slowed_s = hidden_s * link.wire.interference
    return Timeline(tuple(transfers.values()), compute_s, exposed_s, slowed_s)


def _started_by(wait: Node, transfers: Collection[Node]) -> Node | None:
    """Return the start in `transfers` for which `wait` waits. None: it is in another graph, or its gather is cached."""
    node = args_of(wait)[0]
    while isinstance(node, Node) and node.op == "call_function":
        if node in transfers:
            return node
        node = next(iter(node.args), None)  # an item of a start of several tensors, or a view of it
    return None


def transfer_s(start: Node, link: Link) -> float:
    """Return the seconds that the gather or reduce of node `start` takes if nothing else is transferred."""
    return (link.gather_s if start.target in GATHERS else link.reduce_s)(wire_bytes(start, link))


def wire_bytes(start: Node, link: Link) -> int:
    """Return `transfer_bytes`; for a reduce of embedding rows with p2p, which sends only rows, their bytes."""
    if start.target in ROW_REDUCES and link.wire.transport == "p2p":
        return sum(result_bytes(args_of(start)[0]))
    return transfer_bytes(start)
