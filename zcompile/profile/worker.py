"""The process of one rank of one engine, such as FSDP2: trains, measures, and writes the results.

`launch.py` starts it with torch.distributed's environment variables. The argument is the path of a `Job` as JSON.
"""

import ctypes
import gzip
import itertools
import json
import os
import signal
import statistics
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map_only

from zcompile.explanation.planned_step import PlannedStep, step_of
from zcompile.explanation.workloads import Workload, load
from zcompile.profile.engine import Engine, Training
from zcompile.profile.engines import find
from zcompile.profile.flops import count_step
from zcompile.profile.launch import PARENT, Job
from zcompile.profile.resident_memory import ResidentMemory
from zcompile.profile.timeline import STEP, Parts, parts_of_step, wire_bytes

TRACED_STEPS = 3
HOST_STEPS = 3
MOST_TRACES = 3  # taken until one is as fast as untraced steps
SLOWER = 1.05  # a trace whose steps take longer by this factor is repeated
RECORDED_STEPS = 2  # in the trace that may be kept


class Run:
    def __init__(self, job: Job):
        self.job = job
        self.cuda = job.device == "cuda"
        self.resident = None if self.cuda else ResidentMemory()
        torch.manual_seed(job.seed)
        with torch.device(job.device):
            self.workload: Workload = load(job.model, job.module, job.sequences, job.tokens, job.checkpointing)
        self.workload.model.to(job.device)
        self.parameters = sum(parameter.numel() for parameter in self.workload.model.parameters())
        entry, options = find(job.engine)
        training = Training(job.precision, job.learning_rate, job.accumulation)
        self.engine: Engine = entry.make(self.workload.model, training, options)
        self.losses: list[torch.Tensor] = []

    def run(self) -> dict[str, Any]:
        """Run warm-up steps, timed steps, and then traced steps.

        Returns:
            The engine's entry of `results.json`, without its plan. Rank 0 writes it. Step times are the slowest rank's,
            losses are means over ranks, and other values are this rank's. A value is None if it was not measured.
        """
        first_step_s = self.warm_up()
        dist.barrier()
        wire_before = self.engine.wire_bytes()
        step_ms, peak_bytes = self.timed_with_memory()
        wire_after = self.engine.wire_bytes()
        measured: dict[str, Any] = {
            "step_ms": step_ms,
            "first_step_s": first_step_s,
            "peak_bytes": peak_bytes,
            "pinned_bytes": pinned_bytes() if self.cuda else 0,  # of host memory, at the peak
            "host_ms": self.host_ms() if self.cuda else None,  # before tracing, which may slow every later launch
            "wire_bytes": None,  # gathered and reduced in a step
            "losses": self.mean_losses(),
            "parameters": self.parameters,
            "tokens": self.workload.tokens and self.workload.tokens * self.job.accumulation * self.job.ranks,
            "parts": None,
            "plan": None,
            "missing": [],  # measurements that failed, and why
            "about": f"{self.job.ranks} x {torch.cuda.get_device_name() if self.cuda else 'CPU'}",
            "settings": self.engine.ran_with(),
            "versions": {"torch": torch.__version__},
        }
        if self.job.trace:
            measured["parts"] = self.parts(statistics.median(step_ms))
            self.record(measured)
        if wire_before is not None and wire_after is not None:
            measured["wire_bytes"] = (wire_after - wire_before) // self.job.steps
        return measured

    def batches(self) -> list[Any]:
        first = len(self.losses) * self.job.accumulation
        steps = range(first, first + self.job.accumulation)
        batches = [self.workload.batch(step, dist.get_rank()) for step in steps]
        return [_to(batch, self.job.device) for batch in batches]

    def step(self) -> None:
        self.losses.append(self.engine.step(self.batches()))

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def warm_up(self) -> float:
        """Run the warm-up steps. Return the time of the first one, in which most engines compile, in seconds."""
        begin = time.perf_counter()
        self.step()
        self.synchronize()
        first_step_s = time.perf_counter() - begin
        for _ in range(1, self.job.warmup):
            self.step()
        self.synchronize()
        return first_step_s

    def timed_with_memory(self) -> tuple[list[float], int]:
        """Return the slowest rank's times of the timed steps, ms, and this rank's peak memory during them, bytes."""
        if self.resident is not None:
            with self.resident as resident:
                step_ms = self.timed(self.job.steps)
            return self.of_slowest_rank(step_ms), resident.peak_bytes
        torch.cuda.reset_peak_memory_stats()
        step_ms = self.of_slowest_rank(self.timed(self.job.steps))
        return step_ms, torch.cuda.max_memory_allocated() + self.engine.extra_bytes()

    def timed(self, count: int) -> list[float]:
        """Run `count` steps and return their times, ms. On a GPU, CUDA events measure them: the host may run ahead."""
        if not self.cuda:
            times = [time.perf_counter()]
            for _ in range(count):
                self.step()
                times.append(time.perf_counter())
            return [(after - before) * 1e3 for before, after in itertools.pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in itertools.pairwise(events)]

    def of_slowest_rank(self, step_ms: list[float]) -> list[float]:
        """Return the step times of the rank with the largest median step time.

        If ranks communicate, all have about the same step time. In the engine "limit", which does not communicate, some
        GPUs are faster than others.
        """
        of_ranks: list[list[float]] = [[]] * self.job.ranks
        dist.all_gather_object(of_ranks, step_ms)
        return max(of_ranks, key=statistics.median)

    def host_ms(self) -> float:
        """Return how long the host takes to launch a step, ms: the median of steps that all ranks begin together."""
        issued_ms: list[float] = []
        for _ in range(HOST_STEPS):
            batches = self.batches()
            dist.barrier()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            self.losses.append(self.engine.step(batches))
            issued_ms.append((time.perf_counter() - begin) * 1e3)
        torch.cuda.synchronize()
        return statistics.median(issued_ms)

    def mean_losses(self) -> list[float]:
        losses = torch.stack(self.losses[: self.job.warmup + self.job.steps]).float()
        dist.all_reduce(losses)
        return (losses / self.job.ranks).tolist()

    def parts(self, timed_ms: float) -> Parts:
        """Return the parts of a step, such as compute, from the fastest of a few traces.

        On GPUs, steps are traced up to MOST_TRACES times, until rank 0's are about as fast as untraced (`timed_ms`).
        """
        traces: list[Parts] = []
        again = [True]
        while again[0] and len(traces) < MOST_TRACES:
            traces.append(self.traced())
            again = [self.cuda and traces[-1].traced_ms > SLOWER * timed_ms]
            dist.broadcast_object_list(again)
        fastest = min(traces, key=lambda parts: parts.traced_ms)
        return fastest.at_speed(timed_ms) if self.cuda else fastest

    def traced(self) -> Parts:
        """Trace steps and return their parts. All ranks trace, because a rank without tracing would wait for others."""
        # Events of the GPU are enough. Recording every op as well would slow the host, and the GPU would idle.
        activities = [ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(TRACED_STEPS):
                with torch.profiler.record_function(STEP):
                    self.step()
            self.synchronize()
        file = self.job.file(f"trace-{dist.get_rank()}.json")
        profiler.export_chrome_trace(str(file))
        return parts_of_step(json.loads(file.read_text()), TRACED_STEPS)

    def record(self, measured: dict[str, Any]) -> None:
        """Add the transferred bytes per step to `measured` on rank 0. Keep the trace if `job.keep_trace` is True.

        The bytes come from a second trace, because recording shapes would slow the steps of the first. If the bytes
        cannot be read, because another version of torch wrote the trace, `missing` gets the reason.
        """
        with torch.profiler.profile(record_shapes=True) as profiler:
            for _ in range(RECORDED_STEPS):
                with torch.profiler.record_function(STEP):
                    self.step()
            self.synchronize()
        if dist.get_rank() != 0:
            return
        file = self.job.kept_trace if self.job.keep_trace else self.job.file("recorded.json")
        profiler.export_chrome_trace(str(file))
        if not self.engine.wire_is_traced:
            return
        with gzip.open(file) if file.suffix == ".gz" else file.open() as opened:
            trace = json.load(opened)
        try:
            measured["wire_bytes"] = wire_bytes(trace, self.job.ranks) // RECORDED_STEPS
        except Exception as error:
            traceback.print_exc()
            measured["missing"].append(f"count of bytes on the wire ({type(error).__name__}: {error})")

    def planned(self) -> PlannedStep | None:
        """Return the predicted step; None without `job.trace`, with offload, or for other engines. Collective."""
        explained = self.engine.explain(self.batches()[0]) if self.job.trace else None
        return step_of(explained, self.job.accumulation) if explained else None


def pinned_bytes() -> int:
    """Return the most bytes of pinned host memory that torch has held in this process. Torch rounds sizes up."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


def _to(batch: Any, device: str) -> Any:
    """Move a batch to the device, from pinned memory so that the host need not wait for the copy."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device == "cpu" or tensor.is_cuda:
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)

    return tree_map_only(torch.Tensor, move, batch)


def _end_with_parent() -> None:
    """Let the Linux kernel kill this process when the launcher, its parent, ends for any reason."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it has ended already
        sys.exit(1)


def _write(measured: dict[str, Any], job: Job) -> None:
    if dist.get_rank() == 0:
        file = job.file("result.json.new")
        file.write_text(json.dumps(measured, default=asdict))
        file.replace(job.file("result.json"))


def main() -> None:
    """Run the job in the file `sys.argv[1]`. Write an error to a file in the job's folder, which launch.py reads."""
    _end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    try:
        if not job.engine:
            job.file("result.json").write_text(json.dumps(count_step(job)))
            return
        if job.device == "cuda":
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        else:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            dist.init_process_group("gloo")
        run = Run(job)
        measured = run.run()
        _write(measured, job)
        measured["plan"] = run.planned()  # last: if a rank fails here, the measurements are already written
        _write(measured, job)
        dist.barrier()
    except BaseException as error:
        traceback.print_exc()
        last = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        job.file(f"error-{rank}.json").write_text(json.dumps({"time_s": time.time(), "rank": rank, "error": last}))
        os._exit(1)  # an orderly exit would wait for collectives of other ranks
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
