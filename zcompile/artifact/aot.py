"""Compiles one graph ahead of time to bytes for an artifact (file), and loads it, by torch's private API."""

import importlib
import inspect
import io
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo import eval_frame
from torch._dynamo.aot_compile import AOTCompiledFunction
from torch._dynamo.aot_compile_types import SerializableCallable
from torch._dynamo.guards import CheckFunctionManager
from torch._functorch._aot_autograd.aot_autograd_result import deserialize_bundled_cache_entry
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from zcompile.artifact import kernels
from zcompile.artifact.groups import Groups
from zcompile.compiler.cuda_graphs import without_gc
from zcompile.state.attributes import LEAF
from zcompile.state.placement import mesh_key, remembered_mesh

Backend = Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]

_OLDEST = (2, 13)


def lacking() -> str:
    """Return the reason why this version of torch cannot save compiled models, or "" if it can."""
    if tuple(map(int, torch.__version__.split(".")[:2])) < _OLDEST:
        return f"torch {torch.__version__} cannot save compiled models; that needs torch 2.13 or later"
    return ""


class Code(NamedTuple):
    """The code that AOTAutograd and Inductor made of one graph."""

    entry: bytes  # a pickled entry of AOTAutograd's cache
    libraries: dict[str, bytes]  # C++ kernels, see `kernels.take_kernels`
    names_device_number: bool  # see `kernels.names_device_number`


class Reused(BaseException):
    """A backend raises this instead of compiling; the argument is the `Code` of an equal graph in an older file."""


class Made(NamedTuple):
    """One compiled graph, the result of `compile_ahead`. `Loaded` loads the first three fields."""

    program: bytes  # Dynamo's bytecode and guards
    objects: bytes  # globals that the bytecode reads
    code: Code
    # (module, first line, line after the last, SHA-256 of the text) of each traced function.
    sources: list[tuple[str, int, int, str]]
    # Dynamo's guards that a file cannot hold: those on process groups, and those that compare an object by identity.
    # For each: a Python expression for the object (L: the call's arguments, G: globals), and the object.
    dropped: list[tuple[str, Any]]
    meshes: set[DeviceMesh]  # meshes that the traced code reads


def compile_ahead(model: nn.Module, args: Any, kwargs: Any, backend: Backend, groups: Groups) -> Made:
    """Compile `model(*args, **kwargs)`, forward and backward, without running it.

    Args:
        backend: compiles the graph that Dynamo captured. It returns a callable with a method `serialize`, such as
            Inductor's, or raises `Reused` if an older file has the code.
        groups: name of a process group that collectives of the model may use -> its place: a mesh and a dimension.

    Raises:
        torch._dynamo.exc.Unsupported: the model has graph breaks.
        RuntimeError: a part of the compiled program cannot be saved.
    """
    dropped: list[tuple[str, Any]] = []
    meshes: set[DeviceMesh] = set()

    def keep(guards: Sequence[Any]) -> Sequence[bool]:
        meshes.update(each.value for each in guards if each.has_value and isinstance(each.value, DeviceMesh))
        group_names = {f"{each.name}.group_name" for each in guards if _is_group(each)}
        return [each.name not in group_names and _is_saved(each, dropped) for each in guards]

    def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            return _Saved(backend(gm, example_inputs))
        except Reused as reused:
            return _Saved(None, *reused.args)

    compiled: Any = torch.compile(
        model._call_impl, backend=compile_graph, fullgraph=True, options={"guard_filter_fn": keep}
    )
    with torch._dynamo.config.patch(automatic_dynamic_shapes=False):  # earlier calls with other sizes have no effect
        function = compiled.aot_compile((tuple(args), dict(kwargs)))
    artifacts = function._artifacts
    inlined = artifacts.source_info.inlined_sources
    sources = [(each.module, each.firstlineno, each.lastlineno, each.checksum) for each in inlined]
    inlined.clear()  # else the file would hold the source of each module
    code = artifacts.compiled_fn.code or artifacts.compiled_fn.take_code(groups)
    program = type(function).serialize(function).serialized_data
    return Made(program, _save_objects(artifacts), code, sources, dropped, meshes)


def _is_dynamos(name: str) -> bool:
    """Return whether the global `name` is one that Dynamo added to a module for its bytecode."""
    return name.startswith(("___", "__compiled", "__resume", "__import_", "__builtins_dict"))


def _save_objects(artifacts: Any) -> bytes:
    """Pickle the globals that Dynamo added for its bytecode but does not save itself. Modules are saved by name."""
    environment, scope = artifacts.runtime_env, nn.Module._call_impl.__globals__
    saved = {*environment.import_sources, *environment.used_globals, artifacts.backend_id}
    objects = {name: scope[name] for name in environment.external_refs if _is_dynamos(name) and name not in saved}
    modules = {name: value.__name__ for name, value in objects.items() if inspect.ismodule(value)}
    try:
        return pickle.dumps((modules, {name: value for name, value in objects.items() if name not in modules}))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        # `error` names the object's type; `make` in program.py adds "Compile without an artifact."
        raise RuntimeError(f"the model's code reads an object that cannot be pickled: {error}") from error


def _is_group(guard: Any) -> bool:
    return guard.has_value and isinstance(guard.value, dist.ProcessGroup)


def _is_saved(guard: Any, dropped: list[tuple[str, Any]]) -> bool:
    """Return whether a file holds `guard`, a guard of Dynamo.

    Guards on shards are left out, because shard sizes differ between ranks. Guards on process groups and on the
    identity of objects are appended to `dropped`, because torch cannot save them.
    """
    kinds = {guard.guard_type, *guard.derived_guard_types}
    if LEAF in guard.name and "TENSOR_MATCH" in kinds:
        return False
    if "._global_" in guard.name and "DUPLICATE_INPUT" in kinds:  # torch's tables of hooks: a file holds copies
        return False
    if not _is_group(guard) and kinds.isdisjoint(CheckFunctionManager.UNSUPPORTED_SERIALIZATION_GUARD_TYPES):
        return True
    if guard.has_value:
        dropped.append((guard.orig_guard.name, guard.value))
    return False


class _Pickler(pickle.Pickler):
    """Pickles the `DeviceMesh` of a returned DTensor as its `mesh_key`, because each rank has its own mesh object."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, DeviceMesh):
            return NotImplemented
        key = mesh_key(obj)
        remembered_mesh(key)  # raises if no rank could load it
        return remembered_mesh, (key,)


class _Saved(SerializableCallable):
    """The callable of a compiled graph. torch serializes it to zero bytes: the file holds `code` separately."""

    def __init__(self, compiled: Any, code: Code | None = None):
        self.compiled, self.code = compiled, code

    def __call__(self, *args: Any) -> Any:
        return self.compiled(*args)

    def take_code(self, groups: Groups) -> Code:
        """Return the compiled code in the form that a file holds. Afterwards this object cannot be called."""
        with torch._functorch.config.patch(bundled_autograd_cache=True):
            entry = self.compiled.serialize()
        entry.serialized_bw_module = None  # the backward graph, which only compiled autograd needs
        for text in ("aot_joint_graph_str", "aot_forward_graph_str", "aot_backward_graph_str", "min_cut_info_str"):
            if hasattr(entry, text):
                setattr(entry, text, None)  # only logs show it
        libraries = kernels.take_kernels(entry, groups)
        saved = io.BytesIO()
        _Pickler(saved).dump(entry)
        return Code(saved.getvalue(), libraries, kernels.names_device_number(entry))

    @classmethod
    def serialize_compile_artifacts(cls, fn: "_Saved") -> bytes:
        return b""

    @classmethod
    def deserialize_compile_artifacts(cls, data: bytes) -> "_Saved":
        return cls(None)  # callable after `load`

    def load(self, entry: bytes, groups: Groups) -> None:
        """Unpickle `entry` (`Code.entry`) with this rank's process groups. Calls of this object then run its code."""
        loaded = pickle.loads(entry)
        kernels.install_modules(loaded, groups)
        self.compiled = deserialize_bundled_cache_entry(loaded)


@contextmanager
def _silent(logger: logging.Logger) -> Iterator[None]:
    def drop(record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


class Loaded:
    """A callable compiled graph, which `compile_ahead` made in this process or in another one."""

    def __init__(self, program: bytes, objects: bytes, code: Code, groups: Groups):
        """Unpickle a compiled graph, which must come from a trusted file. Runs no compiler, and starts no process."""
        kernels.install_kernels(code.libraries)
        meshes = logging.getLogger("torch.distributed.device_mesh")
        scope = {name: value for name, value in nn.Module._call_impl.__globals__.items() if not _is_dynamos(name)}
        modules, others = pickle.loads(objects)
        scope |= others | {name: importlib.import_module(module) for name, module in modules.items()}
        # The unpickled meshes have the groups of the rank that compiled: suppress torch's warning that this rank lacks
        # them. Stop the garbage collector, which would take a third of the time of unpickling.
        with kernels.in_this_process(), _silent(meshes), without_gc():
            self.function = AOTCompiledFunction.deserialize(program, scope)
            saved: Any = self.function._artifacts.compiled_fn
            saved.load(code.entry, groups)
        self.function.disable_guard_check()  # the caller calls `failed_guard` first

    def failed_guard(self, model: nn.Module, args: Any, kwargs: Any) -> str:
        """Return the text of the saved Dynamo guards that fail for `model(*args, **kwargs)`, or "" if all hold."""
        if self.function.guard_check(model, *args, **kwargs):
            return ""
        arguments = self.function.prepare_f_locals(model, *args, **kwargs)
        guards: Any = self.function._artifacts.guard_manager
        return "; ".join(map(str, guards.check_verbose(arguments).verbose_code_parts)) or "a guard does not hold"

    def look_up(self, expression: Any, model: nn.Module) -> Any:
        """Evaluate in this process an expression of `Made.dropped`, or a compiled tuple of such expressions."""
        return eval(expression, {"L": {"self": model}, "G": self.function.fn.__globals__})


def runs_compiled_code() -> bool:
    """Return whether compiled code may run. It may not if a program set `torch.compiler.set_stance("force_eager")`."""
    return eval_frame._stance.stance == "default"
