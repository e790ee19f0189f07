"""`zcompile precompile`: compiles a training program into an artifact on one machine, without the other ranks.

The program has a function `build()`, which returns the model, `batch(step, rank)` and `loss(model, batch)`. With
`--mesh dp=4,tp=2`, zcompile calls `build(dp=4, tp=2)`. The process is rank 0 of a fake process group. It calls `loss`
on the batch of step 0, or of each step in `--steps`. When `loss` calls the model, this call is compiled, forward and
backward, under the contexts that `loss` set (such as autocast). The call is not run: `loss` ends there. With
`--blocks`, each block's call is compiled and then run in eager, because the next block needs its output's shape.

Under tensor parallelism, each "tp" coordinate needs its own code, see [Note: positions] in groups.py. A new process
compiles for each coordinate, one after the other, because torch's caches for DTensors depend on the rank.

If `--out` exists, its code is kept for graphs that did not change, see [Note: code that is kept] in program.py.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib
import inspect
import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map_only

from zcompile.artifact.file_format import Artifact, ArtifactError, decode, read
from zcompile.artifact.fingerprint import of_call
from zcompile.artifact.groups import makers_of
from zcompile.artifact.model import check_artifact
from zcompile.artifact.program import make, merge
from zcompile.compiler.backend import parse_options
from zcompile.explanation.workloads import DTYPES, BadInput, built_by, function_of
from zcompile.sharding.shard import shard
from zcompile.sharding.validate import is_sharded
from zcompile.state.sharded_model import models_of, state_of
from zcompile.state.transport_choice import Choice
from zcompile.whole_files import write


def run(arguments: argparse.Namespace) -> int:
    """Write the artifact and print its size and SHA-256. Return the exit status: 1 if no file can hold the model."""
    try:
        earlier = _earlier(arguments.out)
        data, makers = precompile(arguments, None if earlier is None else decode(earlier, str(arguments.out)))
        others = [] if arguments.rank is not None else makers[1:]
        data = merge([data, *(compiled_by_another_process(arguments, rank, earlier) for rank in others)])
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        raise BadInput(str(error)) from error
    write(arguments.out, data)
    print(f"{arguments.out}: {len(data) / 1e6:.1f} MB, SHA-256 {hashlib.sha256(data).hexdigest()}")
    return 0


def _earlier(path: Path) -> bytes | None:
    """Read the artifact of an earlier run; None if it does not exist, is damaged, or other users may write it."""
    try:
        decode(data := read(path), str(path))
    except (FileNotFoundError, ArtifactError):
        return None
    return data


def compiled_by_another_process(arguments: argparse.Namespace, rank: int, earlier: bytes | None) -> bytes:
    """Run `precompile` in a new process as `rank`, and return its file's bytes. Raises ArtifactError on failure."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "model.zc"
        if earlier is not None:
            write(out, earlier)
        command = shlex.split(arguments.command_line)[1:] + ["--rank", str(rank), "--out", str(out)]
        if subprocess.run([sys.executable, "-m", "zcompile", *command], stdout=subprocess.DEVNULL).returncode:
            raise ArtifactError(f"zcompile: the process that compiled for rank {rank} failed, see its error above.")
        return out.read_bytes()


def precompile(arguments: argparse.Namespace, earlier: Artifact | None) -> tuple[bytes, list[int]]:
    """Compile the user's training program for all ranks at the position of rank `--rank` (default 0).

    Args:
        earlier: an older artifact, whose code is kept for graphs that did not change.

    Returns:
        A file's bytes, and the values of `--rank` that cover all ranks: the first rank at each position, a combination
        of coordinates in tensor and expert parallelism ([Note: positions] in groups.py).

    Raises:
        BadInput: the program's file, its `build` function, or the results of this function are wrong.
        ValueError: an option of the backend is wrong, or this torch cannot save compiled models.
        ArtifactError: the model has graph breaks, or cannot be saved.
    """
    if arguments.mesh:
        arguments.ranks = _ranks_of(arguments.mesh)
    if arguments.dynamic is not None and len(arguments.steps) > 1:
        raise BadInput("--dynamic and several --steps exclude each other: code with dynamic sizes takes all batches")
    if arguments.ranks % arguments.replicas:
        raise BadInput(f"--ranks {arguments.ranks} is no multiple of --replicas {arguments.replicas}")
    try:
        settings = parse_options(json.loads(arguments.options))
        check_artifact(settings)
    except json.JSONDecodeError as error:
        raise BadInput(f"--options takes a JSON object: {error}") from None
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    build = _with_sizes(function_of(arguments.module, imported), arguments)
    name = Path(arguments.module.rpartition(":")[0]).stem
    if (rank := arguments.rank or 0) >= arguments.ranks:
        raise BadInput(f"--rank {rank} must be less than the number of ranks, {arguments.ranks}")
    dist.init_process_group("fake", rank=rank, world_size=arguments.ranks, store=FakeStore())
    try:
        model, batch, loss = built_by(build, arguments.module)
        _shard(model, arguments, device)

        files: dict[Any, bytes] = {}

        def compile_call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if arguments.dynamic is not None:
                mark_dynamic([args, kwargs], arguments.dynamic)
            call = tuple(of_call(module, args, kwargs).items())
            if call not in files:  # equal blocks have equal calls
                begin = time.perf_counter()
                files[call] = make(module, settings, arguments.mode, args, kwargs, name, earlier)
                _print_progress(files[call], earlier, len(files), time.perf_counter() - begin)
            if module is model:
                raise _Compiled
            return module._call_impl(*args, **kwargs)

        for module in modules_of(model, arguments.blocks):
            module._compiled_call_impl = functools.partial(compile_call, module)
        for step in arguments.steps:
            with contextlib.suppress(_Compiled):
                loss(model, tree_map_only(torch.Tensor, lambda value: value.to(device), batch(step, 0)))
        if not files:
            raise BadInput(f"the loss function of {arguments.module} did not call the model that build() returned")
        return merge([*files.values()]), makers_of(state_of(model))
    finally:
        dist.destroy_process_group()


def mark_dynamic(inputs: Any, dimension: int) -> None:
    """Mark dimension number `dimension` of all tensors in `inputs` as dynamic. Raises BadInput if no tensor has it."""
    tensors = [each for each in tree_leaves(inputs) if isinstance(each, torch.Tensor) and each.ndim > dimension]
    if not tensors:
        raise BadInput(f"--dynamic {dimension}: no tensor in the model's inputs has this dimension")
    for each in tensors:
        torch._dynamo.maybe_mark_dynamic(each, dimension)


def _ranks_of(mesh: Mapping[str, int]) -> int:
    """Return the number of ranks of `--mesh`: the product of its sizes without "ep", which groups the same ranks."""
    ranks = math.prod(size for name, size in mesh.items() if name != "ep")
    if ranks % (ep := mesh.get("ep", 1)):
        raise BadInput(f"--mesh has {ranks} ranks, which groups of ep={ep} do not divide: change ep or another size")
    return ranks


def _with_sizes(build: Callable[..., Any], arguments: argparse.Namespace) -> Callable[[], Any]:
    sizes = arguments.mesh or {}
    try:
        inspect.signature(build).bind(**sizes)
    except TypeError as error:
        raise BadInput(f"build() of {arguments.module} must take the sizes of --mesh, {sizes}: {error}") from None
    return functools.partial(build, **sizes)


def _print_progress(data: bytes, earlier: Artifact | None, number: int, seconds: float) -> None:
    (program,) = decode(data, "program").facts["programs"]
    how = "kept, traced" if earlier is not None and program["code"] in earlier.parts else "compiled"
    where = f"ranks at {program['position']}" if program["position"] else "all ranks"
    print(f"program {number} for {where}: {how} in {seconds:.1f} s, {len(data)} bytes", file=sys.stderr, flush=True)


def _shard(model: nn.Module, arguments: argparse.Namespace, device: str) -> None:
    """Shard the model as the options say, unless `build` has sharded it, and set the transport of compiled graphs."""
    if not is_sharded(model):
        shards = arguments.ranks // arguments.replicas
        mesh = init_device_mesh(device, (arguments.replicas, shards) if arguments.replicas > 1 else (shards,))
        dtypes = [DTYPES.get(name) for name in (arguments.param_dtype, arguments.reduce_dtype)]
        shard(model, mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    elif arguments.param_dtype or arguments.reduce_dtype or arguments.replicas > 1:
        raise BadInput(f"{arguments.module} shards the module: leave out --replicas, --param-dtype, --reduce-dtype")
    if arguments.transport:
        for each in models_of(state_of(model)):
            each.transport = Choice(arguments.transport, "asked for")


def modules_of(model: nn.Module, blocks: str) -> list[nn.Module]:
    if not blocks:
        return [model]
    modules: dict[nn.Module, None] = {}
    for path in blocks.split(","):
        pattern = re.escape(path if "*" in path else f"{path}.*").replace(r"\*", "[^.]+")
        found = [module for name, module in model.named_modules() if re.fullmatch(pattern, name)]
        if not found:
            raise BadInput(f"--blocks {path}: the model has no such module")
        modules |= dict.fromkeys(found)
    return [*modules]


class _Compiled(BaseException):
    """Ends `loss` after the model's call was compiled."""


def imported(file: Path) -> ModuleType:
    """Import the Python file `file` as a module named like the file, by which name other processes can import it."""
    sys.path.insert(0, str(file.resolve().parent))
    module = importlib.import_module(file.stem)
    if not file.samefile(getattr(module, "__file__", None) or os.devnull):
        raise BadInput(f"{file} has the name of another module, {module.__name__}: rename it")
    return module
