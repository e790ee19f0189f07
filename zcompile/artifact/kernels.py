"""Saves Inductor's compiled C++ kernels to an artifact (a file), and loads them without a compiler.

Inductor writes a Python module for each graph. When the module is imported, it passes the source of each kernel to an
`AsyncCompile`, which compiles it. A module from an artifact has a `Kernels` instead, which takes C++ kernels from the
file.
"""

import ast
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch._inductor import config as inductor_config
from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import (
    BypassFxGraphCache,
    CppPythonBindingsCodeCache,
    FxGraphCache,
    code_hash,
    compiled_fx_graph_hash,
    get_path,
    write_atomic,
)
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.fx import GraphModule

from zcompile.artifact.file_format import ArtifactError, check_writers
from zcompile.artifact.groups import Groups, with_names, with_places
from zcompile.whole_files import write

MAKE = "async_compile = AsyncCompile()"
MAKE_FROM_FILE = f"from {__name__} import Kernels; async_compile = Kernels()"
DEVICE_NUMBER = re.compile(r"cuda:\d|\bindex=\d|\b(_DeviceGuard|set_device|get_raw_stream)\(\d")
KNOWN = ("cpp_pybinding", "triton", "wait")  # methods of AsyncCompile that generated code may call

_files: dict[str, Path] = {}  # shared libraries of the installed kernels, by `kernel_key`


def kernel_key(argument_types: list[str], source: str) -> str:
    return hashlib.sha256("\n".join([*argument_types, source]).encode()).hexdigest()


class Kernels(AsyncCompile):
    """Replaces Inductor's `AsyncCompile` in generated modules that come from a file."""

    def cpp_pybinding(self, argtypes: list[str], source_code: str) -> Any:
        key = kernel_key(argtypes, source_code)
        if key not in _files:
            # `FromFile` (model.py) puts the path of the artifact before this text.
            raise RuntimeError(f"zcompile: the artifact lacks C++ kernel {key[:12]}. Delete the artifact, and rerun.")
        return CppPythonBindingsCodeCache._load_library_inner(str(_files[key]), key).kernel


def graph_hash(gm: GraphModule, joint: GraphModule, joint_inputs: Sequence[Any]) -> str:
    """Hash the graph that Dynamo captured, and the joint graph that AOTAutograd made of it.

    If two calls of a model have equal hashes, and equal fingerprints of their environments (versions and more, see
    fingerprint.py), Inductor generates equal code for them.
    Returns "" if torch cannot hash a graph or a custom pass of the user.
    """
    captured = [each.code for each in gm.modules() if isinstance(each, GraphModule)]
    nodes = [
        [node.meta.get(key) for key in ("val", "recompute", "ac_graph_id", "custom")]
        for each in joint.modules()
        if isinstance(each, GraphModule)
        for node in each.graph.nodes
    ]
    details: Any = {"captured": captured, "nodes": nodes}
    try:
        FxGraphCache._check_can_cache(joint)
        return compiled_fx_graph_hash(joint, joint_inputs, details, ())[0]
    except (BypassFxGraphCache, AssertionError):  # AssertionError: a custom pass is a plain function
        return ""


def graphs_of(entry: Any) -> Iterator[Any]:
    """Yield the compiled graphs of `entry`, an entry of AOTAutograd's cache: forward and, if it exists, backward."""
    for part in (entry.compiled_fw, entry.compiled_bw):
        if part is not None:
            yield part.result


def take_kernels(entry: Any, groups: Groups) -> dict[str, bytes]:
    """Return the shared libraries of an AOTAutograd cache entry's C++ kernels. Edit its code to load them from a file.

    Raises RuntimeError if a kernel is neither C++ nor Triton, or if `groups` lacks a collective's process group.
    """
    libraries = {}
    for graph in graphs_of(entry):
        for call in ast.walk(ast.parse(graph.source_code)):
            if not isinstance(call, ast.Call):
                continue
            owner, _, kind = ast.unparse(call.func).rpartition(".")
            if owner != "async_compile":
                continue
            if kind not in KNOWN:  # `make` in program.py adds "Compile without an artifact."
                raise RuntimeError(f"the model needs an Inductor kernel of kind {kind!r}, neither C++ nor Triton")
            if kind == "cpp_pybinding":
                argument_types, source = map(ast.literal_eval, call.args)
                kernel = CppPythonBindingsCodeCache.load_pybinding(argument_types, source)
                libraries[kernel_key(argument_types, source)] = Path(kernel.__self__.__file__).read_bytes()
        graph.source_code = with_places(graph.source_code.replace(MAKE, MAKE_FROM_FILE), groups)
        graph.cache_key = code_hash(graph.source_code)
        graph.counter_deltas.clear()  # else torch's counters would count a load as a compilation
    return libraries


def names_device_number(entry: Any) -> bool:
    """Return whether an AOTAutograd cache entry's code contains its GPU's number, and so runs only on that GPU."""
    return any(DEVICE_NUMBER.search(graph.source_code) for graph in graphs_of(entry))


def install_kernels(libraries: Mapping[str, bytes]) -> None:
    """Write `libraries`, which `take_kernels` returned, to Inductor's cache folder, from which `Kernels` loads them.

    Raises:
        ArtifactError: other users may write to the folder, and so could replace a library.
        OSError: the folder is full, or cannot be written.
    """
    folder = Path(cache_dir()) / "zcompile"
    folder.mkdir(mode=0o700, exist_ok=True)
    for each in (folder.parent, folder):
        try:
            check_writers(each, each.stat())
        except ArtifactError as error:
            raise ArtifactError(f"{error} Or set TORCHINDUCTOR_CACHE_DIR to a cache folder of your own.") from None
    for key, library in libraries.items():
        if key in _files and _files[key].exists():
            continue
        path = folder / f"{hashlib.sha256(library).hexdigest()}.so"
        if not path.exists() or path.read_bytes() != library:
            write(path, library)
        _files[key] = path


def install_modules(entry: Any, groups: Groups) -> None:
    """Write the Python modules of an AOTAutograd cache entry to the paths from which it imports them."""
    for graph in graphs_of(entry):
        graph.source_code = with_names(graph.source_code, groups)
        graph.cache_key = code_hash(graph.source_code)
        write_atomic(get_path(graph.cache_key, "py")[2], graph.source_code, make_dirs=True)


def in_this_process() -> Any:
    """Return a context manager in which Inductor starts no compile workers: loaded code needs none."""
    return inductor_config.patch(compile_threads=1)


def inductor_settings() -> dict[str, Any]:
    """Return Inductor's settings that change generated code: all but compilers, paths and compile workers."""
    tools = ("cpp.cxx", "cpp.vec_isa_ok", "cuda.cuda_cxx")
    settings: dict[str, Any] = inductor_config.save_config_portable()
    return {
        name: value
        for name, value in settings.items()
        if name not in tools and not name.endswith("path") and "worker" not in name
    }
