"""Ctrl-C while a rank waits for another: every program ends with KeyboardInterrupt, within two seconds."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.chaos import context
from tests.support.time_limits import scaled


def rank_main(rank, store, place, compiled, pipe):
    """Rank 0 waits in a gather or reduce of `place`, rank 1 in a barrier of torch's."""
    os.dup2(os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    model = zcompile.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    if compiled:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
    loss = model(torch.ones(2, 8)).sum()
    if place == "forward":
        loss.backward()
    pipe.send("comes to the wait")
    if rank == 1:
        dist.barrier()
    elif place == "forward":
        model(torch.ones(2, 8))
    else:
        loss.backward()


@pytest.mark.parametrize(
    "place, compiled",
    [
        ("forward", False),
        ("backward", True),
        pytest.param("forward", True, marks=pytest.mark.slow),
        pytest.param("backward", False, marks=pytest.mark.slow),
    ],
)
def test_ctrl_c_ends_ranks_that_wait_for_each_other(tmp_path, place, compiled):
    ours, theirs = zip(*(context().Pipe() for _ in range(2)), strict=True)
    args = [(rank, tmp_path / "store", place, compiled, theirs[rank]) for rank in range(2)]
    processes = [context().Process(target=rank_main, args=each) for each in args]
    for process in processes:
        process.start()
    try:
        for pipe in ours:
            assert pipe.poll(scaled(60)) and pipe.recv()
        time.sleep(scaled(0.5))
        begin = time.monotonic()
        for process in processes:
            os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(scaled(10))
        assert time.monotonic() - begin < scaled(2)
        texts = [(tmp_path / f"store.{rank}").read_text() for rank in range(2)]
        assert [text.splitlines()[-1] for text in texts] == ["KeyboardInterrupt"] * 2, texts
    finally:
        for process in processes:
            process.kill()
            process.join()
