"""Planned graphs: storages, buckets, live bytes, sizes that no input decides, and input gradients before weights'."""

import functools
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from tests.support.decoder import FREE_BYTES, LINK, SIZE, planned
from zcompile.costs.hardware import H200
from zcompile.costs.model import Costs
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.trace import trace
from zcompile.explanation.workloads import Workload
from zcompile.graph import ops
from zcompile.graph.liveness import IS_DONATED, Liveness
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.passes.bucket import bucket
from zcompile.passes.free import free


def test_a_plan_gives_readers_no_new_storage(traced):
    """Else Inductor would infer again all that reads a gathered parameter, and all that comes after it."""
    for captured in traced:
        before = {ops.value(gather).untyped_storage()._cdata for gather in ops.calls(captured.graph, ops.GATHER)}
        waits = ops.calls(planned(captured.graph, Settings().plan(LINK, FREE_BYTES)), ops.GATHER_WAIT)
        assert waits and {ops.value(wait).untyped_storage()._cdata for wait in waits} <= before


def test_dtypes_that_alternate_travel_as_two_buckets():
    """Under autocast, norms travel in fp32 between matrices in bf16."""
    graph, mode = Graph(), FakeTensorMode()
    shards = [graph.placeholder(f"shard_{i}") for i in range(6)]
    for shard in shards:
        shard.meta["val"] = mode.from_tensor(torch.empty(4, 8))
    output = graph.output(())
    dtypes = [torch.float32, torch.bfloat16] * 3
    starts = [
        ops.insert(graph, output, ops.GATHER_START, shard, [8, 8], dtype, like=shard)
        for shard, dtype in zip(shards, dtypes)
    ]
    output.args = (tuple(ops.insert(graph, output, ops.GATHER_WAIT, start, like=start) for start in starts),)
    pipeline.run_passes(graph, [functools.partial(bucket, gather_bytes=1 << 20, reduce_bytes=0)])
    groups = ops.calls(graph, ops.GATHER_GROUP_START)
    assert [group.args[0] for group in groups] == [shards[::2], shards[1::2]] and not ops.calls(graph, ops.GATHER_START)
    gathered = [wait.meta["val"].dtype for wait in ops.calls(graph, ops.GATHER_WAIT)]
    assert gathered == 3 * [torch.float32, torch.bfloat16]


@torch.library.custom_op("zcompile_tests::custom_product", mutates_args=(), tags=(torch.Tag.pointwise,))
def custom_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


custom_product.register_fake(torch.matmul)


class CustomBackward(torch.autograd.Function):
    """A product whose backward alone has a custom op, which reads a view of the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return custom_product(grad, weight.t()), x.t() @ grad


class TwoProducts(nn.Module):
    def __init__(self, read):
        super().__init__()
        self.read = read
        self.first, self.second = (nn.Parameter(torch.empty(16, 16)) for _ in range(2))

    def forward(self, x):
        return self.read(x @ self.first, self.second).square().mean()


@pytest.mark.parametrize(
    "read, in_torch_memory",
    [
        (torch.matmul, False),
        (lambda x, w: x + custom_product(x.detach(), w.detach()), True),
        (CustomBackward.apply, True),
    ],
    ids=["matmul", "forward", "backward"],
)
def test_a_parameter_that_a_custom_op_reads_is_in_memory_of_torch(read, in_torch_memory):
    """The op may read it on a stream of its own, and `record_stream` has no effect on memory of a transport."""
    torch._dynamo.reset()
    plan = Settings(save_for_backward_bytes=1 << 30, bucket_bytes=0).plan(LINK, FREE_BYTES)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = TwoProducts(read)
        install_trace_readers(Workload(model, None, None), torch.float32)
        traced = trace(lambda: model(torch.zeros(16, 16, requires_grad=True)), plan, lambda leaf: None)
    in_torch, elsewhere = (
        {start.args[0].name for captured in traced for start in ops.calls(planned(captured.graph, plan), target)}
        for target in (ops.GATHER_START, ops.GATHER_CACHED_START)
    )
    assert (len(in_torch), len(elsewhere)) == ((1, 1) if in_torch_memory else (0, 2))


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


def most_bytes(function, *shapes):
    """The most live bytes of the traced function, beside its inputs."""
    graph = make_fx(function, tracing_mode="fake")(*map(torch.randn, shapes)).graph
    return max(Liveness(graph).live_bytes(exclude=graph.find_nodes(op="placeholder")))


def test_kernels_write_over_what_they_alone_read_and_hold_the_rest():
    """Matrices are 16 x 16, in float32. Inductor fuses `a * b` and `a + b`, though a product stands between them."""
    matrix, sides = 16 * 16 * 4, ((16, 16), (16, 16))
    assert most_bytes(lambda x, w: torch.tanh(x @ w) @ w, *sides) == 2 * matrix  # of tanh and the last product

    def shared(x, w):
        a, b = x @ w, w @ x
        return (a * b) @ w, (a + b) @ w

    assert most_bytes(shared, *sides) == 5 * matrix  # both arguments, both results and a product

    def waits(x, w):
        mask = x[:1] > 0
        return torch.where(mask.expand(16, 16), x @ w, 0).sum()

    assert most_bytes(waits, *sides) == matrix + 4  # the product and its sum, but no mask
    scatter = lambda x, w: torch.full((16, 16), 0.0).index_put((torch.full((16,), 1),), x @ w)
    assert most_bytes(scatter, *sides) == 2 * matrix  # of the product and the result, which begins as zeros


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(16, 16)) for _ in range(2))

    def forward(self, x, returns):
        half = (x @ self.first)[:, :8]
        loss = (half @ self.second[:8]).sum()
        return (loss, half) if returns else loss


@pytest.mark.parametrize("returns", [False, True])
def test_a_saved_half_holds_its_whole_matrix_and_is_donated_unless_the_user_gets_it(returns):
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        names = install_trace_readers(Workload(model := Halves(), None, None), torch.float32)
        plan = Settings(save_for_backward_bytes=0).plan(LINK, FREE_BYTES)
        _, backward = trace(lambda: model(torch.zeros(16, 16), returns), plan, lambda leaf: names.get(id(leaf)))
    nodes = backward.graph.find_nodes(op="placeholder")
    assert [node.meta[IS_DONATED] for node in nodes if IS_DONATED in node.meta] == [not returns]
    gradients = 16 * 8 + 1 if returns else 1
    assert Liveness(backward.graph).input_bytes(exclude=backward.names) == 4 * (16 * 16 + gradients)


TOKENS, EXPERTS, TOP_K, WIDTH = 64, 4, 2, 32


def planned_graph(function, *inputs):
    """The graph of `function` with unbacked sizes, after its costs were computed."""
    graphs = []

    def keep(gm, example_inputs):
        Costs(gm.graph, H200.over("p2p", 2))
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    settings = {"capture_dynamic_output_shape_ops": True, "capture_scalar_outputs": True}
    with torch._dynamo.config.patch(settings):
        torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True)(*inputs)
    return graphs[0]


def tokens_by_one_hot(chosen):
    mask = torch.nn.functional.one_hot(chosen, EXPERTS).permute(2, 1, 0)
    return [torch.where(mask[i])[1] for i in range(EXPERTS)]


tokens_by_comparison = lambda chosen: [torch.where(chosen == i)[0] for i in range(EXPERTS)]


@pytest.mark.parametrize("tokens_of", [tokens_by_comparison, tokens_by_one_hot])
def test_tokens_of_an_expert_are_an_equal_part_of_all_that_were_routed(tokens_of):
    def experts(x, router, weights):
        _, chosen = torch.topk(x @ router, TOP_K)
        out = torch.zeros_like(x)
        for token, weight in zip(tokens_of(chosen), weights):
            out = out.index_add(0, token, x[token] @ weight)
        return out

    inputs = torch.randn(TOKENS, WIDTH), torch.randn(WIDTH, EXPERTS), torch.randn(EXPERTS, WIDTH, WIDTH)
    graph = planned_graph(experts, *inputs)
    products = [node for node in ops.calls(graph, ops.aten.mm.default) if ops.value(node).shape[1] == WIDTH]
    rows = TOKENS * TOP_K // EXPERTS
    assert [tuple(ops.shape_hint(ops.value(node))) for node in products] == [(rows, WIDTH)] * EXPERTS


def test_parts_of_a_split_are_equal():
    def parts(x, counts):
        first, second = (int(count) for count in counts.tolist())
        torch._check(first >= 0)
        torch._check(second >= 0)
        return [part * 2 for part in x.split([first, second])]

    graph = planned_graph(parts, torch.randn(TOKENS, WIDTH), torch.tensor([10, TOKENS - 10]))
    (split,) = ops.calls(graph, ops.aten.split_with_sizes.default)
    assert [tuple(ops.shape_hint(part)) for part in split.meta["val"]] == [(TOKENS // 2, WIDTH)] * 2


def test_what_nothing_is_known_of_is_as_large_as_it_can_be():
    graph = planned_graph(lambda x: torch.nonzero(x > 0) + 1, torch.randn(TOKENS, WIDTH))
    (found,) = ops.calls(graph, ops.aten.nonzero.default)
    assert tuple(ops.shape_hint(ops.value(found))) == (TOKENS * WIDTH, 2)


def origin(node):
    """The node whose value `node` is a view or a cast of."""
    return origin(node.args[0]) if node.args and ops.is_movement(node, node.args[0]) else node


def planned_products(graph, skipped):
    """The place of each node; products that read unsharded parameters, by gradient; other products of gradients."""
    result = planned(graph, Settings(skip_passes=skipped).plan(LINK, FREE_BYTES))
    unsharded = {link for wait in ops.calls(result, ops.GATHER_WAIT) for link in ops.chain(wait)}
    products = ops.calls(result, ops.aten.mm.default)
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
    graph, moved = ops.copied(traced[1].graph)[0], ops.copied(traced[1].graph)[0]
    free(moved)
    before, after = ([node.name for node in ops.calls(each, ops.aten.mm.default)] for each in (graph, moved))
    name = next(old for old, new in zip(before, after, strict=True) if old != new)
    product = next(node for node in graph.nodes if node.name == name)
    with graph.inserting_after(product):
        write = graph.call_function(ops.aten.mul_.Tensor, (product.args[1], 0.5))
    free(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    assert place[product] < place[write]


def test_weight_gradients_of_one_activation_come_together(traced):
    """Otherwise Inductor makes the activation again in a kernel of its own."""
    assert count_apart(traced[1].graph, ()) == 0
    assert count_apart(traced[1].graph, ("free",)) > 0


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.into, self.heads = nn.Linear(16, 16), nn.ModuleList(nn.Linear(16, 512) for _ in range(6))

    def forward(self, x):
        x = self.into(x)
        branch = lambda x, head: head(x).square().mean()
        return sum(checkpoint(branch, x, head, use_reentrant=False) for head in self.heads)


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
            if not lifetime.returned and ops.value(lifetime.wait).ndim > 1:
                outside = {reader for _, reader in ops.readers(ops.chain(lifetime.wait))}
                assert len(outside) == 1, lifetime.shard
