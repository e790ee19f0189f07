"""Numbers: compiled equals eager bit by bit, Inductor stays close to the unsharded model, runs repeat exactly."""

import functools
import time

import pytest
import torch

import zcompile
from tests.support.models import Transformer, batch, loss_of
from tests.support.ranks import slow
from tests.support.reference import autocast_loss, compiled, lm_loss, losses_of, over, pair, same_bits, train_beside
from zcompile.options import OPTIONAL_PASSES
from zcompile.state.sharded_model import state_of


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("loss", [pytest.param(lm_loss, marks=slow), autocast_loss])
def test_aot_eager_equals_eager_bitwise(rank, world, loss):
    same_bits([pair(Transformer, prepare)[1] for prepare in (zcompile.shard, compiled, compiled)], loss, rank)


def many_tokens_loss(model, step, rank, narrow):
    """Over 512 tokens, so that bf16 rounding averages out as it does in real batches."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        return loss_of(model, batch(step, rank, length=257))


@slow
@pytest.mark.parametrize("narrow, tolerance", [(False, 1e-5), (True, 2e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
def test_inductor_stays_close_to_the_unsharded_model(rank, world, narrow, tolerance, late):
    """Losses. `late` poisons what is in flight: whatever reads or reuses it too soon yields NaN.

    test_lifetimes.py has one step of a smaller model.
    """

    def prepare(model):
        compiled(model, inner="inductor")
        return over("late c10d", model) if late else model

    train_beside(
        rank, world, prepare, make=lambda: Transformer(blocks=1), steps=20, loss_tolerance=tolerance,
        loss=functools.partial(many_tokens_loss, narrow=narrow), tolerance=1e6,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip


def counts_of_a_step(rank, **options):
    """Statistics of forward and of backward; bytes of the largest parameter; how many parameters there are."""
    model = compiled(Transformer(), options=options)
    loss = lm_loss(model, 0, rank)
    forward = zcompile.stats(model)
    zcompile.reset_stats(model)
    loss.backward()
    largest_bytes = max(p.numel() for p in model.parameters()) * 4
    return forward, zcompile.stats(model), largest_bytes, len(list(model.parameters()))


@pytest.mark.parametrize("gather_budget_bytes", [0, 20_000])
def test_backward_gathers_what_it_reads_within_the_budget(rank, world, gather_budget_bytes):
    """No unsharded parameter crosses from forward to backward."""
    forward, backward, largest_bytes, parameters = counts_of_a_step(rank, gather_budget_bytes=gather_budget_bytes)
    tied = 1 if gather_budget_bytes == 0 else 0  # the embedding is read again by the head
    assert forward["gathers"] == parameters + tied and forward["reduces"] == 0
    assert backward["reduces"] == parameters
    # Of each block, backward reads the weights of 4 products, and (aten's layer norm backward) weight and bias of 2
    # norms. It also reads the last norm, the head and the scale. It reads no bias of a product: `tag_recompute` forbids
    # to redo an addition for it.
    assert backward["gathers"] == 2 * (4 + 2 * 2) + 2 + 1 + 1
    beside = 2 * largest_bytes  # one beside the budget, one that a thread of gloo has not let go
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert peak_bytes <= gather_budget_bytes + beside


def test_no_unsharded_parameter_is_alive_between_forward_and_backward(rank, world):
    model = compiled(Transformer())
    loss = lm_loss(model, 0, rank)
    zcompile.reset_stats(model)
    time.sleep(0.5)  # gloo's threads let go of a finished collective's tensors when they get to it
    state = state_of(model)
    scalar = next(p for p in state.parameters.values() if p.name == "mix")
    torch.ops.zcompile.gather(scalar.leaf, [3], torch.float32)  # the next gather counts what is still alive
    assert zcompile.stats(model)["peak_unsharded_bytes"] == 3 * 4
    loss.backward()


def losses_without(rank, inner, skipped):
    """Losses of three steps under autocast, without the passes `skipped`; dtypes that travelled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = compiled(Transformer(blocks=1), inner=inner, options={"skip_passes": skipped})
    return losses_of(model, autocast_loss, rank, 3).tolist(), zcompile.stats(model)["gathered_bytes"].keys()


@pytest.mark.parametrize(
    "inner, each",
    [
        ("aot_eager", ()),
        pytest.param("aot_eager", OPTIONAL_PASSES, marks=slow),
        pytest.param("inductor", ("narrow_gathers",), marks=slow),
    ],
    ids=["all", "each", "inductor"],
)
def test_passes_change_no_number(rank, world, inner, each):
    expected, _ = losses_without(rank, inner, ())
    for name in each:
        losses, dtypes = losses_without(rank, inner, (name,))
        assert losses == expected, (name, losses, expected)
        assert name != "narrow_gathers" or dtypes == {"float32"}
    losses, dtypes = losses_without(rank, inner, OPTIONAL_PASSES)
    assert losses == expected and dtypes == {"float32"}, (losses, expected)
