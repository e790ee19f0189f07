"""Predicted live bytes, against a run that adds up what it holds."""

import torch
from torch.fx import Interpreter
from torch.fx.experimental.proxy_tensor import make_fx

from zcompile.graph.liveness import Liveness


class Watcher(Interpreter):
    """Runs a graph and adds up the storages that are held when each node is done, and what it drops directly after."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=True)
        self.held = []

    def run_node(self, node):
        result = super().run_node(node)
        leaves = torch.utils._pytree.tree_leaves([result, *self.env.values()])
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        self.held.append(sum(storages.values()))
        return result


def test_live_bytes_are_what_a_run_holds():
    """Views, views of views, several results, in-place updates, arguments that are returned."""

    def function(x, y):
        a, b = (x @ y).chunk(2, dim=1)
        low, high = torch.aminmax(a * 2, dim=0)
        c = torch.cat((a, b.relu()), dim=1)
        c.add_(1)
        d = c.t().reshape(-1, 4)[1:]
        values, indices = torch.topk(d.sum(0), 2)
        return d @ torch.ones(4, 3) + low.sum() + high.sum() + values.sum(), indices, x

    module = make_fx(function, tracing_mode="fake")(torch.randn(6, 8), torch.randn(8, 10))
    watcher = Watcher(module)
    watcher.run(torch.randn(6, 8), torch.randn(8, 10))
    nodes = list(module.graph.nodes)
    predicted = Liveness(module.graph, fused=False).live_bytes()
    computed = [i for i, node in enumerate(nodes) if node.op == "call_function"]
    assert [predicted[i] for i in computed] == [watcher.held[i] for i in computed]


def test_what_is_computed_inside_its_readers_takes_no_memory():
    def function(x, w):
        return torch.tanh(x * 2 + 1) @ w  # one buffer for the three, and the product

    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 4)).graph
    liveness = Liveness(graph)
    made = [storage for storage in liveness if storage.maker.op == "call_function"]
    assert [storage.nbytes for storage in made] == [8 * 8 * 4, 8 * 4 * 4]
