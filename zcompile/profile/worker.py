"""One rank of one engine, in a process of its own: trains, measures, and writes what it found.

Run by `launch.py` with the usual variables of torch.distributed and the path of a `Job` as JSON.
"""

import ctypes
import gzip
import json
import os
import signal
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity
from torch.utils._pytree import tree_map_only

from zcompile.profile.allocations import allocations_of
from zcompile.profile.engines import Engine, Training, file_name, find
from zcompile.profile.lifetimes import ParamLifetimes, lifetimes_of_step
from zcompile.profile.memory import Memory, memory_of_step
from zcompile.profile.models import Workload, load
from zcompile.profile.owned import Walks, name_deepspeed_transfers
from zcompile.profile.plan import Planned, planned
from zcompile.profile.timeline import STEP, Parts, parts_of_step
from zcompile.profile.wire import wire_bytes

TRACED_STEPS = 3
HOST_STEPS = 3
MOST_TRACES = 3  # until one is as fast as steps that are not traced
SLOWER = 1.05  # a trace that took so much longer is of another step
RECORDED_STEPS = 2  # the first is for what was allocated before and is freed in it
PARENT = "ZCOMPILE_PROFILER_PID"  # the variable that says who starts a worker


@dataclass(frozen=True)
class Job:
    """What one run of one engine does; the same on all ranks."""

    engine: str
    device: str
    ranks: int
    model: str
    module: str | None
    sequences: int | None
    tokens: int | None
    checkpointing: bool
    precision: str
    accumulation: int
    warmup: int
    steps: int
    learning_rate: float
    seed: int
    timeout_s: float
    trace: bool
    folder: str  # where results, errors and traces go
    cache: str  # a folder for what Inductor compiles, empty at an engine's first run
    keep_trace: bool
    keep_snapshot: bool

    def file(self, name: str) -> Path:
        return Path(self.folder) / name

    def kept(self, name: str) -> Path:
        """A file of this engine's in the folder of the report."""
        return Path(self.folder).parents[1] / f"{file_name(self.engine)}.{name}"


@dataclass
class Result:
    """What rank 0 measured; bytes and times are of this rank, but those of steps of the slowest one."""

    step_ms: list[float]
    first_step_s: float
    peak_bytes: int
    reserved_bytes: int | None  # by the allocator; None on the CPU, as the next
    retries: int | None
    held_bytes: int  # after the last step
    host_ms: float | None  # until the host has issued a step to an idle device
    wire_bytes: int | None  # a step
    losses: list[float]  # means over ranks, of each step
    parameters: int
    tokens: int | None  # a step, over all ranks
    parts: Parts | None
    memory: Memory | None
    windows: ParamLifetimes | None  # None also if zcompile gathers nothing
    plan: Planned | None  # of zcompile
    missing: list[str]  # what could not be measured, and why
    about: str
    versions: dict[str, str]


class ResidentMemory:
    """Most resident memory of this process while it is entered, sampled: what there is on a CPU."""

    def __init__(self, interval_s: float = 0.005):
        import psutil

        self.process = psutil.Process()
        self.interval_s = interval_s
        self.before = self.now()
        self.peak = 0

    def now(self) -> int:
        return self.process.memory_info().rss

    def __enter__(self) -> "ResidentMemory":
        self.peak, self.done = self.now(), threading.Event()
        self.thread = threading.Thread(target=self._sample, daemon=True)
        self.thread.start()
        return self

    def _sample(self) -> None:
        while not self.done.wait(self.interval_s):
            self.peak = max(self.peak, self.now())

    def __exit__(self, *_: Any) -> None:
        self.done.set()
        self.thread.join()
        self.peak = max(self.peak, self.now())


class Run:
    """Trains with one engine and measures."""

    def __init__(self, job: Job):
        self.job = job
        self.cuda = job.device == "cuda"
        self.memory = None if self.cuda else ResidentMemory()
        torch.manual_seed(job.seed)
        with torch.device(job.device):
            self.workload: Workload = load(job.model, job.module, job.sequences, job.tokens, job.checkpointing)
        self.workload.model.to(job.device)
        self.parameters = sum(parameter.numel() for parameter in self.workload.model.parameters())
        entry, options = find(job.engine)
        training = Training(job.precision, job.learning_rate, job.accumulation)
        self.engine: Engine = entry.make(self.workload.model, training, options)
        self.losses: list[torch.Tensor] = []

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

    def timed(self, count: int) -> list[float]:
        """Times of `count` steps, ms: between events on a GPU, so that the host may run ahead."""
        if not self.cuda:
            times = [time.perf_counter()]
            for _ in range(count):
                self.step()
                times.append(time.perf_counter())
            return [(after - before) * 1e3 for before, after in zip(times, times[1:])]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        events[0].record()
        for event in events[1:]:
            self.step()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) for before, after in zip(events, events[1:])]

    def of_slowest_rank(self, step_ms: list[float]) -> list[float]:
        """The times of the rank whose median is the greatest. Ranks that exchange anything all take that long; where nothing keeps them
        together, as in compute alone, some GPUs are faster."""
        of_ranks: list[list[float] | None] = [None] * self.job.ranks
        dist.all_gather_object(of_ranks, step_ms)
        return max(of_ranks, key=statistics.median)

    def warm_up(self) -> float:
        """Seconds of the first step, in which most engines that compile do so."""
        begin = time.perf_counter()
        self.step()
        self.synchronize()
        first_step_s = time.perf_counter() - begin
        for _ in range(1, self.job.warmup):
            self.step()
        self.synchronize()
        return first_step_s

    def run(self) -> Result:
        """Warm up, time, and only then trace."""
        first_step_s = self.warm_up()
        dist.barrier()
        wire = self.engine.wire_bytes()
        if self.cuda:
            torch.cuda.reset_peak_memory_stats()
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
            step_ms = self.of_slowest_rank(self.timed(self.job.steps))
            extra = self.engine.extra_bytes()
            stats = torch.cuda.memory_stats()
            memory = {
                "peak_bytes": stats["allocated_bytes.all.peak"] + extra,
                "reserved_bytes": stats["reserved_bytes.all.peak"] + extra,
                "retries": stats["num_alloc_retries"] - retries,
                "held_bytes": stats["allocated_bytes.all.current"] + extra,
            }
        else:
            with self.memory as memory:
                step_ms = self.timed(self.job.steps)
            step_ms = self.of_slowest_rank(step_ms)
            memory = {
                "peak_bytes": memory.peak - memory.before,
                "reserved_bytes": None,
                "retries": None,
                "held_bytes": memory.now() - memory.before,
            }
        counted = None if wire is None else (self.engine.wire_bytes() - wire) // self.job.steps
        host_ms = self.host_ms() if self.cuda else None  # before what traces and may slow every launch from then on
        parts = self.parts(statistics.median(step_ms))
        if parts and self.cuda:
            parts = parts.at_speed(statistics.median(step_ms))
        recorded = self.recorded()
        losses = self.mean_losses()
        self.snapshot()
        missing: list[str] = []
        found = self.analysed(recorded, missing) if recorded else (None, None, None)
        tokens = self.workload.tokens and self.workload.tokens * self.job.accumulation * self.job.ranks
        return Result(
            step_ms=step_ms,
            first_step_s=first_step_s,
            host_ms=host_ms,
            wire_bytes=found[2] if counted is None and self.engine.wire_is_traced else counted,
            losses=losses,
            parameters=self.parameters,
            tokens=tokens,
            parts=parts,
            memory=found[0],
            windows=found[1],
            plan=None,
            missing=missing,
            about=f"{self.job.ranks} x {torch.cuda.get_device_name() if self.cuda else 'CPU'}",
            versions={"torch": torch.__version__},
            **memory,
        )

    def host_ms(self) -> float:
        """The median of a few steps, which all ranks begin together."""
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

    def parts(self, timed_ms: float) -> Parts | None:
        """What a step consists of, on rank 0, from the fastest of a few traces: the first that is about as fast as timed steps."""
        if not self.job.trace:
            return None
        found: list[Parts | None] = []
        again = [True]
        while again[0] and len(found) < MOST_TRACES:
            found.append(self.traced())
            again = [self.cuda and found[-1] is not None and found[-1].traced_ms > SLOWER * timed_ms]
            dist.broadcast_object_list(again)
        return min(found, key=lambda parts: parts.traced_ms) if dist.get_rank() == 0 else None

    def traced(self) -> Parts | None:
        """A trace of some steps, on rank 0. All ranks profile, so that none waits for one that does."""
        # Of a GPU, what it does is enough; recording every op slows the host, which then leaves the GPU idle.
        activities = [ProfilerActivity.CUDA if self.cuda else ProfilerActivity.CPU]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(TRACED_STEPS):
                with torch.profiler.record_function(STEP):
                    self.step()
            self.synchronize()
        file = self.job.file(f"trace-{dist.get_rank()}.json")
        profiler.export_chrome_trace(str(file))
        return parts_of_step(json.loads(file.read_text()), TRACED_STEPS) if dist.get_rank() == 0 else None

    def recorded(self) -> tuple[dict, Walks, int | None] | None:
        """On rank 0, a second trace, with allocations and shapes, which would disturb the times of the first; what the engine kept
        meanwhile; and what a GPU's allocator had given out at the most in its last step."""
        if not self.job.trace:
            return None
        if "deepspeed" in sys.modules:
            name_deepspeed_transfers()
        with (
            Walks(self.engine, self.cuda) as walks,
            torch.profiler.profile(profile_memory=True, record_shapes=True) as profiler,
        ):
            for _ in range(RECORDED_STEPS):
                if self.cuda:
                    torch.cuda.reset_peak_memory_stats()
                with torch.profiler.record_function(STEP):
                    self.step()
                walks.again()
            self.synchronize()
        if dist.get_rank() != 0:
            return None
        file = self.job.kept("trace.json.gz") if self.job.keep_trace else self.job.file("recorded.json")
        profiler.export_chrome_trace(str(file))
        with gzip.open(file) if file.suffix == ".gz" else file.open() as opened:
            return json.load(opened), walks, torch.cuda.max_memory_allocated() if self.cuda else None

    def analysed(
        self, recorded: tuple[dict, Walks, int | None], missing: list[str]
    ) -> tuple[Memory | None, ParamLifetimes | None, int | None]:
        """Memory by kind, windows, and bytes on the wire of a step. Traces differ between versions of torch: what cannot be read
        from one is missing, and the rest is told."""
        trace, walks, peak_bytes = recorded
        device = torch.cuda.current_device() if self.cuda else None

        def attempt(what: str, read: Callable[[], Any]) -> Any:
            try:
                return read()
            except Exception as error:
                traceback.print_exc()
                missing.append(f"{what} ({type(error).__name__}: {error})")
                return None

        allocations = attempt("list of allocations", lambda: allocations_of(trace, device))
        wire = attempt("count of bytes on the wire", lambda: wire_bytes(trace, self.job.ranks) // RECORDED_STEPS)
        if allocations is None:
            return None, None, wire
        memory = attempt(
            "memory by kind",
            lambda: memory_of_step(trace, walks, allocations, device, self.engine.extra_bytes(), peak_bytes),
        )
        return memory, attempt("windows", lambda: lifetimes_of_step(trace, allocations)), wire

    def planned(self) -> Planned | None:
        """What zcompile's plan predicts; all ranks trace the model again."""
        explained = self.engine.explain(self.batches()[0]) if self.job.trace else None
        return explained and planned(explained, self.job.accumulation)

    def snapshot(self) -> None:
        """A step's allocations with where they were made, for docs.pytorch.org/memory_viz. All ranks take the step."""
        if not (self.job.trace and self.job.keep_snapshot):
            return
        torch.cuda.memory._record_memory_history()
        self.step()
        self.synchronize()
        if dist.get_rank() == 0:
            torch.cuda.memory._dump_snapshot(str(self.job.kept("snapshot.pickle")))
        torch.cuda.memory._record_memory_history(enabled=None)


def _to(batch: Any, device: str) -> Any:
    """The batch on the device. From pinned memory, so that the host may run ahead."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if device == "cpu" or tensor.is_cuda:
            return tensor.to(device)
        return tensor.pin_memory().to(device, non_blocking=True)

    return tree_map_only(torch.Tensor, move, batch)


def _end_with_parent() -> None:
    """Have the kernel kill this process when the one that started it ends, however that comes (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):  # it ended before
        sys.exit(1)


def _write(result: Result, job: Job) -> None:
    if dist.get_rank() == 0:
        file = job.file("result.json.new")
        file.write_text(json.dumps(asdict(result)))
        file.replace(job.file("result.json"))


def main() -> None:
    """Run the job of `sys.argv[1]`; an error goes to a file beside it, where `launch` looks."""
    _end_with_parent()
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    rank = int(os.environ["RANK"])
    try:
        if job.device == "cuda":
            torch.cuda.set_device(rank)
            dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
        else:
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
            dist.init_process_group("gloo")
        run = Run(job)
        result = run.run()
        _write(result, job)
        result.plan = run.planned()  # last: a rank that fails here, while others wait for it, takes nothing with it
        _write(result, job)
        dist.barrier()
    except BaseException as error:
        traceback.print_exc()
        last = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
        job.file(f"error-{rank}.json").write_text(json.dumps({"time_s": time.time(), "rank": rank, "error": last}))
        os._exit(1)  # not the orderly way, in which other ranks' collectives are waited for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
