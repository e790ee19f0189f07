"""A regression test for each row of the lifetime table: how Inductor treats the ways to say when a full parameter dies.

Each runs a small function in which a functional `make` stands for a gather, and a pass after the partition rewrites it
to the form under test, as zcompile's own pass does. If torch changes its mind on one, the design may change with it.
"""

import copy
import functools
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.utils import run_and_get_code
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

import zcompile
from tests.support.models import Chain
from tests.support.reference import compiled
from zcompile.analysis.fx_utils import (
    GATHER_CACHED_START,
    GATHER_GROUP_START,
    GATHER_START,
    GATHER_WAIT,
    REDUCE_START,
    REDUCE_WAIT,
    calls,
    insert,
)
from zcompile.analysis.hardware import CPU
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.passes.bucket import bucket

t = torch.ops.zcompile_test
library = torch.library.Library("zcompile_test", "DEF")


def define(schema, real, fake):
    name = library.define(schema)
    library.impl(name, real, "CPU")
    library.impl(name, fake, "Meta")


def poison(full):
    full.fill_(float("nan"))


fulls = []  # storages of full parameters: a runtime's own table, for the release that does not take the full parameter


def make(w):
    full = w.clone()
    fulls.append(full.untyped_storage())
    return full


def shrink(w, reader):
    fulls.pop().resize_(0)


define("make(Tensor w) -> Tensor", make, torch.empty_like)
define("lying_wait(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
define("honest_wait(Tensor(a) x) -> Tensor(a)", torch.ops.aten.alias, torch.ops.aten.alias)
define("release(Tensor(a!) x) -> ()", poison, lambda x: None)
define("threaded_release(Tensor x, Tensor[] readers) -> Tensor", lambda x, readers: (poison(x), readers[0].clone())[1],
       lambda x, readers: torch.empty_like(readers[0]))  # fmt: skip
define("shrinking_release(Tensor(a!) w, Tensor reader) -> ()", shrink, lambda w, reader: None)
define("returning_release(Tensor(a!) x) -> Tensor(a!)", lambda x: x, lambda x: x)


def rewrite(edit, graph):
    """Call `edit(graph, make)` on the one `make` of a graph."""
    (make,) = graph.find_nodes(op="call_function", target=t.make.default)
    edit(graph, make)


def run(function, edit, *args):
    """`function(*args)` under Inductor with `edit` applied: the result and the generated code."""
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": functools.partial(rewrite, edit)}
    result, code = run_and_get_code(torch.compile(function, fullgraph=True, options=options), *args)
    return result, code[0]


def waits_with(op):
    def edit(graph, make):
        with graph.inserting_after(make):
            wait = graph.call_function(op, (make,))
        wait.meta["val"] = make.meta["val"]
        make.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)

    return edit


def releases_with(op):
    """Release directly after the last reader in the graph's order."""

    def edit(graph, make):
        last = [node for node in graph.nodes if make in node.all_input_nodes][-1]
        with graph.inserting_after(last):
            graph.call_function(op, (make,))

    return edit


X, W = torch.randn(16, 16), torch.randn(16, 16)


def error(result, expected):
    """Norm of the error relative to the norm of `expected`; infinite for NaN."""
    return float(((result - expected).norm() / expected.norm()).nan_to_num(float("inf")))


# Rounding is below RIGHT, another result's values are above WRONG: these tests must not take one for the other.
RIGHT, WRONG = 1e-5, 1e-2


def two_products(x, w):
    """Buffers of one size, so that any may be recycled as any other.

    Of `-w`: on CPU, Inductor takes an input to be unaligned, and what an op makes of it too, and does not recycle that.
    """
    return t.make(-w) @ x @ x


def test_a_wait_that_lies_is_given_another_results_memory():
    with torch._functorch.config.patch(check_custom_op_aliasing=False):  # torch's own check, an error where CI is set
        _, code = run(two_products, waits_with(t.lying_wait.default), X, W)
    waited = re.search(r"lying_wait\.default\((\w+)\)", code)[1]  # what is read afterwards is this memory
    reused = re.search(rf"= {waited}; del {waited}  # reuse", code)
    assert reused and "extern_kernels.mm" in code[reused.end() :], "the hazard is gone: see the lifetime table"
    right, _ = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert error(right, -W @ X @ X) < RIGHT


def test_a_wait_that_says_what_it_aliases_is_right_and_freed_after_its_last_reader():
    right, code = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert error(right, -W @ X @ X) < RIGHT
    code = code[code.index("honest_wait.default(") :]
    made, waited, full = re.search(r"^\S+\((buf\d+)\)\n\s+(buf\d+) = (buf\d+)\n", code).group(1, 3, 2)
    products = [found.start() for found in re.finditer(r"extern_kernels\.mm\(", code)]
    assert code[products[0] :].startswith(f"extern_kernels.mm({full},") and len(products) == 2
    for name in (made, waited, full):  # gone, or handed on to the second product, as soon as the first is done
        assert products[0] < re.search(rf"del {name}\b", code).start() < products[1], (name, code)
    for op in (torch.ops.zcompile.gather_wait, torch.ops.zcompile.reduce_wait):
        first = op.default._schema.arguments[0]
        assert first.alias_info.before_set == op.default._schema.returns[0].alias_info.before_set != set()
        assert not first.alias_info.is_write


def pointwise_reader(x, w):
    full = t.make(w)
    early = full + 1  # the reader, in the graph's order before the release, but fused into the kernel after it
    return (x @ x) * early


def test_a_mutating_release_runs_before_a_fused_reader_or_costs_the_fusion():
    expected = (X @ X) * (W + 1)
    result, code = run(pointwise_reader, releases_with(t.release.default), X, W)
    fused = run(pointwise_reader, lambda graph, make: None, X, W)[1].count("cpp_fused")
    unfused = code.count("cpp_fused") > fused
    assert error(result, expected) > WRONG or unfused, "the hazard is gone: see the lifetime table"
    right, code = run(pointwise_reader, waits_with(t.honest_wait.default), X, W)
    assert error(right, expected) < RIGHT and code.count("cpp_fused") == fused


def test_a_release_threaded_through_readers_costs_the_fusion():
    def edit(graph, make):
        (reader,) = make.users
        with graph.inserting_after(reader):
            release = graph.call_function(t.threaded_release.default, (make, [reader]))
        release.meta["val"] = reader.meta["val"]
        reader.replace_all_uses_with(release, delete_user_cb=lambda user: user is not release)

    result, threaded = run(pointwise_reader, edit, X, W)
    torch.testing.assert_close(result, (X @ X) * (W + 1))
    right, plain = run(pointwise_reader, waits_with(t.honest_wait.default), X, W)
    torch.testing.assert_close(right, result)
    assert threaded.count("cpp_fused") > plain.count("cpp_fused")


def test_a_release_that_shrinks_the_storage_takes_it_from_another_result():
    """The op finds the full parameter in its own table; to Inductor that memory was free, and is now the result's."""

    def edit(graph, make):
        waits_with(t.honest_wait.default)(graph, make)
        (result,) = graph.output_node().all_input_nodes
        (shard,) = (node for node in graph.find_nodes(op="placeholder") if make.args[0] in node.users)
        with graph.inserting_after(result):
            graph.call_function(t.shrinking_release.default, (shard, result))

    result, _ = run(two_products, edit, X, W.clone())
    assert result.untyped_storage().nbytes() == 0, "the hazard is gone: see the lifetime table"
    right, _ = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert error(right, -W @ X @ X) < RIGHT
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("zcompile::")]
    assert ours and not [name for name in ours if "release" in name or "free" in name or "resize" in name]


def test_an_alias_before_functionalisation_is_rejected():
    def function(x):
        return t.honest_wait(x.cos()) @ x

    with pytest.raises(Exception, match="alias"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X)


def test_a_returned_mutable_alias_has_no_lowering():
    with pytest.raises(Exception, match="FallbackKernel for zcompile_test.returning_release"):
        run(two_products, waits_with(t.returning_release.default), X, W)
    schemas = [op.default._schema for op in (torch.ops.zcompile.gather_wait, torch.ops.zcompile.reduce_wait)]
    assert not any(schema.is_mutable for schema in schemas)


WIDTH = 33  # odd, so that shards are padded; Inductor on CPU makes smaller products pointwise
MATRIX_BYTES = 4 * WIDTH**2


class ThreeLayers(nn.Module):
    """Parameters, activations and gradients of one size: Inductor may recycle any buffer as any other."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def reads_before_waiting(graph):
    """Readers of a full parameter take it from its start, and the wait comes after them."""
    for wait in calls(graph, GATHER_WAIT):
        wait.replace_all_uses_with(wait.args[0])
        graph.output_node().prepend(wait)


def forgets_the_gradient(graph):
    """Waits no longer hold the gradient that their reduce is reading."""
    for wait in calls(graph, REDUCE_WAIT):
        wait.args = (wait.args[0], wait.args[0])


def fx_order(graph):
    """Our ops and the matrix products of a graph, as `code_order` gives them."""
    starts = calls(graph, GATHER_CACHED_START, REDUCE_START)
    number = {start: sum(other.target is start.target for other in starts[:at]) for at, start in enumerate(starts)}
    short = {
        op: op.name().removeprefix("zcompile::").replace("cached_", "")
        for op in (GATHER_CACHED_START, GATHER_WAIT, REDUCE_START, REDUCE_WAIT)
    }
    order = []
    for node in graph.nodes:
        if node.target in short:
            order.append(f"{short[node.target]} {number.get(node if node in number else node.args[0])}")
        elif node.target is torch.ops.aten.mm.default:
            order.append("mm")
    return order


def code_order(code):
    """["gather_start 0", "gather_start 1", "gather_wait 0", "mm", ...]; a wait has the number of its start."""
    number, order = {}, []  # number: a name in the code -> which start made its memory
    count = {"gather": 0, "reduce": 0}
    for line in code.splitlines():
        if call := re.match(
            r"\s+(\w+) = torch\.ops\.zcompile\.(gather|reduce)_(?:cached_)?(start|wait)\.default\((\w+)", line
        ):
            name, kind, what, argument = call.groups()
            if what == "start":
                number[name] = count[kind]
                count[kind] += 1
            order.append(f"{kind}_{what} {number.get(name if what == 'start' else argument)}")
        elif alias := re.match(r"\s+(\w+) = (\w+)\s*(;|#|$)", line):
            number[alias[1]] = number.get(alias[2])
        elif "extern_kernels.mm(" in line:
            order.append("mm")
    return order


def late_step(rank, world, sabotage=None, gather_budget_bytes=MATRIX_BYTES, bucket_bytes=0):
    """One step on Inductor beside the unsharded model, on a transport that is late: NaN until the wait.

    Returns the worst `error` of loss and gradients; the order of forward and of backward in FX, and in generated code; and
    that code.
    """
    torch.manual_seed(0)
    reference = ThreeLayers()
    model = zcompile.shard(copy.deepcopy(reference))
    model.layers[0].__dict__["_zcompile_state"].runtime.use_transport("late c10d")
    batches = torch.randn(world, WIDTH, WIDTH)
    planned = []
    settings = Settings(gather_budget_bytes=gather_budget_bytes, reduce_budget_bytes=0, bucket_bytes=bucket_bytes)
    plan = settings.plan(CPU.over("gloo", world), free_bytes=0)

    def schedule(graph):
        pipeline.run_passes(graph, pipeline.schedule_passes(plan))
        if sabotage is not None:
            sabotage(graph)
        planned.append(fx_order(graph))

    inductor = {"force_disable_caches": True, "post_grad_custom_post_pass": schedule}
    model.compile(backend="zcompile", options={"inductor": inductor}, fullgraph=True)

    def step():
        loss = model(batches[rank]).square().mean()
        loss.backward()
        return loss.detach()

    loss, codes = run_and_get_code(step)
    expected = [reference(one).square().mean() for one in batches]
    (sum(expected) / world).backward()
    pairs = [(loss, expected[rank].detach())]
    grads = zip(model.parameters(), reference.parameters(), strict=True)
    pairs += [(ours.grad.full_tensor(), theirs.grad) for ours, theirs in grads]
    return max(error(*pair) for pair in pairs), planned, [code_order(code) for code in codes], codes


def test_prefetch_of_one_survives_inductor(ranks):
    """Generated code has our ops and the products in the planned order, and is right however late data comes."""
    forward = "gather_start 0, gather_start 1, gather_wait 0, mm, gather_start 2, gather_wait 1, mm, gather_wait 2, mm"
    for worst, planned, generated, _ in ranks(2).run(late_step):
        assert worst < RIGHT
        assert len(generated) == 2 and generated == planned
        assert generated[0] == forward.split(", ")
        for kind, count in (("gather", 2), ("reduce", 3)):  # the first layer's weight is not read in backward
            backward = [call for call in generated[1] if call.startswith(kind)]
            ahead = [f"{kind}_start 0"]
            for at in range(1, count):
                ahead += [f"{kind}_start {at}", f"{kind}_wait {at - 1}"]
            assert backward == [*ahead, f"{kind}_wait {count - 1}"]


def names_of_full(code):
    """For each gather, all names that the code has for the full parameter."""
    names: dict[str, set[str]] = {}
    for line in code.splitlines():
        if start := re.match(r"\s+(\w+) = torch\.ops\.zcompile\.gather_cached_start", line):
            names[start[1]] = {start[1]}
        elif alias := re.match(
            r"\s+(\w+) = (?:torch\.ops\.zcompile\.gather_wait\.default\()?(\w+)\)?\s*(?:#.*)?$", line
        ):
            for one in names.values():
                one |= {alias[1]} if alias[2] in one else set()
    return list(names.values())


def test_full_parameters_are_freed_at_once_and_not_reused(ranks):
    """All names for one are deleted before the next call after its last reader, and its memory is given to no other result."""
    for _, _, _, codes in ranks(2).run(late_step):
        for code, count in zip(codes, (3, 2), strict=True):
            assert len(names_of_full(code)) == count
            for names in names_of_full(code):
                assert len(names) == 4  # the start and its wait, and what each is called afterwards
                mentions = [place for name in names for place in re.finditer(rf"(del )?\b{name}\b", code)]
                reads, deletions = (
                    [place.end() for place in mentions if bool(place[1]) == is_deletion]
                    for is_deletion in (False, True)
                )
                assert len(deletions) == len(names)
                assert not re.search(
                    r"zcompile\.|extern_kernels|cpp_fused|# reuse",
                    code[max(reads) : max(deletions) + 12].partition("\n")[2],
                )


@pytest.mark.parametrize("sabotage", [reads_before_waiting, forgets_the_gradient])
def test_what_is_in_flight_is_read_or_reused_unless_the_waits_forbid_it(ranks, sabotage):
    """Why the numbers above are right. In the second, Inductor writes another result over a gradient in flight."""
    assert max(worst for worst, *_ in ranks(2).run(late_step, sabotage)) > WRONG


def test_groups_are_waited_for_one_by_one_and_freed_one_by_one(ranks):
    """What starts together has a wait of its own each, and the list that the group came in lets go at once."""
    for worst, _, _, (forward, backward) in ranks(2).run(late_step, None, 1 << 20, 1 << 20):
        assert worst < RIGHT
        for code, kind, count in ((forward, "gather", 3), (backward, "gather", 2), (backward, "reduce", 3)):
            name, tensors = re.search(
                rf"(\w+) = torch\.ops\.zcompile\.{kind}_group_start\.default\(\[(.*?)\]", code
            ).groups()
            assert len(tensors.split(",")) == count
            assert len(re.findall(rf"\w+ = {name}\[\d\]", code)) == count
            rest = code[code.index(f"{name} = torch") :]
            assert rest.index(f"del {name}\n") < rest.index(f"zcompile.{kind}_wait")
            assert rest.count(f"zcompile.{kind}_wait.default(") == count


def inferred_again(rank, world):
    """For each time that Inductor looks which fake values to infer again, the nodes for which it does."""
    found = []
    look = FakeTensorUpdater.incremental_update

    def watched(self):
        graph = self.graph if hasattr(self, "graph") else self.gm.graph  # torch 2.11, and later
        before = {node: node.meta.get("val") for node in graph.nodes}
        answer = look(self)
        found.append([str(node) for node, fake in before.items() if node.meta.get("val") is not fake])
        return answer

    layers = [
        layer for _ in range(3) for layer in (nn.RMSNorm(33), nn.Linear(33, 33, bias=False), nn.GELU())
    ]  # of biases Inductor makes nodes of its own
    model = compiled(Chain(*layers), inner="inductor", options={"inductor": {"force_disable_caches": True}})
    with mock.patch.object(FakeTensorUpdater, "incremental_update", watched):
        model(torch.randn(5, 33)).square().mean().backward()
    return found


def test_nothing_is_inferred_again_behind_the_passes(ranks):
    """One value set anew, and Inductor infers those of nearly all nodes behind it, which takes a tenth of its time."""
    for found in ranks(2).run(inferred_again):
        assert len(found) >= 2 and not any(found)


def test_widths_that_alternate_travel_as_two_groups():
    """Under autocast, norms travel in fp32 between matrices in bf16."""
    graph, mode = Graph(), FakeTensorMode()
    shards = [graph.placeholder(f"shard_{at}") for at in range(6)]
    for shard in shards:
        shard.meta["val"] = mode.from_tensor(torch.empty(4, 8))
    output = graph.output(())
    starts = [
        insert(graph, output, GATHER_START, shard, [8, 8], torch.bfloat16 if at % 2 else torch.float32, like=shard)
        for at, shard in enumerate(shards)
    ]
    output.args = (tuple(insert(graph, output, GATHER_WAIT, start, like=start) for start in starts),)
    pipeline.run_passes(graph, [functools.partial(bucket, gather_bytes=1 << 20, reduce_bytes=0)])
    groups = calls(graph, GATHER_GROUP_START)
    assert [group.args[0] for group in groups] == [shards[::2], shards[1::2]] and not calls(graph, GATHER_START)
    gathered = [wait.meta["val"].dtype for wait in calls(graph, GATHER_WAIT)]
    assert gathered == 3 * [torch.float32, torch.bfloat16]


def test_groups_keep_to_their_bytes(ranks):
    for _, _, _, (forward, _) in ranks(2).run(late_step, None, 1 << 20, 2 * MATRIX_BYTES):
        assert (
            forward.count("zcompile.gather_group_start.default(")
            == 1
            == forward.count("zcompile.gather_cached_start.default(")
        )
