"""Bad input gets one clear error before any collective, on every rank, and nothing hangs."""

import copy
import functools
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zcompile
import zcompile.sharding.select_transport
from tests.support.models import Transformer
from tests.support.reference import compiled, lm_loss
from zcompile.options import Settings
from zcompile.sharding.model_state import state_of
from zcompile.sharding.select_transport import Choice


def raises(error, pattern, call):
    with pytest.raises(error, match=pattern):
        call()


def test_no_process_group():
    with pytest.raises(RuntimeError, match="init_process_group"):
        zcompile.shard(nn.Linear(2, 2))


def test_unknown_option():
    with pytest.raises(ValueError, match="unknown option 'iner'; known options are inner, inductor"):
        Settings.parse({"iner": "aot_eager"})
    with pytest.raises(ValueError, match="'inner' must be"):
        Settings.parse({"inner": "fast"})
    with pytest.raises(ValueError, match="differs between ranks"):
        Settings.parse({"inductor": {"shape_padding": True}})
    Settings.parse({"inductor": {"shape_padding": True, "force_shape_pad": True}})


def transports(rank, world):
    model = compiled(Transformer(), options={"transport": "gloo"})
    assert "the model is on cpu" in zcompile.stats(model)["transport_reason"]
    lm_loss(model, 0, rank).backward()
    stats = zcompile.stats(model)
    assert (stats["transport"], stats["transport_reason"], stats["transport_bytes"]) == ("gloo", "asked for", 0)
    for wrong in ("p2p", "nccl"):
        torch._dynamo.reset()
        model = compiled(Transformer(), options={"transport": wrong})
        raises(
            ValueError,
            f"'{wrong}' is not possible here: the model is on cpu. Use 'auto' or 'gloo'",
            lambda: lm_loss(model, 0, rank),
        )


class HostEvent:
    """In the place of a CUDA event."""

    def __init__(self, enable_timing):
        self.time = 0.0

    def record(self):
        self.time = time.perf_counter()

    def elapsed_time(self, other):
        return 1e3 * (other.time - self.time)


class Apart:
    """A runtime on which peer to peer fails on some ranks; on the others it moves nothing."""

    def __init__(self, runtime, failing):
        self.runtime, self.failing = runtime, failing

    def __getattr__(self, name):
        return getattr(self.runtime, name)

    def use_transport(self, name):
        if name == "p2p" and dist.get_rank() in self.failing:
            raise RuntimeError("rank 0 does not share its memory\nand where that was found")
        self.runtime.use_transport("loopback" if name == "p2p" else name)


def falls_back(rank, world, folder):
    state = state_of(zcompile.shard(nn.Linear(4, 4)))
    on_gpu = mock.patch.multiple(torch.cuda, Event=HostEvent, synchronize=lambda: None, get_device_name=lambda: "a GPU")
    small = mock.patch.object(zcompile.sharding.select_transport, "_MEASURED_NUMEL", 64)
    no_products = mock.patch.object(torch, "mm", lambda a, b: None)
    with on_gpu, small, no_products, mock.patch.dict(os.environ, XDG_CACHE_HOME=folder):
        choose = functools.partial(zcompile.sharding.select_transport._faster, state.mesh, nccl_max_ctas=None)
        for failing in ({1}, {0, 1}):
            expected = f"peer to peer failed on rank {min(failing)}: rank 0 does not share its memory"
            assert choose(lambda: Apart(state.new_runtime(), failing)) == Choice("nccl", expected)
            assert not zcompile.sharding.select_transport._cache_file().exists()  # it may not fail the next time
        for when in ("now", "earlier"):
            assert f"measured {when}" in choose(lambda: Apart(state.new_runtime(), ())).reason
            dist.barrier()


def test_auto_where_ranks_cannot_share_memory(ranks, tmp_path):
    ranks(2).run(falls_back, str(tmp_path))


class OnGpu:
    """A mesh that says that it is of GPUs."""

    device_type = "cuda"

    def __init__(self, mesh):
        self.mesh = mesh

    def __getattr__(self, name):
        return getattr(self.mesh, name)


def finds_obstacles(rank, world):
    mesh = OnGpu(state_of(zcompile.shard(nn.Linear(4, 4))).mesh)

    def obstacle(uuid=rank, reachable=True, namespaces="net:[1]", host="one", visible=world):
        gpus = mock.patch.multiple(
            torch.cuda,
            current_device=lambda: rank % visible,
            device_count=lambda: visible,
            get_device_properties=lambda device: SimpleNamespace(uuid=uuid),
            can_device_access_peer=lambda device, other: reachable,
        )
        here = mock.patch.multiple(
            zcompile.sharding.select_transport,
            _namespaces=lambda: (namespaces,),
            _C=SimpleNamespace(built_with_cuda=True),
        )
        with gpus, here, mock.patch("socket.gethostname", lambda: host):
            return zcompile.sharding.select_transport._obstacle_to_p2p(mesh)

    assert obstacle() == obstacle(visible=1) == ""  # each may see its own GPU alone
    assert obstacle(host=str(rank)) == "the ranks are on several hosts"
    assert obstacle(uuid=0) == "ranks share a GPU"
    assert obstacle(reachable=rank == 0) == "the GPU of rank 1 cannot access GPU 0"
    assert "containers that do not share a network" in obstacle(namespaces=f"net:[{rank}]")
    kinds = [one.partition(":")[0] for one in zcompile.sharding.select_transport._namespaces()]
    assert kinds == ["net", "pid"]


def test_obstacles_to_peer_to_peer(ranks):
    ranks(2).run(finds_obstacles)


def test_transport_option(ranks):
    with pytest.raises(ValueError, match="'transport' must be one of auto, p2p, nccl, gloo, not 'rdma'"):
        Settings.parse({"transport": "rdma"})
    with pytest.raises(ValueError, match="'reduce_budget_bytes' must be a whole number of bytes"):
        Settings.parse({"reduce_budget_bytes": -1})
    with pytest.raises(ValueError, match="'inductor' has 'max_autotun', which Inductor does not know"):
        Settings.parse({"inductor": {"max_autotun": True, "cpp.threads": 1}})
    for wrong in (["dedup_gathers"], "sink_gathers", 3):
        with pytest.raises(ValueError, match="'skip_passes' must be a list of narrow_gathers"):
            Settings.parse({"skip_passes": wrong})
    ranks(2).run(transports)


def bad_models(rank, world):
    model = zcompile.shard(Transformer())
    raises(RuntimeError, f"sharded already .rank {rank}", lambda: zcompile.shard(model))

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    raises(RuntimeError, "an optimizer .AdamW. built before holds parameter 'scale'", lambda: zcompile.shard(model))
    del optimizer
    zcompile.shard(model)

    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    raises(ValueError, "'0.*' on cpu and '1.*' on meta", lambda: zcompile.shard(model))

    model = nn.Linear(2, 2)
    model.counts = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)
    raises(TypeError, "'counts' has dtype torch.int64", lambda: zcompile.shard(model))
    zcompile.shard(model, ignored_params=[model.counts])

    raises(RuntimeError, "second reference to parameter 'weight_ih_l0'", lambda: zcompile.shard(nn.LSTM(3, 3)))
    mesh = dist.init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("a", "b", "c"))
    raises(ValueError, "3 dimensions", lambda: zcompile.shard(nn.Linear(2, 2), mesh))
    raises(TypeError, "must be a torch DeviceMesh", lambda: zcompile.shard(nn.Linear(2, 2), "cpu"))
    raises(TypeError, "must be floating-point", lambda: zcompile.shard(nn.Linear(2, 2), param_dtype=torch.int8))
    for wrong in (0, -1, 2.0, True):
        raises(
            ValueError,
            f"must be a positive number of SMs, or None, not {wrong}",
            functools.partial(zcompile.shard, nn.Linear(2, 2), nccl_max_ctas=wrong),
        )
    raises(ValueError, "this mesh is on cpu over gloo", lambda: zcompile.shard(nn.Linear(2, 2), nccl_max_ctas=4))
    raises(RuntimeError, "no sharded parameter", lambda: zcompile.stats(nn.Linear(2, 2)))


def test_bad_models(ranks):
    ranks(2).run(bad_models)


def disagreement(rank, world):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 + rank))
    raises(RuntimeError, "rank 0 has '1.weight' .5, 4. .*, rank 1 has '1.weight' .6, 4.", lambda: zcompile.shard(model))
    raises(
        RuntimeError,
        "rank 0 has .*native_reduce=False, rank 1 has .*native_reduce=True",
        lambda: zcompile.shard(nn.Linear(2, 2), native_reduce=rank == 1),
    )
    model = nn.Linear(3, 4)
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.int32 if rank else torch.float32), requires_grad=False)
    raises((RuntimeError, TypeError), "'extra' has dtype torch.int32", lambda: zcompile.shard(model))


def test_ranks_that_disagree(ranks):
    ranks(2).run(disagreement)


class TwoOrders(nn.Module):
    """Reads its second layer first if it is told to."""

    def __init__(self, turned):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.turned = turned

    def forward(self, x):
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x.sum()


def different_programs(rank, world):
    """As over NCCL, where ranks do not agree before each collective."""
    for turned, error in ((False, None), (rank == 1, "First difference: on rank [01] reads 'layers.[01].weight'")):
        torch._dynamo.reset()
        model = zcompile.shard(TwoOrders(turned))
        state = state_of(model)
        state.agreement = state.new_agreement()
        model.compile(backend="zcompile", options={"inner": "aot_eager"}, fullgraph=True)
        begin = time.monotonic()
        if error:
            raises(RuntimeError, error, lambda: model(torch.ones(2, 4)))
            assert time.monotonic() - begin < 30
        else:
            for length in (2, 3 + rank, 5):  # lengths may differ, and one rank may compile where another does not
                model(torch.ones(length, 4)).backward()
    alone = type(state.agreement)("alone", rank, world, timeout_s=0.5)
    if rank == 0:
        raises(
            RuntimeError,
            "rank 0 has waited 0 s for rank 1 to come to a graph that begins with: first",
            lambda: alone.check(["first"]),
        )


def test_ranks_that_run_different_programs_are_told(ranks):
    ranks(2).run(different_programs)


def replaced(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))

    def assign():
        model.weight = nn.Parameter(torch.zeros(4, 3))

    raises(RuntimeError, f"'weight' was replaced after zcompile.shard .rank {rank}", assign)
    model(torch.ones(1, 3)).sum().backward()

    model._parameters["weight"] = nn.Parameter(torch.zeros(4, 3))
    with pytest.raises(RuntimeError, match="'weight' was replaced"):
        model(torch.ones(1, 3)).sum().backward()

    raises(RuntimeError, "cannot be copied", lambda: copy.deepcopy(zcompile.shard(nn.Linear(3, 4))))


def test_replaced_parameter(ranks):
    ranks(2).run(replaced)


def lost_write(rank, world):
    model = zcompile.shard(nn.Linear(3, 4))
    with torch.no_grad():
        model.weight.mul_(2)
    raises(RuntimeError, f"'weight' was modified in place .* on rank {rank}", lambda: model(torch.ones(1, 3)))


def lost_write_beside_compiled(rank, world):
    model = torch.compile(zcompile.shard(nn.Linear(3, 4)), backend="zcompile", options={"inner": "aot_eager"})
    model(torch.ones(1, 3)).sum().backward()
    with torch.no_grad():
        nn.init.zeros_(model.weight)
    raises(RuntimeError, f"'weight' was modified in place .* on rank {rank}", lambda: model(torch.ones(1, 3)))


class Renormalised(nn.Linear):
    def forward(self, x):
        with torch.no_grad():
            self.weight.view(-1).clamp_(-0.1, 0.1)
        return super().forward(x)


def compiled_write(rank, world):
    model = compiled(Renormalised(3, 4))
    raises(Exception, "modifies parameter .* in place", lambda: model(torch.ones(1, 3)))


@pytest.mark.parametrize("job", [lost_write, lost_write_beside_compiled, compiled_write])
def test_writes_that_would_be_lost(ranks, job):
    ranks(2).run(job)


def unsharded(rank, world):
    model = torch.compile(nn.Linear(3, 4), backend="zcompile")
    with pytest.warns(UserWarning, match="Call zcompile.shard"):
        out = model(torch.ones(1, 3))
    torch.testing.assert_close(out, model._orig_mod(torch.ones(1, 3)))


def test_unsharded_model_is_warned_about(ranks):
    ranks(2).run(unsharded)


def followed(rank, world):
    """What replaces a parameter's storage in ways that users may: the shard follows."""
    model = zcompile.shard(nn.Linear(5, 3).double())
    before = model.weight.detach().clone()
    model.float()
    torch.testing.assert_close(model.weight, before.float())
    assert model.weight.dtype == torch.float32
    other = zcompile.shard(nn.Linear(5, 3))
    model.load_state_dict(other.state_dict(), assign=True)
    torch.testing.assert_close(model.weight, other.weight)
    model(torch.ones(1, 5)).sum().backward()
    assert model._parameters["weight"].grad is not None


def test_conversions_and_assigned_state_are_followed(ranks):
    ranks(2).run(followed)


def meta(rank, world):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 9, bias=False))
        model[3].in_features = 6
        model[3].weight = nn.Parameter(torch.empty(9, 6))
        model[3].weight = model[0].weight
    zcompile.shard(model)
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    for ours, theirs in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    assert model[3]._parameters["weight"] is model[0]._parameters["weight"]

    class Nameless(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.empty(3, device="meta"))

    raises(
        RuntimeError,
        "'0' has meta tensor 'w' but no reset_parameters",
        lambda: zcompile.shard(nn.Sequential(Nameless())),
    )


def test_meta_device(ranks):
    ranks(2).run(meta)


def closed(rank, world):
    model = zcompile.shard(Transformer())
    lm_loss(model, 0, rank).backward()
    dist.destroy_process_group()
    lm_loss(model, 1, rank)


def test_closed_process_group(ranks):
    for message in ranks(2).run(closed, allow_failure=True):
        assert "of this sharded model was closed" in message


def dies(rank, world):
    model = compiled(Transformer())
    lm_loss(model, 0, rank).backward()
    if rank == 1:
        import os

        os._exit(1)
    lm_loss(model, 1, rank)


def test_a_rank_that_dies_is_named_as_the_cause(ranks):
    survivor, dead = ranks(2).run(dies, allow_failure=True)
    assert "rank 0 wanted to gather 'embed.weight', but other ranks did not answer" in survivor
    assert "died" in dead


RAISES = []  # not empty: `may_raise` raises


@torch.library.custom_op("zcompile_tests::may_raise", mutates_args=())
def may_raise(x: torch.Tensor) -> torch.Tensor:
    if RAISES:
        raise RuntimeError("broken on purpose")
    return x.clone()


may_raise.register_fake(torch.empty_like)
may_raise.register_autograd(lambda context, grad: may_raise(grad))


class MayRaise(nn.Module):
    def forward(self, x):
        return may_raise(x)


def goes_on(rank, world, inner):
    """Steps behind a backward that raised in the middle, while gathers were on their way, beside steps without it."""
    curves, peaks = [], []
    for raising in (False, True):
        torch.manual_seed(0)
        layers = [nn.Linear(24, 24) for _ in range(6)]
        model = zcompile.shard(nn.Sequential(*layers[:4], MayRaise(), *layers[4:]))
        model = torch.compile(model, backend="zcompile", options={"inner": inner, "bucket_bytes": 0})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randn(4, 24, generator=torch.Generator().manual_seed(rank))
        curves.append([])
        for step in range(5):
            if step == 2 and raising:
                loss = model(x).square().mean()
                RAISES.append(step)
                raises(RuntimeError, "broken on purpose", loss.backward)
                RAISES.clear()
                optimizer.zero_grad()
            if step == 4:
                zcompile.reset_stats(model)
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curves[-1].append(loss.item())
        peaks.append(zcompile.stats(model)["peak_unsharded_bytes"])
    assert curves[0] == curves[1] and peaks[0] == peaks[1], (curves, peaks)


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_a_backward_that_raised_leaves_nothing(ranks, inner):
    ranks(2).run(goes_on, inner)


def test_backend_is_found_without_an_import():
    code = "import torch; assert 'zcompile' in torch._dynamo.list_backends(), torch._dynamo.list_backends()"
    subprocess.run([sys.executable, "-c", code], check=True)
