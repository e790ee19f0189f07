"""Numbers: compiled equals eager bit by bit, Inductor stays close to the unsharded model, runs repeat exactly."""

import copy
import functools
import time

import pytest
import torch

import zcompile
from tests.support.models import Transformer, batch, loss_of
from tests.support.reference import autocast_loss, compiled, full, lm_loss
from zcompile.options import OPTIONAL_PASSES


def bitwise(rank, world, loss):
    torch.manual_seed(0)
    model = Transformer()
    models = [zcompile.shard(copy.deepcopy(model)), compiled(copy.deepcopy(model)), compiled(copy.deepcopy(model))]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]
    for step in range(5):
        losses = [loss(m, step, rank) for m in models]
        for one in losses:
            one.backward()
        assert torch.equal(losses[0], losses[1]) and torch.equal(losses[1], losses[2]), (step, losses)
        for name, *grads in zip([n for n, _ in model.named_parameters()], *(m.parameters() for m in models)):
            eager, first, second = (p.grad.to_local() for p in grads)
            assert torch.equal(eager, first), (
                f"step {step}: gradient of {name} differs from eager by {(eager - first).abs().max()}"
            )
            assert torch.equal(first, second), f"step {step}: gradient of {name} differs between two runs"
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("loss", [lm_loss, autocast_loss])
def test_aot_eager_equals_eager_bitwise(ranks, world, loss):
    ranks(world).run(bitwise, loss)


def many_tokens_loss(model, step, rank, narrow):
    """Over 512 tokens, so that bf16 rounding averages out as it does in real batches."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        return loss_of(model, batch(step, rank, length=257))


def beside_unsharded(rank, world, narrow, late):
    loss = functools.partial(many_tokens_loss, narrow=narrow)
    torch.manual_seed(0)
    reference = Transformer()
    model = compiled(copy.deepcopy(reference), inner="inductor")
    if late:
        model.__dict__["_zcompile_state"].runtime.use_transport("late c10d")
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, reference)]
    worst = 0.0
    for step in range(20):
        ours = loss(model, step, rank)
        ours.backward()
        theirs = [loss(reference, step, other) for other in range(world)]
        (sum(theirs) / world).backward()
        worst = max(worst, ((ours - theirs[rank]).abs() / theirs[rank]).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return worst


@pytest.mark.parametrize("narrow, tolerance", [(False, 1e-5), (True, 2e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
def test_inductor_against_unsharded(ranks, narrow, tolerance, late):
    """`late` poisons what is in flight: whatever reads or reuses it too soon yields NaN."""
    assert max(ranks(2).run(beside_unsharded, narrow, late)) <= tolerance


def count_backward_gathers(rank, world, gather_budget_bytes, **how):
    model = compiled(
        Transformer(), options={"gather_budget_bytes": gather_budget_bytes, **how.pop("options", {})}, **how
    )
    loss = lm_loss(model, 0, rank)
    forward = zcompile.stats(model)
    zcompile.reset_stats(model)
    loss.backward()
    backward = zcompile.stats(model)
    biggest = max(p.numel() for p in model.parameters()) * 4
    return forward, backward, biggest, len(list(model.parameters()))


@pytest.mark.parametrize("gather_budget_bytes", [0, 20_000])
def test_nothing_full_crosses_to_backward(ranks, gather_budget_bytes):
    """Backward gathers again what it reads, and what is whole at once keeps to the budget and one parameter beside it."""
    forward, backward, biggest, parameters = ranks(2).run(count_backward_gathers, gather_budget_bytes)[0]
    tied = 1 if gather_budget_bytes == 0 else 0  # the embedding is read again by the head
    assert forward["gathers"] == parameters + tied and forward["reduces"] == 0
    assert backward["reduces"] == parameters
    # Backward reads the weights of 4 products and (aten's layer norm backward) weight and bias of 2 norms a block, of the
    # last norm, the head and the scale. No bias of a product: `recompute` forbids to redo an addition for it.
    assert backward["gathers"] == 2 * (4 + 2 * 2) + 2 + 1 + 1
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert (
            peak_bytes <= gather_budget_bytes + 2 * biggest
        )  # one beside the budget, one that a thread of gloo has not let go


def peaks_under_inductor(rank, world):
    forward, backward, biggest, _ = count_backward_gathers(
        rank, world, 0, inner="inductor", options={"bucket_bytes": 0}
    )
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert peak_bytes <= 2 * biggest, (forward, backward, biggest)


def test_compiled_code_frees_what_it_gathered(ranks):
    ranks(2).run(peaks_under_inductor)


def held_between(rank, world):
    """Bytes of gathered storages that are alive between forward and backward."""
    model = compiled(Transformer())
    loss = lm_loss(model, 0, rank)
    zcompile.reset_stats(model)
    time.sleep(0.5)  # gloo's threads let go of a finished collective's tensors when they get to it
    state = model.__dict__["_zcompile_state"]
    scalar = next(p for p in state.parameters.values() if p.name == "mix")
    torch.ops.zcompile.gather(scalar.leaf, [3], torch.float32)  # the next gather counts what is still alive
    alive = zcompile.stats(model)["peak_unsharded_bytes"]
    loss.backward()
    return alive


def test_no_full_parameter_is_alive_between_forward_and_backward(ranks):
    assert ranks(2).run(held_between) == [3 * 4, 3 * 4]


def dtypes(rank, world):
    model = zcompile.shard(Transformer(), param_dtype=torch.bfloat16)
    loss_of(model, batch(0, rank)).backward()
    grads = {name: full(p.grad) for name, p in model.named_parameters()}
    return {name: grad.sum().item() for name, grad in grads.items()}


def test_reduces_repeat_exactly(ranks):
    first, second = (ranks(4).run(dtypes) for _ in range(2))
    assert first == second and first[0] == first[3]


def disabled_passes(rank, world, inner):
    curves = {}
    singly = [
        (one,) for one in OPTIONAL_PASSES if inner == "aot_eager" or one == "narrow_gathers"
    ]  # Inductor takes its time
    for disabled in ((), *singly, OPTIONAL_PASSES):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = compiled(Transformer(blocks=1), inner=inner, options={"skip_passes": disabled})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        curves[disabled] = curve = []
        for step in range(3):
            with torch.autocast("cpu", torch.bfloat16):
                loss = lm_loss(model, step, rank)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            curve.append(loss.item())
        if disabled == ("narrow_gathers",):
            assert zcompile.stats(model)["gathered_bytes"].keys() == {"float32"}
    assert all(curve == curves[()] for curve in curves.values()), curves


@pytest.mark.parametrize("inner", ["aot_eager", "inductor"])
def test_passes_change_no_number(ranks, inner):
    ranks(2).run(disabled_passes, inner)
