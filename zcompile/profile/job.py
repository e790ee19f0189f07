"""What a run of one engine is given, and what it gives back."""

from dataclasses import dataclass
from pathlib import Path

from zcompile.profile.engines import file_name
from zcompile.profile.memory import Memory
from zcompile.profile.planned_step import PlannedStep
from zcompile.profile.timeline import Parts

PARENT = "ZCOMPILE_PROFILER_PID"  # the environment variable that says which process starts a worker


@dataclass(frozen=True)
class Job:
    """What one run of one engine does. It is the same on all ranks.

    Attributes:
        trace: whether this run traces steps, which the first of an engine does.
        untraced: whether none does.
        folder: where results, errors and traces go.
        cache: a folder for what Inductor compiles, empty at an engine's first run.
    """

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
    untraced: bool
    folder: str
    cache: str
    keep_trace: bool

    def file(self, name: str) -> Path:
        return Path(self.folder) / name

    @property
    def kept_trace(self) -> Path:
        """The file of this engine's trace in the folder of the report."""
        return Path(self.folder).parents[1] / f"{file_name(self.engine)}.trace.json.gz"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on rank 0 during the timed steps.

    Attributes:
        peak_bytes: the most in use at once.
        reserved_bytes: the most that the allocator held; None on a CPU.
        retries: how often the allocator freed its cache to find memory; None on a CPU.
        held_bytes: in use after the last step.
    """

    peak_bytes: int
    reserved_bytes: int | None
    retries: int | None
    held_bytes: int


@dataclass
class Result:
    """What rank 0 measured. Bytes and times are of rank 0, but for times of steps, which are of the slowest rank.

    Attributes:
        peak_bytes, reserved_bytes, retries, held_bytes: see DeviceMemory.
        host_ms: until the host has issued a step to an idle device; None on a CPU.
        wire_bytes: gathered and reduced in a step.
        losses: of each step, means over ranks.
        tokens: of a step, over all ranks.
        plan: of zcompile.
        missing: what could not be measured, and why.
        settings: as in `Engine`.
    """

    step_ms: list[float]
    first_step_s: float
    peak_bytes: int
    reserved_bytes: int | None
    retries: int | None
    held_bytes: int
    host_ms: float | None
    wire_bytes: int | None
    losses: list[float]
    parameters: int
    tokens: int | None
    parts: Parts | None
    memory: Memory | None
    plan: PlannedStep | None
    missing: list[str]
    about: str
    settings: list[str]
    versions: dict[str, str]
