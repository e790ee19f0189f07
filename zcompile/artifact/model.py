"""`zcompile.compile`: a model runs the code in a file, and what its ranks decide together at the first call.

[Note: decided together]
Ranks that run different code may start different collectives. So no rank decides alone. At the first call, each looks
at the file and says what it found: the file fits, it is not there, or why it does not fit. All ranks gather that.

- All have the same file, and it fits: each loads its own.
- Some have it, and it is not there for the others (no shared folder): one rank sends it to them.
- No rank has it: rank 0 compiles and sends, and all load what it sent. It writes the file. Under tensor parallelism,
  the first rank of each position compiles.
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

from zcompile.artifact import aot
from zcompile.artifact.file_format import Artifact, ArtifactError, decode, read
from zcompile.artifact.fingerprint import NUMBER, differences, fingerprint, of_call, surroundings
from zcompile.artifact.groups import makers_of, span_of
from zcompile.artifact.program import Program, find, first_line, make, merge
from zcompile.compiler.backend import compile_graph, parse_options, prepare
from zcompile.compiler.inductor import wants_cuda_graphs
from zcompile.options import Settings
from zcompile.ranks.process_groups import all_gather_over_mesh
from zcompile.state.sharded_model import models_of, state_of
from zcompile.whole_files import write

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

    A model with graph breaks has no file: every rank compiles.

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
    model._compiled_call_impl = FromFile(model, Path(artifact), settings, mode, require or sha256 is not None, sha256)
    return model


def check_artifact(settings: Settings, mode: str | None = None) -> None:
    """Refuse settings, or a torch, with which no file can be made."""
    if reason := aot.lacking():
        raise ValueError(f"zcompile: an artifact is not possible here: {reason}. Leave 'artifact' out.")
    if settings.inner != "inductor":
        raise ValueError(f"zcompile: an artifact needs the option inner='inductor', not {settings.inner!r}.")
    if settings.cuda_graphs or wants_cuda_graphs(settings.inductor, mode):
        raise ValueError("zcompile: an artifact holds no CUDA graphs: leave 'cuda_graphs', or the mode that asks, out.")


@dataclass(frozen=True)
class _Report:
    """What one rank found."""

    rank: int
    verdict: str  # FITS, ABSENT, or why the file does not fit
    file: str  # the SHA-256 of the file
    here: str  # the SHA-256 of the rank's own fingerprint


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
        require: bool = False,
        sha256: str | None = None,
        around_make: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        """See `compile`. `around_make` makes a context in which the file is made, if it is."""
        state_of(model)
        check_artifact(settings, mode)
        self.model = weakref.ref(model)
        self.path, self.settings, self.mode = path, settings, mode
        self.require, self.sha256, self.around_make = require, sha256, around_make
        self.decided = False
        self.program: Program | None = None
        self.warned = False
        backend = functools.partial(compile_graph, options=vars(settings), mode=mode)
        self.compiled: Callable[..., Any] = torch.compile(nn.Module._call_impl, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        assert model is not None
        if not aot.runs_compiled_code():
            return self.compiled(model, *args, **kwargs)  # which runs the model in eager
        if not self.decided:
            self.decide(model, args, kwargs)
            self.decided = True
        if self.program is None:
            return self.compiled(model, *args, **kwargs)
        if reason := self.program.changed(model, args, kwargs):
            text = f"zcompile: {self.path} does not serve a call on rank {dist.get_rank()}: {reason}"
            if self.require:
                raise RuntimeError(text)
            if not self.warned:
                warnings.warn(f"{text}. Such calls are compiled by this process.", stacklevel=2)
                self.warned = True
            return self.compiled(model, *args, **kwargs)
        return self.program.loaded.function(model, *args, **kwargs)

    def decide(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Load the file, or make it, or give it up; all ranks together. See [Note: decided together].

        Raises:
            RuntimeError: the file is required, and a rank cannot use it.
        """
        state = state_of(model)
        here: dict[str, str] = {}
        data, verdict = b"", ABSENT
        try:
            here = fingerprint(model, self.settings, self.mode, state.machine.memory_bytes, args, kwargs)
            data = read(self.path, self.sha256)
            artifact = decode(data, str(self.path))
            if NUMBER not in artifact.fingerprint:
                here.pop(NUMBER, None)  # which may differ between ranks
            verdict = self.examine(model, artifact, args, kwargs)
        except FileNotFoundError:
            pass
        except ArtifactError as error:
            verdict = str(error)
        except Exception as error:  # of this rank alone, perhaps: others wait for what it says
            verdict = f"{type(error).__name__}: {error}"
        file, digest = (hashlib.sha256(each).hexdigest() for each in (data, json.dumps(here).encode()))
        mesh = span_of(state)
        reports = all_gather_over_mesh(mesh, _Report(dist.get_rank(), verdict, file, digest))
        reason, how = _obstacle(reports, here, mesh, self.require), f"loaded from {self.path}"
        owners = [i for i, report in enumerate(reports) if report.verdict == FITS]
        if not reason and not owners:
            data, reason, makers = self.make_together(model, args, kwargs)
            ranks = f"rank {makers[0]}" if len(makers) == 1 else f"ranks {', '.join(map(str, makers))}"
            how = f"loaded: {ranks} compiled it, because {self.path} was not there"
        elif not reason and len(owners) < len(reports):
            data = broadcast_over_mesh(mesh, data, owners[0])
        if reason := reason or self.load(model, data, args, kwargs):
            self.give_up(model, reason)
            return
        prepare(state, self.settings)
        for each in models_of(state):
            each.provenance.compiled = how
        log.info("zcompile: compiled code: %s", how)

    def give_up(self, model: nn.Module, reason: str) -> None:
        """Compile on all ranks, which do this together."""
        self.program = None
        if self.require:
            raise RuntimeError(f"zcompile: {self.path} is required and cannot be used. {reason}")
        state = state_of(model)
        for each in models_of(state):
            each.provenance.compiled = f"compiled by this process: {reason}"
        if _is_first(span_of(state)):
            warnings.warn(f"zcompile: {self.path} is not used, and every rank compiles. {reason}", stacklevel=2)

    def examine(self, model: nn.Module, artifact: Artifact, args: Any, kwargs: Any) -> str:
        """Why the file does not fit this rank, or FITS."""
        memory_bytes, has_bytes = int(artifact.facts["memory_bytes"]), state_of(model).machine.memory_bytes
        differing = differences(artifact.fingerprint, surroundings(model, self.settings, self.mode, memory_bytes))
        differing += find(artifact, model, of_call(model, args, kwargs))[1]
        if self.settings.gather_budget_bytes is None and memory_bytes > has_bytes:
            differing.append(f"memory: made for ranks that have {memory_bytes} bytes; here {has_bytes}")
        return f"It was made for something else: {'; '.join(differing)}." if differing else FITS

    def make_together(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[bytes, str, list[int]]:
        """The file, on all ranks, or why it could not be made; and the ranks that compiled. The first one writes it.

        Of each position, see [Note: positions] in groups.py, the first rank compiles.
        """
        state = state_of(model)
        mesh, makers = span_of(state), makers_of(state)
        ranks = mesh.mesh.flatten().tolist()
        made: tuple[bytes, str] = (b"", "")
        if dist.get_rank() in makers:
            made = self.make_here(model, args, kwargs)
        files = []
        for maker in makers:
            data, reason = broadcast_over_mesh(mesh, made, ranks.index(maker))
            if reason:
                return b"", reason, makers
            files.append(data)
        data = merge(files)
        if _is_first(mesh):
            try:
                write(self.path, data)
            except OSError as error:  # all ranks have what is in it
                warnings.warn(f"zcompile: {self.path} could not be written: {error}", stacklevel=2)
        return data, "", makers

    def make_here(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[bytes, str]:
        """A file for the position of this rank, or why it could not be made."""
        try:
            with self.around_make():
                return make(model, self.settings, self.mode, args, kwargs), ""
        except Exception as error:
            log.info("zcompile: %s could not be made", self.path, exc_info=True)
            return b"", f"Rank {dist.get_rank()} could not make it: {first_line(error)}"

    def load(self, model: nn.Module, data: bytes, args: Any, kwargs: Any) -> str:
        """Load on all ranks, which do this together. Why one of them could not, with its number; empty if all did."""
        try:
            artifact = decode(data, str(self.path))
            program, _ = find(artifact, model, of_call(model, args, kwargs))
            self.program = Program(artifact, program, model, str(self.path))
            reason = self.program.changed(model, args, kwargs)
        except Exception as error:
            log.info("zcompile: %s could not be loaded", self.path, exc_info=True)
            reason = first_line(error)
        reasons = all_gather_over_mesh(span_of(state_of(model)), (dist.get_rank(), reason))
        return next((f"Rank {rank} could not load it: {reason}" for rank, reason in reasons if reason), "")


def _is_first(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


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
    """On all ranks of the mesh, the value of the one at place `source` in it, as in `all_gather_over_mesh`."""
    place = torch.unravel_index(torch.tensor(source), mesh.mesh.shape)
    for dimension in reversed(range(mesh.ndim)):
        values = [value]
        dist.broadcast_object_list(values, group=mesh.get_group(dimension), group_src=int(place[dimension]))
        value = values[0]
    return value
