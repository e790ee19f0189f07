"""Runs one engine, such as FSDP2: starts its ranks in new processes, and returns rank 0's measurements or an error."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.distributed.elastic.utils.distributed import get_free_port

from zcompile.profile.engines import file_name, find

PARENT = "ZCOMPILE_PROFILER_PID"  # environment variable: process id of the launcher
LOG_LINES = 200  # last lines of a rank's log, which are searched for an error


@dataclass(frozen=True)
class Job:
    """One run of one engine: options of the command line, and from `engine` on, fields that `compare` sets per run."""

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
    untraced: bool  # whether no run traces steps
    keep_trace: bool
    engine: str = ""  # empty in a process that runs `flops.count_step` alone
    trace: bool = False  # whether this run traces steps, as the first run of an engine does
    folder: str = ""  # where results, errors and traces go
    cache: str = ""  # Inductor's cache folder, which has no files at an engine's first run

    def file(self, name: str) -> Path:
        return Path(self.folder) / name

    @property
    def kept_trace(self) -> Path:
        """Path of this engine's trace in the folder of the report."""
        return Path(self.folder).parents[1] / f"{file_name(self.engine)}.trace.json.gz"


class Failed(Exception):
    """The run of an engine gave no measurements. The text has the reason, such as the error line of a rank."""


def run(job: Job) -> dict[str, Any]:
    """Run `job` on new processes, and return the measurements of rank 0, see `worker.Run.run`.

    Raises:
        Failed: a rank crashed or was killed, or rank 0 wrote no measurements within `job.timeout_s`.
    """
    folder = Path(job.folder)
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier comparison
    folder.mkdir(parents=True)
    for lock in _extensions(job).glob("*/lock"):
        lock.unlink()  # of a rank that was killed while it built an extension: other ranks would wait forever
    file = folder / "job.json"
    file.write_text(json.dumps(asdict(job)))
    processes: list[subprocess.Popen[bytes]] = []
    port = get_free_port()
    try:
        for rank in range(job.ranks):
            processes.append(_start(job, file, rank, port))
        _wait(job, processes)
        failed = None
    except Failed as error:
        failed = error
    finally:
        for process in processes:
            _kill(process)
    result = folder / "result.json"
    if not result.exists():
        raise failed or Failed(f"all ranks exited, but rank 0 wrote no result; {_last_words(job, 0)}")
    measured = json.loads(result.read_text())
    if failed:  # failed after the measurement
        measured["missing"].append(f"{'exit without an error' if measured['plan'] else 'plan'} ({failed})")
    return measured


def _start(job: Job, file: Path, rank: int, port: int) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        PARENT: str(os.getpid()),
    }
    environment |= find(job.engine)[0].environment if job.engine else {}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment["TORCHINDUCTOR_CACHE_DIR"] = job.cache  # without code of other engines or earlier comparisons
    environment["TORCH_EXTENSIONS_DIR"] = str(_extensions(job))
    with open(job.file(f"rank-{rank}.log"), "wb") as log:
        command = [sys.executable, "-m", "zcompile.profile.worker", str(file)]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)


def _extensions(job: Job) -> Path:
    """Return the folder where DeepSpeed builds its ops: not the user's, because a killed rank may leave a lock."""
    return Path(job.folder).parent / "extensions"


def _wait(job: Job, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + job.timeout_s
    while any(process.poll() is None for process in processes):
        if any(process.poll() for process in processes):
            time.sleep(1.0)  # other ranks may be about to report the cause
            break
        if time.monotonic() > deadline:
            raise Failed(f"rank 0 gave no result within {job.timeout_s:.0f} s (--timeout); {_last_words(job, 0)}")
        time.sleep(0.05)
    for rank, process in enumerate(processes):
        if process.returncode and process.returncode < 0:  # checked first: errors of other ranks result from it
            raise Failed(
                f"rank {rank} was killed by {signal.Signals(-process.returncode).name} (SIGKILL: perhaps the host "
                f"lacked memory); {_last_words(job, rank)}"
            )
    errors = [json.loads(error.read_text()) for error in Path(job.folder).glob("error-*.json")]
    if errors:
        raise Failed(min(errors, key=lambda error: error["time_s"])["error"])
    for rank, process in enumerate(processes):
        if process.returncode:
            raise Failed(f"rank {rank} ended with exit code {process.returncode}; {_last_words(job, rank)}")


def _last_words(job: Job, rank: int) -> str:
    lines = job.file(f"rank-{rank}.log").read_text(errors="replace").splitlines()[-LOG_LINES:]
    lines = [line.strip() for line in lines if line.strip()]
    errors = [line for line in lines if "Error" in line]
    return f"the last error or line in its rank-{rank}.log: {(errors or lines or ['none'])[-1]}"


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a rank and all processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
