"""The pass that runs input gradients before weight gradients, so that unsharded parameters are freed early."""

from collections import defaultdict
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from tests.support.decoder import FREE_BYTES, LINK, SIZE, planned
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.trace import copied, trace
from zcompile.explanation.workloads import Workload
from zcompile.graph.liveness import Liveness
from zcompile.graph.ops import GATHER_WAIT, aten, calls, chain, is_movement, readers, value
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.options import Settings
from zcompile.passes.free import free


def origin(node):
    """The node whose value `node` is a view or a cast of."""
    return origin(node.args[0]) if node.args and is_movement(node, node.args[0]) else node


def planned_products(graph, skipped):
    """The products of the planned graph, by what they read.

    Returns:
        The place of each node; the product that reads an unsharded parameter, by the gradient that it reads; the other
        products of those gradients, which make weight gradients.
    """
    result = planned(graph, Settings(skip_passes=skipped).plan(LINK, FREE_BYTES))
    unsharded = {link for wait in calls(result, GATHER_WAIT) for link in chain(wait)}
    products = calls(result, aten.mm.default)
    dgrads = {origin(product.args[0]): product for product in products if product.args[1] in unsharded}
    wgrads = [mm for mm in products if mm.args[1] not in unsharded and origin(mm.args[0]) in dgrads]
    return {node: i for i, node in enumerate(result.nodes)}, dgrads, wgrads


def count_early_and_late(graph, skipped):
    """How many weight gradients come before the input gradient of the same matrix, and after it."""
    place, dgrads, wgrads = planned_products(graph, skipped)
    late = [place[wgrad] > place[dgrads[origin(wgrad.args[0])]] for wgrad in wgrads]
    return late.count(False), late.count(True)


def count_apart(graph, skipped):
    """How many weight gradients come before an input gradient of a matrix that read the same recomputed activation."""
    place, dgrads, wgrads = planned_products(graph, skipped)
    by_activation = defaultdict(list)
    for wgrad in wgrads:
        if origin(wgrad.args[1]).op != "placeholder":
            by_activation[origin(wgrad.args[1])].append(wgrad)
    shared = [together for together in by_activation.values() if len(together) > 1]
    assert len(shared) == 2 * SIZE.layers  # what queries, keys and values read, and both halves of the feed-forward
    lasts = [max(place[dgrads[origin(wgrad.args[0])]] for wgrad in together) for together in shared]
    return sum(place[wgrad] < last for together, last in zip(shared, lasts, strict=True) for wgrad in together)


def test_weight_gradients_come_second(traced):
    """Of two products that read one gradient, the one with the unsharded parameter comes first, for every matrix."""
    assert count_early_and_late(traced[1].graph, ()) == (0, 3 * 7)
    assert count_early_and_late(traced[1].graph, ("free",))[0] > 0


def test_weight_gradients_do_not_pass_a_write(traced):
    """What the first product to move reads is written to directly after it. The product must have read that before."""
    graph, moved = copied(traced[1].graph)[0], copied(traced[1].graph)[0]
    free(moved)
    before, after = ([node.name for node in calls(each, aten.mm.default)] for each in (graph, moved))
    name = next(old for old, new in zip(before, after, strict=True) if old != new)
    product = next(node for node in graph.nodes if node.name == name)
    with graph.inserting_after(product):
        write = graph.call_function(aten.mul_.Tensor, (product.args[1], 0.5))
    free(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    assert place[product] < place[write]


def test_weight_gradients_of_one_activation_come_together(traced):
    """After all products that the activation's gradient is summed from.

    Otherwise Inductor makes the activation again in a kernel of its own.
    """
    assert count_apart(traced[1].graph, ()) == 0
    assert count_apart(traced[1].graph, ("free",)) > 0


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.heads = nn.Linear(16, 16), nn.ModuleList(nn.Linear(16, 512) for _ in range(6))

    def forward(self, x):
        x = self.into(x)
        return sum(
            checkpoint(lambda x, head=head: head(x).square().mean(), x, use_reentrant=False) for head in self.heads
        )


def test_weight_gradients_of_checkpointed_branches_come_with_each():
    """All gradients of branches together would take what checkpoints had saved."""
    peaks = []
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Branches()
        names = install_trace_readers(Workload(model, None, None), torch.float32)
        plan = Settings().plan(LINK, FREE_BYTES)
        _, backward = trace(lambda: model(torch.zeros(256, 16)), plan, lambda leaf: names.get(id(leaf)))
    for skipped in ((), ("free",)):
        peaks.append(max(Liveness(planned(backward.graph, replace(plan, disabled=skipped))).live_bytes()))
    assert peaks[0] < 1.25 * peaks[1], peaks


def test_unsharded_matrices_die_at_their_first_reader(traced):
    """Between a decoder's first and last reader of a matrix lies nothing that another order could move after it."""
    for captured in traced:
        for lifetime in ParamLifetimes(planned(captured.graph, Settings().plan(LINK, 1 << 40))).lifetimes:
            if not lifetime.returned and value(lifetime.wait).ndim > 1:
                outside = {reader for _, reader in readers(chain(lifetime.wait))}
                assert len(outside) == 1, lifetime.shard
