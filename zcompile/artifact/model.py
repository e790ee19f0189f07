"""`zcompile.compile`: runs a model with compiled code from a file, if all ranks agree on the file at the first call.

[Note: decided together]
Ranks that run different code may start different collectives, so all ranks must use the file, or none. At the first
call, each rank reads the file, and ranks all-gather their *verdicts*: the file fits this rank's model, call and
machine; the file does not exist; or the reason why it does not fit.

- All ranks have the same file, and it fits: each rank loads its own.
- The file fits on some ranks and does not exist on the others (no shared folder): one rank broadcasts it.
- No rank has the file: rank 0 compiles, broadcasts the file and writes it, and all ranks load it. Under tensor
  parallelism, the first rank at each "tp" coordinate compiles (see [Note: positions] in groups.py).
- In all other cases, or if a rank fails to load the file, one warning gives the reason, and every rank compiles for
  itself, as `model.compile` does.
"""

import functools
import hashlib
import json
import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zcompile.artifact import aot
from zcompile.artifact.file_format import Artifact, ArtifactError, decode, read
from zcompile.artifact.fingerprint import NUMBER, differences, inputs, of_call, surroundings
from zcompile.artifact.groups import makers_of, positions_of, span_of
from zcompile.artifact.program import LoadedFile, Program, find, first_line, make, merge
from zcompile.compiler.backend import compile_graph, parse_options, prepare
from zcompile.compiler.inductor import wants_cuda_graphs
from zcompile.options import Settings
from zcompile.ranks.process_groups import all_gather_over_mesh
from zcompile.state.sharded_model import models_of, state_of
from zcompile.whole_files import write

log = logging.getLogger("zcompile")

FITS, ABSENT = "fits", "absent"  # verdicts; any other text is the reason why the file does not fit


def compile(
    model: nn.Module,
    artifact: str | Path,
    options: Mapping[str, Any] | None = None,
    *,
    require: bool = False,
    sha256: str | None = None,
    mode: str | None = None,
    blocks: Iterable[nn.Module] = (),
) -> nn.Module:
    """Compile `model` in place, as `model.compile(backend="zcompile")` does, but take the code from a file.

    The first call of `model` loads the file, without tracing or compiling. If the file does not exist, rank 0 compiles
    and writes it, and all ranks load the result. If the file was made for another model, machine or settings, a warning
    names the differences, and every rank compiles. Every rank also compiles if the model has graph breaks, because no
    file can hold its code. The code in a file is for the input shapes, the training or evaluation mode, and the
    autocast of the calls that were compiled. A call for which the file has no code is compiled, with a warning.

    Loading a file runs code from it, so load only files that you trust.

    Args:
        model: a sharded model, without compiled submodules.
        artifact: the path of the file. If it exists only on some ranks, one of these broadcasts it to the others.
        options: see `zcompile.options.Settings`.
        require: if True, a call for which the file cannot be used raises an error; if False, every rank compiles it.
        sha256: the SHA-256 that the file must have, as hexadecimal digits. It is checked before anything is unpickled.
            Implies `require`.
        mode: an Inductor mode, such as "max-autotune-no-cudagraphs".
        blocks: modules of `model` to compile one by one, as `block.compile(backend="zcompile")` does, instead of the
            whole model. The file holds the code of equal blocks once.

    Returns:
        `model`.

    Raises:
        RuntimeError: `model` is not sharded; or, with `require`, at a call for which the file cannot be used.
        ValueError: an option is unknown or wrong, or this torch cannot save compiled models.
    """
    settings = parse_options(options)
    path, require = Path(artifact), require or sha256 is not None
    modules = [*blocks]
    shared = _Shared() if modules else None
    for each in modules or [model]:
        each._compiled_call_impl = FromFile(each, path, settings, mode, require, sha256, shared=shared)
    return model


def check_artifact(settings: Settings, mode: str | None = None) -> None:
    """Raise ValueError if no artifact can be made with these settings or with this version of torch."""
    if reason := aot.lacking():
        raise ValueError(f"zcompile: an artifact is not possible here: {reason}. Leave 'artifact' out.")
    if settings.inner != "inductor":
        raise ValueError(f"zcompile: an artifact needs the option inner='inductor', not {settings.inner!r}.")
    if settings.cuda_graphs or wants_cuda_graphs(settings.inductor, mode):
        raise ValueError("zcompile: an artifact holds no CUDA graphs: leave out 'cuda_graphs' and modes that set it.")


@dataclass(frozen=True)
class _Report:
    """The report that each rank all-gathers at the first call of a model."""

    rank: int
    verdict: str  # FITS, ABSENT, or why the file does not fit
    file: str  # the SHA-256 of the file
    here: str  # the SHA-256 of the rank's fingerprint


@dataclass
class _Shared:
    """State of a file that the `FromFile` objects of one model's blocks share."""

    mesh: DeviceMesh | None = None  # all ranks that decide together, see `span_of`
    position: str = ""  # this rank's coordinates in inner meshes, see [Note: positions] in groups.py
    data: bytes = b""  # content of the file
    file: LoadedFile | None = None
    digest: tuple[bytes | None, str] = None, ""  # the last `data` that was hashed, and its SHA-256
    how: str = ""  # origin of the code, for `zcompile.stats`; empty if all blocks were loaded from the file
    is_made_here: bool = False  # whether the ranks of this run compiled the file
    surroundings: dict[str, str] = field(default_factory=dict)  # fingerprint fields of this rank's machine and settings
    compiled: Callable[..., Any] | None = None  # compiles a module's call; equal blocks are compiled once
    differing: list[str] = field(default_factory=list)  # see `FromFile.differing`

    def sha256(self) -> str:
        if self.digest[0] is not self.data:
            self.digest = self.data, hashlib.sha256(self.data).hexdigest()
        return self.digest[1]

    def open(self, name: str) -> LoadedFile:
        """Return the parsed `data`, which errors call `name`."""
        if self.file is None:
            self.file = LoadedFile(decode(self.data, name), name)
            if NUMBER not in self.file.artifact.fingerprint:
                self.surroundings.pop(NUMBER, None)  # the file's code runs on a GPU of any number
        return self.file

    def add(self, files: list[bytes], name: str) -> None:
        """Add `files`, which ranks of this run compiled, to the content of the file. Loaded programs stay loaded."""
        self.data, self.is_made_here = merge([self.data, *files] if self.is_made_here else files), True
        loaded, self.file = self.file.loaded if self.file is not None else {}, None
        self.open(name).loaded = loaded


class FromFile:
    """A module's `_compiled_call_impl`: runs compiled code from a file, or compiles the module if no code fits.

    The reference to the module is weak, because the module holds this object.
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
        shared: _Shared | None = None,
    ):
        """See `compile`. A rank that makes the file does so in the context `around_make()`, by which DeepSpeed's
        integration hides attributes that cannot be pickled. All blocks of a model have the same `shared`."""
        state_of(model)
        check_artifact(settings, mode)
        self.model = weakref.ref(model)
        self.path, self.settings, self.mode = path, settings, mode
        self.require, self.sha256, self.around_make = require, sha256, around_make
        self.decided = False
        self.programs: list[Program] = []  # most recently used first
        self.shared, self.is_alone = shared or _Shared(), shared is None
        self.missed: set[Any] = set()  # calls for which the file has no program
        self.warned = False
        if self.shared.compiled is None:
            backend = functools.partial(compile_graph, options=vars(settings), mode=mode)
            self.shared.compiled = torch.compile(nn.Module._call_impl, backend=backend)
        self.compiled = self.shared.compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        model = self.model()
        assert model is not None
        if not aot.runs_compiled_code():
            return self.compiled(model, *args, **kwargs)  # torch then runs the model in eager
        if not self.decided:
            self.decide(model, args, kwargs)
            self.decided = True
        if not self.programs:
            return self.compiled(model, *args, **kwargs)
        program, reason = self.serving(model, args, kwargs)
        if program is not None:
            return program.loaded.function(model, *args, **kwargs)
        text = f"zcompile: {self.path} has no code for a call on rank {dist.get_rank()}: {reason}"
        if self.require:
            raise RuntimeError(f"{text}. Make the file for such calls, too, or leave out require= and sha256=.")
        if not self.warned:
            warnings.warn(f"{text}. This process compiles such calls.", stacklevel=2)
            self.warned = True
        return self.compiled(model, *args, **kwargs)

    def serving(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[Program | None, str]:
        """Return a program that can run the call; or None, and why the program that ran last cannot run it.

        Loads the program if necessary, and puts it first in `programs`.
        """
        reasons: list[str] = []
        for program in self.programs:
            if not (reason := program.changed(model, args, kwargs)):
                if reasons:
                    self.programs = [program, *(each for each in self.programs if each is not program)]
                return program, ""
            reasons.append(reason)
        if (another := self.load_another(model, args, kwargs)) is not None:
            self.programs = [another, *self.programs]
        return another, reasons[0]

    def load_another(self, model: nn.Module, args: Any, kwargs: Any) -> Program | None:
        """Load the file's program for a call, without a collective. Return None if no program can run the call."""
        key = inputs(args, kwargs), torch.is_grad_enabled(), model.training
        file = self.shared.file
        if file is None or key in self.missed or len(file.artifact.facts["programs"]) == 1:
            return None
        self.missed.add(key)  # removed again if a program is found
        call = of_call(model, args, kwargs)
        try:
            if find(file.artifact, self.shared.position, call)[1]:
                return None
            program = file.load(model, self.shared.position, call)
        except Exception as error:
            log.info("zcompile: a program of %s could not be loaded: %s", self.path, first_line(error))
            return None
        if program.changed(model, args, kwargs):
            return None
        self.missed.discard(key)
        return program

    def decide(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Load the file, make a new one, or compile without one; see [Note: decided together]. A collective call."""
        state, shared = state_of(model), self.shared
        if shared.mesh is None:
            shared.mesh, shared.position = span_of(state), positions_of(state)[dist.get_rank()]
        mesh, (verdict, call) = shared.mesh, self.look(model, args, kwargs)
        here = {**shared.surroundings, **call}
        digest = hashlib.sha256(json.dumps(here).encode()).hexdigest()
        reports = all_gather_over_mesh(mesh, _Report(dist.get_rank(), verdict, shared.sha256(), digest))
        reason, how = _obstacle(reports, here, mesh, self.require), f"loaded from {self.path}"
        owners = [i for i, report in enumerate(reports) if report.verdict == FITS]
        if not reason and not owners:
            reason, makers = self.make_together(model, args, kwargs)
            ranks = f"rank {makers[0]}" if len(makers) == 1 else f"ranks {', '.join(map(str, makers))}"
            shared.how = f"loaded: {ranks} compiled it, because {self.path} was not there"
        elif not reason and len(owners) < len(reports):
            shared.data = broadcast_over_mesh(mesh, shared.data, owners[0])
        if reason := reason or self.load(model, call, args, kwargs):
            self.give_up(model, reason)
            return
        if self.is_alone and len(shared.open(str(self.path)).artifact.facts["programs"]) == 1:
            self.shared = _Shared()  # frees the bytes of the file
        prepare(state, self.settings)
        for each in models_of(state):
            each.provenance.compiled = shared.how or how
        log.info("zcompile: compiled code: %s", shared.how or how)

    def give_up(self, model: nn.Module, reason: str) -> None:
        """Let this rank compile instead of using the file; one rank warns. If `require` is True, raise instead."""
        self.programs = []
        if self.require:
            raise RuntimeError(f"zcompile: {self.path} is required and cannot be used. {reason}")
        state = state_of(model)
        self.shared.how = f"compiled by this process: {reason}"
        for each in models_of(state):
            each.provenance.compiled = self.shared.how
        if _is_first(span_of(state)):
            warnings.warn(f"zcompile: {self.path} is not used, and every rank compiles. {reason}", stacklevel=2)

    def look(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[str, Mapping[str, str]]:
        """Return this rank's verdict on the file (on an error, its text), and the call's fingerprint fields."""
        call: Mapping[str, str] = {}
        try:
            call = of_call(model, args, kwargs)
            verdict = self.examine(model, call)
            if verdict == FITS:  # ranks may differ in dynamic sizes, for which the file's fields have `ANY`
                call = find(self.shared.open(str(self.path)).artifact, self.shared.position, call)[0]["call"]
            return verdict, call
        except FileNotFoundError:
            return ABSENT, call
        except ArtifactError as error:
            return str(error), call
        except Exception as error:
            return f"{type(error).__name__}: {error}", call

    def examine(self, model: nn.Module, call: Mapping[str, str]) -> str:
        """Compare the file's fingerprint with this rank's and this call's.

        Returns:
            FITS; ABSENT if ranks of this run made the file and must add code for this call; else why it does not fit.
        """
        shared, state = self.shared, state_of(model)
        if not shared.surroundings:
            shared.surroundings = surroundings(model, self.settings, self.mode, state.machine.memory_bytes)
        if shared.file is None:
            shared.data = read(self.path, self.sha256)
            shared.differing = self.differing(model, shared.open(str(self.path)).artifact)
        differing = [*shared.differing, *find(shared.open(str(self.path)).artifact, shared.position, call)[1]]
        if differing and shared.is_made_here:
            return ABSENT
        return f"Make it anew for this model, call and machine: {'; '.join(differing)}." if differing else FITS

    def differing(self, model: nn.Module, artifact: Artifact) -> list[str]:
        """Return a line for each field of machine and settings that differs between the file and this rank."""
        memory_bytes, has_bytes = int(artifact.facts["memory_bytes"]), state_of(model).machine.memory_bytes
        here = self.shared.surroundings
        if memory_bytes != has_bytes:
            here = surroundings(model, self.settings, self.mode, memory_bytes)
        lines = differences(artifact.fingerprint, here)
        if self.settings.gather_budget_bytes is None and memory_bytes > has_bytes:
            lines.append(f"memory: made for ranks that have {memory_bytes} bytes; here {has_bytes}")
        return lines

    def make_together(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[str, list[int]]:
        """Compile the model or block on the ranks of `makers_of`, and broadcast the code to all ranks.

        A collective call. The first rank of the mesh writes the file.

        Returns:
            The reason why the code could not be made ("" if it was), and the ranks that compiled.
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
                return reason, makers
            files.append(data)
        self.shared.add(files, str(self.path))
        if _is_first(mesh):
            try:
                write(self.path, self.shared.data)
            except OSError as error:  # only a warning, because all ranks have the content
                warnings.warn(f"zcompile: {self.path} is not written, so later runs compile: {error}", stacklevel=2)
        return "", makers

    def make_here(self, model: nn.Module, args: Any, kwargs: Any) -> tuple[bytes, str]:
        """Compile on this rank. Return (bytes of a file, ""), or empty bytes and the reason why compiling failed."""
        try:
            with self.around_make():
                return make(model, self.settings, self.mode, args, kwargs), ""
        except Exception as error:
            log.info("zcompile: %s could not be made", self.path, exc_info=True)
            return b"", f"Rank {dist.get_rank()} could not make it: {first_line(error)}"

    def load(self, model: nn.Module, call: Mapping[str, str], args: Any, kwargs: Any) -> str:
        """On all ranks together, load the file's code for a call. Return why a rank could not, or "" if all could."""
        try:
            program = self.shared.open(str(self.path)).load(model, self.shared.position, call)
            reason = program.changed(model, args, kwargs)
            self.programs = [program]
        except Exception as error:
            log.info("zcompile: %s could not be loaded", self.path, exc_info=True)
            reason = first_line(error)
        reasons = all_gather_over_mesh(span_of(state_of(model)), (dist.get_rank(), reason))
        return next((f"Rank {rank} could not load it: {reason}" for rank, reason in reasons if reason), "")


def _is_first(mesh: DeviceMesh) -> bool:
    return not any(mesh.get_coordinate() or ())


def _obstacle(reports: list[_Report], here: Mapping[str, str], mesh: DeviceMesh, require: bool) -> str:
    """Return why the ranks can neither load an existing file nor make one; "" if they can. A collective call."""
    for report in reports:
        if report.verdict not in (FITS, ABSENT):
            return f"Rank {report.rank}: {report.verdict}"
    fitting = [report for report in reports if report.verdict == FITS]
    if require and not fitting:
        return f"Rank {reports[0].rank}: there is no such file."
    for report in fitting:
        if report.file != fitting[0].file:
            return f"Ranks {fitting[0].rank} and {report.rank} have different files of this name. Give both the same."
    if all(report.here == reports[0].here for report in reports):
        return ""
    fields = all_gather_over_mesh(mesh, dict(here))
    base = reports.index(fitting[0]) if fitting else 0  # a rank with the file: its fields have `ANY` for dynamic sizes
    for report, each in zip(reports, fields, strict=True):
        if differing := "; ".join(differences(fields[base], each)):
            return f"Ranks {reports[base].rank} and {report.rank} differ: {differing}."
    return ""


def broadcast_over_mesh(mesh: DeviceMesh, value: Any, source: int) -> Any:
    """Return, on all ranks of `mesh`, the `value` of the rank with the index `source` in the flattened mesh."""
    place = torch.unravel_index(torch.tensor(source), mesh.mesh.shape)
    for dimension in reversed(range(mesh.ndim)):
        values = [value]
        dist.broadcast_object_list(values, group=mesh.get_group(dimension), group_src=int(place[dimension]))
        value = values[0]
    return value
