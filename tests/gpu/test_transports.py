"""Training over each transport, against the unsharded model, eager, and others; units, generation, packed weights."""

import copy
import functools
import itertools

import pytest
import torch
import torch.distributed as dist

import zcompile
from tests.support import microbatches as micro
from tests.support.architectures import VOCABULARY, hugging_face
from tests.support.deferred import MICROBATCHES, all_close, reference_grads, run
from tests.support.embedding_rows import rank_rows_like_whole, tables_curve
from tests.support.gpu import compiled_over, make_transformer, needs_two_gpus, rank_trains_as_over_nccl, sharded_over
from tests.support.mixtures import Experts, MixtureModel, StackedExperts, routed_loss
from tests.support.models import batch
from tests.support.packed import Quantized, quantized_loss
from tests.support.ranks import on_gpus, slow_case
from tests.support.reference import autocast_loss, compiled, finish_step, lm_loss, same_values, train_beside
from tests.support.sharded_ops import rank_native_sums

TOLERANCES = {lm_loss: 1e-4, autocast_loss: 6e-2}
PROMPT = [("c10d", "inductor"), ("p2p", "aot_eager"), ("p2p", "inductor")]
LATE = ["late p2p", "late c10d", "delayed p2p", "delayed p2p in step", "delayed c10d"]


@pytest.mark.parametrize(
    "world, transport, inner, loss",
    [
        *((2, *case, loss) for case in PROMPT for loss in TOLERANCES),
        *((2, transport, "inductor", lm_loss) for transport in LATE),  # nothing depends on when data arrives
        *((world, "p2p", "inductor", lm_loss) for world in (4, 8)),
    ],
)
@on_gpus()
def test_training_is_close_to_unsharded(rank, world, transport, inner, loss):
    prepare, how = functools.partial(compiled_over, transport, inner=inner), {"microbatches": 2, "loss": loss}
    model = train_beside(rank, world, prepare, make=make_transformer, tolerance=TOLERANCES[loss], **how)
    assert zcompile.stats(model)["transport"] == transport.replace("c10d", "nccl").removesuffix(" in step")
    assert ("bfloat16" in zcompile.stats(model)["gathered_bytes"]) == (loss is autocast_loss)


@pytest.mark.parametrize("world", [4, 8])
@on_gpus()
def test_training_of_replicated_shards_is_close_to_unsharded(rank, world):
    mesh = dist.init_device_mesh("cuda", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    over_p2p = functools.partial(compiled_over, "p2p", mesh=mesh)
    train_beside(rank, world, over_p2p, make=make_transformer, tolerance=1e-4)
    native = functools.partial(compiled_over, "c10d", mesh=mesh, native_reduce=True)
    train_beside(rank, world, native, make=make_transformer, tolerance=1e-4)


def loss_and_grads(model, rank, loss):
    value = loss(model, 0, rank)
    value.backward()
    grads = {name: p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for name, p in model.named_parameters()}
    return value, grads


@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
@on_gpus(2)
def test_aot_eager_equals_eager_bitwise(rank, world, loss):
    """Gradients that torch's own aot_eager does not reproduce on this GPU may differ: atomics, other layouts."""
    torch.manual_seed(0)
    model = make_transformer()
    eager_model, aot_eager_model = (copy.deepcopy(model) for _ in range(2))
    aot_eager_model.compile(backend="aot_eager")
    (_, once), (_, again) = (loss_and_grads(plain, rank, loss) for plain in (eager_model, aot_eager_model))
    unstable = {name for name in once if not torch.equal(once[name], again[name])}
    assert len(unstable) <= 2, unstable
    (eager_loss, eager), (our_loss, ours) = (
        loss_and_grads(sharded, rank, loss)
        for sharded in (zcompile.shard(copy.deepcopy(model)), compiled(copy.deepcopy(model)))
    )
    assert torch.equal(eager_loss, our_loss)
    differ = {name for name in eager if not torch.equal(eager[name], ours[name])}
    assert differ <= unstable, (differ, unstable)


@pytest.mark.parametrize(
    "world, loss, transport",
    [
        *((2, loss, transport) for loss in (lm_loss, autocast_loss) for transport in ("p2p", "p2p in step")),
        *((world, autocast_loss, "p2p") for world in (4, 8)),
    ],
)
def test_transports_agree_bitwise(gpus, world, loss, transport):
    gpus(world).run(rank_trains_as_over_nccl, loss, transport, {})


@pytest.mark.parametrize("transport", ["p2p", "c10d", "delayed p2p", "delayed c10d"])
@on_gpus(2)
def test_microbatches_gather_once(rank, world, transport):
    """Compared with microbatches over NCCL that do not share."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        apart = micro.train_microbatches(rank, micro.separately, "cuda", "c10d", options=micro.UNBUCKETED)
        together = micro.train_microbatches(rank, micro.accumulate_checked, "cuda", transport, options=micro.UNBUCKETED)
    finally:
        torch.use_deterministic_algorithms(False)
    micro.assert_same_run(together, apart)
    assert together.gathered_bytes == micro.STEPS * [
        4 * sum(parameter.numel() for parameter in together.model.parameters())
    ]


@needs_two_gpus
@on_gpus(2)
def test_transport_option_is_obeyed(rank, world):
    model = zcompile.shard(make_transformer())
    assert zcompile.stats(model)["transport"] in ("p2p", "nccl") and "us" in zcompile.stats(model)["transport_reason"]
    for transport in ("nccl", "p2p"):
        torch._dynamo.reset()
        options = {"inner": "aot_eager", "transport": transport}
        lm_loss(torch.compile(model, backend="zcompile", options=options), 0, rank)
        assert zcompile.stats(model)["transport"] == transport
        assert zcompile.stats(model)["transport_reason"] == "asked for"
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="the model is on cuda"):
        tokens = torch.zeros(1, 4, dtype=torch.int64, device="cuda")
        torch.compile(model, backend="zcompile", options={"transport": "gloo"})(tokens)


@pytest.mark.parametrize("world", [2, 4, 8])
def test_native_reduces_are_close_to_sums(gpus, world):
    gpus(world).run(rank_native_sums, "cuda")


@pytest.mark.parametrize("transport", ["c10d", "late c10d", "delayed c10d"])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss], ids=["fp32", "bf16"])
def test_native_reduces_of_two_ranks_in_fp32_are_exact(gpus, loss, transport):
    """Two numbers have one sum."""
    gpus(2).run(rank_trains_as_over_nccl, loss, transport, {"native_reduce": True, "reduce_dtype": torch.float32})


@pytest.mark.parametrize("transport", ["p2p", "c10d", "late p2p", "delayed p2p"])
def test_rows_equal_whole_matrices(gpus, transport):
    gpus(2).run(rank_rows_like_whole, transport, "cuda")


@pytest.mark.parametrize("world, microbatches", [(2, 1), (2, 3), (4, 3), (8, 3)])
@on_gpus()
def test_rows_over_transports_agree_bitwise(rank, world, microbatches):
    options = {"device": "cuda", "steps": 5, "microbatches": microbatches}
    curve = functools.partial(tables_curve, rank, {"inner": "inductor"}, **options)
    over_p2p, *others = (curve(transport=transport) for transport in ("p2p", "c10d", "delayed p2p"))
    for other in others:
        same_values(other, over_p2p)


HOW = {"steps": 3, "device": "cuda", "optimizer": functools.partial(torch.optim.SGD, lr=0.1)}


@pytest.mark.parametrize("reduce, world", [("last", 2), ("shards", 4), ("last", 4)])
@pytest.mark.parametrize("inner", [None, slow_case("inductor")])
@pytest.mark.parametrize("transport", ["c10d", "p2p", slow_case("delayed p2p")])
@on_gpus()
def test_deferred_gradients_are_those_of_the_unsharded_model(rank, world, transport, inner, reduce):
    mesh = dist.init_device_mesh("cuda", (2, 2) if world == 4 else (2,))
    prepare = functools.partial(sharded_over, transport, inner=inner, mesh=mesh)
    _, grads, stats = run(rank, prepare, reduce, **HOW)
    assert stats["reduces"] == len(grads) * (1 if reduce == "last" else MICROBATCHES)
    all_close(grads, reference_grads(world, **HOW), 1e-4)
    torch.cuda.synchronize()


TRANSPORTS, INNERS = ("c10d", "p2p", "late c10d", "delayed p2p"), (None, "aot_eager", "inductor")


@pytest.mark.parametrize(
    "world, transport, experts, inner",
    [
        *((2, *case) for case in itertools.product(TRANSPORTS, (Experts, StackedExperts), INNERS)),
        *((4, transport, Experts, "aot_eager") for transport in TRANSPORTS[:2]),
    ],
)
@on_gpus()
def test_ranks_may_route_and_skip_as_they_like(rank, world, transport, experts, inner):
    def loss(model, step, rank):
        return routed_loss(model, step, rank, skip_experts=(0, 1) if rank == 1 and step == 2 else ())

    prepare = functools.partial(sharded_over, transport, inner=inner, units=[experts])
    train_beside(rank, world, prepare, make=lambda: MixtureModel(experts).cuda(), loss=loss, steps=5, tolerance=1e-4)
    torch.cuda.synchronize()


@pytest.mark.parametrize("inner", [None, slow_case("aot_eager")])
@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("transport", ["c10d", "p2p", slow_case("delayed p2p")])
@on_gpus(2)
def test_ranks_stop_when_they_like(rank, world, transport, inner, how):
    torch.manual_seed(0)
    reference = hugging_face("llama").cuda()
    reference.generation_config.eos_token_id = None
    model = sharded_over(transport, copy.deepcopy(reference), inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    prompt = torch.randint(3, VOCABULARY, (2, 2 + 3 * rank), generator=generator).cuda()
    for step, lengths in enumerate(((5, 50), (50, 5))):
        arguments = {"max_new_tokens": lengths[rank], "do_sample": False, "pad_token_id": 0, **how}
        with torch.no_grad():
            parameters = reference.state_dict().values()
            for (name, tensor), parameter in zip(zcompile.full_parameters(model), parameters, strict=True):
                assert step > 0 or torch.equal(tensor, parameter), name
                parameter.copy_(tensor)  # what training changed
        expected = reference.generate(prompt, **arguments, disable_compile=True)
        assert torch.equal(model.generate(prompt, **arguments), expected)
        tokens = batch(step, rank).cuda()
        finish_step(optimizer, model(input_ids=tokens, labels=tokens, use_cache=False).loss)
    torch.cuda.synchronize()


@pytest.mark.parametrize("inner", [None, "inductor"])
@pytest.mark.parametrize("transport", ["c10d", "p2p"])
@on_gpus(2)
def test_frozen_parameters_of_any_dtype_travel(rank, world, transport, inner):
    prepare = functools.partial(sharded_over, transport, inner=inner)
    train_beside(rank, world, prepare, make=lambda: Quantized().cuda(), loss=quantized_loss, tolerance=1e-4)
