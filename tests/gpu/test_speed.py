"""What a step must not do: wait on the host, put kernels on many streams, delay compute that comes before it."""

import copy
import json
import tempfile
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from tests.support.gpu import compiled_over, make_transformer, needs_two_gpus
from tests.support.models import Chain, batch, loss_of
from tests.support.ranks import on_gpus
from tests.support.reference import lm_loss
from zcompile.profile.timeline import busiest_stream


@on_gpus(2)
def test_no_host_synchronisation_in_forward_and_backward(rank, world):
    model = compiled_over("p2p", make_transformer(), inner="inductor")
    for step in range(3):
        lm_loss(model, step, rank).backward()
    tokens = batch(3, rank).cuda()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profiler:
        torch.cuda.set_sync_debug_mode("error")  # what torch itself would wait for
        try:
            loss_of(model, tokens).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    calls = {event.key for event in profiler.key_averages()}
    assert "zcompile::gather_group_start" in calls and "zcompile::reduce_wait" in calls
    calls -= {"cudaDeviceSynchronize"}
    assert not [name for name in calls if name.startswith("cu") and "Synchronize" in name]
    synchronisations = [event.name for event in profiler.events() if "cudaDeviceSynchronize" in event.name]
    assert len(synchronisations) <= 1  # the profiler's own, when it stops


@needs_two_gpus
@on_gpus(2)
def test_only_one_stream_beside_compute_has_kernels(rank, world):
    """See [Note: one stream beside compute] in csrc."""
    layers = [nn.Linear(2048, 4096, bias=False), nn.RMSNorm(4096), nn.Linear(4096, 2048, bias=False)]
    model = compiled_over("p2p", Chain(*layers, *map(copy.deepcopy, layers)).cuda(), inner="inductor")
    x = torch.randn(4096, 2048, device="cuda")

    def train(steps):
        for _ in range(steps):
            with torch.autocast("cuda", torch.bfloat16):
                model(x).float().square().mean().backward()
            model.zero_grad()
        torch.cuda.synchronize()

    train(3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        train(2)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    device_events = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    compute = busiest_stream(device_events)
    with_kernels = {event["args"]["stream"] for event in device_events if "PtoP" not in event["name"]}
    assert len(with_kernels - {compute}) == 1


def matmul_us(issue_next=None):
    """Median microseconds of a matmul, of 200 in a row, while what `issue_next` issues is pending behind them."""
    factors = torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16)
    product = torch.empty_like(factors)
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(200_000_000)  # 0.1 s, in which the host issues all that follows
        begin.record()
        for _ in range(200):
            torch.mm(factors, factors, out=product)
        end.record()
        if issue_next:
            issue_next()
        torch.cuda.synchronize()
        times.append(1000 * begin.elapsed_time(end) / 200)
    return median(times)


@needs_two_gpus
@on_gpus(2)
def test_a_pending_step_does_not_delay_compute(rank, world):
    """However many streams the process has used before: each round uses one more, which then has a hardware queue."""
    for _ in range(3):
        model = compiled_over("p2p", make_transformer())
        for step in range(3):
            lm_loss(model, step, rank).backward()
        with_pending_step = matmul_us(lambda model=model: lm_loss(model, 3, rank).backward())
        assert with_pending_step < matmul_us() + 0.8  # else it is 1.2 us longer and more
        with torch.cuda.stream(torch.cuda.Stream(priority=-1)):
            torch.zeros(1, device="cuda")
