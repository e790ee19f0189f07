"""Which transport a model takes, and why not another."""

import contextlib
import functools
import os
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
from tests.support.models import Transformer
from tests.support.process import full_disk
from tests.support.ranks import on_ranks, slow_case
from tests.support.reference import compiled, lm_loss
from zcompile.state import transport_choice as select_transport
from zcompile.state.sharded_model import state_of
from zcompile.state.transport_choice import Choice


def test_stats_say_which_transport_was_taken_and_why(rank, world):
    model = compiled(Transformer(), options={"transport": "gloo"})
    assert "the model is on cpu" in zcompile.stats(model)["transport_reason"]
    lm_loss(model, 0, rank).backward()
    stats = zcompile.stats(model)
    assert (stats["transport"], stats["transport_reason"], stats["transport_bytes"]) == ("gloo", "asked for", 0)


@pytest.mark.parametrize("transport", ["p2p", "nccl"])
def test_a_transport_of_gpus_is_refused_on_the_cpu(rank, world, transport):
    model = compiled(Transformer(), options={"transport": transport})
    message = f"'{transport}' is not possible here: the model is on cpu. Use 'auto' or 'gloo'"
    with pytest.raises(ValueError, match=message):
        lm_loss(model, 0, rank)


class HostEvent:
    """In the place of a CUDA event."""

    def __init__(self, enable_timing):
        self.time = 0.0

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


class WithoutPeers:
    """A runtime on which peer to peer fails on the ranks `failing`. On the others it moves nothing."""

    def __init__(self, runtime, failing):
        self.runtime, self.failing = runtime, failing

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def use_transport(self, name):
        if name == "p2p" and dist.get_rank() in self.failing:
            raise RuntimeError("rank 0 does not share its memory\nand where that was found")
        self.runtime.use_transport("loopback" if name == "p2p" else name)


def without_peers(state, failing):
    return WithoutPeers(state.groups.make_runtime_to_measure(), failing)


@contextlib.contextmanager
def measuring_on_gpus():
    """Lets measurements of this process be as on a GPU, and small."""
    gpu = {"Event": HostEvent, "synchronize": lambda: None, "get_device_name": lambda: "a GPU"}
    small = mock.patch.object(select_transport, "_MEASURED_NUMEL", 64)
    with mock.patch.multiple(torch.cuda, **gpu), small, mock.patch.object(torch, "mm", lambda a, b: None):
        yield


def test_auto_takes_nccl_where_ranks_cannot_share_memory_and_does_not_remember_it(rank, world, tmp_path):
    state = state_of(zcompile.shard(nn.Linear(4, 4)))
    with measuring_on_gpus(), mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{tmp_path}"):
        choose = functools.partial(select_transport._faster, state.mesh)
        for failing in ({1}, {0, 1}):
            expected = f"peer to peer failed on rank {min(failing)}: rank 0 does not share its memory"
            make_runtime = functools.partial(without_peers, state, failing)
            assert choose(make_runtime) == Choice("nccl", expected)
            assert not select_transport._cache_file().exists()  # it may not fail the next time
        for when in ("now", "earlier"):
            assert f"measured {when}" in choose(functools.partial(without_peers, state, ())).reason
            dist.barrier()


@contextlib.contextmanager
def no_home():
    """As for a user that the host does not know."""

    def raises():
        raise RuntimeError("Could not determine home directory.")

    environment = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
    with mock.patch.dict(os.environ, environment, clear=True), mock.patch("pathlib.Path.home", raises):
        yield


DAMAGED = ("[]", '{"nccl": 1.0}', '{"nccl": 1.0, "p2p": "2"}', '{"nccl": 1.0, "p2p": NaN}')  # times of a machine


@pytest.mark.parametrize("text", [None, "[]", *(slow_case(f'{{"KEY": {each}}}') for each in DAMAGED)])
@on_ranks(2, timeout=60)
def test_a_damaged_cache_or_none_is_measured_again(rank, world, tmp_path, text):
    """Ranks have caches of their own. That of rank 0 holds `text`; with None, no rank has a place for one."""
    state = state_of(zcompile.shard(nn.Linear(4, 4)))
    place = no_home() if text is None else mock.patch.dict(os.environ, XDG_CACHE_HOME=f"{tmp_path}/{rank}")
    with measuring_on_gpus(), place:
        if rank == 0 and text is not None:
            file = select_transport._cache_file()
            file.parent.mkdir(parents=True)
            key = f"a GPU x{world}, torch {torch.__version__}, cuda {torch.version.cuda}, wire 2"
            file.write_text(text.replace("KEY", key))
        make_runtime = functools.partial(without_peers, state, ())
        assert "measured now" in select_transport._faster(state.mesh, make_runtime).reason


def test_a_full_disk_leaves_no_file_behind(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with full_disk():
        select_transport._write_cache("a machine", {"nccl": 1.0, "p2p": 2.0})
    assert "could not be kept" in caplog.text
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


class OnGpu:
    """A mesh that says that it is of GPUs."""

    device_type = "cuda"

    def __init__(self, mesh):
        self.mesh = mesh

    def __getattr__(self, name):
        return getattr(self.mesh, name)


def test_obstacles_to_peer_to_peer_are_named(rank, world):
    mesh = OnGpu(state_of(zcompile.shard(nn.Linear(4, 4))).mesh)

    def obstacle(uuid=rank, reachable=True, namespaces="net:[1]", host="one", visible=world, built=True):
        gpus = mock.patch.multiple(
            torch.cuda,
            current_device=lambda: rank % visible,
            device_count=lambda: visible,
            get_device_properties=lambda device: SimpleNamespace(uuid=uuid),
            can_device_access_peer=lambda device, other: reachable,
        )
        runtime = SimpleNamespace(built_with_cuda=built)
        here = mock.patch.multiple(select_transport, _namespaces=lambda: (namespaces,), _C=runtime)
        with gpus, here, mock.patch("socket.gethostname", lambda: host):
            return select_transport._obstacle_to_p2p(mesh)

    assert obstacle() == obstacle(visible=1) == ""  # each may see its own GPU alone
    assert "built without CUDA" in obstacle(built=rank == 0) and "on several hosts" in obstacle(host=str(rank))
    assert obstacle(uuid=0) == "ranks share a GPU"
    assert obstacle(reachable=rank == 0) == "the GPU of rank 1 cannot access GPU 0"
    assert "containers that do not share a network" in obstacle(namespaces=f"net:[{rank}]")
    assert [namespace.partition(":")[0] for namespace in select_transport._namespaces()] == ["net", "pid"]
