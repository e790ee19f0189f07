"""Plans: what they are computed from, against counts and runs that know nothing of them, and what they promise."""

import functools
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, Interpreter
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import zcompile
from tests.support.models import Transformer, batch, loss_of
from zcompile.analysis.cost_model import Costs, operations, simulate
from zcompile.analysis.fx_utils import (
    GATHER,
    GATHER_WAIT,
    GATHERS,
    MOVEMENT,
    aten,
    calls,
    chain,
    insert,
    readers,
    value,
)
from zcompile.analysis.hardware import CPU, H200
from zcompile.analysis.liveness import Liveness
from zcompile.analysis.param_lifetimes import ParamLifetimes
from zcompile.options import Plan, Settings
from zcompile.passes import pipeline
from zcompile.passes.free import free
from zcompile.passes.regather import regather_points
from zcompile.planning.command import install_trace_readers, main
from zcompile.planning.explain import copied, trace
from zcompile.profile.models import Llama, Size, Workload, load

SIZE = Size(layers=3, width=32, hidden=96, heads=4, kv_heads=2, vocabulary=64, tokens=24, sequences=2)


@pytest.fixture(scope="module")
def traced():
    """Forward and backward of a small decoder, not yet scheduled."""
    torch._dynamo.reset()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = Llama(SIZE)
        workload = load("tiny", None, 2, 24, False)
        workload.model = model
        names = install_trace_readers(workload, torch.bfloat16)
        tokens = torch.zeros(2, 25, dtype=torch.int64)
        return trace(
            lambda: model(tokens), Settings().plan(H200.over("p2p", 8), 1 << 30), lambda leaf: names.get(id(leaf))
        )


def test_a_plan_gives_readers_no_new_storage(traced):
    """Or Inductor would infer again all that reads a gathered parameter, and all that comes behind it."""
    for one in traced:
        planned, _ = copied(one.graph)
        before = {value(gather).untyped_storage()._cdata for gather in calls(planned, GATHER)}
        pipeline.run_passes(planned, pipeline.schedule_passes(Settings().plan(H200.over("p2p", 8), 1 << 30)))
        waits = calls(planned, GATHER_WAIT)
        assert waits and {value(wait).untyped_storage()._cdata for wait in waits} <= before


def test_operations_of_products_are_torchs(traced):
    """Against torch's counter on the model in one piece, which counts no attention on the CPU."""
    model = Llama(SIZE)
    with FlopCounterMode(display=False) as counter:
        model(torch.zeros(2, 25, dtype=torch.int64)).backward()
    nodes = [node for one in traced for node in one.graph.nodes if node.op == "call_function"]
    products = [node for node in nodes if "scaled_dot_product" not in str(node.target)]
    assert sum(map(operations, products)) == counter.get_total_flops() > 0
    assert len(nodes) - len(products) >= 2 * SIZE.layers


def test_operations_of_attention_are_those_of_its_products():
    """Grouped queries, values of another width; flash attention's backward forms the scores once more than the plain one."""
    query, key, value = torch.randn(2, 6, 10, 8), torch.randn(2, 3, 12, 8), torch.randn(2, 3, 12, 8)

    def plain(query, key, value):
        key, value = (one.repeat_interleave(2, 1) for one in (key, value))
        return torch.softmax(query @ key.transpose(-1, -2), -1) @ value

    def counted(function):
        inputs = [one.clone().requires_grad_() for one in (query, key, value)]
        with FlopCounterMode(display=False) as forward:
            out = function(*inputs)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops(), backward.get_total_flops()

    def step(query, key, value, causal):
        out, rest = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, causal)
        grad = torch.ones_like(out)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, query, key, value, out, rest, 0.0, causal
        )

    forward, backward = counted(plain)
    scores = forward // 2
    for causal, share in ((False, 1), (True, 2)):
        graph = make_fx(functools.partial(step, causal=causal), tracing_mode="fake")(query, key, value).graph
        ours = [operations(node) for node in graph.nodes if "scaled_dot_product" in str(node.target)]
        assert ours == [forward // share, (backward + scores) // share]


class Watcher(Interpreter):
    """Runs a graph and adds up the storages that are held when each node is done, and what it drops directly after."""

    def __init__(self, module):
        super().__init__(module, garbage_collect_values=True)
        self.held = []

    def run_node(self, node):
        result = super().run_node(node)
        tensors = [
            one
            for one in torch.utils._pytree.tree_leaves([result, *self.env.values()])
            if isinstance(one, torch.Tensor)
        ]
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        self.held.append(sum(storages.values()))
        return result


def test_liveness_is_what_a_run_holds():
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
    computed = [at for at, node in enumerate(nodes) if node.op == "call_function"]
    assert [predicted[at] for at in computed] == [watcher.held[at] for at in computed]


def test_what_is_computed_inside_its_readers_takes_no_memory():
    def function(x, w):
        return torch.tanh(x * 2 + 1) @ w  # one buffer for the three, and the product

    graph = make_fx(function, tracing_mode="fake")(torch.randn(8, 8), torch.randn(8, 4)).graph
    liveness = Liveness(graph)
    made = [storage for storage in liveness if storage.maker.op == "call_function"]
    assert [storage.nbytes for storage in made] == [8 * 8 * 4, 8 * 4 * 4]


def fewest_misses(reads, capacity):
    """By trying everything: a cache of `capacity` that must hold each of `reads` when it is read."""

    @functools.cache
    def misses(at, held):
        if at == len(reads):
            return 0
        if reads[at] in held:
            return misses(at + 1, held)
        if len(held) < capacity:
            return 1 + misses(at + 1, held | {reads[at]})
        return 1 + min(misses(at + 1, held - {one} | {reads[at]}) for one in held)

    return misses(0, frozenset())


def test_given_up_is_as_seldom_as_can_be():
    drawn = random.Random(0)
    for _ in range(200):
        count, capacity = drawn.randint(2, 5), drawn.randint(1, 4)
        sequence = [drawn.randrange(count) for _ in range(drawn.randint(count, 14))]
        graph, mode = Graph(), FakeTensorMode()
        gathers = [graph.placeholder(f"p{number}") for number in range(count)]
        places = {}
        for number, gather in enumerate(gathers):
            gather.meta["val"] = mode.from_tensor(torch.empty(1))
            read = [at for at, one in enumerate(sequence) if one == number]
            if read:
                places[gather] = read
        again = regather_points(places, capacity * 4, last=len(sequence))
        assert len(places) + sum(map(len, again.values())) == fewest_misses(tuple(sequence), capacity)


LINKS = {"h200 p2p": H200.over("p2p", 8), "h200 nccl": H200.over("nccl", 2), "cpu": CPU.over("gloo", 2)}


@pytest.mark.parametrize("link", LINKS.values(), ids=LINKS)
@pytest.mark.parametrize("budget", [0, 10_000, 50_000, 1 << 30])
def test_prefetch_hides_as_much_as_starting_everything_first_within_the_budget(traced, link, budget):
    """Simulated exposure, against all gathers at the graph's beginning, as their order allows, and against none early."""
    exposed = {}
    for name, settings in {
        "planned": Settings(gather_budget_bytes=budget, bucket_bytes=0),
        "late": Settings(gather_budget_bytes=budget, bucket_bytes=0, skip_passes=["prefetch"]),
    }.items():
        plan = settings.plan(link, 0)
        for at, one in enumerate(traced):
            graph, _ = copied(one.graph)
            pipeline.run_passes(graph, pipeline.schedule_passes(plan))
            windows = ParamLifetimes(graph)
            assert max(windows.unsharded_bytes()) <= windows.bound_bytes(budget)
            exposed[name, at] = simulate(graph, Costs(graph, link)).exposed_s
            if name == "planned":
                first = next(node for node in graph.nodes if node.op != "placeholder")
                for start in calls(graph, *GATHERS):
                    first.prepend(start)
                exposed["first", at] = simulate(graph, Costs(graph, link)).exposed_s
    for at in range(len(traced)):
        assert exposed["planned", at] <= exposed["late", at]
        if budget == 1 << 30:
            assert exposed["planned", at] <= 1.001 * exposed["first", at]


def test_a_gather_is_not_earlier_than_it_must_be():
    """Ten equal products, each of which hides ten transfers: no more than two parameters are full at once."""
    graph, mode = Graph(), FakeTensorMode()
    with mode:
        x, shard = torch.empty(64, 256), torch.empty(128, 256)
    shards = [graph.placeholder(f"shard{at}") for at in range(10)]
    value = graph.placeholder("x")
    value.meta["val"] = x
    for one in shards:
        one.meta["val"] = shard
    output = graph.output(())
    for one in shards:
        full = insert(graph, output, GATHER, one, [256, 256], torch.float32, like=one)
        value = insert(graph, output, aten.mm.default, value, full, like=one)
    output.args = ((value,),)
    link = H200.over("p2p", 2)
    slow = Plan(link, gather_budget_bytes=1 << 30, reduce_budget_bytes=0, bucket_bytes=0, save_for_backward_bytes=0)
    transfer_s = link.gather_s(256 * 256 * 4)
    hardware = replace(link.hardware, kernel_s=10 * transfer_s)
    pipeline.run_passes(graph, pipeline.schedule_passes(replace(slow, link=replace(link, hardware=hardware))))
    windows = ParamLifetimes(graph)
    assert max(windows.unsharded_bytes()) == 2 * 256 * 256 * 4
    assert all(later.begins > sooner.begins for sooner, later in itertools.pairwise(windows.lifetimes))


def explained_beside_micro_steps(rank, world, microbatch_cache_bytes):
    options = {
        "inner": "aot_eager",
        "bucket_bytes": 0,
        "save_for_backward_bytes": 0,
        "microbatch_cache_bytes": microbatch_cache_bytes,
    }
    model = zcompile.shard(WithLoss())
    plan = zcompile.explain(model, batch(0, rank), options=options)
    torch._dynamo.reset()
    model.compile(backend="zcompile", options=options, fullgraph=True)
    gathered = []

    def note():
        gathered.append(sum(zcompile.stats(model)["gathered_bytes"].values()))
        zcompile.reset_stats(model)

    zcompile.reset_stats(model)
    with zcompile.accumulate(model):
        for micro in range(3):
            loss = model(batch(micro, rank))
            note()
            loss.backward()
            note()
    return plan, gathered


@pytest.mark.parametrize("microbatch_cache_bytes", [None, 3000, 0])
def test_explain_says_what_micro_steps_share(ranks, microbatch_cache_bytes):
    plan, gathered = ranks(2).run(explained_beside_micro_steps, microbatch_cache_bytes)[0]
    first, (forward, backward) = plan.graphs, plan.again or plan.graphs
    later = [forward.gathered_bytes, backward.gathered_bytes]
    assert gathered == [first[0].gathered_bytes, backward.gathered_bytes, *later, *later]
    assert bool(plan.again) == (microbatch_cache_bytes != 0) == bool(plan.shared_bytes) and plan.shared_bytes <= (
        microbatch_cache_bytes or 1 << 30
    )
    assert forward.gathered_bytes < first[0].gathered_bytes or microbatch_cache_bytes == 0


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Transformer()

    def forward(self, tokens):
        return loss_of(self.model, tokens)


def explained_beside_a_run(rank, world, save_for_backward_bytes):
    options = {"inner": "aot_eager", "save_for_backward_bytes": save_for_backward_bytes}
    model = zcompile.shard(WithLoss())
    plan = zcompile.explain(model, batch(0, rank), options=options)
    before = zcompile.stats(model)["gathers"]
    zcompile.reset_stats(model)
    torch._dynamo.reset()
    model.compile(backend="zcompile", options=options, fullgraph=True)
    loss = model(batch(0, rank))
    forward = zcompile.stats(model)
    zcompile.reset_stats(model)
    loss.backward()
    return plan, before, forward, zcompile.stats(model), {name: p.numel() for name, p in model.named_parameters()}


@pytest.mark.parametrize("save_for_backward_bytes", [None, 0])
def test_explain_says_what_a_run_does(ranks, save_for_backward_bytes):
    results = ranks(2).run(explained_beside_a_run, save_for_backward_bytes)
    one, other = (
        replace(result[0], graphs=tuple(replace(graph, memory=()) for graph in result[0].graphs)) for result in results
    )
    assert one == other  # ranks plan alike; their shares of gradients differ by a row
    plan, before, forward, backward, sizes = results[0]
    ahead, behind = plan.graphs
    assert (ahead.kind, behind.kind) == ("forward", "backward")
    assert before == len(ahead.gathers) == forward["gathers"] and len(behind.gathers) == backward["gathers"]
    assert ahead.gathered_bytes == sum(forward["gathered_bytes"].values())
    assert behind.reduced_bytes == sum(backward["reduced_bytes"].values())
    assert {one.parameter for one in ahead.gathers} == {f"model.{name.removeprefix('model.')}" for name in sizes}
    kept = [one for one in ahead.gathers if one.kept]
    if save_for_backward_bytes is None:  # the tied embedding, which the head reads last
        most = 4 * max(sizes.values())
        assert kept[0].nbytes == most < sum(one.nbytes for one in kept) <= most * 9 // 8
        assert not {one.parameter for one in kept} & {one.parameter for one in behind.gathers}
    else:
        assert not kept
    assert json.loads(plan.to_json())["world"] == 2
    assert "embed" in str(plan)


class Broken(nn.Linear):
    """A forward in two graphs."""

    def forward(self, x):
        x = torch.relu(super().forward(x))
        torch._dynamo.graph_break()
        return (x * self.weight.sum()).sum()


def explained_often(rank, world):
    torch._dynamo.reset()
    model = zcompile.shard(Broken(4, 4))
    plans = [zcompile.explain(model, torch.ones(2, 4)) for _ in range(10)]
    assert all(plan == plans[0] for plan in plans)
    return [one.kind for one in plans[0].graphs]


def test_explain_again_and_again(ranks):
    assert ranks(2).run(explained_often) == 2 * [["forward", "backward"] * 2]


def unplanned(rank, world):
    model = zcompile.shard(nn.Linear(4, 4))
    model.forward = torch._dynamo.disable(model.forward)
    with pytest.raises(RuntimeError, match="no graph was captured"):
        zcompile.explain(model, torch.ones(2, 4))
    with pytest.raises(ValueError, match="'p2p' is not possible here"):
        zcompile.explain(model, torch.ones(2, 4), options={"transport": "p2p"})


def test_explain_what_cannot_be(ranks):
    ranks(2).run(unplanned)


def pair():
    return 1, 2


def test_explain_on_paper(tmp_path, capsys):
    arguments = [
        "--model",
        "tiny",
        "--tokens",
        "32",
        "--ranks",
        "2,4096",
        "--budgets",
        "0,1",
        "--json",
        str(tmp_path / "plan.json"),
    ]
    assert main(arguments) == 0
    told = capsys.readouterr().out
    assert "embedding.weight" in told and "4096" in told
    found = json.loads((tmp_path / "plan.json").read_text())
    two, many = found["ranks"]
    assert two["peak_bytes"] > many["peak_bytes"] and two["step_ms"] < many["step_ms"]
    parameters = sum(parameter.numel() for parameter in load("tiny", None, None, None, False).model.parameters())
    assert two["parameters"] == many["parameters"] == parameters
    forward = two["graphs"][0]
    (embedding,) = forward["rows"]
    table = load("tiny", None, None, None, False).model.embedding.weight
    assert embedding == {"parameter": "embedding.weight", "dtype": "bfloat16", "nbytes": 2 * 8 * 32 * table.shape[1]}
    assert sum(one["nbytes"] for one in forward["gathers"]) == 2 * (parameters - table.numel())
    assert forward["gathered_bytes"] == sum(one["nbytes"] for one in forward["gathers"] + forward["rows"])
    assert all(one["full_bytes"] <= one["bound_bytes"] for plan in found["budgets"] for one in plan["graphs"])
    for graph in two["graphs"]:
        times, live, full = zip(*graph["memory"])
        total_ms = graph["compute_ms"] + graph["exposed_ms"] + graph["slowed_ms"]
        assert times[0] == 0 and list(times) == sorted(times) and times[-1] == pytest.approx(total_ms, abs=2e-3)
        assert max(live) == graph["live_bytes"] and 0 < max(full) <= graph["gathered_bytes"]
        assert all(begin <= end <= total_ms + 2e-3 for begin, end in graph["transfers"])
        starts = {at if one["bucket"] is None else f"bucket {one['bucket']}" for at, one in enumerate(graph["gathers"])}
        reduces = len(graph["transfers"]) - len(starts)
        assert reduces > 0 if graph["kind"] == "backward" else reduces == 0


def test_what_passes_change_is_logged_and_traced(tmp_path):
    command = [sys.executable, "-m", "zcompile.explain", "--model", "tiny", "--tokens", "16", "--ranks", "2"]
    environment = os.environ | {"TORCH_LOGS": "+zcompile", "TORCH_TRACE": str(tmp_path)}
    told = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert told.returncode == 0 and "a step of" in told.stdout
    assert re.search(
        r"zcompile: split_collectives: -(\d+) zcompile.gather.default, \+\1 zcompile.gather_start.default, \+\1 zcompile.gather_wait.default",
        told.stderr,
    )
    (trace,) = tmp_path.iterdir()
    assert "zcompile_before" in trace.read_text() and "zcompile_prefetch" in trace.read_text()


@pytest.mark.parametrize(
    "arguments, says",
    [
        (["--ranks", "0"], "--ranks takes whole numbers"),
        (["--ranks", "2,many"], "--ranks takes whole numbers"),
        (["--model", "no/such model"], "no model 'no/such model'"),
        (["--hardware", "abacus"], "invalid choice"),
        (["--budgets", "-1"], "--budgets takes"),
        (["--persist", "-1"], "--persist takes"),
        (["--transport", "ncll"], "--transport must be one of p2p, nccl on H200, not 'ncll'"),
        (["--transport", "p2p", "--ranks", "16"], "p2p reaches the 8 ranks"),
        (["--module", f"{__file__}:pair"], "must return a module, batch"),
    ],
)
def test_bad_input_is_one_line(arguments, says, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    told = capsys.readouterr().err
    assert stopped.value.code == 2 and says in told and told.count("\n") == 1


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_rematerialized_is_what_products_read_of_pointwise_kernels(inner):
    """Bytes saved for backward, as autograd sees them, with and without: the results of norms and of the gated activation."""
    size = replace(SIZE, layers=2)
    tokens = torch.randint(0, size.vocabulary, (2, 25), generator=torch.Generator().manual_seed(0))
    saved, gradients = {}, {}
    for rematerialize in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Llama(size)
        model.compile(backend="zcompile", options={"inner": inner, "rematerialize": rematerialize})
        kept: dict[int, int] = {}

        def pack(tensor):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = model(tokens)
        loss.backward()
        saved[rematerialize] = sum(kept.values())
        gradients[rematerialize] = [parameter.grad for parameter in model.parameters()]
    rows, width = 2 * 24, 4
    made_again = size.layers * rows * (2 * size.width + size.hidden) + rows * size.width
    attended = (
        size.layers * rows * size.width
    )  # under Inductor, also the copy of what attention returns that has its heads side by side
    assert saved[False] - saved[True] == (made_again + attended * (inner == "inductor")) * width
    exact = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-5, "atol": 1e-7}
    for one, other in zip(*gradients.values(), strict=True):
        torch.testing.assert_close(one, other, **exact)


def test_weight_gradients_come_second(traced):
    """Of the two products that read one gradient, that with the full parameter comes first, in each of a decoder's matrices."""
    pairs = [early_and_late(traced[1].graph, disabled) for disabled in ((), ("free",))]
    assert pairs[0] == (0, 3 * 7)
    assert pairs[1][0] > 0


def test_weight_gradients_do_not_pass_a_write(traced):
    """What the first one to move reads is written to directly behind it: it must have read that before."""
    graph, moved = copied(traced[1].graph)[0], copied(traced[1].graph)[0]
    free(moved)
    order = [[node.name for node in calls(one, aten.mm.default)] for one in (graph, moved)]
    name = next(one for one, other in zip(*order, strict=True) if one != other)
    product = next(node for node in graph.nodes if node.name == name)
    with graph.inserting_after(product):
        write = graph.call_function(aten.mul_.Tensor, (product.args[1], 0.5))
    free(graph)
    place = {node: at for at, node in enumerate(graph.nodes)}
    assert place[product] < place[write]


def origin(node):
    return origin(node.args[0]) if node.op == "call_function" and node.target in MOVEMENT else node


def planned_products(graph, disabled):
    """Places of nodes in the planned graph; its products that read a full parameter, by the gradient they read; its other products."""
    planned, _ = copied(graph)
    pipeline.run_passes(
        planned, pipeline.schedule_passes(Settings(skip_passes=disabled).plan(H200.over("p2p", 8), 1 << 30))
    )
    full = {link for wait in calls(planned, GATHER_WAIT) for link in chain(wait)}
    products = calls(planned, aten.mm.default)
    reading = {origin(one.args[0]): one for one in products if one.args[1] in full}
    of_weights = [one for one in products if one.args[1] not in full and origin(one.args[0]) in reading]
    return {node: at for at, node in enumerate(planned.nodes)}, reading, of_weights


def early_and_late(graph, disabled):
    """How many weight gradients come before the product that reads the same gradient, and behind it."""
    place, reading, of_weights = planned_products(graph, disabled)
    behind = [place[one] > place[reading[origin(one.args[0])]] for one in of_weights]
    return behind.count(False), behind.count(True)


def apart(graph, disabled):
    """Of the weight gradients that read one activation, made again: how many come before a product that reads one of their gradients."""
    place, reading, of_weights = planned_products(graph, disabled)
    made_again = defaultdict(list)
    for one in of_weights:
        if origin(one.args[1]).op != "placeholder":
            made_again[origin(one.args[1])].append(one)
    several = [together for together in made_again.values() if len(together) > 1]
    assert len(several) == 2 * SIZE.layers  # what queries, keys and values read, and both halves of the feed-forward
    lasts = [max(place[reading[origin(one.args[0])]] for one in together) for together in several]
    return sum(place[one] < last for together, last in zip(several, lasts, strict=True) for one in together)


def test_weight_gradients_of_one_activation_come_together(traced):
    """Behind all products that the activation's gradient is summed from: else Inductor makes it again in a kernel of its own."""
    assert apart(traced[1].graph, ()) == 0
    assert apart(traced[1].graph, ("free",)) > 0


class Branches(nn.Module):
    """Several checkpointed branches that read one input."""

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
        plan = Settings().plan(H200.over("p2p", 8), 1 << 30)
        _, backward = trace(lambda: model(torch.zeros(256, 16)), plan, lambda leaf: names.get(id(leaf)))
    for disabled in ((), ("free",)):
        planned, _ = copied(backward.graph)
        pipeline.run_passes(planned, pipeline.schedule_passes(replace(plan, disabled=disabled)))
        peaks.append(max(Liveness(planned).live_bytes()))
    assert peaks[0] < 1.25 * peaks[1], peaks


def test_full_matrices_die_at_their_first_reader(traced):
    """There is nothing between a decoder's first and last reader of a matrix that another order could move behind it."""
    for one in traced:
        graph, _ = copied(one.graph)
        pipeline.run_passes(graph, pipeline.schedule_passes(Settings().plan(H200.over("p2p", 8), 1 << 40)))
        for window in ParamLifetimes(graph).lifetimes:
            if not window.returned and value(window.wait).ndim > 1:
                outside = {reader for _, reader in readers(chain(window.wait))}
                assert len(outside) == 1, window.shard
