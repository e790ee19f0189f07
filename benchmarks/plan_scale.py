"""How long planning takes by size of the graph: all schedule passes and their checks, and tracing beside them.

python benchmarks/plan_scale.py --layers 8,24,80,160
"""

import argparse
import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zcompile.analysis.hardware import H200
from zcompile.options import Settings
from zcompile.passes import pipeline
from zcompile.planning.command import install_trace_readers
from zcompile.planning.explain import copied, trace
from zcompile.profile.models import Llama, Size, Workload, draw_tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", default="8,24,80")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    plan = Settings().plan(H200.over("p2p", 8), H200.memory_bytes)
    for layers in map(int, arguments.layers.split(",")):
        size = Size(layers=layers, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048)
        begin = time.perf_counter()
        with FakeTensorMode(allow_non_fake_inputs=True):
            workload = Workload(Llama(size), lambda step, rank: draw_tokens(32_000, 1, 2048, step, rank), 2048)
            names = install_trace_readers(workload, torch.bfloat16)
            batch = workload.batch(0, 0)
            torch._dynamo.reset()
            traced = trace(lambda: workload.model(batch), plan, lambda leaf: names.get(id(leaf)))
        traced_s = time.perf_counter() - begin
        for one in traced:
            times_s = []
            for _ in range(arguments.repeats):
                graph, _ = copied(one.graph)
                begin = time.perf_counter()
                pipeline.run_passes(graph, pipeline.schedule_passes(plan))
                times_s.append(time.perf_counter() - begin)
            count = len(one.graph.nodes)
            median = sorted(times_s)[len(times_s) // 2]
            print(
                f"{layers} layers, {one.kind}, {count} nodes: passes and checks {median:.2f} s ({min(times_s):.2f} to {max(times_s):.2f}), "
                f"{1e6 * median / count:.0f} us a node; tracing all {traced_s:.1f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
