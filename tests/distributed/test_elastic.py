"""A job under torchrun that loses a host goes on from its last checkpoint with fewer ranks: examples/elastic.py."""

import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import slow
from tests.support.reference import finish_step
from tests.support.time_limits import scaled

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/elastic.py"
ANEW = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see examples/elastic.py
STEPS, LOST_AT = 8, 6  # a checkpoint after every second step

# Runs the example. On the host that is lost, all processes end while they write the checkpoint of step LOST_AT.
PROGRAM = f"""
import os, runpy, signal, sys
import torch.distributed.checkpoint as dcp

def save(*args, checkpoint_id, save=dcp.save, **how):
    if "LOST" in os.environ and checkpoint_id.name == "step-{LOST_AT}":
        for process in (os.getppid(), os.getpid()):
            os.kill(process, signal.SIGKILL)
    return save(*args, checkpoint_id=checkpoint_id, **how)

dcp.save = save
runpy.run_path({str(EXAMPLE)!r}, run_name="__main__")
"""


def start_host(program, port, out, log, **environment):
    rendezvous = {"last_call_timeout": round(scaled(8)), "keep_alive_interval": 1, "keep_alive_max_attempt": 3}
    rendezvous["is_host"] = str("LOST" not in environment).lower()
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc-per-node", "2"]
    command += ["--max-restarts", "3", "--monitor-interval", "0.1", "--rdzv-backend", "c10d", "--rdzv-id", "job"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{port}"]
    command += ["--rdzv-conf", ",".join(f"{name}={value}" for name, value in rendezvous.items())]
    command += [program, "--out", out, "--steps", STEPS, "--checkpoint-every", 2]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ANEW} | environment
    return subprocess.Popen(list(map(str, command)), env=environment, stdout=log, stderr=subprocess.STDOUT)


def losses_without_ranks():
    """Of each step, of the example's model unsharded."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    model = example["NextByte"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        loss = model(example["global_batch"](step))
        finish_step(optimizer, loss)
        yield loss.item()


@slow
def test_a_job_that_loses_a_host_goes_on_from_a_checkpoint_with_fewer_ranks(tmp_path):
    """The checkpoint that it was lost in is not whole, so the steps after the one before it run again."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, log = tmp_path / "program.py", tmp_path / "log"
    program.write_text(PROGRAM)
    with log.open("w") as written:
        first = start_host(program, port, tmp_path / "out", written)
        lost = start_host(program, port, tmp_path / "out", written, LOST="1")
        try:
            assert first.wait(scaled(240)) == 0, log.read_text()
            assert lost.wait(scaled(10)) == -9
        finally:
            for process in (first, lost):
                process.kill()
                process.wait()
    told = re.findall(r"step (\d+), (\d+) ranks: loss (\S+)", log.read_text())
    expected = [(step, 4) for step in range(1, LOST_AT + 1)] + [(step, 2) for step in range(LOST_AT - 1, STEPS + 1)]
    assert [(int(step), int(ranks)) for step, ranks, _ in told] == expected
    unsharded = list(losses_without_ranks())
    losses = [unsharded[step - 1] for step, _ in expected]
    assert [float(loss) for _, _, loss in told] == pytest.approx(losses, rel=1e-5)
