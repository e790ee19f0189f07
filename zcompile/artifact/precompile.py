"""`zcompile precompile`: the artifact of a training program, made by one process without the other ranks.

The program's own functions say what is compiled: `build()` makes the model, and `loss(model, batch)` calls it, with
autocast or whatever else `loss` uses, on the batch of step 0 and rank 0. The process is rank 0 of a group whose other
ranks do not exist. When `loss` calls the model, that call is compiled, forward and backward, instead of run, and `loss`
ends there.
"""

import argparse
import hashlib
import importlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_map_only

from zcompile.artifact.file_format import ArtifactError
from zcompile.artifact.model import check_artifact
from zcompile.artifact.program import make
from zcompile.compiler.backend import parse_options
from zcompile.explanation.workloads import DTYPES, BadInput, built_by, function_of
from zcompile.sharding.shard import shard
from zcompile.sharding.validate import is_sharded
from zcompile.state.sharded_model import models_of, state_of
from zcompile.state.transport_choice import Choice
from zcompile.whole_files import write


def run(arguments: argparse.Namespace) -> int:
    """Write the artifact and print its size and SHA-256. Returns 1 if the model cannot be compiled into a file."""
    try:
        data = precompile(arguments)
    except ArtifactError as error:
        print(error, file=sys.stderr)
        return 1
    except ValueError as error:
        raise BadInput(str(error)) from error
    write(arguments.out, data)
    print(f"{arguments.out}: {len(data) / 1e6:.1f} MB, SHA-256 {hashlib.sha256(data).hexdigest()}")
    return 0


def precompile(arguments: argparse.Namespace) -> bytes:
    """The artifact that the command line asks for.

    Raises:
        BadInput: the file, the function, or what it returns.
        ValueError: an option of the backend, or a torch that cannot save compiled models.
        ArtifactError: the model has graph breaks, or cannot be saved.
    """
    if arguments.ranks % arguments.replicas:
        raise BadInput(f"--ranks {arguments.ranks} is no multiple of --replicas {arguments.replicas}")
    try:
        settings = parse_options(json.loads(arguments.options))
        check_artifact(settings)
    except json.JSONDecodeError as error:
        raise BadInput(f"--options takes a JSON object: {error}") from None
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(arguments.threads or int(os.environ.get("OMP_NUM_THREADS", "1")))
    build = function_of(arguments.module, imported)
    name = Path(arguments.module.rpartition(":")[0]).stem
    dist.init_process_group("fake", rank=0, world_size=arguments.ranks, store=FakeStore())
    try:
        model, batch, loss = built_by(build, arguments.module)
        _shard(model, arguments, device)

        def compile_call(*args: Any, **kwargs: Any) -> Any:
            raise _Compiled(make(model, settings, arguments.mode, args, kwargs, name))

        model._compiled_call_impl = compile_call
        try:
            loss(model, tree_map_only(torch.Tensor, lambda value: value.to(device), batch(0, 0)))
        except _Compiled as compiled:
            return compiled.args[0]
        raise BadInput(f"the loss of {arguments.module} did not call the module")
    finally:
        dist.destroy_process_group()


def _shard(model: nn.Module, arguments: argparse.Namespace, device: str) -> None:
    """Shard as the run does, unless FUNCTION did, and let plans count with the transport that the run will use."""
    if not is_sharded(model):
        shards = arguments.ranks // arguments.replicas
        mesh = init_device_mesh(device, (arguments.replicas, shards) if arguments.replicas > 1 else (shards,))
        dtypes = [DTYPES.get(name) for name in (arguments.param_dtype, arguments.reduce_dtype)]
        shard(model, mesh, param_dtype=dtypes[0], reduce_dtype=dtypes[1])
    elif arguments.param_dtype or arguments.reduce_dtype or arguments.replicas > 1:
        raise BadInput(f"{arguments.module} shards the module itself: leave out --replicas and the dtypes")
    if arguments.transport:
        for each in models_of(state_of(model)):
            each.transport = Choice(arguments.transport, "asked for")


class _Compiled(BaseException):
    """The model was called, and compiled into the artifact that is the argument."""


def imported(file: Path) -> ModuleType:
    """The module of a file, imported by the name by which `import` finds it."""
    sys.path.insert(0, str(file.resolve().parent))
    module = importlib.import_module(file.stem)
    if not file.samefile(getattr(module, "__file__", None) or os.devnull):
        raise BadInput(f"{file} has the name of another module, {module.__name__}: rename it")
    return module
