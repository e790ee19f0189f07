"""Bad input gets one clear error on every rank before any collective, nothing hangs, and Ctrl-C ends waiting ranks."""

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch._inductor.utils import fresh_cache
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import remove_parametrizations

import zcompile
import zcompile.state.transport_choice
from tests.support.chaos import context
from tests.support.models import Transformer
from tests.support.process import full_disk
from tests.support.raising import RAISES, MayRaise, raises
from tests.support.ranks import slow_case
from tests.support.reference import compiled, finish_step, lm_loss
from tests.support.time_limits import scaled
from zcompile.ranks.program_check import Agreement, Line


def test_an_optimizer_built_before_sharding_is_refused(rank, world):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    raises(RuntimeError, "an optimizer .AdamW. built before holds parameter 'scale'", lambda: zcompile.shard(model))
    del optimizer
    zcompile.shard(model)


def test_parameters_that_cannot_be_sharded_are_named(rank, world):
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    raises(ValueError, "'0.*' on cpu and '1.*' on meta", lambda: zcompile.shard(model))
    model = nn.Linear(2, 2)
    model.mine = [model.weight]
    raises(RuntimeError, "second reference to parameter 'weight' in 'mine'", lambda: zcompile.shard(model))
    model = nn.Sequential(nn.ParameterList([torch.empty(3, device="meta")]))
    raises(RuntimeError, "'0' has meta tensor '0' but no reset_parameters", lambda: zcompile.shard(model))


def test_bad_arguments_of_shard_are_refused(rank, world):
    raises(RuntimeError, f"sharded already .rank {rank}", lambda: zcompile.shard(zcompile.shard(nn.Linear(2, 2))))
    mesh = dist.init_device_mesh("cpu", (world, 1, 1), mesh_dim_names=("a", "b", "c"))
    raises(ValueError, "3 dimensions", lambda: zcompile.shard(nn.Linear(2, 2), mesh))
    raises(TypeError, "must be a torch DeviceMesh", lambda: zcompile.shard(nn.Linear(2, 2), "cpu"))
    raises(TypeError, "must be floating-point", lambda: zcompile.shard(nn.Linear(2, 2), param_dtype=torch.int8))


def test_ranks_with_different_models_or_arguments_are_told(rank, world):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5 + rank))
    raises(RuntimeError, "rank 0 has '1.weight' .5, 4. .*, rank 1 has '1.weight' .6, 4.", lambda: zcompile.shard(model))
    model = nn.Linear(3, 4)
    model.extra = nn.Parameter(torch.zeros(2, dtype=torch.int32 if rank else torch.float32), requires_grad=False)
    message = "rank 0 has 'extra' .2,. torch.float32 .*, rank 1 has 'extra' .2,. torch.int32"
    raises(RuntimeError, message, lambda: zcompile.shard(model))
    message = "rank 0 has .*native_reduce=False, rank 1 has .*native_reduce=True"
    raises(RuntimeError, message, lambda: zcompile.shard(nn.Linear(2, 2), native_reduce=rank == 1))


class TwoOrders(nn.Module):
    def __init__(self, turned):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.turned = turned

    def forward(self, x):
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = layer(x)
        return x.sum()


def test_ranks_that_run_different_programs_are_told(rank, world):
    model = compiled(TwoOrders(False))
    for length in (2, 3 + rank, 5):  # lengths may differ, and one rank may compile where another does not
        model(torch.ones(length, 4)).backward()
    torch._dynamo.reset()
    model = compiled(TwoOrders(rank == 1))
    begin = time.monotonic()
    raises(RuntimeError, "First difference: on rank [01] reads 'layers.[01].weight'", lambda: model(torch.ones(2, 4)))
    assert time.monotonic() - begin < scaled(30)


def test_a_rank_whose_graph_no_other_runs_is_told(rank, world):
    agreement = Agreement("alone", rank, range(world), timeout_s=0.5)
    if rank == 0:
        message = "rank 0 has waited 0 s for rank 1 to come to a graph that begins with: first"
        raises(RuntimeError, message, lambda: agreement.check([Line("first")]))


@contextlib.contextmanager
def cache_below_a_file():
    with tempfile.NamedTemporaryFile() as file, pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", f"{file.name}/cache")
        yield


@pytest.mark.parametrize("fault", [full_disk, cache_below_a_file])
def test_others_are_told_of_a_rank_that_cannot_compile(rank, world, fault):
    """Its own error says why, and the others do not wait for it. Later they go on together."""
    model = compiled(nn.Linear(4, 4), inner="inductor")
    begin = time.monotonic()
    with fresh_cache(), fault() if rank == 1 else contextlib.nullcontext(), pytest.raises(Exception) as raised:
        model(torch.ones(2, 4))
    assert ("rank 1 could not compile a graph: " in str(raised.value)) == (rank == 0), raised.value
    assert time.monotonic() - begin < scaled(60)
    torch._dynamo.reset()
    with fresh_cache():
        model(torch.ones(2, 4)).sum().backward()


def test_a_damaged_cache_of_inductor_is_compiled_again(rank, world):
    model = compiled(nn.Linear(4, 4), inner="inductor")
    with fresh_cache():
        expected = model(torch.ones(2, 4))
        expected.sum().backward()
        for path in Path(cache_dir()).rglob("*"):
            if path.is_file() and path.suffix != ".so":  # which are loaded
                path.write_bytes(path.read_bytes()[:-7] + b"damaged")
        torch._dynamo.reset()
        found = model(torch.ones(2, 4))
        found.sum().backward()
    assert torch.equal(found, expected)


def test_a_replaced_parameter_is_refused(rank, world):
    model, other = zcompile.shard(nn.Linear(3, 4)), nn.Parameter(torch.zeros(4, 3))
    text = f"'weight' was replaced or removed after zcompile.shard .rank {rank}"
    raises(RuntimeError, text, lambda: setattr(model, "weight", other))
    model(torch.ones(1, 3)).sum().backward()
    model._parameters["weight"] = other
    raises(RuntimeError, "'weight' was replaced", lambda: model(torch.ones(1, 3)).sum().backward())
    model = zcompile.shard(parametrizations.weight_norm(nn.Linear(3, 4)))
    raises(RuntimeError, "'weight' of class .* be deleted", lambda: remove_parametrizations(model, "weight"))


@pytest.mark.parametrize("prepare", [zcompile.shard, compiled])
def test_a_tied_parameter_is_replaced_in_all_modules_or_in_none(rank, world, prepare):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model = prepare(model)
    model[1].weight = nn.Parameter(model[0].weight.detach().clone())
    raises(RuntimeError, "'0.weight' is tied, and only 1 of the 2 modules", lambda: model(torch.ones(1, 4)))
    model[0].weight = model[1].weight
    model(torch.ones(1, 4)).sum().backward()
    model.load_state_dict({"0.weight": model[0].weight.detach().clone()}, strict=False, assign=True)
    model(torch.ones(1, 4))


def test_an_unsharded_model_is_warned_about_and_has_no_stats(rank, world):
    raises(RuntimeError, "no sharded parameter", lambda: zcompile.stats(nn.Linear(2, 2)))
    model = torch.compile(nn.Linear(3, 4), backend="zcompile")
    with pytest.warns(UserWarning, match="Call zcompile.shard"):
        out = model(torch.ones(1, 3))
    torch.testing.assert_close(out, model._orig_mod(torch.ones(1, 3)))


def test_a_model_on_meta_gets_the_values_of_one_that_was_not(rank, world):
    torch.manual_seed(3)
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 9, bias=False))
        model[3].in_features = 6
        model[3].weight = nn.Parameter(torch.empty(9, 6))
        model[3].weight = model[0].weight
    zcompile.shard(model)
    torch.manual_seed(3)
    expected = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 5), nn.LayerNorm(5))
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    assert model[3]._parameters["weight"] is model[0]._parameters["weight"]


def rank_closes_the_group(rank, world, queued):
    """With so many gathers queued, which end before the group does."""
    model = zcompile.shard(Transformer())
    lm_loss(model, 0, rank).backward()
    shard = model.head.__dict__["_zcompile_leaf_weight"].detach()
    shape, whole = list(model.head.weight.shape), model.head.weight.full_tensor().detach()
    started = [torch.ops.zcompile.gather_start(shard, shape, torch.float32) for _ in range(queued)]
    dist.destroy_process_group()
    for unsharded in started:
        assert torch.equal(torch.ops.zcompile.gather_wait(unsharded), whole)
    lm_loss(model, 1, rank)


@pytest.mark.parametrize("queued", [0, 30])
def test_a_closed_process_group_is_named(ranks, queued):
    for message in ranks(2).run(rank_closes_the_group, queued, allow_failure=True):
        assert "of this sharded model was closed" in message, message


def rank_dies(rank, world):
    model = compiled(Transformer())
    lm_loss(model, 0, rank).backward()
    if rank == 1:
        os._exit(1)
    lm_loss(model, 1, rank)


def test_a_rank_that_dies_is_named_as_the_cause(ranks):
    survivor, dead = ranks(2).run(rank_dies, allow_failure=True)
    assert "rank 0 " in survivor and " 'embed.weight' " in survivor and "a rank stopped" in survivor
    assert "died" in dead


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("inductor")])
def test_a_backward_that_raised_leaves_nothing_behind(rank, world, inner):
    """Steps after a backward that raised in the middle, with gathers in flight, beside the same steps without it."""
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
            finish_step(optimizer, loss)
            curves[-1].append(loss.item())
        peaks.append(zcompile.stats(model)["peak_unsharded_bytes"])
    assert curves[0] == curves[1] and peaks[0] == peaks[1], (curves, peaks)


def rank_main(rank, store, place, compiled, pipe):
    """Rank 0 waits in a gather or reduce of `place`, rank 1 in a barrier of torch's."""
    os.dup2(os.open(f"{store}.{rank}", os.O_WRONLY | os.O_CREAT), 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 2), rank=rank, world_size=2)
    model = zcompile.shard(nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))))
    if compiled:
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
    loss = model(torch.ones(2, 8)).sum()
    if place == "forward":
        loss.backward()
    pipe.send("comes to the wait")
    if rank == 1:
        dist.barrier()
    elif place == "forward":
        model(torch.ones(2, 8))
    else:
        loss.backward()


@pytest.mark.parametrize(
    "place, compiled",
    [("forward", False), ("backward", True), slow_case("forward", True), slow_case("backward", False)],
)
def test_ctrl_c_ends_ranks_that_wait_for_each_other(tmp_path, place, compiled):
    ours, theirs = zip(*(context().Pipe() for _ in range(2)), strict=True)
    args = [(rank, tmp_path / "store", place, compiled, theirs[rank]) for rank in range(2)]
    processes = [context().Process(target=rank_main, args=each) for each in args]
    for process in processes:
        process.start()
    try:
        for pipe in ours:
            assert pipe.poll(scaled(60)) and pipe.recv()
        time.sleep(scaled(0.5))
        begin = time.monotonic()
        for process in processes:
            os.kill(process.pid, signal.SIGINT)
        for process in processes:
            process.join(scaled(10))
        assert time.monotonic() - begin < scaled(2)
        texts = [(tmp_path / f"store.{rank}").read_text() for rank in range(2)]
        assert [text.splitlines()[-1] for text in texts] == ["KeyboardInterrupt"] * 2, texts
    finally:
        for process in processes:
            process.kill()
            process.join()
