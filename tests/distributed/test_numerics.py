"""Numbers: compiled equals eager bit by bit, Inductor stays close to the unsharded model, runs repeat exactly."""

import copy
import functools
import time

import pytest
import torch

import zcompile
from tests.support.models import Transformer, batch, loss_of
from tests.support.ranks import on_ranks
from tests.support.reference import autocast_loss, compiled, full, lm_loss
from zcompile.options import OPTIONAL_PASSES
from zcompile.state.sharded_model import state_of

slow = pytest.mark.slow


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("loss", [pytest.param(lm_loss, marks=slow), autocast_loss])
@on_ranks()
def test_aot_eager_equals_eager_bitwise(rank, world, loss):
    """An eager sharded model beside two compiled ones."""
    torch.manual_seed(0)
    model = Transformer()
    models = [zcompile.shard(copy.deepcopy(model)), compiled(copy.deepcopy(model)), compiled(copy.deepcopy(model))]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(5):
        losses = [loss(m, step, rank) for m in models]
        for each in losses:
            each.backward()
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[1], losses[2]), (step, losses)
        for name, *grads in zip([n for n, _ in model.named_parameters()], *(m.parameters() for m in models)):
            eager, first, second = (p.grad.to_local() for p in grads)
            difference = (eager - first).abs().max() if eager.numel() else 0
            assert torch.equal(eager, first), f"step {step}: gradient of {name} differs from eager by {difference}"
            assert torch.equal(first, second), f"step {step}: gradient of {name} differs between two runs"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def many_tokens_loss(model, step, rank, narrow):
    """Over 512 tokens, so that bf16 rounding averages out as it does in real batches."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        return loss_of(model, batch(step, rank, length=257))


@slow
@pytest.mark.parametrize("narrow, tolerance", [(False, 1e-5), (True, 2e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
@on_ranks(2)
def test_inductor_stays_close_to_the_unsharded_model(rank, world, narrow, tolerance, late):
    """`late` poisons what is in flight: whatever reads or reuses it too soon yields NaN.

    test_lifetimes.py has one step of a smaller model.
    """
    loss = functools.partial(many_tokens_loss, narrow=narrow)
    torch.manual_seed(0)
    reference = Transformer(blocks=1)
    model = compiled(copy.deepcopy(reference), inner="inductor")
    if late:
        state_of(model).runtime.use_transport("late c10d")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    for step in range(20):
        ours = loss(model, step, rank)
        ours.backward()
        theirs = [loss(reference, step, other) for other in range(world)]
        (sum(theirs) / world).backward()
        assert (ours - theirs[rank]).abs() / theirs[rank] <= tolerance, step
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def rank_counts_gathers(rank, world, inner="aot_eager", **options):
    """Statistics of forward and of backward; bytes of the largest parameter; how many parameters there are."""
    model = compiled(Transformer(), inner=inner, options=options)
    loss = lm_loss(model, 0, rank)
    forward = zcompile.stats(model)
    zcompile.reset_stats(model)
    loss.backward()
    largest_bytes = max(p.numel() for p in model.parameters()) * 4
    return forward, zcompile.stats(model), largest_bytes, len(list(model.parameters()))


def rank_counts_gathers_within(rank, world, gather_budget_bytes):
    return rank_counts_gathers(rank, world, gather_budget_bytes=gather_budget_bytes)


@pytest.mark.parametrize("gather_budget_bytes", [0, pytest.param(20_000, marks=slow)])
def test_backward_gathers_what_it_reads(ranks, gather_budget_bytes):
    """No unsharded parameter crosses from forward to backward."""
    forward, backward, _, parameters = ranks(2).run(rank_counts_gathers_within, gather_budget_bytes)[0]
    tied = 1 if gather_budget_bytes == 0 else 0  # the embedding is read again by the head
    assert forward["gathers"] == parameters + tied and forward["reduces"] == 0
    assert backward["reduces"] == parameters
    # Of each block, backward reads the weights of 4 products, and (aten's layer norm backward) weight and bias of 2
    # norms. It also reads the last norm, the head and the scale. It reads no bias of a product: `tag_recompute` forbids
    # to redo an addition for it.
    assert backward["gathers"] == 2 * (4 + 2 * 2) + 2 + 1 + 1


@pytest.mark.parametrize("gather_budget_bytes", [pytest.param(0, marks=slow), 20_000])
def test_unsharded_bytes_keep_to_the_budget(ranks, gather_budget_bytes):
    forward, backward, largest_bytes, _ = ranks(2).run(rank_counts_gathers_within, gather_budget_bytes)[0]
    beside = 2 * largest_bytes  # one beside the budget, one that a thread of gloo has not let go
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert peak_bytes <= gather_budget_bytes + beside


@slow
@on_ranks(2)
def test_code_of_inductor_frees_what_it_gathered(rank, world):
    forward, backward, largest_bytes, _ = rank_counts_gathers(
        rank, world, "inductor", gather_budget_bytes=0, bucket_bytes=0
    )
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert peak_bytes <= 2 * largest_bytes, (forward, backward, largest_bytes)


def rank_bytes_between(rank, world):
    """Bytes of gathered storages that are alive between forward and backward."""
    model = compiled(Transformer())
    loss = lm_loss(model, 0, rank)
    zcompile.reset_stats(model)
    time.sleep(0.5)  # gloo's threads let go of a finished collective's tensors when they get to it
    state = state_of(model)
    scalar = next(p for p in state.parameters.values() if p.name == "mix")
    torch.ops.zcompile.gather(scalar.leaf, [3], torch.float32)  # the next gather counts what is still alive
    alive = zcompile.stats(model)["peak_unsharded_bytes"]
    loss.backward()
    return alive


def test_no_unsharded_parameter_is_alive_between_forward_and_backward(ranks):
    assert ranks(2).run(rank_bytes_between) == [3 * 4, 3 * 4]


def rank_sums_of_gradients(rank, world):
    model = zcompile.shard(Transformer(), param_dtype=torch.bfloat16)
    loss_of(model, batch(0, rank)).backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return {name: grad.sum().item() for name, grad in grads.items()}


def test_reduces_repeat_exactly(ranks):
    first, second = (ranks(4).run(rank_sums_of_gradients) for _ in range(2))
    assert first == second and first[0] == first[3]


def losses_without(rank, inner, skipped):
    """Losses of three steps under autocast, without the passes `skipped`; dtypes that travelled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = compiled(Transformer(blocks=1), inner=inner, options={"skip_passes": skipped})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    losses = []
    for step in range(3):
        loss = autocast_loss(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, zcompile.stats(model)["gathered_bytes"].keys()


@pytest.mark.parametrize(
    "inner, each",
    [
        ("aot_eager", ()),
        pytest.param("aot_eager", OPTIONAL_PASSES, marks=slow),
        pytest.param("inductor", ("narrow_gathers",), marks=slow),
    ],
    ids=["all", "each", "inductor"],
)
@on_ranks(2)
def test_passes_change_no_number(rank, world, inner, each):
    expected, _ = losses_without(rank, inner, ())
    for name in each:
        losses, dtypes = losses_without(rank, inner, (name,))
        assert losses == expected, (name, losses, expected)
        assert name != "narrow_gathers" or dtypes == {"float32"}
    losses, dtypes = losses_without(rank, inner, OPTIONAL_PASSES)
    assert losses == expected and dtypes == {"float32"}, (losses, expected)
