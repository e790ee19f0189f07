"""What changes after a file was loaded is an error or a compile, never old code."""

import contextlib
import shutil
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import zcompile
from tests.support import artifacts
from tests.support.artifacts import cache_in, during, make_file, sharded, tokens_of
from tests.support.process import no_collector
from tests.support.ranks import on_ranks
from zcompile.artifact import program
from zcompile.artifact.aot import lacking
from zcompile.state.sharded_model import state_of

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())
patch = mock.patch.object


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "model.zc"
    make_file(path, 1)
    return path


FUNCTION_REPLACED = "a function that the model calls, or a process group, was replaced"
CHANGES = {  # a change, or a context in which the next call is, and the error
    "freeze": (lambda model: model.down.weight.requires_grad_(False), "'down.weight' was frozen"),
    "set frozen": (lambda model: setattr(model.down.weight, "requires_grad", False), "'down.weight' was frozen"),
    "unfreeze": (lambda model: model.up.bias.requires_grad_(True), "'up.bias' was unfrozen"),
    "evaluate": (lambda model: model.eval(), "training"),
    "evaluate one module": (lambda model: model.drop.eval(), "training"),
    "no_grad": (lambda model: torch.no_grad(), "grad"),
    "autocast": (lambda model: torch.autocast("cpu", torch.bfloat16), "autocast"),
    "deterministic": (lambda model: during(torch.use_deterministic_algorithms, True, False), "deterministic"),
    "other function": (lambda model: patch(artifacts, "squared_relu", torch.relu), FUNCTION_REPLACED),
    "other function of a module": (lambda model: setattr(model, "activate", torch.relu), FUNCTION_REPLACED),
    "other forward": (
        lambda model: patch(artifacts.Mixed, "forward", lambda self, tokens: self.head(self.embed(tokens))),
        "the forward of Mixed was replaced",
    ),
    "own forward": (lambda model: setattr(model.down, "forward", lambda x: x @ model.down.weight.t()), "forward"),
    "other buffer": (lambda model: setattr(model, "offset", torch.zeros(6, dtype=torch.float64)), "offset"),
    "new hook": (lambda model: model.down.register_forward_hook(lambda module, args, output: 2 * output), "hook"),
    "other dtype": (lambda model: model.double(), "torch.float64"),
}


@pytest.mark.parametrize("name", CHANGES)
@on_ranks(1)
def test_a_change_after_loading_is_noticed(rank, world, file, name):
    model = zcompile.compile(sharded(), artifact=file, require=True)
    model(tokens_of(0, rank))
    assert zcompile.stats(model)["compiled"].startswith("loaded")
    change, told = CHANGES[name]
    changed = change(model)
    refused = pytest.raises(RuntimeError, match="has no code for a call on rank 0")
    with refused as raised, changed if hasattr(changed, "__exit__") else contextlib.nullcontext():
        model(tokens_of(0, rank))
    assert told in str(raised.value)


def edited_lines(module, lines=program._source_lines.__wrapped__):
    return [line.replace("x.relu()", "x.sigmoid()") for line in lines(module)]


OTHERWISE = {  # where a file is loaded, and the error
    "another function": (lambda: patch(artifacts, "squared_relu", artifacts.as_bytes), "squared_relu is no longer"),
    "another forward": (lambda: patch(artifacts.Mixed, "forward", lambda self, x: x), "modules: made for"),
    "an edited source": (
        lambda: patch(program, "_source_lines", edited_lines),
        r"lines \d+ to \d+ of module tests.support.artifacts have changed since",
    ),
}


@pytest.mark.parametrize("where", OTHERWISE)
@on_ranks(1)
def test_a_file_is_not_loaded_beside_other_code(rank, world, file, where):
    code, told = OTHERWISE[where]
    with code():
        model = zcompile.compile(sharded(), artifact=file, require=True)
        with pytest.raises(RuntimeError, match=f"is required and cannot be used.*{told}"):
            model(tokens_of(0, rank))


LOADS = """
import sys, socket, torch, torch.distributed as dist, zcompile
from tests.support.artifacts import sharded, tokens_of
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = zcompile.compile(sharded(), artifact=sys.argv[1], require=True)
model(tokens_of(0, 0)).sum().backward()
assert not any(torch._dynamo.utils.counters.values())
print(torch.__file__, zcompile.__file__, socket.gethostname(), zcompile.stats(model)["compiled"], sep="\\n")
"""


def test_a_file_is_loaded_in_another_virtual_environment_folder_and_host(file, tmp_path):
    """In an interpreter without this one's environment, which has the same packages at other paths."""
    for name, module in (("environment", torch), ("source", zcompile)):
        (tmp_path / name).symlink_to(Path(module.__file__).parent.parent)
    environment = {
        "PYTHONPATH": f"{tmp_path / 'source'}:{tmp_path / 'environment'}",
        **dict.fromkeys(("HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR"), str(tmp_path)),
        **dict.fromkeys(("USER", "LOGNAME"), "another"),
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCHINDUCTOR_COMPILE_THREADS": "3",
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    copied = shutil.copy(file, tmp_path / "copied.zc")
    command = [f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}", "-c", LOADS, copied]
    rename = ["unshare", "--uts", "sh", "-c", 'hostname another && exec "$@"', "sh"]
    renames = subprocess.run([*rename, "true"], capture_output=True).returncode == 0  # not without CAP_SYS_ADMIN
    done = subprocess.run([*rename * renames, *command], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    torch_file, source, host, how = done.stdout.splitlines()
    assert torch_file.startswith(f"{tmp_path}/environment") and source.startswith(f"{tmp_path}/source")
    assert how == f"loaded from {copied}" and (host == "another") == renames


class Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens).sum()


@pytest.mark.slow
@on_ranks(1)
def test_a_wrapper_around_a_sharded_model_is_loaded_and_sees_what_is_frozen(rank, world, inductor_cache, tmp_path):
    path = tmp_path / "model.zc"
    with cache_in(inductor_cache):
        for _ in range(2):
            wrapper = zcompile.compile(Wrapper(sharded()), artifact=path)
            wrapper(tokens_of(0, rank)).backward()
        assert zcompile.stats(wrapper)["compiled"] == f"loaded from {path}"
        wrapper.model.down.weight.requires_grad = False
        told = pytest.warns(UserWarning, match="'down.weight' was frozen")
        with told, pytest.raises(RuntimeError, match="requires_grad"):
            wrapper(tokens_of(0, rank))


@on_ranks(1)
def test_another_length_is_compiled(rank, world, inductor_cache, file):
    with cache_in(inductor_cache):
        model = zcompile.compile(sharded(), artifact=file)
        model(tokens_of(0, rank))
        with pytest.warns(UserWarning, match="has no code for a call on rank 0.*size mismatch"):
            longer = model(tokens_of(1, rank, length=7))
        with torch.compiler.set_stance("force_eager"):
            expected = model(tokens_of(1, rank, length=7))
        assert torch.allclose(longer, expected, atol=1e-6)
        program = model._compiled_call_impl.programs[0]
        assert not program.changed(model, (tokens_of(0, rank),), {}), "the first length still runs what was loaded"


@on_ranks(1)
def test_a_file_is_for_the_sizes_of_its_call_and_not_for_those_compiled_before(rank, world, inductor_cache, tmp_path):
    with cache_in(inductor_cache):
        for path, length in (tmp_path / "four.zc", 4), (tmp_path / "six.zc", 6):
            model = zcompile.compile(sharded(), artifact=path)
            model(tokens_of(0, rank, length=length))
            with pytest.warns(UserWarning, match="has no code for a call"):
                model(tokens_of(1, rank, length=7))


@on_ranks(1)
def test_the_last_reference_to_a_model_frees_what_it_loaded(rank, world, file):
    model = zcompile.compile(sharded(), artifact=file, require=True)
    model(tokens_of(0, rank)).sum().backward()
    with no_collector():
        state = weakref.ref(state_of(model))
        del model
        assert state() is None
