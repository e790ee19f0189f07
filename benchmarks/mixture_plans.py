"""Exposed time of large mixtures of experts on many ranks, as it is simulated, beside the least of any schedule.

    python benchmarks/mixture_plans.py --layers 8 --tokens 4096 --ranks 8,64,512

The layers have the sizes of Qwen3-30B-A3B and of DeepSeek-V3, with random weights that take no memory. Each plan is
made with at most 256 MiB of gradients on their way, which once was the default, and with today's default. The latter is
also made from the shards of the first, a middle and the last rank, which must give the same graphs. Needs no GPU.
"""

import argparse
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from zcompile.costs.hardware import H200
from zcompile.explanation.command import install_trace_readers
from zcompile.explanation.predict import predict_step
from zcompile.explanation.trace import Traced, trace
from zcompile.explanation.without_gpu import attention_of_gpus
from zcompile.explanation.workloads import WithLoss, Workload
from zcompile.graph.ops import REDUCES, calls, copied, value
from zcompile.options import Plan, Settings
from zcompile.passes import pipeline

MIB = 1 << 20
EARLIER_BUDGET_BYTES = 256 * MIB


def qwen3_30b_a3b(layers: int) -> nn.Module:
    """Qwen3-30B-A3B with so many of its 48 layers."""
    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        vocab_size=151_936,
        use_cache=False,
    )
    return made(Qwen3MoeForCausalLM, config)


def whole_qwen3() -> tuple[nn.Module, Callable[[int, int], torch.Tensor], Callable[..., torch.Tensor]]:
    """Qwen3-30B-A3B and one sequence of 4,096 tokens, for `zcompile explain --module`."""
    return qwen3_30b_a3b(48), lambda step, rank: torch.zeros(1, 4096, dtype=torch.int64), loss_of


def deepseek_v3(layers: int) -> nn.Module:
    """DeepSeek-V3 with so many of its 61 layers, of which the first is dense (of all, the first three are)."""
    config = DeepseekV3Config(num_hidden_layers=layers, first_k_dense_replace=1, use_cache=False)
    return made(DeepseekV3ForCausalLM, config)


def made(model: Callable[..., nn.Module], config: DeepseekV3Config | Qwen3MoeConfig) -> nn.Module:
    """The model, with experts as grouped matmuls."""
    config._experts_implementation = "grouped_mm"
    config._attn_implementation = "sdpa"
    return model(config)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(input_ids=batch, labels=batch).loss


def traced_model(make: Callable[[int], nn.Module], layers: int, tokens: int, plan: Plan) -> tuple[list[Traced], int]:
    """The graphs of a step on one sequence, and how many elements the parameters have."""
    with FakeTensorMode(allow_non_fake_inputs=True), attention_of_gpus(H200):
        batch = torch.zeros(1, tokens, dtype=torch.int64)
        workload = Workload(WithLoss(make(layers), loss_of), lambda step, rank: batch, tokens)
        parameters = sum(parameter.numel() for parameter in workload.model.parameters())
        names = install_trace_readers(workload, torch.bfloat16)
        torch._dynamo.reset()
        return trace(lambda: workload.model(batch), plan, lambda leaf: names.get(id(leaf))), parameters


def digests(graphs: list[Traced], plan: Plan) -> Iterator[str]:
    """A hash of the planned graphs for each of three ranks, made from graphs with the shards of that rank."""
    world = plan.link.world
    for rank in sorted({0, world // 2, world - 1}):
        text = ""
        for traced in graphs:
            graph, copies = copied(traced.graph)
            for node in [*(copies[node] for node in traced.names), *calls(graph, *REDUCES)]:
                cut_to(node, rank, world)
            pipeline.run_passes(graph, pipeline.schedule_passes(plan))
            text += str(graph)
        yield hashlib.sha256(text.encode()).hexdigest()


def cut_to(node: Node, rank: int, world: int) -> None:
    """Let what `node` gives, of all rows of a parameter, be the rows that are this rank's."""
    whole = value(node)
    if whole.dim() > 0:
        rows = -(-whole.shape[0] // world)
        count = min(rows, max(0, whole.shape[0] - rank * rows))
        node.meta["val"] = whole.new_empty(count, *whole.shape[1:])


def main() -> None:
    """Print a row for each model and number of ranks.

    Raises:
        AssertionError: ranks plan differently.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, help="of each model")
    parser.add_argument("--tokens", type=int, default=4096, help="on each rank, in one sequence")
    parser.add_argument("--ranks", default="8,64,512", help="numbers of ranks, with commas between them")
    arguments = parser.parse_args()
    print("| model | ranks | compute ms | exposed ms, 256 MiB | default | least | held by |")
    print("|---|---|---|---|---|---|---|")
    for make in (qwen3_30b_a3b, deepseek_v3):
        plans = {}
        for world in map(int, arguments.ranks.split(",")):
            link = H200.over("p2p" if world <= H200.domain else "nccl", world)
            plans[world] = Settings().plan(link, H200.memory_bytes)
        graphs, parameters = traced_model(make, arguments.layers, arguments.tokens, next(iter(plans.values())))
        for world, plan in plans.items():
            earlier = predict_step(graphs, replace(plan, reduce_budget_bytes=EARLIER_BUDGET_BYTES), parameters, 1)
            now = predict_step(graphs, plan, parameters, 1)
            compute_ms = sum(graph.compute_ms for graph in now.graphs)
            least_ms = sum(graph.least_exposed_ms for graph in now.graphs)
            held = ", ".join(f"{graph.kind}: {graph.held_by or 'nothing'}" for graph in now.graphs)
            assert len(set(digests(graphs, plan))) == 1, "ranks plan differently"
            figures = [compute_ms, earlier.exposed_ms, now.exposed_ms, least_ms]
            cells = [f"{make.__name__}, {parameters / 1e9:.1f} B", world, *(f"{ms:.1f}" for ms in figures), held]
            print("|", " | ".join(map(str, cells)), "|", flush=True)


if __name__ == "__main__":
    main()
