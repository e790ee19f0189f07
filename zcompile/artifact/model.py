"""`zcompile.compile`: a model runs the code in a file, and what its ranks decide together at the first call.

[Note: decided together]
Ranks that run different code may start different collectives. So no rank decides alone. At the first call, each looks
at the file and says what it found: the file fits, it is not there, or why it does not fit. All ranks gather that.

- All have the same file, and it fits: each loads its own.
- Some have it, and it is not there for the others (no shared folder): one rank sends it to them.
- Nobody has it: rank 0 compiles and sends, and all load what it sent. It writes the file.
- Nobody has it, and rank 0 finds graph breaks: every rank compiles. At the second call, when forward and backward ran
  once, rank 0 writes what it compiled; see caches.py.
- Anything else: one warning that says why, and every rank compiles for itself, as `model.compile` does.

Loading may fail on one rank, so ranks gather once more how it went. Files travel by broadcasts in the groups of the
mesh.
"""

import functools
import hashlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.artifact import aot, caches
from zcompile.artifact.file_format import Artifact, ArtifactError, decode, read, write
from zcompile.artifact.fingerprint import differences, fingerprint
from zcompile.artifact.program import GraphBreaks, Program, make
from zcompile.compiler.backend import compile_graph, parse_options, prepare
from zcompile.options import Settings
from zcompile.ranks.process_groups import all_gather_over_mesh
from zcompile.state.sharded_model import models_of, state_of

log = logging.getLogger("zcompile")

FITS, ABSENT = "fits", "absent"  # what a rank may have found; anything else is a reason why the file does not fit


def compile(
    model: nn.Module,
    artifact: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    require: bool = False,
    sha256: str | None = None,
    mode: str | None = None,
) -> nn.Module:
    """Compile `model` in place, as `model.compile(backend="zcompile")` does, but take the code from a file.

    The first call of `model` loads the file: no tracing, no compiler. Where the file is not there, rank 0 compiles, all
    ranks load what it made, and it writes the file. Where the file was made for something else, a warning names what
    differs, and every rank compiles. What the first call is, the file is for: its input shapes, training or not,
    autocast. Another call later (another length, say) compiles, with a warning.

    A file is a program: load only what you would run. See [Note: a file is a program] in file_format.py.

    A model with graph breaks is traced by every rank. Its file has what comes after that, and does not serve `require`.

    Args:
        model: a sharded model, of whose parts none is compiled.
        artifact: the path of the file. Ranks may have copies of one file; at most one needs it.
        options: see `zcompile.options.Settings`.
        require: whether it is an error if the file cannot be used, instead of a compile.
        sha256: what the file must have, hexadecimal; it is checked before anything is unpickled. Implies `require`.
        mode: an Inductor mode, such as "max-autotune-no-cudagraphs".

    Returns:
        `model`.

    Raises:
        RuntimeError: `model` is not sharded. At the first call, with `require`: why the file cannot be used.
        ValueError: an option that is unknown or wrong, or a torch that cannot save compiled models.
    """
    settings = parse_options(options)
    install(model, Path(artifact), settings, mode, require or sha256 is not None, sha256)
    return model


def install(
    model: nn.Module,
    path: Path,
    settings: Settings,
    mode: str | None,
    require: bool = False,
    sha256: str | None = None,
    around_make: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """Let `model` take its code from `path` from its next call on; see `compile`.

    Args:
        around_make: makes a context in which the file is made, if it is.
    """
    state_of(model)
    check_artifact(settings)
    model._compiled_call_impl = FromFile(model, path, settings, mode, require, sha256, around_make)


def check_artifact(settings: Settings) -> None:
    """Refuse settings, or a torch, with which no file can be made.

    Raises:
        ValueError: says what is missing.
    """
    if reason := aot.lacking():
        raise ValueError(f"zcompile: an artifact is not possible here: {reason}. Leave 'artifact' out.")
    if settings.inner != "inductor":
        raise ValueError(f"zcompile: an artifact needs the option inner='inductor', not {settings.inner!r}.")


@dataclass(frozen=True)
class _Report:
    """What one rank found.

    Attributes:
        verdict: FITS, ABSENT, or why the file does not fit.
        file: the SHA-256 of the file, "" if there is none.
        here: the SHA-256 of the rank's own fingerprint.
    """

    rank: int
    verdict: str
    file: str
    here: str


class FromFile:
    """What a model has as its compiled call: the code of a file, or what was compiled because no file fits.

    It refers to the model weakly: the model holds it.
    """

    def __init__(
        self,
        model: nn.Module,
        path: Path,
        settings: Settings,
        mode: str | None,
        require: bool,
        sha256: str | None,
        around_make: Callable[[], AbstractContextManager[None]],
    ):
        self.model = weakref.ref(model)
        self.path, self.settings, self.mode = path, settings, mode
        self.require, self.sha256, self.around_make = require, sha256, around_make
        self.decided = False
        self.program: Program | None = None
        self.to_keep: dict[str, str] | None = None  # the fingerprint of what this rank will write at the next call
        self.warned = False
        backend = functools.partial(compile_graph, options=vars(settings), mode=mode)
        self.compiled: Callable[..., Any] = torch.compile(nn.Module._call_impl, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        assert model is not None
        if not aot.runs_compiled_code():
            return self.compiled(model, *args, **kwargs)  # which runs the model in eager
        if self.to_keep is not None:
            self.keep(model, self.to_keep)
            self.to_keep = None
        if not self.decided:
            self.decide(model, args, kwargs)
            self.decided = True
        if self.program is None:
            return self.compiled(model, *args, **kwargs)
        if reason := self.program.changed(model, args, kwargs):
            self.refuse(model, reason)
            return self.compiled(model, *args, **kwargs)
        return self.program(model, args, kwargs)

    def refuse(self, model: nn.Module, reason: str) -> None:
        """A call that the code of the file is not for.

        Raises:
            RuntimeError: the file is required.
        """
        text = f"zcompile: {self.path} does not serve a call on rank {dist.get_rank()}: {reason}"
        if self.require:
            raise RuntimeError(text)
        if not self.warned:
            warnings.warn(f"{text}. Such calls are compiled by this process.", stacklevel=2)
            self.warned = True

    def decide(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Load the file, or make it, or give it up; all ranks together. See [Note: decided together].

        Raises:
            RuntimeError: the file is required, and a rank cannot use it.
        """
        state = state_of(model)
        here: dict[str, str] = {}
        try:
            here = fingerprint(model, self.settings, self.mode, state.machine.memory_bytes, args, kwargs)
            data, mine = self.examine(model, here, args, kwargs)
        except Exception as error:  # of this rank alone, perhaps: others wait for what it says
            data, mine = b"", _Report(dist.get_rank(), f"{type(error).__name__}: {error}", "", "")
        reports = all_gather_over_mesh(state.mesh, mine)
        reason, how = _obstacle(reports, here, state.mesh, self.require), f"loaded from {self.path}"
        owners = [i for i, report in enumerate(reports) if report.verdict == FITS]
        if not reason and not owners:
            how = f"loaded: rank {reports[0].rank} compiled it, because {self.path} was not there"
            data, reason, has_breaks = self.make_on_first(model, args, kwargs)
            if has_breaks:
                self.compile_and_keep(model, here)
                return
        elif not reason and len(owners) < len(reports):
            data = broadcast_over_mesh(state.mesh, data, owners[0])
        if not reason:
            reason = self.load(model, data, args, kwargs)
        if reason:
            self.give_up(model, reason)
            return
        if self.program is None:
            how = f"traced by this process, which has graph breaks; compiled code from {self.path}"
        else:
            prepare(state, self.settings)
        for each in models_of(state):
            each.provenance.compiled = how
        log.info("zcompile: compiled code: %s", how)

    def compile_and_keep(self, model: nn.Module, here: dict[str, str]) -> None:
        """Compile on all ranks, and write on the first one, at its next call, what it compiled."""
        state = state_of(model)
        if not any(state.mesh.get_coordinate() or ()):
            self.to_keep = here
        for each in models_of(state):
            each.provenance.compiled = (
                f"compiled by this process: graph breaks. {self.path} gets the code at the second call"
            )

    def keep(self, model: nn.Module, fields: Mapping[str, str]) -> None:
        """Write what this rank compiled of a model with graph breaks, whose fingerprint is `fields`."""
        try:
            data = caches.keep(fields, state_of(model).machine.memory_bytes)
        except ArtifactError as error:
            warnings.warn(str(error), stacklevel=3)
        else:
            self.write(data)

    def give_up(self, model: nn.Module, reason: str) -> None:
        """Compile on all ranks, which do this together.

        Raises:
            RuntimeError: the file is required.
        """
        self.program = None
        if self.require:
            raise RuntimeError(f"zcompile: {self.path} is required and cannot be used. {reason}")
        state = state_of(model)
        for each in models_of(state):
            each.provenance.compiled = f"compiled by this process: {reason}"
        if not any(state.mesh.get_coordinate() or ()):
            warnings.warn(f"zcompile: {self.path} is not used, and every rank compiles. {reason}", stacklevel=2)

    def examine(self, model: nn.Module, here: Mapping[str, str], args: Any, kwargs: Any) -> tuple[bytes, _Report]:
        """The file, and what this rank, whose fingerprint is `here`, found."""
        state, rank = state_of(model), dist.get_rank()
        digest = hashlib.sha256(json.dumps(here).encode()).hexdigest()
        try:
            data = read(self.path, self.sha256)
            artifact = decode(data, str(self.path))
        except FileNotFoundError:
            return b"", _Report(rank, ABSENT, "", digest)
        except ArtifactError as error:
            return b"", _Report(rank, str(error), "", digest)
        memory_bytes = int(artifact.facts["memory_bytes"])
        differing = differences(
            artifact.fingerprint, fingerprint(model, self.settings, self.mode, memory_bytes, args, kwargs)
        )
        if self.settings.gather_budget_bytes is None and memory_bytes > state.machine.memory_bytes:
            differing.append(
                f"memory: made for ranks that have {memory_bytes} bytes; here {state.machine.memory_bytes}"
            )
        verdict = f"It was made for something else: {'; '.join(differing)}." if differing else FITS
        return data, _Report(rank, verdict, artifact.sha256, digest)

    def make_on_first(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[bytes, str, bool]:
        """What the first rank compiles, on all ranks; it also writes the file. Or why it could not be made.

        Returns:
            The file; why there is none; and whether that is because of graph breaks.
        """
        mesh, data, reason, has_breaks = state_of(model).mesh, b"", "", False
        if not any(mesh.get_coordinate() or ()):
            try:
                with self.around_make():
                    data = make(model, self.settings, self.mode, args, kwargs)
            except Exception as error:
                log.info("zcompile: %s could not be made", self.path, exc_info=True)
                reason = f"Rank {dist.get_rank()} could not make it: {_first_line(error)}"
                has_breaks = isinstance(error, GraphBreaks)
            else:
                self.write(data)
        made: tuple[bytes, str, bool] = broadcast_over_mesh(mesh, (data, reason, has_breaks), 0)
        return made

    def write(self, data: bytes) -> None:
        """Write the file; that it cannot be written is a warning, because all ranks have what is in it."""
        try:
            write(self.path, data)
        except OSError as error:
            warnings.warn(f"zcompile: {self.path} could not be written: {error}", stacklevel=2)

    def load(self, model: nn.Module, data: bytes, args: Any, kwargs: Any) -> str:
        """Load on all ranks, which do this together. Why one of them could not, with its number; empty if all did."""
        reason = ""
        try:
            artifact = decode(data, str(self.path))
            if caches.PART in artifact.parts:
                reason = self.load_caches(artifact)
            else:
                self.program = Program(artifact, model, str(self.path))
                reason = self.program.changed(model, args, kwargs)
        except Exception as error:
            log.info("zcompile: %s could not be loaded", self.path, exc_info=True)
            reason = _first_line(error)
        reasons = all_gather_over_mesh(state_of(model).mesh, (dist.get_rank(), reason))
        return next((f"Rank {rank} could not load it: {reason}" for rank, reason in reasons if reason), "")

    def load_caches(self, artifact: Artifact) -> str:
        """Load what torch compiled of a model with graph breaks. Why not, or an empty string."""
        if self.require:
            return "the model has graph breaks, so this rank traces it, and might compile"
        caches.load(artifact)
        return ""


def _obstacle(reports: list[_Report], here: Mapping[str, str], mesh: DeviceMesh, require: bool) -> str:
    """Why the ranks can neither load the file that some of them have nor make one; empty if they can.

    Args:
        here: the fingerprint of this rank. If the ranks' differ, all of them gather them.
    """
    for report in reports:
        if report.verdict not in (FITS, ABSENT):
            return f"Rank {report.rank}: {report.verdict}"
    fitting = [report for report in reports if report.verdict == FITS]
    if require and not fitting:
        return f"Rank {reports[0].rank}: there is no such file."
    for report in fitting:
        if report.file != fitting[0].file:
            return f"Ranks {fitting[0].rank} and {report.rank} have different files of this name."
    if all(report.here == reports[0].here for report in reports):
        return ""
    fields = all_gather_over_mesh(mesh, dict(here))
    other = next(i for i, each in enumerate(fields) if each != fields[0])
    differing = "; ".join(differences(fields[0], fields[other]))
    return f"Ranks {reports[0].rank} and {reports[other].rank} differ: {differing}."


def broadcast_over_mesh(mesh: DeviceMesh, value: Any, source: int) -> Any:
    """The value of one rank on all ranks of the mesh.

    Args:
        source: its place in the mesh, as in `all_gather_over_mesh`.
    """
    place = torch.unravel_index(torch.tensor(source), mesh.mesh.shape)
    for dimension in reversed(range(mesh.ndim)):
        values = [value]
        dist.broadcast_object_list(values, group=mesh.get_group(dimension), group_src=int(place[dimension]))
        value = values[0]
    return value


def _first_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
