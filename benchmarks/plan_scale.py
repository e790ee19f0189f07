"""How long planning takes by size of the graph: all schedule passes and their checks, and tracing beside them.

Run: python benchmarks/plan_scale.py --layers 8,24,80,160
"""

import argparse
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph

from zcompile.costs.hardware import H200
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.llama import Llama, Size
from zcompile.explanation.trace import Traced, trace
from zcompile.explanation.workloads import Workload, draw_tokens
from zcompile.graph.ops import copied
from zcompile.options import Plan, Settings
from zcompile.passes import pipeline


def traced_model(size: Size, plan: Plan) -> tuple[list[Traced], float]:
    """The graphs of a step of a Llama of `size`, and the seconds that tracing took."""
    begin = time.perf_counter()
    with FakeTensorMode(allow_non_fake_inputs=True):
        workload = Workload(Llama(size), lambda step, rank: draw_tokens(32_000, 1, 2048, step, rank), 2048)
        names = install_trace_readers(workload, torch.bfloat16)
        batch = workload.batch(0, 0)
        torch._dynamo.reset()
        graphs = trace(lambda: workload.model(batch), plan, lambda leaf: names.get(id(leaf)))
    return graphs, time.perf_counter() - begin


def plan_seconds(graph: Graph, plan: Plan) -> float:
    """Seconds of all schedule passes and their checks on a copy of `graph`."""
    planned, _ = copied(graph)
    begin = time.perf_counter()
    pipeline.run_passes(planned, pipeline.schedule_passes(plan))
    return time.perf_counter() - begin


def main() -> None:
    """Print a line for each graph of each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="8,24,80")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    plan = Settings().plan(H200.over("p2p", 8), H200.memory_bytes)
    for layers in map(int, arguments.layers.split(",")):
        size = Size(layers=layers, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048)
        graphs, traced_s = traced_model(size, plan)
        for traced in graphs:
            times_s = sorted(plan_seconds(traced.graph, plan) for _ in range(arguments.repeats))
            count, median = len(traced.graph.nodes), times_s[len(times_s) // 2]
            print(
                f"{layers} layers, {traced.kind}, {count} nodes: passes and checks {median:.2f} s ({times_s[0]:.2f} to "
                f"{times_s[-1]:.2f}), {1e6 * median / count:.0f} us a node; tracing all {traced_s:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
