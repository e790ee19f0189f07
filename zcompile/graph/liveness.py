"""Find the nodes of an FX graph at which each storage, the memory of a result, is made and freed.

Compiled code frees a storage after its last reader, including readers of aliases: there it *dies*.

[Note: what fuses]
Inductor seldom writes the result of a pointwise node to memory: each reader computes the result again. So such a result
has no storage here, and the storages from which it is computed live until its readers have run.

Nodes that fuse are pointwise nodes, casts, copies and reductions. Others, such as matmuls, attention and transfers, do
not fuse, and divide the graph into *segments* (other ones than those of segments.py). The result of a node that fuses
is written to memory if one of its readers does not fuse, or is in a later segment. An exception is a pointwise node,
such as a mask, if all paths from it to readers in later segments have only nodes that fuse: readers compute it again.

Nodes that fuse and share arguments become one *kernel*, also across segments, unless one depends on another through a
node that does not fuse. A kernel runs when its last argument is made. All its arguments and results live then. But if
only one node of the kernel, and no later node, reads an argument, a result of that node with the argument's size is
written over the argument. Inductor writes over an input of a graph only if it is a donated buffer: an activation that
forward saved, whose memory no input or output of forward and no output of backward has.
"""

import operator
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch.fx import Graph, GraphModule, Node

from zcompile.costs.unbacked_sizes import size_hint
from zcompile.graph.ops import SAVED_FOR_BACKWARD, args_of, aten, named_args, nodes_in, result_bytes

# A key in `meta` of backward's inputs that forward computes. If its value is true, backward may write over the input.
IS_DONATED = "zcompile_is_donated"

# Ops that Inductor computes inside of each reader, besides those with torch's tag for pointwise ops.
POINTWISE = {
    aten._to_copy.default,
    aten.arange.start_step,
    aten.embedding.default,
    aten.full.default,
    aten.full_like.default,
    aten.gather.default,
    aten.new_zeros.default,
    aten.scalar_tensor.default,
    aten.zeros_like.default,
    torch.ops.prims.convert_element_type.default,
    torch.ops.prims.iota.default,
}
# Ops that fuse, and whose result Inductor does not compute again in another kernel.
REDUCTIONS = {
    aten._softmax.default,
    aten.amax.default,
    aten.any.default,
    aten.any.dim,
    aten.argmax.default,
    aten.max.dim,
    aten.mean.default,
    aten.mean.dim,
    aten.sum.default,
    aten.sum.dim_IntList,
    aten.var_mean.correction,
}
# All ops that fuse, besides pointwise ones.
FUSES = {
    *REDUCTIONS,
    aten.cat.default,
    aten.clone.default,
    aten.constant_pad_nd.default,
    aten.copy.default,
    aten.empty.memory_format,
    aten.index.Tensor,
    aten.repeat.default,
    aten.scatter.value,
    aten.select_backward.default,
    aten.select_scatter.default,
    aten.slice_backward.default,
    aten.slice_scatter.default,
}
# Ops that copy their first argument and write to the copy. Inductor computes a constant, such as zeros, in that copy.
COPY_FIRST = {aten.index_put.default, aten.scatter_add.default, aten.scatter_reduce.two, aten.index_add.default}


@dataclass(eq=False)
class Storage:
    """Memory that one node makes."""

    maker: Node
    nbytes: int  # with the traced values of dynamic sizes
    made: int  # index of `maker` in the graph
    dies: int  # index of the last reader; the number of nodes if the graph returns this memory


class Liveness:
    """The storages of `graph`, in the order of their makers. `fused`: whether nodes fuse, as under Inductor."""

    def __init__(self, graph: Graph, fused: bool = True):
        self.nodes, self.fused = list(graph.nodes), fused
        self.position = {node: i for i, node in enumerate(self.nodes)}
        # Node -> the storages that hold its result or, if that is never written, those from which it is computed.
        self.storages: dict[Node, list[Storage]] = {}
        self.written: set[Node] = set()  # nodes whose result is written to memory that they make
        self._inputs: dict[int, list[Storage]] = {}  # of saved activations, by memory: several may be views of one
        self.segment = _segments(self.nodes) if fused else dict(self.position)
        for i, node in enumerate(self.nodes):
            self.storages[node] = self._storages_of(node, i)
            is_output = node.op == "output"
            for source in node.all_input_nodes:
                for storage in self.storages[source]:
                    storage.dies = len(self.nodes) if is_output else max(storage.dies, i)

    def __iter__(self) -> Iterator[Storage]:
        for node in self.nodes:
            if node in self.written:
                yield from (storage for storage in self.storages[node] if storage.maker is node)

    def input_bytes(self, exclude: Collection[Node] = ()) -> int:
        """Return the bytes of memory that the inputs of the graph hold, except those in `exclude`."""
        return sum(each.nbytes for each in self if each.maker.op == "placeholder" and each.maker not in exclude)

    def live_bytes(
        self, exclude: Collection[Node] = (), scaled: Collection[Node] = (), scale: float = 1.0
    ) -> list[int]:
        """Return the bytes alive while each node runs: its arguments, its result, and storages that later nodes read.

        Storages made by nodes in `exclude` do not count; those made by nodes in `scaled` count `scale` times.
        """
        change = [0] * (len(self.nodes) + 2)
        lives = {storage: (storage.made, storage.dies) for storage in self if storage.maker not in exclude}
        for kernel in self._kernels() if self.fused else ():
            self._run_at_once(kernel, lives)
        for storage, (made, dies) in lives.items():
            nbytes = round(storage.nbytes * scale) if storage.maker in scaled else storage.nbytes
            change[made] += nbytes
            change[dies + 1] -= nbytes
        return list(accumulate(change[: len(self.nodes)]))

    def _run_at_once(self, kernel: list[Node], lives: dict[Storage, tuple[int, int]]) -> None:
        """Change `lives`: `kernel` runs once its last argument is made; all its arguments and results live then."""
        first, last = (self.position[node] for node in (kernel[0], kernel[-1]))
        # Dictionaries: the order of sets differs from rank to rank.
        results = {storage: storage.maker for node in kernel for storage in self.storages[node] if storage in lives}
        readers: dict[Storage, list[Node]] = {}
        for node in kernel:
            for storage in self._arguments(node):
                if storage in lives and storage not in results:
                    readers.setdefault(storage, []).append(node)
        runs = max([first, *(storage.made for storage in readers)])
        lives |= {each: (min(lives[each][0], runs), max(lives[each][1], runs)) for each in results}
        free = dict(results)  # result that is not yet written over an argument -> maker
        for storage in readers:
            if not first <= storage.dies <= last:
                continue
            of_one = [result for result in free if [free[result]] == readers[storage]]
            is_kept = storage.maker.op == "placeholder" and not storage.maker.meta.get(IS_DONATED)
            same_size = [result for result in of_one if result.nbytes == storage.nbytes and not is_kept]
            lives[storage] = lives[storage][0], lives[same_size[0]][0] - 1 if same_size else max(storage.dies, runs)
            free = {result: maker for result, maker in free.items() if result not in same_size[:1]}

    def _kernels(self) -> list[list[Node]]:
        """Return, for each kernel, its nodes whose results are written to memory; see [Note: what fuses]."""
        kernel_of: dict[Node, list[Node]] = {}
        last_reader: dict[Storage, Node] = {}
        for node in self.nodes:
            if node not in self.written or not fuses(node):
                continue
            kernel_of[node] = [node]
            size = sum(result_bytes(node))
            arguments = [each for each in self._arguments(node) if 2 * each.nbytes >= size]
            others = {each.maker for each in arguments} | {last_reader.get(each, node) for each in arguments}
            for other in sorted(others & kernel_of.keys(), key=self.position.__getitem__):
                joined = kernel_of[other]
                own = kernel_of[node]
                pairs = [(each, set(own)) for each in joined] + [(each, set(joined)) for each in own]
                if joined is not own and not any(self._is_between(*pair) for pair in pairs):
                    joined.extend(kernel_of[node])
                    for each in kernel_of[node]:
                        kernel_of[each] = joined
            last_reader |= dict.fromkeys(arguments, node)
        kernels = {id(kernel): kernel for kernel in kernel_of.values()}
        return [sorted(kernel, key=self.position.__getitem__) for kernel in kernels.values()]

    def _arguments(self, node: Node) -> dict[Storage, None]:
        return dict.fromkeys(storage for source in node.all_input_nodes for storage in self.storages[source])

    def _storages_of(self, node: Node, i: int) -> list[Storage]:
        aliased = aliases(node)
        if aliased is not None:
            storages = [storage for source in aliased for storage in self.storages[source]]
            if node.target is operator.getitem and aliased[0] in self.written:
                has_all = len(storages) == len(aliased[0].meta["val"])  # else some items are no tensors
                return [storages[args_of(node)[1]]] if has_all else storages
            return storages
        memory = _memory_of(node) if IS_DONATED in node.meta and node.op == "placeholder" else None
        if memory is not None:
            if memory._cdata not in self._inputs:
                self.written.add(node)
                self._inputs[memory._cdata] = [Storage(node, size_hint(memory.nbytes()), i, i)]
            return self._inputs[memory._cdata]
        if not self._is_written(node):
            sources = (storage for source in node.all_input_nodes for storage in self.storages[source])
            return list(dict.fromkeys(sources))
        self.written.add(node)
        return [Storage(node, nbytes, i, i) for nbytes in result_bytes(node)]

    def _is_written(self, node: Node) -> bool:
        if not fuses(node):
            return True
        readers = list(_readers_through_aliases(node))
        if not node.all_input_nodes:  # a constant, which each kernel computes itself
            return not all(fuses(reader) or reader.target in COPY_FIRST for reader in readers)
        if not all(map(fuses, readers)):
            return True
        later = {reader for reader in readers if self.segment[reader] != self.segment[node]}
        again = self.fused and _is_pointwise(node) and not self._is_reduced(node)
        return bool(later) and not (again and not self._is_between(node, later))

    def _is_reduced(self, node: Node) -> bool:
        """Whether `node` is, or depends on, a reduction in the same kernel. Other kernels do not repeat reductions."""
        is_read_through = node not in self.written and (fuses(node) or bool(aliases(node)))
        return is_read_through and (node.target in REDUCTIONS or any(map(self._is_reduced, node.all_input_nodes)))

    def _is_between(self, node: Node, readers: set[Node]) -> bool:
        """Whether a node between `node` and one of `readers` does not fuse, so no kernel computes both of them."""
        last = max(self.position[reader] for reader in readers)
        pending, seen = [(node, False)], set()
        while pending:
            source, is_past = pending.pop()
            for user in source.users:
                if self.position[user] > last:
                    continue
                if is_past and user in readers:
                    return True
                reached = user, is_past or not (fuses(user) or aliases(user) is not None)
                if reached not in seen:
                    seen.add(reached)
                    pending.append(reached)
        return False


def mark_saved(forward: GraphModule, backward: GraphModule, num_outputs: int) -> None:
    """Set IS_DONATED on inputs of `backward` that `forward` computes and saves: its outputs from `num_outputs` on."""
    outputs, gradients = (args_of(graph.graph.output_node())[0] for graph in (forward, backward))
    of_others = [*forward.graph.find_nodes(op="placeholder"), *outputs[:num_outputs], *gradients]
    held = {memory._cdata for memory in map(_memory_of, of_others) if memory is not None}
    computed = {node.name: node for node in nodes_in(outputs[num_outputs:]) if node.op != "placeholder"}
    for node in backward.graph.find_nodes(op="placeholder"):
        memory = _memory_of(node)
        if node.name in computed and memory is not None:
            node.meta[IS_DONATED] = not (SAVED_FOR_BACKWARD in computed[node.name].meta or memory._cdata in held)


def _memory_of(node: Node | None) -> torch.UntypedStorage | None:
    """Return the storage of the fake value of `node`; None if the value is no dense tensor."""
    value = node.meta.get("val") if node is not None else None
    return value.untyped_storage() if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def fuses(node: Node) -> bool:
    """Whether Inductor may compute `node` inside a kernel of its neighbours; see [Note: what fuses]."""
    if node.op != "call_function":
        return False
    return node.target in FUSES or _is_pointwise(node)


def _is_pointwise(node: Node) -> bool:
    return node.target in POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())


def aliases(node: Node) -> list[Node] | None:
    """Return the inputs whose memory the result of `node` shares, by the op's schema; None if it has its own memory."""
    if node.op != "call_function":
        return [] if node.op in ("output", "get_attr") or not result_bytes(node) else None
    if node.target is operator.getitem:
        return [args_of(node)[0]]
    if not isinstance(node.target, torch._ops.OpOverload):
        return None if result_bytes(node) else []
    if node.target.is_view or node.target is aten._unsafe_view.default:  # its schema does not tell that it is a view
        return [args_of(node)[0]]
    schema = node.target._schema
    returned = set().union(*(result.alias_info.before_set for result in schema.returns if result.alias_info))
    if not returned:
        return None if result_bytes(node) else []
    names = [arg.name for arg in schema.arguments if arg.alias_info and arg.alias_info.before_set & returned]
    given = named_args(node)
    return [source for name in names for source in nodes_in(given.get(name))]


def _segments(nodes: list[Node]) -> dict[Node, int]:
    number, segment_of = 0, {}
    for node in nodes:
        if node.op == "call_function" and not fuses(node) and aliases(node) is None:
            number += 1
        segment_of[node] = number
    return segment_of


def _readers_through_aliases(node: Node) -> Iterator[Node]:
    """Readers of `node` and of its aliases, without the aliases themselves."""
    pending, seen = [node], {node}
    while pending:
        source = pending.pop()
        for user in source.users:
            if user in seen:
                continue
            seen.add(user)
            if user.op == "call_function" and source in (aliases(user) or ()):
                pending.append(user)
            else:
                yield user
