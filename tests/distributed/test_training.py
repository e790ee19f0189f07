"""Every way to train that users have, eager and compiled, against the unsharded model; passes change no number."""

import functools
import math
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.utils.checkpoint import checkpoint

import zcompile
from tests.support import reference as ref
from tests.support.architectures import HUGGING_FACE, hugging_face, hugging_face_loss
from tests.support.compiling import SELECTIVE, by_blocks
from tests.support.models import Block, Sometimes, Transformer, batch, loss_of, normal, sometimes_loss
from tests.support.ranks import on_ranks, slow, slow_case
from zcompile.options import OPTIONAL_PASSES
from zcompile.state.sharded_model import state_of

WITHOUT = [("aot_eager", ()), slow_case("aot_eager", OPTIONAL_PASSES), slow_case("inductor", ("narrow_gathers",))]

eager_and_compiled = pytest.mark.parametrize("prepare", [slow_case(zcompile.shard), ref.compiled])


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
@pytest.mark.parametrize("prepare", [zcompile.shard, ref.compiled])
def test_fp32_trains_as_unsharded(rank, world, prepare):
    ref.train_beside(rank, world, prepare)


def test_autocast_gathers_two_bytes_per_element_and_use(rank, world):
    model = ref.train_beside(rank, world, loss=ref.autocast_loss, tolerance=ref.BF16)
    gathered_bytes = zcompile.stats(model)["gathered_bytes"]
    # Linear weights and biases are read in bf16: once in forward and, weights alone, once in backward. Autocast runs
    # norms, the embedding and the scalars in fp32. The tied embedding is read in both dtypes, so gathered in fp32.
    linears = [module for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    narrow = sum(2 * linear.weight.numel() * 2 + 2 * linear.bias.numel() for linear in linears)
    narrow += 2 * model.embed.weight.numel()
    assert gathered_bytes["bfloat16"] == 4 * narrow, (gathered_bytes, narrow)


def test_a_param_dtype_travels_and_gradients_are_fp32(rank, world):
    prepare = functools.partial(ref.compiled, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = ref.train_beside(rank, world, prepare, steps=3, tolerance=0.05)
    ref.lm_loss(model, 0, rank).backward()
    assert all(parameter.grad.dtype == torch.float32 for parameter in model.parameters())
    counted = zcompile.stats(model)
    assert set(counted["gathered_bytes"]) == set(counted["reduced_bytes"]) == {"bfloat16"}


class Checkpointed(Transformer):
    def __init__(self, how):
        super().__init__()
        self.how = how

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **self.how)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


@pytest.mark.parametrize("how", [slow_case({}), SELECTIVE])
@eager_and_compiled
def test_activation_checkpointing_trains_as_unsharded(rank, world, how, prepare):
    ref.train_beside(rank, world, prepare, make=lambda: Checkpointed(how))


@eager_and_compiled
def test_gradient_accumulation_trains_as_unsharded(rank, world, prepare):
    ref.train_beside(rank, world, prepare, microbatches=3, steps=3)


def evaluate_between(model, reference, step):
    model.eval(), reference.eval()
    with torch.no_grad():
        ref.close(model(batch(50 + step, 0)), reference(batch(50 + step, 0)), 2e-5, "no_grad")
    with torch.inference_mode():
        ref.close(model(batch(60 + step, 0)), reference(batch(60 + step, 0)), 2e-5, "inference_mode")
    model.train(), reference.train()


@eager_and_compiled
def test_evaluation_between_steps_changes_nothing(rank, world, prepare):
    ref.train_beside(rank, world, prepare, after_step=evaluate_between)


@pytest.mark.parametrize("world, native", [(2, False), (2, True), *(slow_case(4, native) for native in (False, True))])
@eager_and_compiled
def test_a_parameter_may_be_unused(rank, world, prepare, native):
    prepare = functools.partial(prepare, native_reduce=native)
    ref.train_beside(rank, world, prepare, make=Sometimes, loss=sometimes_loss, steps=5)


@pytest.mark.parametrize("dynamic", [slow_case(True), None])
def test_ranks_may_see_different_lengths(rank, world, dynamic):
    loss = lambda model, step, rank: loss_of(model, batch(step, rank, length=6 + (5 * step + 3 * rank) % 11))
    ref.train_beside(rank, world, functools.partial(ref.compiled, dynamic=dynamic), loss=loss, steps=5)


class Broken(Transformer):
    """Breaks the graph between blocks; one block runs outside of any graph."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            torch._dynamo.graph_break()
            x = torch.compiler.disable(block)(x) if number == 0 else block(x)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


def test_graphs_may_break_and_frames_be_skipped(rank, world):
    ref.train_beside(rank, world, functools.partial(ref.compiled, fullgraph=False), make=Broken)


class Rambling(nn.Module):
    """Runs a data-dependent number of times over one block, with a graph break each time."""

    def __init__(self):
        super().__init__()
        self.block, self.head = Block(6), nn.Linear(6, 2)

    def forward(self, x, times: torch.Tensor):
        for _ in range(times.item()):
            torch._dynamo.graph_break()
            x = self.block(x)
        return self.head(x)


def test_a_fragment_may_run_a_different_number_of_times(rank, world):
    loss = lambda model, step, rank: model(normal(step, rank, 2, 3, 6), torch.tensor(1 + step % 3)).square().mean()
    ref.train_beside(rank, world, functools.partial(ref.compiled, fullgraph=False), make=Rambling, loss=loss, steps=3)


def test_blocks_compiled_one_by_one_share_a_compilation(rank, world):
    torch._dynamo.utils.counters.clear()
    ref.train_beside(rank, world, by_blocks, make=functools.partial(Transformer, blocks=4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "equal blocks must share one compilation"


def test_two_models_in_one_process_do_not_disturb_each_other(rank, world):
    references, models = zip(*(ref.pair(Transformer) for _ in range(2)))
    for step in range(3):
        losses = [ref.lm_loss(model, step + i, rank) for i, model in enumerate(models)]
        for loss in reversed(losses):
            loss.backward()
        for i, reference in enumerate(references):
            (sum(ref.lm_loss(reference, step + i, other) for other in range(world)) / world).backward()
    for model, reference in zip(models, references):
        ref.same_grads(model, reference)
    counts = [zcompile.stats(model) for model in models]
    for count in counts:
        count.pop("peak_unsharded_bytes")  # of a moment: depends on when gloo's threads let go of a tensor
    assert counts[0] == counts[1]


@pytest.mark.parametrize("world", [2, slow_case(4)])
def test_clipping_and_fused_adamw_step_as_unsharded(rank, world):
    def clip(model, reference):
        gradients = [parameter.grad for parameter in model.parameters()]
        for norm_type, foreach in ((2.0, None), (0.5, False), (0.0, True)):
            ours = zcompile.clip_grad_norm_(model.parameters(), math.inf, norm_type, foreach=foreach)
            assert torch.equal(ours, nn.utils.get_total_norm(gradients, norm_type, foreach=foreach).full_tensor())
        ref.close(*(nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, reference)), 1e-5, "norm")

    adamw = functools.partial(torch.optim.AdamW, lr=1e-2, fused=True)
    ref.train_beside(rank, world, optimizer=adamw, before_step=clip, parameter_tolerance=1e-4)


def test_norms_are_found_beside_an_empty_shard(rank, world):
    model = zcompile.shard(nn.Linear(4, 1))
    model(torch.tensor([1.0, -3.0, 2.0, 0.5])).backward()
    for norm_type, norm in ((math.inf, 3), (-math.inf, 0.5), (-1, 6 / 29)):
        assert zcompile.clip_grad_norm_(model.parameters(), 9.0, norm_type).item() == pytest.approx(norm)


@pytest.mark.parametrize("name", ["llama", *(slow_case(name) for name in HUGGING_FACE[1:])])
@on_ranks(2, needs="transformers")
def test_hugging_face_models_train_in_one_graph(rank, world, name):
    make = functools.partial(hugging_face, name)
    ref.train_beside(rank, world, make=make, loss=functools.partial(hugging_face_loss, name), steps=2, tolerance=1e-4)


def rank_saves(rank, world, path):
    torch.manual_seed(0)
    model = ref.compiled(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        sum(ref.lm_loss(model, step, other) for other in range(4)).backward()
        optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    return [ref.lm_loss(model, step, 0).item() for step in range(3, 5)]


def rank_resumes(rank, world, path):
    torch.manual_seed(7)
    model = ref.compiled(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    losses = [ref.lm_loss(model, step, 0).item() for step in range(3, 5)]
    moments = [s["exp_avg"].full_tensor().abs().sum().item() for s in optimizer.state.values()]
    assert all(moment > 0 for moment in moments)
    return losses


def test_checkpoint_saved_on_four_ranks_resumes_on_two(ranks, tmp_path):
    before = ranks(4).run(rank_saves, str(tmp_path))[0]
    assert ranks(2).run(rank_resumes, str(tmp_path))[0] == pytest.approx(before, rel=1e-5)


@pytest.mark.parametrize("world", [slow_case(1), 2, slow_case(4)])
@pytest.mark.parametrize("loss", [slow_case(ref.lm_loss), ref.autocast_loss])
def test_aot_eager_equals_eager_bitwise(rank, world, loss):
    ref.same_bits(
        [ref.pair(Transformer, prepare)[1] for prepare in (zcompile.shard, ref.compiled, ref.compiled)], loss, rank
    )


def many_tokens_loss(model, step, rank, narrow):
    """Over 512 tokens, so that bf16 rounding averages out as it does in real batches."""
    with torch.autocast("cpu", torch.bfloat16, enabled=narrow):
        return loss_of(model, batch(step, rank, length=257))


@slow
@pytest.mark.parametrize("narrow, tolerance", [(False, 1e-5), (True, 2e-3)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("late", [False, True], ids=["prompt", "late"])
def test_inductor_stays_close_to_the_unsharded_model(rank, world, narrow, tolerance, late):
    """Losses. `late` poisons what is in flight: whatever reads or reuses it too soon yields NaN."""

    def prepare(model):
        ref.compiled(model, inner="inductor")
        return ref.over("late c10d", model) if late else model

    ref.train_beside(
        rank, world, prepare, make=lambda: Transformer(blocks=1), steps=20, loss_tolerance=tolerance,
        loss=functools.partial(many_tokens_loss, narrow=narrow), tolerance=1e6,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
    )  # fmt: skip


def counts_of_a_step(rank, **options):
    """Statistics of forward and of backward; bytes of the largest parameter; how many parameters there are."""
    model = ref.compiled(Transformer(), options=options)
    loss = ref.lm_loss(model, 0, rank)
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
    # norms. It also reads the last norm, the head and the scale. It reads no bias: `tag_recompute` redoes no addition.
    assert backward["gathers"] == 2 * (4 + 2 * 2) + 2 + 1 + 1
    beside = 2 * largest_bytes  # one beside the budget, one that a thread of gloo has not let go
    for peak_bytes in (forward["peak_unsharded_bytes"], backward["peak_unsharded_bytes"]):
        assert peak_bytes <= gather_budget_bytes + beside


def test_no_unsharded_parameter_is_alive_between_forward_and_backward(rank, world):
    model = ref.compiled(Transformer())
    loss = ref.lm_loss(model, 0, rank)
    zcompile.reset_stats(model)
    time.sleep(0.5)  # gloo's threads let go of a finished collective's tensors when they get to it
    scalar = next(p for p in state_of(model).parameters.values() if p.name == "mix")
    torch.ops.zcompile.gather(scalar.leaf, [3], torch.float32)  # the next gather counts what is still alive
    assert zcompile.stats(model)["peak_unsharded_bytes"] == 3 * 4
    loss.backward()


def losses_without(rank, inner, skipped):
    """Losses of three steps under autocast, without the passes `skipped`; dtypes that travelled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = ref.compiled(Transformer(blocks=1), inner=inner, options={"skip_passes": skipped})
    return ref.losses_of(model, ref.autocast_loss, rank, 3).tolist(), zcompile.stats(model)["gathered_bytes"].keys()


@pytest.mark.parametrize("inner, each", WITHOUT, ids=["all", "each", "inductor"])
def test_passes_change_no_number(rank, world, inner, each):
    expected, _ = losses_without(rank, inner, ())
    for name in each:
        losses, dtypes = losses_without(rank, inner, (name,))
        assert losses == expected, (name, losses, expected)
        assert name != "narrow_gathers" or dtypes == {"float32"}
    losses, dtypes = losses_without(rank, inner, OPTIONAL_PASSES)
    assert losses == expected and dtypes == {"float32"}, (losses, expected)
