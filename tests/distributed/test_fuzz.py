"""Random modules, options and delays, compiled and sharded, against the same modules in one piece; random plans.

ZCOMPILE_FUZZ_GRAPHS=10000 python -m pytest tests/distributed/test_fuzz.py -m slow -s
"""

import contextlib
import copy
import os
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch.fx import GraphModule, Interpreter

import zcompile
from tests.support import fuzz
from tests.support.cuda_graphs import counts, same_as_uncaptured
from tests.support.ranks import slow, slow_case
from tests.support.reference import finish_step
from zcompile.compiler.backend import compile_aot_eager
from zcompile.costs.hardware import CPU, H200
from zcompile.graph.ops import copied
from zcompile.graph.param_lifetimes import ParamLifetimes
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.state.sharded_model import state_of

SECONDS = 60  # of each slow test, unless a number of graphs is asked for
GRAPHS = int(os.environ.get("ZCOMPILE_FUZZ_GRAPHS", 0))
REPLAYED_STEPS = 30
PLANS = 20  # of each module, twice: forward and backward
FIRST = int(os.environ.get("ZCOMPILE_FUZZ_FIRST", 0))  # seed
seeded = lambda seed, rank: torch.Generator().manual_seed(100 * seed + rank)
batch = lambda *of: torch.randn(fuzz.ROWS, fuzz.WIDTH, generator=seeded(*of))
run = lambda graph, arguments: Interpreter(GraphModule(torch.nn.Module(), graph)).run(*arguments)


def check_module(seed, rank, world):
    """Two steps, bitwise as eager, close to one piece; odd seeds have two microbatches. Returns a count of graphs."""
    microbatches = 1 + seed % 2
    reference = fuzz.Model(seed)
    eager, compiled = (zcompile.shard(copy.deepcopy(reference)) for _ in range(2))
    options = fuzz.options_of(seed)
    compiled.compile(backend="zcompile", options={"inner": "aot_eager", **options}, fullgraph=True)
    state_of(compiled).runtime.use_transport("late c10d")  # NaN until waited for, gradients read as late as their wait
    for step in range(2):
        with zcompile.accumulate(compiled) if microbatches > 1 else contextlib.nullcontext():
            for microbatch in range(microbatches * step, microbatches * (step + 1)):
                ours, beside = compiled(batch(seed + microbatch, rank)), eager(batch(seed + microbatch, rank))
                theirs = [reference(batch(seed + microbatch, other)) for other in range(world)]
                for loss in (ours, beside, sum(theirs) / world):
                    loss.backward()
                same(ours, beside, f"loss of step {step}")
                near(ours, theirs[rank], f"loss of step {step}")
        others = eager.parameters(), reference.parameters()
        for (name, mine), other, whole in zip(compiled.named_parameters(), *others, strict=True):
            missing = [parameter.grad is None for parameter in (mine, other, whole)]
            assert len(set(missing)) == 1, f"gradient of {name} is missing: {missing}"
            if mine.grad is not None:
                same(mine.grad.to_local(), other.grad.to_local(), f"gradient of {name} at step {step}")
                near(mine.grad.full_tensor(), whole.grad, f"gradient of {name} at step {step}")
        for model in (compiled, eager, reference):
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            model.zero_grad()
    return 2


def same(ours, eager, what):
    assert torch.equal(ours, eager), f"{what}: {ours} is not that of eager, {eager}"


def near(ours, expected, what):
    """Some products are in bf16, and are summed in another order."""
    error, norm = (ours.detach() - expected.detach()).norm(), expected.detach().norm()
    assert error <= 3e-2 * norm + 1e-3, f"{what}: {ours} is not near {expected}"


class Poisoner(Interpreter):
    """Runs a planned graph, and overwrites each unsharded parameter with NaN directly after its lifetime."""

    def __init__(self, graph):
        super().__init__(GraphModule(torch.nn.Module(), graph), garbage_collect_values=False)
        lifetimes = ParamLifetimes(self.module.graph)
        self.dead = {}
        for lifetime in lifetimes.lifetimes:
            if not lifetime.returned:
                self.dead.setdefault(lifetimes.liveness.nodes[lifetime.ends], []).append(lifetime.wait)

    def run_node(self, node):
        result = super().run_node(node)
        for wait in self.dead.get(node, ()):
            (result if wait is node else self.env[wait]).fill_(float("nan"))
        return result


def check_plans(seed, rank, world):
    """Random plans of forward and backward, bitwise what unplanned graphs give. Returns how many graphs it checked."""
    model = zcompile.shard(fuzz.Model(seed))
    state_of(model).runtime.use_transport("late c10d")
    taken = []

    def backend(gm, example_inputs):
        link = (CPU.over("gloo", world), H200.over("p2p", world))[seed % 2]  # which reads rows of tables alone
        saves = {"save_for_backward_bytes": fuzz.options_of(seed)["save_for_backward_bytes"]}
        look = lambda graph, _: taken.append((copied(graph)[0], example_inputs))
        return compile_aot_eager(gm, example_inputs, Settings.parse(saves).plan(link, 1 << 30), look)

    with torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
        torch.compile(model, backend=backend, fullgraph=True)(batch(seed, rank))
    (forward, inputs), (backward, _) = taken
    given = [inputs[node.meta["desc"].idx] for node in forward.find_nodes(op="placeholder")]
    with torch.no_grad():
        results = run(forward, given)
        tangents_and_saved = [*results[1:], torch.ones_like(results[0])]
        gradients = run(backward, tangents_and_saved)
        for number in range(PLANS):
            drawn = Settings.parse(fuzz.options_of(1000 * seed + number))
            link = [CPU.over("gloo", world), H200.over("p2p", 8), H200.over("nccl", 4096)][number % 3]
            schedule = pipeline.schedule_passes(drawn.plan(link, 1 << 30))
            for graph, arguments, expected in ((forward, given, results), (backward, tangents_and_saved, gradients)):
                planned, _ = copied(graph)
                pipeline.run_passes(planned, schedule)
                if not {"sink_gathers", "regather"} & set(drawn.skip_passes):
                    lifetimes = ParamLifetimes(planned)
                    bound_bytes = lifetimes.bound_bytes(drawn.gather_budget_bytes)
                    assert max(lifetimes.unsharded_bytes()) <= bound_bytes
                results_of_plan = Poisoner(planned).run(*arguments)
                for ours, theirs in zip(results_of_plan, expected, strict=True):
                    equal = theirs is None if ours is None else torch.equal(ours, theirs)
                    assert equal, (number, fuzz.options_of(1000 * seed + number))
    return 2 * PLANS


def check_replays(seed, rank, world):
    """Captured code computes and notes in random steps what code does without. Returns how many replays it checked."""

    def train(model, optimizer, _, step):
        drawn = random.Random(f"{seed} {step}")
        parameters = list(model.parameters())
        parameters[0].requires_grad_(step // 10 % 2 == 0)
        action = drawn.choice(["step"] * 8 + ["two backwards", "accumulate", "evaluate", "edit", "two forwards"])
        x = [batch(100 * seed + step + i, rank) for i in range(2)]
        if action == "two backwards":
            model(x[1]).backward()
        if action == "accumulate":
            with zcompile.accumulate(model):
                for each in x:
                    model(each).backward()
        if action == "edit":
            with torch.no_grad():
                drawn.choice(parameters).mul_(0.5)
        with torch.no_grad():
            evaluated = model(x[1]) if action == "evaluate" else None
        loss = model(x[0]) + (model(x[1]) if action == "two forwards" else 0)
        return finish_step(optimizer, loss), evaluated

    return counts(same_as_uncaptured("cpu", rank, train, lambda: fuzz.Model(seed), steps=REPLAYED_STEPS))[1]


def rank_fuzzes(rank, world, check, first, graphs, seconds):
    """How many graphs were checked, of seeds from `first` on: `graphs` of them, or as many as there is time for."""
    begin, seed, done = time.monotonic(), first, 0
    while done < graphs if graphs else not late(begin + seconds):
        torch._dynamo.reset()
        try:
            done += check(seed, rank, world)
        except Exception as error:
            raise AssertionError(f"seed {seed}, options {fuzz.options_of(seed)}") from error
        seed += 1
    return done


def late(deadline):
    """Whether a rank is past it; the same on all ranks."""
    past = torch.tensor(float(time.monotonic() > deadline))
    dist.all_reduce(past, op=dist.ReduceOp.MAX)
    return bool(past)


def fuzz_on_two_ranks(ranks, check, graphs):
    counts = ranks(2).run(rank_fuzzes, check, FIRST, graphs, SECONDS, timeout=20 * graphs + 4 * SECONDS)
    print(f"{check.__name__}: {counts[0]} graphs")
    assert min(counts) >= (graphs or 12)


@pytest.mark.parametrize("graphs", [12, slow_case(GRAPHS // 10, id="many")])
def test_random_modules_train_as_eager_and_as_unsharded(ranks, graphs):
    fuzz_on_two_ranks(ranks, check_module, graphs)


@slow
def test_replays_of_random_steps_are_as_uncaptured_ones(ranks):
    fuzz_on_two_ranks(ranks, check_replays, GRAPHS // 10)


@pytest.mark.parametrize("graphs", [100, slow_case(GRAPHS, id="many")])
def test_random_plans_change_no_number_and_read_nothing_dead(ranks, graphs):
    fuzz_on_two_ranks(ranks, check_plans, graphs)
