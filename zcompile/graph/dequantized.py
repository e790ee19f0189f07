"""What a graph makes of quantized weights alone."""

import torch
from torch.fx import Graph, Node

from zcompile.costs.formulas.products import is_matmul
from zcompile.graph.ops import GATHER, calls, is_user_collective, value
from zcompile.options import TRAINABLE

aten = torch.ops.aten
LOOKUPS = {aten.index.Tensor, aten.index_select.default, aten.embedding.default, aten.take.default}


def dequantized(graph: Graph) -> list[Node]:
    """Gathers of dtypes that do not train, and nodes that are made of them and of other parameters alone.

    A lookup of packed values in a table, whose result has the shape of the weight, counts, whatever the table is.
    Matmuls do not, nor does what is random.
    """
    found: dict[Node, bool] = {  # of parameters alone -> whether one of them is quantized
        gather: value(gather).dtype not in TRAINABLE for gather in calls(graph, GATHER)
    }
    for node in graph.nodes:
        if node.op != "call_function" or node in found or is_matmul(node) or is_user_collective(node):
            continue
        sources = node.all_input_nodes
        if node.target in LOOKUPS:
            sources = [source for source in sources if source is not node.args[0] or source in found]
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if sources and not is_random and all(source in found for source in sources):
            found[node] = any(found[source] for source in sources)
    return [node for node, is_quantized in found.items() if is_quantized]
