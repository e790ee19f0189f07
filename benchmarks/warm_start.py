"""First step of a process: with cold caches, with warm caches, and from a file that `zcompile.compile` made.

Run: python benchmarks/warm_start.py --blocks 8

Rank 0's figures, of processes on which nothing was compiled before: wall and CPU seconds of the first forward and
backward, compilers that it started included, and what torch says of where they went. "probes off" is with
TORCHINDUCTOR_VEC_ISA_OK=1: a process then does not try which instructions the processor has. Caches that were filled
without it are not hit with it.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PARTS = {"Dynamo": "_compile.compile_inner", "of that AOTAutograd, Inductor": "OutputGraph.call_user_compiler"}


def cpu_s() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def rank_main(blocks: int, file: str, by_blocks: bool) -> None:
    """One rank: compile or load, run three steps, and report the first one's seconds and all losses."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    import zcompile
    from tests.support.models import Transformer
    from tests.support.reference import lm_loss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = zcompile.shard(Transformer(blocks=blocks, width=64))
    if file:
        zcompile.compile(model, artifact=file, blocks=model.blocks if by_blocks else ())
    for each in () if file else model.blocks if by_blocks else [model]:
        each.compile(backend="zcompile", fullgraph=True)
    dist.barrier()
    losses, begin, begin_cpu = [], time.perf_counter(), cpu_s()
    for step in range(3):
        loss = lm_loss(model, step, dist.get_rank())
        loss.backward()
        losses.append(loss.item())
        if step == 0:
            wall, cpu = time.perf_counter() - begin, cpu_s() - begin_cpu
    if dist.get_rank() == 0:
        times = torch._dynamo.utils.compilation_time_metrics
        parts = {name: sum(times.get(key, [])) for name, key in PARTS.items()}
        how = zcompile.stats(model)["compiled"]
        print(json.dumps({"wall": wall, "cpu": cpu, "losses": losses, "parts": parts, "how": how}))
    dist.destroy_process_group()


def run(cache: str, blocks: int, ranks: int, by_blocks: bool, file: str = "", probes: bool = True) -> dict:
    """Ranks with Inductor's caches in `cache`; what rank 0 reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), __file__]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    environment.pop("TORCHINDUCTOR_VEC_ISA_OK", None)
    if not probes:
        environment["TORCHINDUCTOR_VEC_ISA_OK"] = "1"
    arguments = ["--rank", "--blocks", str(blocks), "--file", file, *(["--by-blocks"] if by_blocks else ())]
    done = subprocess.run([*command, *arguments], env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Start processes in each way, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--by-blocks", action="store_true", help="compile one block after the other")
    parser.add_argument("--probes-off", action="store_true", help="measure that, too")
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--file", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.blocks, arguments.file, arguments.by_blocks)
        return
    size = arguments.blocks, arguments.ranks, arguments.by_blocks
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/model.zc"
        results = {
            "cold": run(f"{folder}/cache", *size),
            "warm": run(f"{folder}/cache", *size),
            "cold, making the file": run(f"{folder}/other", *size, file=file),
            "from the file": run(f"{folder}/empty", *size, file=file),
        }
        for name in ("cold, probes off", "warm, probes off") if arguments.probes_off else ():
            results[name] = run(f"{folder}/quiet", *size, probes=False)
        megabytes = Path(file).stat().st_size / 1e6
    print(f"{arguments.blocks} blocks, {arguments.ranks} ranks; a file of {megabytes:.1f} MB")
    for name, result in results.items():
        parts = ", ".join(f"{part} {seconds:.2f} s" for part, seconds in result["parts"].items())
        print(f"{name:22} wall {result['wall']:6.2f} s, CPU {result['cpu']:6.2f} s ({parts}); {result['how'][:40]}")
    for other in ("warm", "cold"):
        print(
            f"from the file: {results['from the file']['cpu'] / results[other]['cpu']:.3f} of the CPU time of {other}"
        )
    print(f"making: {results['cold, making the file']['cpu'] / results['cold']['cpu']:.2f} of the CPU time of cold")
    print(f"losses equal: {all(result['losses'] == results['cold']['losses'] for result in results.values())}")


if __name__ == "__main__":
    main()
