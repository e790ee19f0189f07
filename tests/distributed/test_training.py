"""Every way to train that users have, on sharded and compiled models, against the unsharded single-process model."""

import copy
import functools
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import zcompile
from tests.support.architectures import HUGGING_FACE, hugging_face, hugging_face_loss
from tests.support.meshes import short_mesh
from tests.support.models import Block, Sometimes, Transformer, batch, loss_of, sometimes_loss
from tests.support.ranks import on_ranks
from tests.support.reference import (
    BF16,
    autocast_loss,
    close,
    compiled,
    full,
    lm_loss,
    same_grads,
    same_parameters,
    train_beside,
)
from tests.support.time_limits import scaled

slow = pytest.mark.slow


def eager(model):
    return zcompile.shard(model)


eager_and_compiled = pytest.mark.parametrize("prepare", [pytest.param(eager, marks=slow), compiled])


@pytest.mark.parametrize("world", [pytest.param(1, marks=slow), 2, pytest.param(4, marks=slow)])
@pytest.mark.parametrize("prepare", [eager, compiled])
@on_ranks()
def test_fp32_trains_as_unsharded(rank, world, prepare):
    train_beside(rank, world, prepare)


class Sizes:
    def __init__(self, linear):
        parameters = linear._parameters
        self.weight_numel, self.bias_numel = parameters["weight"].numel(), parameters["bias"].numel()


@on_ranks(2)
def test_autocast_gathers_two_bytes_per_element_and_use(rank, world):
    model = train_beside(rank, world, loss=autocast_loss, tolerance=BF16)
    gathered_bytes = zcompile.stats(model)["gathered_bytes"]
    # Linear weights and biases are read in bf16: once in forward and, weights alone, once in backward. Autocast runs
    # norms, the embedding and the scalars in fp32. The tied embedding is read in both dtypes, so forward gathers it in
    # fp32.
    linears = [Sizes(module) for block in model.blocks for module in block.modules() if isinstance(module, nn.Linear)]
    narrow = sum(2 * sizes.weight_numel * 2 + 2 * sizes.bias_numel for sizes in linears)
    narrow += 2 * model.embed.num_embeddings * 18
    assert gathered_bytes["bfloat16"] == 4 * narrow, (gathered_bytes, narrow)


def to_bf16(model):
    return compiled(model, param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@on_ranks(2)
def test_a_param_dtype_travels_and_gradients_are_fp32(rank, world):
    torch.manual_seed(0)
    reference = Transformer()
    model = to_bf16(copy.deepcopy(reference))
    wide = zcompile.shard(copy.deepcopy(reference))  # the same in eager, fp32
    for step in range(3):
        ours, theirs = lm_loss(model, step, rank), lm_loss(wide, step, rank)
        ours.backward()
        theirs.backward()
        close(ours, theirs, 2e-2, "loss")
        for (name, narrow), exact in zip(model.named_parameters(), wide.parameters()):
            assert narrow.grad.dtype == torch.float32
            close(narrow.grad, full(exact.grad), 0.05, name)
    counted = zcompile.stats(model)
    assert set(counted["gathered_bytes"]) == set(counted["reduced_bytes"]) == {"bfloat16"}


class Checkpointed(Transformer):
    """Recomputes every block, wholly or by a policy."""

    context_fn = None

    def forward(self, tokens):
        x = self.embed(tokens)
        more = {} if self.context_fn is None else {"context_fn": self.context_fn}
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, **more)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


def save_products(context, op, *args, **kwargs):
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if op in products else CheckpointPolicy.PREFER_RECOMPUTE


class SelectivelyCheckpointed(Checkpointed):
    context_fn = staticmethod(functools.partial(create_selective_checkpoint_contexts, save_products))


@pytest.mark.parametrize("make", [pytest.param(Checkpointed, marks=slow), SelectivelyCheckpointed])
@eager_and_compiled
@on_ranks(2)
def test_activation_checkpointing_trains_as_unsharded(rank, world, make, prepare):
    train_beside(rank, world, prepare, make=make)


@eager_and_compiled
@on_ranks(2)
def test_gradient_accumulation_trains_as_unsharded(rank, world, prepare):
    train_beside(rank, world, prepare, microbatches=3, steps=3)


def evaluate_between(model, reference, step):
    model.eval(), reference.eval()
    with torch.no_grad():
        close(model(batch(50 + step, 0)), reference(batch(50 + step, 0)), 2e-5, "no_grad")
    with torch.inference_mode():
        close(model(batch(60 + step, 0)), reference(batch(60 + step, 0)), 2e-5, "inference_mode")
    model.train(), reference.train()


@eager_and_compiled
@on_ranks(2)
def test_evaluation_between_steps_changes_nothing(rank, world, prepare):
    train_beside(rank, world, prepare, after_step=evaluate_between)


class LowRank(nn.Module):
    """A frozen linear layer with a trained low-rank change."""

    def __init__(self, base: nn.Linear, rank: int = 3):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


def low_rank_model():
    model = Transformer()
    model.requires_grad_(False)
    for block in model.blocks:
        block.qkv, block.up = LowRank(block.qkv), LowRank(block.up)
    return model


@eager_and_compiled
@on_ranks(2)
def test_frozen_weights_with_low_rank_changes_train_as_unsharded(rank, world, prepare):
    model = train_beside(rank, world, prepare, make=low_rank_model)
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8 and all(name.endswith((".a", ".b")) for name in trained)


def thaw_after_first(model, reference, step):
    for each in (model, reference):
        each.blocks.requires_grad_(step % 2 == 1)


@eager_and_compiled
@on_ranks(2)
def test_requires_grad_may_change_between_steps(rank, world, prepare):
    train_beside(rank, world, prepare, after_step=thaw_after_first)


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=slow)])
@eager_and_compiled
@on_ranks()
def test_a_parameter_may_be_unused(rank, world, prepare):
    train_beside(rank, world, prepare, make=Sometimes, loss=sometimes_loss, steps=5)


def lengths_loss(model, step, rank):
    return loss_of(model, batch(step, rank, length=6 + (5 * step + 3 * rank) % 11))


@pytest.mark.parametrize("dynamic", [pytest.param(True, marks=slow), None])
@on_ranks(2)
def test_ranks_may_see_different_lengths(rank, world, dynamic):
    def prepare(model):
        zcompile.shard(model)
        model.compile(backend="zcompile", options={"inner": "aot_eager"}, fullgraph=True, dynamic=dynamic)
        return model

    train_beside(rank, world, prepare, loss=lengths_loss, steps=5)


class Broken(Transformer):
    """Breaks the graph between blocks; one block runs outside of any graph."""

    def forward(self, tokens):
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            torch._dynamo.graph_break()
            x = torch.compiler.disable(block)(x) if number == 0 else block(x)
        return self.head(self.norm(x)) * self.scale * self.mix.sum()


@on_ranks(2)
def test_graphs_may_break_and_frames_be_skipped(rank, world):
    train_beside(rank, world, functools.partial(compiled, fullgraph=False), make=Broken)


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


def rambling_loss(model, step, rank, times):
    x = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x, torch.tensor(times)).square().mean()


@on_ranks(2)
def test_a_fragment_may_run_a_different_number_of_times(rank, world):
    def loss(model, step, rank):
        return rambling_loss(model, step, rank, 1 + step % 3)

    train_beside(rank, world, functools.partial(compiled, fullgraph=False), make=Rambling, loss=loss, steps=3)


@on_ranks(2)
def test_a_fragment_that_runs_more_often_on_one_rank_is_an_error_on_all(rank, world):
    model = compiled(Rambling(), fullgraph=False, mesh=short_mesh(scaled(60)))
    rambling_loss(model, 0, rank, 1).backward()
    begin = time.monotonic()
    with pytest.raises(RuntimeError, match="ranks started different gathers and reduces"):
        rambling_loss(model, 0, rank, 1 + rank).backward()
    assert time.monotonic() - begin < scaled(30)


def per_block(model):
    zcompile.shard(model)
    for block in model.blocks:
        block.compile(backend="zcompile", options={"inner": "aot_eager"}, fullgraph=True)
    return model


@on_ranks(2)
def test_blocks_compiled_one_by_one_share_a_compilation(rank, world):
    torch._dynamo.utils.counters.clear()
    train_beside(rank, world, per_block, make=functools.partial(Transformer, blocks=4))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1, "equal blocks must share one compilation"


def recompiled_loss(model, step, rank):
    model.train(step % 2 == 0)
    return loss_of(model, batch(step, rank, length=8 + step % 3)[: 1 + step % 2])


@on_ranks(2)
def test_recompiled_graphs_train_as_unsharded(rank, world):
    train_beside(rank, world, loss=recompiled_loss, steps=3)


@on_ranks(2)
def test_two_models_in_one_process_do_not_disturb_each_other(rank, world):
    torch.manual_seed(0)
    references = [Transformer(), Transformer()]
    models = [compiled(copy.deepcopy(reference)) for reference in references]
    for step in range(3):
        losses = [lm_loss(model, step + i, rank) for i, model in enumerate(models)]
        for loss in reversed(losses):
            loss.backward()
        for i, reference in enumerate(references):
            (sum(lm_loss(reference, step + i, other) for other in range(world)) / world).backward()
    for model, reference in zip(models, references):
        same_grads(model, reference)
    counts = [zcompile.stats(model) for model in models]
    for count in counts:
        count.pop("peak_unsharded_bytes")  # of a moment: depends on when gloo's threads let go of a tensor
    assert counts[0] == counts[1]


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=slow)])
@on_ranks()
def test_clipping_and_fused_adamw_step_as_unsharded(rank, world):
    torch.manual_seed(0)
    reference = Transformer()
    model = compiled(copy.deepcopy(reference))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, reference)]
    for step in range(4):
        lm_loss(model, step, rank).backward()
        (sum(lm_loss(reference, step, other) for other in range(world)) / world).backward()
        norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (model, reference)]
        close(norms[0], norms[1], 1e-5, "norm")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    same_parameters(model, reference, tolerance=1e-4)


@on_ranks(4)
def test_replicas_stay_bitwise_equal(rank, world):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = train_beside(rank, world, functools.partial(compiled, mesh=mesh))
    shard = model.embed._parameters["weight"].to_local()
    rows = [torch.empty_like(shard) for _ in range(2)]
    dist.all_gather(rows, shard, group=mesh.get_group("replicate"))
    assert torch.equal(rows[0], rows[1]), "replicas must stay bitwise equal"


def rank_trains_hugging_face(rank, world, name):
    make = functools.partial(hugging_face, name)
    train_beside(rank, world, make=make, loss=functools.partial(hugging_face_loss, name), steps=2, tolerance=1e-4)


@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=slow) for name in HUGGING_FACE[1:])])
def test_hugging_face_models_train_in_one_graph(ranks, name):
    pytest.importorskip("transformers")
    ranks(2).run(rank_trains_hugging_face, name)


def rank_saves(rank, world, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    torch.manual_seed(0)
    model = compiled(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        optimizer.zero_grad()
        sum(lm_loss(model, step, other) for other in range(4)).backward()
        optimizer.step()
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    return [lm_loss(model, step, 0).item() for step in range(3, 5)]


def rank_resumes(rank, world, path):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    torch.manual_seed(7)
    model = compiled(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": state, "optimizer": optimizer_state}, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
    losses = [lm_loss(model, step, 0).item() for step in range(3, 5)]
    moments = [s["exp_avg"].full_tensor().abs().sum().item() for s in optimizer.state.values()]
    assert all(moment > 0 for moment in moments)
    return losses


def test_checkpoint_saved_on_four_ranks_resumes_on_two(ranks, tmp_path):
    before = ranks(4).run(rank_saves, str(tmp_path))[0]
    after = ranks(2).run(rank_resumes, str(tmp_path))[0]
    assert after == pytest.approx(before, rel=1e-5)
