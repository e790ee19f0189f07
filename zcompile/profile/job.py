"""What a run of one engine is given."""

from dataclasses import dataclass
from pathlib import Path

from zcompile.profile.engines import file_name

PARENT = "ZCOMPILE_PROFILER_PID"  # the environment variable that says which process starts a worker


@dataclass(frozen=True)
class Job:
    """One run of one engine: the command's options, and from `engine` on what `compare` sets for each run."""

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
    engine: str = ""
    trace: bool = False  # whether this run does, as the first of an engine
    folder: str = ""  # where results, errors and traces go
    cache: str = ""  # a folder for what Inductor compiles, empty at an engine's first run

    def file(self, name: str) -> Path:
        return Path(self.folder) / name

    @property
    def kept_trace(self) -> Path:
        """The file of this engine's trace in the folder of the report."""
        return Path(self.folder).parents[1] / f"{file_name(self.engine)}.trace.json.gz"
