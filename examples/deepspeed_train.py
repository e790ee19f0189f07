"""Train the model of train.py with DeepSpeed ZeRO-3: eager, with its own compiler, or with zcompile.

    torchrun --standalone --nproc-per-node 2 examples/deepspeed_train.py --engine zcompile

`deepspeed examples/deepspeed_train.py` works too; on a machine without GPUs set DS_ACCELERATOR=cpu. A DeepSpeed program
needs two things for zcompile: `import zcompile` below, and the "zcompile" block of ds_config.json. Each run writes
OUT/deepspeed-ENGINE.json and draws all of OUT/*.json into OUT/loss.png.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.distributed as dist
from train import LanguageModel, draw_batch, draw_curves, mean_over_ranks, read_corpus

import zcompile
from zcompile.cli import require

require("examples/deepspeed_train.py", "deepspeed,train", "deepspeed", "matplotlib", "tqdm")
import deepspeed  # noqa: E402
from deepspeed.accelerator import get_accelerator  # noqa: E402
from tqdm import tqdm  # noqa: E402


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--engine", choices=["zcompile", "eager", "deepcompile"], default="zcompile")
    add("--config", type=Path, default=Path(__file__).with_name("ds_config.json"))
    add("--steps", type=int, default=100)
    add("--tokens", type=int, default=128, help="bytes per sequence")
    add("--dim", type=int, default=192)
    add("--layers", type=int, default=4)
    add("--heads", type=int, default=6)
    add("--bf16", action="store_true", help="torch_autocast in the DeepSpeed config")
    add("--seed", type=int, default=0, help="of weights and batches")
    add("--log-every", type=int, default=10, help="steps")
    add("--out", type=Path, default=Path("out"))
    add("--local_rank", type=int, help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    parser.set_defaults(pp=1, tp=1)  # of train.py, whose batches these are
    return parser.parse_args()


def config_for(args: argparse.Namespace) -> dict:
    """The DeepSpeed config, with one engine's switch on."""
    config = json.loads(args.config.read_text())
    zero = config["zero_optimization"]
    zero["zcompile"] = zero.get("zcompile", {}) | {"enabled": args.engine == "zcompile"}
    if args.engine == "deepcompile":
        config["compile"] = {"deepcompile": True}
    if args.bf16:
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    return config


def main() -> None:
    args = arguments()
    deepspeed.init_distributed()
    device = torch.device(get_accelerator().current_device_name())
    torch.manual_seed(args.seed)
    model = LanguageModel(args.dim, args.layers, args.heads, args.tokens)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config_for(args))
    if args.engine == "deepcompile":  # zcompile compiles at the first forward by itself
        engine.compile()
    args.batch = engine.train_micro_batch_size_per_gpu() * dist.get_world_size()
    corpus, _ = read_corpus(8_000_000)

    records, begin, first = [], time.perf_counter(), None
    for step in tqdm(range(1, args.steps + 1), desc=args.engine, disable=dist.get_rank() > 0):
        loss = engine(*draw_batch(corpus, args.seed + step - 1, args, device))
        engine.backward(loss)
        engine.step()
        if step % args.log_every == 0 or step in (1, args.steps):
            records.append({"step": step, "loss": mean_over_ranks(loss.detach())})
        first = first or time.perf_counter()
    speed = (args.steps - 1) * args.batch * args.tokens / (time.perf_counter() - first)

    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        run = {"tokens_per_second": round(speed), "first_step_s": round(first - begin, 1), "records": records}
        (args.out / f"deepspeed-{args.engine}.json").write_text(json.dumps(run, indent=1))
        print(f"training loss    {records[0]['loss']:.4f} -> {records[-1]['loss']:.4f}")
        world, first_s = dist.get_world_size(), first - begin
        print(f"tokens/s         {speed:.0f} on {world} ranks, without the first step ({first_s:.1f} s)")
        if args.engine == "zcompile":
            for dtype, count in zcompile.stats(engine.module)["gathered_bytes"].items():
                print(f"gathered         {count / 1e6:.1f} MB of {dtype}")
        print(f"loss curve       {draw_curves(args.out)}")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
