"""Saves a compiled model as a file, loads it, and checks at each call that the code is still valid.

A file lacks some of Dynamo's guards: those that compare objects by identity, and those on process groups and on shards,
whose sizes differ between ranks. The checks here replace them. When a file is loaded, functions are compared with their
names and hashes in the file's header. At each call, functions, process groups, parameters' shards and modules' hooks
are compared with those that existed when the file was loaded.
"""

import functools
import hashlib
import importlib
import inspect
import operator
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule
from torch.utils.hooks import RemovableHandle

from zcompile.artifact import aot
from zcompile.artifact.file_format import Artifact, ArtifactError, decode, encode
from zcompile.artifact.fingerprint import (
    ANY,
    HOOKS,
    NUMBER,
    code_hash,
    differences,
    hooks_of,
    module_name,
    of_call,
    parameters_of,
    surroundings,
)
from zcompile.artifact.groups import Groups, groups_of, inner_meshes, positions_of, refuse_meshes
from zcompile.artifact.kernels import graph_hash
from zcompile.compiler.backend import compile_planned, limited, link_of, partition
from zcompile.options import Plan, Settings
from zcompile.state.placement import remember_mesh
from zcompile.state.sharded_model import state_of
from zcompile.state.sharded_parameter import ShardedParameter

LIBRARY = "library/"  # + the key of a C++ kernel = the name of a part
ASKS_FOR_RANK = re.compile(r"\bget_(local_|group_|node_local_)?rank\b|\bget_coordinate\b|\.rank\(\)|\bRANK\b")


def make(
    model: nn.Module,
    settings: Settings,
    mode: str | None,
    args: Any,
    kwargs: Any,
    main_module: str = "",
    earlier: Artifact | None = None,
) -> bytes:
    """Compile `model(*args, **kwargs)`, without running it, into a file. Return the file's bytes.

    The file is for all ranks with this rank's coordinates in tensor and expert parallelism, see `positions_of`.

    Args:
        settings: options that `check_artifact` of model.py accepted.
        main_module: the name under which this process imported the training program; "" if it runs it as `__main__`.
        earlier: an older file. Its code for an equal graph is kept; see [Note: code that is kept].

    Raises:
        ArtifactError: the model has graph breaks, or a part of it cannot be saved.
    """
    state = state_of(model)
    refuse_meshes(state)
    _refuse_units(model)
    fields = surroundings(model, settings, mode, state.machine.memory_bytes)
    call, position = of_call(model, args, kwargs), positions_of(state)[dist.get_rank()]
    known = _known_code(earlier, fields, position, call)
    graph = ""
    plan = settings.plan(link_of(state, settings), state.machine.memory_bytes)

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        def split(plan: Plan, joint: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> Any:
            nonlocal graph
            if (graph := graph_hash(gm, joint, joint_inputs)) in known:
                raise aot.Reused(known[graph])
            return partition(plan, joint, joint_inputs, **kwargs)

        return compile_planned(gm, example_inputs, settings, limited(settings, plan, example_inputs), mode, split)

    try:
        made = aot.compile_ahead(model, args, kwargs, compile_graph, groups_of(model))
    except torch._dynamo.exc.Unsupported as error:
        raise ArtifactError(
            f"zcompile: the model has graph breaks, so no artifact can hold its program: {first_line(error)}. "
            "`torch.compile(model, fullgraph=True)` shows where."
        ) from error
    except RuntimeError as error:  # Dynamo's errors are of this type, too
        raise ArtifactError(
            f"zcompile: no artifact can hold the model: {first_line(error).rstrip('.')}. Compile without an artifact."
        ) from error
    refuse_meshes(state, made.meshes)
    if line := asks_for_rank(made.sources):
        raise ArtifactError(f"zcompile: no artifact can hold code that reads the rank: {line}. Compile without one.")
    if not made.code.names_device_number:
        fields.pop(NUMBER, None)
    contents = {LIBRARY + key: library for key, library in made.code.libraries.items()}
    names = {}
    for kind, content in (("program", made.program), ("objects", made.objects), ("code", made.code.entry)):
        names[kind] = f"{kind}/{hashlib.sha256(content).hexdigest()}"
        contents[names[kind]] = content
    program = {
        **names,
        "position": position,
        "call": call,
        "graph": graph,
        "libraries": list(made.code.libraries),
        "sources": [each for each in made.sources if not each[0].startswith("torch.")],
        "functions": _functions(made, model),
    }
    facts = {"memory_bytes": state.machine.memory_bytes, "main": main_module, "programs": [program]}
    return encode(fields, facts, contents)


def _refuse_units(model: nn.Module) -> None:
    """Raise ArtifactError if `model` has a unit: a module that gathers its parameters in eager, a graph break."""
    order, modules = state_of(model).unit_order, set(model.modules())
    for unit in order.units if order is not None else ():
        if not modules.isdisjoint(unit.owners):
            raise ArtifactError(
                f"zcompile: no artifact can hold the program: '{unit.name}' gathers parameters in eager, because it "
                "loops over experts or is in units=... of zcompile.shard. Compile modules that contain no such module: "
                "zcompile.compile(model, artifact=..., blocks=[layer.attention for layer in model.layers]), or pass "
                "--blocks to zcompile precompile."
            )


def _known_code(
    earlier: Artifact | None, fields: Mapping[str, str], position: str, call: Mapping[str, str]
) -> dict[str, aot.Code]:
    """Return {hash of a graph: compiled code} from the file `earlier`, for `call` on ranks at `position`.

    `position`: the ranks' coordinates in the meshes of tensor or expert parallelism; see `positions_of`.

    [Note: code that is kept]
    A compiled call has two parts: Dynamo's bytecode and guards, and Inductor's code for the graph. Dynamo's part is
    always made again, so a change of the model's source, or of a value that tracing reads, is never missed. Inductor's
    code is kept if the whole fingerprint, Dynamo's graph and AOTAutograd's joint graph are equal. Code with dynamic
    sizes is never kept, because Inductor adds guards on such sizes while it compiles.
    """
    if earlier is None or ANY in call["inputs"] or differences(earlier.fingerprint, fields):
        return {}
    programs = [each for each in earlier.facts["programs"] if each["graph"] and each["position"] == position]
    return {each["graph"]: _code(earlier, each) for each in programs if each["call"] == call}


def _code(artifact: Artifact, program: Mapping[str, Any]) -> aot.Code:
    libraries = {key: artifact.parts[LIBRARY + key] for key in program["libraries"]}
    return aot.Code(artifact.parts[program["code"]], libraries, NUMBER in artifact.fingerprint)


def merge(files: Sequence[bytes]) -> bytes:
    """Merge files that `make` returned, for different calls (input shapes) or positions of ranks, into one file."""
    artifacts = [decode(each, f"part {i}") for i, each in enumerate(files)]
    first = artifacts[0]
    programs: dict[Any, Mapping[str, Any]] = {}
    parts: dict[str, bytes] = {}
    for each in artifacts:
        if differing := differences(first.fingerprint, each.fingerprint):
            raise ArtifactError(f"zcompile: one file cannot hold code for different settings: {'; '.join(differing)}.")
        parts |= each.parts
        programs |= {(program["position"], *program["call"].items()): program for program in each.facts["programs"]}
    return encode(first.fingerprint, {**first.facts, "programs": list(programs.values())}, parts)


def find(artifact: Artifact, position: str, call: Mapping[str, str]) -> tuple[Mapping[str, Any], list[str]]:
    """Return the program (compiled call) of a file that fits `call` best, and its `differences` from `call`.

    Raises ArtifactError if the file has no program for `position`, a result of `positions_of`.
    """
    found = [
        (program, differences(program["call"], call))
        for program in artifact.facts["programs"]
        if program["position"] == position
    ]
    if not found:
        has = sorted({program["position"] or "all ranks" for program in artifact.facts["programs"]})
        raise ArtifactError(
            f"the file is for {' and '.join(has)} of the mesh, not for {position or 'all ranks'}. Delete it, and rerun."
        )
    return min(found, key=lambda each: len(each[1]))


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _functions(made: aot.Made, model: nn.Module) -> list[tuple[str, str]]:
    """Return (expression, `_identity` of its value) for guards of the code of `model` that compare objects by identity.

    torch cannot save these guards (`Made.dropped`). A process that loads the file evaluates the expression, and
    compares its value's `_identity`. A guard is left out if, in this process, its expression cannot be evaluated or
    has another object as its value.
    """
    groups = groups_of(model)
    loaded = aot.Loaded(made.program, made.objects, made.code, groups)
    found: dict[str, tuple[str, str]] = {}
    for expression, value in made.dropped:
        try:
            there = loaded.look_up(expression, model)
        except Exception:  # Dynamo's expression is not valid Python
            continue
        if there is value and not isinstance(there, types.ModuleType):
            found[expression] = (expression, _identity(there, groups))
    return list(found.values())


def _identity(value: Any, groups: Groups) -> str:
    """Describe a function, class or other object by a text that is the same in every process."""
    if isinstance(value, dist.ProcessGroup):
        return f"process group at {groups.get(value.group_name, f'no place: {value.group_name}')}"
    name = getattr(value, "__qualname__", None) or getattr(value, "co_name", None) or getattr(value, "__name__", "")
    code = code_hash(value) if isinstance(value, (types.FunctionType, types.CodeType)) else ""
    return f"{name or type(value).__qualname__} of {module_name(value)} {code}"


class LoadedFile:
    """The content of a file, which errors call `name`. Blocks with equal code share one loaded program."""

    def __init__(self, artifact: Artifact, name: str):
        self.artifact, self.name = artifact, name
        self.loaded: dict[str, aot.Loaded] = {}  # by the name of the part

    def load(self, model: nn.Module, position: str, call: Mapping[str, str]) -> "Program":
        """Unpickle the compiled code that `find` returns for a call of `model`.

        Raises ArtifactError if a function that was traced, or that the code calls, has changed since the file was made.
        """
        program, _ = find(self.artifact, position, call)
        part, parts, groups = program["program"], self.artifact.parts, groups_of(model)
        if part not in self.loaded:
            with _importable_main(self.artifact.facts["main"]):
                _check_sources(program["sources"], self.name)
                for inner in inner_meshes(state_of(model)).values():
                    remember_mesh(inner)
                code = _code(self.artifact, program)
                self.loaded[part] = aot.Loaded(parts[part], parts[program["objects"]], code, groups)
        return Program(self.loaded[part], program["functions"], model, groups, self.name)


class Program:
    """Compiled code that was loaded from a file, for one model or block."""

    def __init__(
        self, loaded: aot.Loaded, functions: Sequence[Sequence[Any]], model: nn.Module, groups: Groups, name: str
    ):
        """Raises ArtifactError if a function in `functions` has changed since the file, called `name`, was made."""
        self.loaded = loaded
        self.watched: Any = ""  # compiled expression: functions and other objects that calls compare
        self.found: tuple[Any, ...] = ()  # their values when the file was loaded
        self._check_functions(model, groups, functions, name)
        self.shards = [_Shard(sharded) for _, sharded, _ in parameters_of(model)]
        self.forwards = [(each, each.forward) for each in {type(module) for module in model.modules()}]
        self.hooks = _Hooks(model)

    def _check_functions(self, model: nn.Module, groups: Groups, functions: Sequence[Sequence[Any]], name: str) -> None:
        """Raise ArtifactError if a function or process group is not the traced one. Keep them for `changed`."""
        found = []
        for expression, identity in functions:
            try:
                value = self.loaded.look_up(expression, model)
            except Exception as error:
                raise ArtifactError(f"zcompile: {name} needs {expression}: {error!r}. Delete it, and rerun.") from None
            if _identity(value, groups) != identity:
                raise ArtifactError(f"zcompile: {expression} is no longer {identity}. Delete {name}, and rerun.")
            found.append(value)
        self.watched = compile(f"({''.join(f'{each}, ' for each, _ in functions)})", "<zcompile>", "eval")
        self.found = tuple(found)

    def changed(self, model: nn.Module, args: Any, kwargs: Any) -> str:
        """Return why the compiled code must not run for the call `model(*args, **kwargs)`; "" if it may."""
        for shard in self.shards:
            if reason := shard.changed():
                return reason
        for each, forward in self.forwards:
            if each.forward is not forward:
                return f"the forward of {each.__qualname__} was replaced after the artifact was loaded"
        if self.hooks.changed(model):
            return "a hook of a module was registered or removed after the artifact was loaded"
        now = self.loaded.look_up(self.watched, model)
        if not all(map(operator.is_, now, self.found)):
            return "a function that the model calls, or a process group, was replaced after the artifact was loaded"
        if reason := self.loaded.failed_guard(model, args, kwargs):
            return f"it differs from the call that was compiled: {reason}"
        return ""


class _Shard:
    """Properties of a parameter's shard on which compiled code relies, at the time when the file was loaded."""

    def __init__(self, sharded: ShardedParameter):
        self.sharded = sharded
        self.trains = sharded.leaf.requires_grad
        self.dtype, self.device = sharded.leaf.dtype, sharded.leaf.device.type
        self.leaf = sharded.leaf_reference  # a weak reference; a new leaf has a new one

    def changed(self) -> str:
        """Return how the shard changed since the file was loaded; "" if it did not."""
        leaf: Any = self.sharded.leaf_reference()
        # Compare both: if a program sets the parameter's `requires_grad`, the leaf gets it only later.
        if leaf.requires_grad is not self.trains or self.sharded.parameter.requires_grad is not self.trains:
            return f"parameter '{self.sharded.name}' was {'frozen' if self.trains else 'unfrozen'}"
        if self.sharded.leaf_reference is not self.leaf:
            if (leaf.dtype, leaf.device.type) != (self.dtype, self.device):
                return f"parameter '{self.sharded.name}' is {leaf.dtype} on {leaf.device.type} now"
            self.leaf = self.sharded.leaf_reference
        return ""


class _Hooks:
    """The hooks of all modules when the file was loaded. Dynamo traces hooks, but sets no guards on them."""

    def __init__(self, model: nn.Module):
        self.registered = RemovableHandle.next_id  # number of hooks that this process has registered so far
        self.names = hooks_of(model)
        tables = (getattr(module, kind) for module in model.modules() for kind in HOOKS)
        self.used = [(table, len(table)) for table in tables if table]

    def changed(self, model: nn.Module) -> bool:
        """Return whether a hook was added or removed since loading. Lists hooks only if one was registered."""
        if any(len(table) != count for table, count in self.used):
            return True
        if self.registered != RemovableHandle.next_id:
            if hooks_of(model) != self.names:
                return True
            self.registered = RemovableHandle.next_id
        return False


def _check_sources(sources: Sequence[Sequence[Any]], name: str) -> None:
    """Raise ArtifactError if the text of a traced function differs in the module that this process imports."""
    for module, first, end, checksum in sources:
        try:
            lines = _source_lines(module)
        except (ImportError, OSError, TypeError) as error:
            raise ArtifactError(f"zcompile: {name} needs the source of module {module}: {error!r}.") from None
        if hashlib.sha256("".join(lines[first - 1 : end - 1]).encode()).hexdigest() != checksum:
            raise ArtifactError(
                f"zcompile: lines {first} to {end - 1} of module {module} have changed since {name} was made. Make "
                "the file anew."
            )


@functools.cache
def _source_lines(module: str) -> list[str]:
    return inspect.getsourcelines(importlib.import_module(module))[0]


def asks_for_rank(sources: Iterable[tuple[str, int, int, str]]) -> str:
    """Return the first line in traced functions (`Made.sources`) that reads this rank's number; "" if none does.

    The compiled code would have this number as a constant, which is wrong on other ranks.
    """
    for module, first, end, _ in sources:
        if module.split(".")[0] in ("torch", "zcompile"):
            continue
        for i, line in enumerate(_source_lines(module)[first - 1 : end - 1]):
            if ASKS_FOR_RANK.search(line):
                return f"line {first + i} of module {module}, `{line.strip()}`"
    return ""


@contextmanager
def _importable_main(name: str) -> Iterator[None]:
    """Let pickled code import `__main__` by `name`, under which `zcompile precompile` imported the script."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    is_main = bool(name) and file is not None and name == Path(file).stem and name not in sys.modules
    if is_main:
        sys.modules[name] = sys.modules["__main__"]
    try:
        yield
    finally:
        if is_main:
            del sys.modules[name]
