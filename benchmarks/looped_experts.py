"""A loop over experts in eager: zcompile and FSDP2 beside the model alone, on CPUs. On one rank, that is host time.

Run: OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 1 benchmarks/looped_experts.py

A DeepSeek-V3 of `deepseek_v3.py`, so narrow that computing takes no time, in bf16, under each in turns. zcompile once
with the experts of each layer as units, the default, and once with whole layers, which FSDP2 shards.
"""

import statistics
import time

import torch
import torch.distributed as dist
from deepseek_v3 import SIZES, model_of
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import zcompile

STEPS, WARMUP = 20, 4
NARROW = SIZES | {
    **dict.fromkeys(("hidden_size", "intermediate_size"), 32),
    **dict.fromkeys(("moe_intermediate_size", "q_lora_rank", "kv_lora_rank", "v_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 8),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "vocab_size": 64,
}


def make(engine: str) -> nn.Module:
    torch.manual_seed(0)
    model = model_of("eager", NARROW)
    if engine.startswith("zcompile"):
        units = [*model.model.layers] if engine == "zcompile, layers" else None
        return zcompile.shard(model, param_dtype=torch.bfloat16, units=units)
    if engine == "alone":
        return model.bfloat16()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        fully_shard(layer, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def step_ms(model: nn.Module, tokens: torch.Tensor) -> float:
    begin = time.perf_counter()
    model(input_ids=tokens, labels=tokens).loss.backward()
    taken = time.perf_counter() - begin
    model.zero_grad()
    return 1e3 * taken


def main() -> None:
    dist.init_process_group("gloo")
    tokens = torch.randint(NARROW["vocab_size"], (1, 64), generator=torch.Generator().manual_seed(0))
    models = {engine: make(engine) for engine in ("alone", "fsdp2", "zcompile", "zcompile, layers")}
    times: dict[str, list[float]] = {engine: [] for engine in models}
    for _ in range(WARMUP + STEPS):
        for engine, model in models.items():
            times[engine].append(step_ms(model, tokens))
    for engine, taken in times.items() if dist.get_rank() == 0 else ():
        low, median, high = statistics.quantiles(taken[WARMUP:], n=4)
        print(f"{engine:18}{median:6.1f} ms ({low:.1f} to {high:.1f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
