"""Generated code of Inductor waits, frees and reuses memory as planned, and is right however late data comes."""

import copy
import re
from unittest import mock

import pytest
import torch
from torch import nn
from torch._inductor.fx_utils import FakeTensorUpdater
from torch._inductor.utils import run_and_get_code

import zcompile
from tests.support.models import Chain
from tests.support.ranks import TORCH, slow_case
from tests.support.reference import RIGHT, WRONG, compiled, relative_error
from zcompile.costs.hardware import CPU
from zcompile.graph.ops import GATHER_CACHED_START, GATHER_WAIT, REDUCE_START, REDUCE_WAIT, calls
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.state.sharded_model import state_of

WIDTH = 33  # odd, so that shards are padded; Inductor on CPU makes smaller products pointwise
MATRIX_BYTES = 4 * WIDTH**2


def reads_before_waiting(graph):
    """Readers of an unsharded parameter take it from its start, and the wait comes after them."""
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
    number = {start: sum(other.target is start.target for other in starts[:i]) for i, start in enumerate(starts)}
    ops = (GATHER_CACHED_START, GATHER_WAIT, REDUCE_START, REDUCE_WAIT)
    short = {op: op.name().removeprefix("zcompile::").replace("cached_", "") for op in ops}
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
        if call := re.match(r"\s+(\w+) = \S+zcompile\.(gather|reduce)_(?:cached_)?(start|wait)\.default\((\w+)", line):
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


def rank_late_step(rank, world, sabotage=None, gather_budget_bytes=MATRIX_BYTES, bucket_bytes=0):
    """One step on Inductor beside the unsharded model, on a transport that is late: NaN until the wait.

    Returns the worst relative error; the orders of forward and backward in FX and in generated code; and that code."""
    torch.manual_seed(0)
    layers = (layer for _ in range(3) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()))
    reference = Chain(*layers)  # all is of one size: Inductor may recycle any buffer as any other
    model = zcompile.shard(copy.deepcopy(reference))
    state_of(model).runtime.use_transport("late c10d")
    batches = torch.randn(world, WIDTH, WIDTH)
    planned = []
    settings = Settings(gather_budget_bytes=gather_budget_bytes, reduce_budget_bytes=0, bucket_bytes=bucket_bytes)
    plan = settings.plan(CPU.over("gloo", world), memory_bytes=0)

    def schedule(graph):
        pipeline.run_passes(graph, pipeline.schedule_passes(plan))
        if sabotage is not None:
            sabotage(graph)
        planned.append(fx_order(graph))

    inductor = {"force_disable_caches": True, "allow_buffer_reuse": True, "post_grad_custom_post_pass": schedule}
    model.compile(backend="zcompile", options={"inductor": inductor}, fullgraph=True)

    def step():
        loss = model(batches[rank]).square().mean()
        loss.backward()
        return loss.detach()

    loss, codes = run_and_get_code(step)
    expected = [reference(each).square().mean() for each in batches]
    (sum(expected) / world).backward()
    pairs = [(loss, expected[rank].detach())]
    grads = zip(model.parameters(), reference.parameters(), strict=True)
    pairs += [(ours.grad.full_tensor(), theirs.grad) for ours, theirs in grads]
    return max(relative_error(*pair) for pair in pairs), planned, [code_order(code) for code in codes], codes


@pytest.fixture(scope="module")
def late_steps(ranks):
    """Of all ranks, under a plan that has one gather ahead."""
    return ranks(2).run(rank_late_step)


def test_prefetch_of_one_survives_inductor(late_steps):
    """Generated code has our ops and the products in the planned order, and is right however late data comes."""
    forward = "gather_start 0, gather_start 1, gather_wait 0, mm, gather_start 2, gather_wait 1, mm, gather_wait 2, mm"
    for worst, planned, generated, _ in late_steps:
        assert worst < RIGHT
        assert len(generated) == 2 and generated == planned
        assert generated[0] == forward.split(", ")
        for kind, count in (("gather", 2), ("reduce", 3)):  # the first layer's weight is not read in backward
            backward = [call for call in generated[1] if call.startswith(kind)]
            ahead = [f"{kind}_start 0"]
            for i in range(1, count):
                ahead += [f"{kind}_start {i}", f"{kind}_wait {i - 1}"]
            assert backward == [*ahead, f"{kind}_wait {count - 1}"]


def names_of_unsharded(code):
    """For each gather, all names that the code has for the unsharded parameter."""
    names: dict[str, set[str]] = {}
    for line in code.splitlines():
        if start := re.match(r"\s+(\w+) = torch\.ops\.zcompile\.gather_cached_start", line):
            names[start[1]] = {start[1]}
        elif alias := re.match(r"\s+(\w+) = (?:\S+\.gather_wait\.default\()?(\w+)\)?\s*(?:#.*)?$", line):
            for same in names.values():
                same |= {alias[1]} if alias[2] in same else set()
    return list(names.values())


def test_unsharded_parameters_are_freed_at_once_and_not_reused(late_steps):
    """All names for one are deleted before the next call after its last reader. No other result gets its memory."""
    for _, _, _, codes in late_steps:
        for code, count in zip(codes, (3, 2), strict=True):
            assert len(names_of_unsharded(code)) == count
            for names in names_of_unsharded(code):
                # The start and its wait; before torch 2.14 also what each is called afterwards.
                assert len(names) == (4 if TORCH < (2, 14) else 2)
                mentions = [place for name in names for place in re.finditer(rf"(del )?\b{name}\b", code)]
                reads = [place.end() for place in mentions if not place[1]]
                deletions = [place.end() for place in mentions if place[1]]
                assert len(deletions) == len(names)
                after = code[max(reads) : max(deletions) + 12].partition("\n")[2]
                assert not re.search(r"zcompile\.|extern_kernels|cpp_fused|# reuse", after)


@pytest.mark.parametrize("sabotage", [reads_before_waiting, slow_case(forgets_the_gradient)])
def test_what_is_in_flight_is_read_or_reused_unless_waits_forbid_it(ranks, sabotage):
    """Why the numbers above are right. In the second, Inductor writes another result over a gradient in flight."""
    assert max(worst for worst, *_ in ranks(2).run(rank_late_step, sabotage)) > WRONG


def test_buckets_are_waited_for_and_freed_one_by_one(ranks):
    """Each of what starts together has a wait of its own. The list that the group came in lets go at once."""
    for worst, _, _, (forward, backward) in ranks(2).run(rank_late_step, None, 1 << 20, 1 << 20):
        assert worst < RIGHT
        for code, kind, count in ((forward, "gather", 3), (backward, "gather", 2), (backward, "reduce", 3)):
            name, tensors = re.search(rf"(\w+) = \S+zcompile\.{kind}_group_start\.default\(\[(.*?)\]", code).groups()
            assert len(tensors.split(",")) == count
            assert len(re.findall(rf"\w+ = {name}\[\d\]", code)) == count
            rest = code[code.index(f"{name} = torch") :]
            assert rest.index(f"del {name}\n") < rest.index(f"zcompile.{kind}_wait")
            assert rest.count(f"zcompile.{kind}_wait.default(") == count


@torch.library.custom_op("zcompile_tests::add_aside", mutates_args=("total",))
def add_aside(total: torch.Tensor, weight: torch.Tensor) -> None:
    total.add_(weight)


class ReadAside(nn.Module):
    """Forward makes a result of a parameter's size after its last read, and backward one in the last read of `gate`."""

    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(2))
        self.gate = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x):
        total = torch.zeros_like(x)
        for weight in self.weights:
            add_aside(total, weight.detach())
        return 2 * ((total @ x) * self.gate).sum()


@pytest.mark.parametrize("bucket_bytes", [0, 1 << 20])
def test_what_a_custom_op_may_read_aside_is_not_reused(rank, world, bucket_bytes):
    """On a stream of its own: `record_stream` holds back torch's allocator, not Inductor."""
    options = {"bucket_bytes": bucket_bytes, "inductor": {"force_disable_caches": True}}
    model = compiled(ReadAside(), inner="inductor", options=options)
    as_on_gpus = mock.patch("torch._inductor.graph.should_assume_input_aligned", lambda tensor: True)
    with as_on_gpus:  # Inductor reuses no result of an op that has unaligned inputs
        _, codes = run_and_get_code(lambda: model(torch.randn(WIDTH, WIDTH, requires_grad=True)).backward())
    forward, backward = codes
    gathered = re.findall(r"zcompile\.gather_wait\.default\((\w+)\)", forward)
    reused = re.findall(r"= (\w+);.*# reuse", forward), re.findall(r"= (saved\w*);.*# reuse", backward)
    assert len(gathered) == 3 and "saved" in backward
    assert not [*(name for name in reused[0] if name in gathered), *reused[1]]


@pytest.mark.skipif(TORCH >= (2, 14), reason="torch 2.14 infers again what reads a lowering: time of compiling alone")
def test_nothing_is_inferred_again_after_the_passes(rank, world):
    """One value set anew makes Inductor infer those of nearly all later nodes, which takes a tenth of its time."""
    inferred = []  # for each time that Inductor looks which fake values to infer again, the nodes for which it does
    look = FakeTensorUpdater.incremental_update

    def watched(self):
        graph = self.graph if hasattr(self, "graph") else self.gm.graph  # torch 2.11, and later
        before = {node: node.meta.get("val") for node in graph.nodes}
        answer = look(self)
        inferred.append([str(node) for node, fake in before.items() if node.meta.get("val") is not fake])
        return answer

    layers = nn.RMSNorm(33), nn.Linear(33, 33, bias=False), nn.GELU()  # of biases Inductor makes nodes of its own
    model = compiled(Chain(*layers), inner="inductor", options={"inductor": {"force_disable_caches": True}})
    with mock.patch.object(FakeTensorUpdater, "incremental_update", watched):
        model(torch.randn(5, 33)).square().mean().backward()
    assert len(inferred) >= 2 and not any(inferred)


def test_buckets_keep_to_their_bytes(ranks):
    for _, _, _, (forward, _) in ranks(2).run(rank_late_step, None, 1 << 20, 2 * MATRIX_BYTES):
        assert [forward.count(f"zcompile.gather_{kind}_start.default(") for kind in ("group", "cached")] == [1, 1]
