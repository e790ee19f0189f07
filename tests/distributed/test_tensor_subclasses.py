"""Parameters that are tensor subclasses with FSDP2's all-gather hooks, beside FSDP2."""

import functools
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support import subclasses as sub
from tests.support.compiling import SELECTIVE
from tests.support.process import no_collector
from tests.support.ranks import on_ranks, slow, slow_case
from tests.support.reference import over
from tests.support.subclasses import Kept8, Rows8, adam_losses, batch_loss, by_fsdp2, by_zcompile, same_as_fsdp2, seeded
from zcompile.state.sharded_model import state_of

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.mark.parametrize("policy", [None, BF16])
@pytest.mark.parametrize("kind, hidden", [(Rows8, 20), (Kept8, 20), (sub.Half16, 17), (sub.Half16, 1)])
def test_training_equals_that_of_fsdp2_bit_by_bit(rank, world, kind, hidden, policy):
    same_as_fsdp2(rank, by_zcompile(seeded(kind, hidden=hidden), policy), by_fsdp2(seeded(kind, hidden=hidden), policy))


@on_ranks(1)
def test_one_rank_quantizes_as_several_do(rank, world):
    """Under FSDP2, a class of one component alone runs on one rank."""
    same_as_fsdp2(rank, by_zcompile(seeded(sub.Half16)), by_fsdp2(seeded(sub.Half16)))
    model, reference = by_zcompile(seeded(Kept8)), seeded(nn.Parameter)
    with torch.no_grad():
        for layer in (each for block in reference for each in (block.up, block.down)):
            (rows, scale), _ = Rows8(layer.weight.detach()).fsdp_pre_all_gather(dist.init_device_mesh("cpu", (1,)))
            layer.weight.copy_(rows * scale)
    assert torch.equal(batch_loss(model, 0, rank), batch_loss(reference, 0, rank))


@slow
@on_ranks(4)
def test_replicas_train_as_under_fsdp2(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    same_as_fsdp2(rank, by_zcompile(seeded(Kept8), None, mesh), by_fsdp2(seeded(Kept8), None, mesh))
    torch.manual_seed(rank)  # the first replica's values are those of all
    parameters = nn.ParameterDict({"weight": nn.Parameter(Rows8(torch.randn(4, 3)))})
    model = by_zcompile(nn.Sequential(parameters), None, mesh)
    for parameter in model.parameters():
        values = [torch.empty_like(sub.plain(parameter)) for _ in range(2)]
        dist.all_gather(values, sub.plain(parameter), group=mesh.get_group("replicate"))
        assert torch.equal(*values)


@pytest.mark.parametrize("transport", ["c10d", "late c10d"])
@pytest.mark.parametrize("how", ["root block", "blocks", "units", "units, compiled"])
def test_components_are_read_after_they_have_arrived(rank, world, how, transport):
    units = [sub.Block] if "units" in how else None
    model = by_zcompile(seeded(Kept8)) if how == "blocks" else zcompile.shard(seeded(Kept8), units=units)
    over(transport, model)
    if how == "units, compiled":
        model.compile(backend="zcompile", options={"inner": "aot_eager"})
    same_as_fsdp2(rank, model, by_fsdp2(seeded(Kept8)))


def test_components_travel_at_their_own_widths_in_one_transfer(rank, world):
    model = by_zcompile(seeded())
    batch_loss(model, 0, rank).backward()
    zcompile.reset_stats(model)
    runtime = state_of(model).runtime
    before = runtime.order_digests()[0][0]
    with torch.no_grad():
        batch_loss(model, 0, rank)
    weights = [(20, 12), (12, 20)]
    vectors = 3 * (12 + 12 + 20 + 12) * 4
    stats = zcompile.stats(model)
    int8 = 3 * sum(rows * columns for rows, columns in weights)
    scales = 3 * sum(rows for rows, _ in weights) * 4
    assert stats["gathered_bytes"] == {"int8": int8, "float32": scales + vectors}
    assert runtime.order_digests()[0][0] - before == 3 * 2  # of each block: its components, and its plain parameters
    assert stats["peak_unsharded_bytes"] <= 2 * (int8 + scales + vectors) // 3  # a block, and the next one


@pytest.mark.parametrize("kind", [Rows8, slow_case(Kept8)])
@pytest.mark.parametrize("way", sub.COMPILED)
def test_compiled_layers_and_models_train_as_fsdp2(rank, world, kind, way):
    model = by_zcompile(seeded(kind))
    sub.COMPILED[way](model)
    same_as_fsdp2(rank, model, by_fsdp2(seeded(kind)))
    with torch.no_grad():
        assert torch.equal(batch_loss(model, 0, rank), batch_loss(model, 0, rank))


@slow
def test_a_model_compiled_by_inductor_trains(rank, world):
    model, reference = by_zcompile(seeded()), by_zcompile(seeded())
    model.compile(backend="zcompile")
    torch.testing.assert_close(adam_losses(model, rank), adam_losses(reference, rank))


def test_a_compiled_function_around_a_model_names_parameter_class_and_remedy(rank, world):
    model = zcompile.shard(seeded_root())

    def read(x):
        return model(x)

    message = r"parameter '0.weight', a tests\.support\.subclasses\.Rows8 \(rank \d\).*model\.compile\(\)"
    with pytest.raises(Exception, match=f"(?s){message}"):
        torch.compile(read, backend="zcompile", options={"inner": "aot_eager"})(torch.ones(2, 4))
    torch._dynamo.reset()
    message = r"parameter '0.weight' is a tests\S*Rows8, whose all-gather hooks run in eager"
    with pytest.raises(Exception, match=message):
        torch.compile(read, backend="aot_eager")(torch.ones(2, 4))
    torch._dynamo.reset()
    expected = model(torch.ones(2, 4))
    model.compile(backend="zcompile", options={"inner": "aot_eager"}, fullgraph=True)  # the remedy
    assert torch.equal(model(torch.ones(2, 4)), expected)


def seeded_root():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    model[0].weight = nn.Parameter(Rows8(model[0].weight.detach()))
    return model


class Checkpointed(sub.Stack):
    """Each block is computed again in backward; a selective checkpoint counts ops in both."""

    def __init__(self, selects):
        super().__init__(Kept8)
        self.how = SELECTIVE if selects else {}

    def forward(self, x):
        for block in self:
            x = checkpoint(block, x, use_reentrant=False, **self.how)
        return x


@pytest.mark.parametrize("selects", [False, True])
def test_checkpointed_blocks_train_as_others(rank, world, selects):
    torch.manual_seed(0)
    same_as_fsdp2(rank, by_zcompile(Checkpointed(selects)), by_fsdp2(seeded(Kept8)))


@pytest.mark.parametrize("reduce", ["each", "last"])
def test_microbatches_add_up(rank, world, reduce):
    model, reference = by_zcompile(seeded(Kept8)), by_zcompile(seeded(Kept8))
    zcompile.reset_stats(model)
    with zcompile.accumulate(model, reduce=reduce):
        for step in range(2):
            batch_loss(model, step, rank).backward()
    assert zcompile.stats(model)["gathered_bytes"]["int8"] == 3 * 2 * 240  # once, and kept
    for step in range(2):
        batch_loss(reference, step, rank).backward()
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_local(), other.grad.to_local())


def test_checkpoints_of_both_engines_load_in_both(rank, world, tmp_path):
    engines = {"zcompile": by_zcompile, "fsdp2": by_fsdp2}
    for name, prepare in engines.items():
        model = prepare(seeded())
        adam_losses(model, rank, steps=1)
        for other, prepare_other in engines.items():
            folder = tmp_path / f"{name} {other}"
            dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
            torch.manual_seed(1)
            loaded = prepare_other(type(model)(Rows8) if name == "fsdp2" else seeded())
            state = loaded.state_dict()
            with torch.serialization.safe_globals([Rows8]):
                dcp.load({"model": state}, checkpoint_id=folder)
            loaded.load_state_dict(state)
            for mine, theirs in zip(loaded.parameters(), model.parameters(), strict=True):
                assert torch.equal(sub.plain(mine), sub.plain(theirs))
            assert torch.equal(batch_loss(loaded, 0, rank), batch_loss(model, 0, rank))


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_loaded_and_cast_is_what_forward_reads(rank, world, assign):
    trained, model = by_zcompile(seeded()), by_zcompile(seeded())
    adam_losses(trained, rank)
    batch_loss(model, 0, rank).backward()  # unsharded parameters are made
    model.load_state_dict(trained.state_dict(), assign=assign)
    model.zero_grad()
    assert torch.equal(batch_loss(model, 0, rank), batch_loss(trained, 0, rank))
    for each in (model, trained):
        each.double()
    loss = lambda model, step, rank: model(torch.ones(2, 12, dtype=torch.float64)).float().mean()
    assert adam_losses(model, rank, loss=loss).dtype is torch.float32
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    with pytest.raises(RuntimeError, match=r"'0.up.weight' was replaced or removed after"):
        local = model[0].up.weight.detach().to_local().values_
        mesh, shape = model[0].up.weight.device_mesh, model[0].up.weight.shape
        from_plain = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(12, 1))
        model[0].up.weight = nn.Parameter(from_plain)


def test_unshard_gives_what_forward_reads_and_full_parameters_the_values(rank, world):
    model = by_zcompile(seeded(Kept8))
    expected, values = batch_loss(model, 0, rank), dict(zcompile.full_parameters(model))
    for name, parameter in seeded(Kept8).named_parameters():
        assert torch.equal(values[name], parameter.values_ if isinstance(parameter, sub.Wrapped) else parameter)
    with zcompile.unshard(model):
        assert isinstance(model[0].up.weight, sub.Dequantizing) and model[0].up.weight.shape == (20, 12)
        with torch.no_grad():
            assert torch.equal(batch_loss(model, 0, rank), expected)
    message = r"parameter '0.up.weight' on rank \d is a \S*Kept8.*cannot be written back"
    with pytest.raises(RuntimeError, match=message), zcompile.unshard(model, writeback=True):
        pass
    with torch.no_grad():
        model[0].up.weight.zero_()  # the remedy
    assert not batch_loss(model, 0, rank).equal(expected)


def test_a_write_between_forward_and_backward_is_refused(rank, world):
    model = by_zcompile(seeded())
    loss = batch_loss(model, 0, rank)
    with torch.no_grad():
        model[2].down.weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter '2.down.weight' was modified between forward and backward"):
        loss.backward()
    model.zero_grad()
    batch_loss(model, 0, rank).backward()


class SameGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return weight.detach().float()

    @staticmethod
    def backward(ctx, grad):
        return Rows8(grad)


class WithClassOfGrad(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Rows8(torch.ones(4, 3)))

    def forward(self, x):
        return x @ SameGrad.apply(self.weight).t()


def test_a_gradient_that_is_a_subclass_is_refused(rank, world):
    model = zcompile.shard(WithClassOfGrad())
    with pytest.raises(RuntimeError, match=r"the gradient of parameter 'weight' is a \S*Rows8 \(rank \d\)"):
        model(torch.ones(2, 3)).sum().backward()


NO_ROOM = r"rank 1 .*'0.up.weight'.*shapes \[\(8, 12\)\].*padded shard's size.*\(9, 12\)"
REFUSED = {
    "no hooks": (sub.Plain, 20, r"'0.up.weight' is a \S*Plain \(rank \d\).*ignored_params", TypeError),
    "one hook": (sub.Half, 20, r"'0.up.weight' is a \S*Half \(rank \d\), which has no fsdp_post_all_gather", TypeError),
    "no padding": (Rows8, 17, r"'0.up.weight' is a \S*Rows8 \(rank \d\) with 17 rows.*ignored_params", ValueError),
    "no room": (sub.Unpadded16, 17, NO_ROOM, RuntimeError),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_fsdp2_cannot_gather_is_refused_by_name_on_all_ranks(rank, world, case):
    kind, hidden, message, error = REFUSED[case]
    with pytest.raises(error, match=f"(?s){message}"):
        by_zcompile(seeded(kind, hidden=hidden))
    model = seeded(kind, hidden=hidden)
    weights = [parameter for parameter in model.parameters() if isinstance(parameter, sub.Wrapped)]
    zcompile.shard(model, ignored_params=weights)  # the remedy
    batch_loss(model, 0, rank).backward()


def test_other_dimensions_and_other_arguments_are_refused_by_name(rank, world):
    with pytest.raises(ValueError, match=r"'0.up.weight' is a \S*Rows8 .* along dimension 1.*Shard\(0\)"):
        zcompile.shard(seeded(), shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None)

    class Three(Rows8):
        def fsdp_pre_all_gather(self, mesh, outer_size, module):
            raise AssertionError

    with pytest.raises(TypeError, match=r"'0.up.weight' is a \S*Three .*fsdp_pre_all_gather takes 3 arguments"):
        zcompile.shard(seeded(Three))


def patched(model):
    """Sets the hooks of `Half16` on plain local tensors."""
    for local in (layer.weight._local_tensor for block in model for layer in (block.up, block.down)):
        local.values_, local.pads = local, True
        for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather"):
            setattr(local, name, functools.partial(getattr(sub.Half16, name), local))
    return model


@pytest.mark.parametrize("world, way", [(1, "eager"), (2, "model"), *(slow_case(2, way) for way in sub.COMPILED)])
def test_hooks_that_come_after_shard_gather_as_under_fsdp2(rank, world, way):
    model = by_zcompile(seeded(nn.Parameter, hidden=17))  # in fp32: without the hooks, losses would differ
    sub.COMPILED.get(way, lambda model: None)(model)
    same_as_fsdp2(rank, patched(model), patched(by_fsdp2(seeded(nn.Parameter, hidden=17))))
    if world > 1:
        model = patched(zcompile.shard(seeded(nn.Parameter), units=[sub.Block]))
        with pytest.raises(RuntimeError, match=r"'0.up.weight' has got fsdp_pre_all_gather after zcompile.shard"):
            batch_loss(model, 0, rank)


def test_models_are_freed_and_memory_of_blocks_too(rank, world):
    with no_collector():
        model = by_zcompile(seeded())
        adam_losses(model, rank, steps=2)
        shards = [weakref.ref(parameter.to_local()) for parameter in model.parameters()]
        state = weakref.ref(state_of(model))
        sharded = next(each for each in state_of(model).parameters.values() if each.extension is not None)
        assert sharded.leaf.untyped_storage().nbytes() == 0
        assert [each.untyped_storage().nbytes() for each in sharded.extension.memory()] == [0, 0, 0]
        del model, sharded
        assert state() is None and not [each for each in shards if each() is not None]


@pytest.mark.parametrize("offload", [None, "moments"])
def test_fused_steps_leave_subclasses_to_torch(rank, world, offload):
    fuse = functools.partial(zcompile.fuse_optimizer, offload=offload)
    fused = adam_losses(by_zcompile(seeded()), rank, fuse=fuse, fused=True)
    assert torch.equal(fused, adam_losses(by_fsdp2(seeded()), rank, fused=True))


def test_a_hook_that_gathers_nothing_is_refused(rank, world):
    class Nothing(Rows8):
        def fsdp_pre_all_gather(self, mesh):
            return (), None

    model = by_zcompile(seeded(Nothing))
    with pytest.raises(RuntimeError, match="returned nothing to gather"):
        batch_loss(model, 0, rank)
