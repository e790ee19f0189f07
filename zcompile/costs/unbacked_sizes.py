"""Hints for sizes that the trace does not know, such as the number of tokens that an expert gets.

[Note: hints of unbacked sizes]
A size of an op's result that depends on values is an unbacked symbol of SymPy. Plans need a number for it, a hint. If
the graph tells the number of experts or ranks, the hint assumes that tokens are spread evenly over them. If not, the
hint is the most that the op can return. Hints are stored for each `ShapeEnv` of torch; forward and backward share one.
Hints follow from the graph alone, so all ranks find the same hints.
"""

import math
import weakref
from collections.abc import Sequence
from typing import Any, cast

import sympy
import torch
from torch.fx import Graph, Node
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten

MOST = 1 << 40  # larger bounds, such as the largest int64, tell nothing

_hints: "weakref.WeakKeyDictionary[Any, dict[sympy.Symbol, int]]" = weakref.WeakKeyDictionary()  # by shape environment


def size_hint(size: int | torch.SymInt) -> int:
    """Return a number for `size`: for a dynamic size its value in the trace, for an unbacked size its hint."""
    if isinstance(size, int):
        return size
    if size.node.has_hint():
        return int(size.node.hint)
    return _hint_of(size)


def _hint_of(size: torch.SymInt) -> int:
    environment, expression = cast(Any, size.node.shape_env), size.node.expr
    known = _hints.get(environment, {})
    counts = {symbol: known.get(symbol, _most(environment, symbol) or 1) for symbol in _unbacked_in(size)}
    values = {symbol: sympy.Integer(count) for symbol, count in counts.items()}
    found = environment.replace(expression.xreplace(values))
    for symbol in found.free_symbols:
        found = found.xreplace({symbol: _backed(environment).get(symbol, sympy.Integer(1))})
    return max(0, int(found))


def _most(environment: Any, symbol: sympy.Symbol) -> int | None:
    """Return the upper bound of an unbacked size; None if none below MOST is known."""
    bounds = environment.var_to_range.get(symbol)
    upper = None if bounds is None else bounds.upper
    return int(upper) if isinstance(upper, (int, sympy.Integer)) and upper < MOST else None


def _backed(environment: Any) -> Any:
    """Return {symbol: size} of sizes that the trace knows. The attribute's name depends on the version of torch."""
    known = getattr(environment, "backed_var_to_val", None)
    return environment.var_to_val if known is None else known


def _unbacked_in(size: Any) -> list[sympy.Symbol]:
    """Return the unbacked symbols of a size, in a fixed order."""
    if not isinstance(size, torch.SymInt) or size.node.has_hint():
        return []
    backed = _backed(size.node.shape_env)
    return sorted((symbol for symbol in size.node.expr.free_symbols if symbol not in backed), key=str)


def note_unbacked_sizes(graph: Graph) -> None:
    """Store hints for unbacked sizes of `graph` that have none yet; see [Note: hints of unbacked sizes]."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    for node in nodes:  # first, because a split tells more than an upper bound
        _note_parts(node)
    for node in nodes:
        if node.target is aten.nonzero.default:
            (mask,) = node.all_input_nodes
            _note(_sizes_of(node), _numel(mask) // _experts_of(mask))
        elif unknown := [symbol for size in _sizes_of(node) for symbol in _unbacked_in(size)]:
            sources = [size for source in node.all_input_nodes for size in _sizes_of(source)]
            given = {symbol for size in sources for symbol in _unbacked_in(size)}
            if node.all_input_nodes and not given.intersection(unknown):
                _note(_sizes_of(node), max(map(_numel, node.all_input_nodes)))


def _note_parts(node: Node) -> None:
    """If `node` splits a tensor into parts of unbacked sizes, store hints by which all parts are equal."""
    name, args = str(node.target), cast(tuple[Any, ...], node.args)
    if name.startswith("_c10d_functional.all_to_all_single"):
        (source, outputs, inputs), dim = args[:3], 0
    elif node.target is aten.split_with_sizes.default:
        (source, inputs, dim), outputs = (*args, 0)[:3], ()
    else:
        return
    rows = size_hint(source.meta["val"].shape[dim])
    for sizes in (inputs, outputs):  # as if a rank received as many rows as it sends
        values = [size.meta.get("val") if isinstance(size, Node) else size for size in sizes]
        for value in values:
            _note([value], rows // len(values))


def _note(sizes: Sequence[Any], count: int) -> None:
    """Store `count`, from 1 to the symbol's upper bound, as the hint of each unbacked symbol in `sizes` without one."""
    for size in sizes:
        for symbol in _unbacked_in(size):
            environment = size.node.shape_env
            most = _most(environment, symbol)
            known = _hints.setdefault(environment, {})
            known.setdefault(symbol, max(1, count if most is None else min(count, most)))


def _sizes_of(node: Node) -> list[Any]:
    """Return all sizes of tensors in the result of `node`, and its dynamic numbers (SymInts)."""
    sizes: list[Any] = []
    for leaf in tree_leaves(node.meta.get("val")):
        if isinstance(leaf, torch.Tensor):
            sizes += leaf.shape
        elif isinstance(leaf, torch.SymInt):
            sizes.append(leaf)
    return sizes


def _numel(node: Node) -> int:
    fake = node.meta.get("val")
    return math.prod(map(size_hint, fake.shape)) if isinstance(fake, torch.Tensor) else 0


def _experts_of(mask: Node) -> int:
    """Return the number of experts if `mask` selects the tokens of one of them, else 1.

    For `topk(scores)[1] == expert`, the number is the size of the dimension of `scores` from which topk selects; for an
    index `one_hot[:, expert]`, the size of the indexed dimension.
    """
    node: Node | None = mask
    while node is not None:
        if node.target is aten.topk.default:
            scores, _, *rest = node.args
            shape = cast(Node, scores).meta["val"].shape
            return max(1, size_hint(shape[cast(int, rest[0]) if rest else -1]))
        if node.target is aten.select.int:
            source, dim, _ = cast(tuple[Node, int, Any], node.args)
            return max(1, size_hint(source.meta["val"].shape[dim]))
        node = next(iter(node.all_input_nodes), None)
    return 1
