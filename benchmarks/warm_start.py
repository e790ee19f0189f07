"""First step of a cold process against that of a second process, whose Inductor caches are warm.

Run: OMP_NUM_THREADS=1 python benchmarks/warm_start.py
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time


def rank_main(blocks: int) -> None:
    """One rank: compile, run three steps, and report the seconds of the first and the losses."""
    import torch
    import torch.distributed as dist

    sys.path.insert(0, os.path.join(os.path.dirname(__file__), ".."))
    from tests.support.models import Transformer
    from tests.support.reference import compiled, lm_loss

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = compiled(Transformer(blocks=blocks, width=64), inner="inductor")
    start, seconds, losses = time.perf_counter(), None, []
    for step in range(3):
        loss = lm_loss(model, step, dist.get_rank())
        loss.backward()
        seconds = seconds or time.perf_counter() - start
        losses.append(loss.item())
    if dist.get_rank() == 0:
        print(json.dumps({"seconds": seconds, "losses": losses}))
    dist.destroy_process_group()


def run(cache: str, blocks: int) -> dict:
    """Two ranks with Inductor's caches in `cache`; what rank 0 reports."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--rank", "--blocks", str(blocks)], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    """Run twice with one cache, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank_main(arguments.blocks)
        return
    with tempfile.TemporaryDirectory() as cache:
        cold, warm = (run(cache, arguments.blocks) for _ in range(2))
    ratio = cold["seconds"] / warm["seconds"]
    print(f"first step: cold {cold['seconds']:.1f} s, warm {warm['seconds']:.1f} s: {ratio:.1f} x")
    print(f"losses equal: {cold['losses'] == warm['losses']}")


if __name__ == "__main__":
    main()
