"""How much forward saves for backward under a budget of activations or a limit of memory, and recomputation there."""

import contextlib
import functools
import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zcompile
from benchmarks import deepseek_v3
from tests.support.decoder import SIZE
from tests.support.models import normal
from tests.support.ranks import slow_case
from tests.support.reference import compiled, train_beside
from zcompile.compiler import memory_limit
from zcompile.explanation.llama import Llama

BUDGETS = (1.0, 0.7, 0.4, 0.1)
WIDTH = 64


class Block(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


calls_of_op = 0


@torch.library.custom_op("zcompile_tests::next_scale", mutates_args=())
def next_scale(x: torch.Tensor) -> torch.Tensor:
    """In each call another tensor."""
    global calls_of_op
    calls_of_op += 1
    return torch.full_like(x, 1 + calls_of_op % 3 / 10)


next_scale.register_fake(torch.empty_like)


class Stateful(Block):
    """Calls an op that has state, and reads a buffer before it writes to it."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("count", torch.ones(()))

    def forward(self, x):
        x = x * next_scale(x.detach())
        x = x * (x.detach() * self.count).cos()
        self.count.add_(1.0)
        return super().forward(x)


class Blocks(nn.Module):
    def __init__(self, count, dropout=0.0, checkpointing=False, kind=Block):
        super().__init__()
        self.blocks = nn.ModuleList(kind(WIDTH, dropout) for _ in range(count))
        self.checkpointing = checkpointing

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointing else block(x)
        return x.square().mean()


def saved_bytes(model, x):
    """Bytes that forward saves for backward beside parameters, and the gradient of the input, if it can have one."""
    own = {getattr(each, "_local_tensor", each).untyped_storage().data_ptr() for each in model.parameters()}
    saved: dict[int, int] = {}

    def pack(value):
        if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in own:
            saved[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    x = x.clone().requires_grad_(x.is_floating_point())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        loss = model(x)
    loss.backward()
    return sum(saved.values()), x.grad


def torch_alone(budget, blocks, inner):
    torch.manual_seed(0)
    model = Blocks(blocks)
    boxed = lambda gm, _: make_boxed_func(gm)
    aot_eager = aot_autograd(fw_compiler=boxed, partition_fn=min_cut_rematerialization_partition)
    model.compile(backend=aot_eager if inner == "aot_eager" else inner)
    with torch._functorch.config.patch(activation_memory_budget=budget):
        return saved_bytes(model, normal(0, 0, 32, WIDTH))


def under_zcompile(budget, blocks, by_option, inner):
    torch.manual_seed(0)
    options = {"activation_memory_budget": budget} if by_option else {}
    model = compiled(Blocks(blocks), inner=inner, options=options)
    with torch._functorch.config.patch(activation_memory_budget=1.0 if by_option else budget):
        return saved_bytes(model, normal(0, 0, 32, WIDTH))


@pytest.mark.parametrize(
    "blocks, by_option, inner",
    [(3, True, "aot_eager"), *(slow_case(12, by, "aot_eager") for by in (True, False)), slow_case(3, True, "inductor")],
)
def test_a_budget_saves_what_torch_alone_saves_under_it(rank, world, blocks, by_option, inner):
    ours, theirs = [], []
    for budget in BUDGETS:
        torch._dynamo.reset()
        mine, grad = under_zcompile(budget, blocks, by_option, inner)
        other, expected = torch_alone(budget, blocks, inner)
        torch.testing.assert_close(grad, expected, rtol=1e-5, atol=1e-8)
        ours.append(mine)
        theirs.append(other)
    more = 32 * WIDTH * 4 if blocks < 12 else 0  # the bytes that a block returns: more than a tenth
    assert 0.5 * theirs[0] < ours[0] <= theirs[0]  # rematerialized as ever
    for mine, other in zip(ours[1:], theirs[1:]):
        assert mine == pytest.approx(other, rel=0.1, abs=more), (ours, theirs)
    assert ours == sorted(ours, reverse=True) and ours[-1] < 0.3 * ours[0]


class Watched(torch.autograd.graph.save_on_cpu):
    """Tells what it packs, and copies it, as on a GPU."""

    def __init__(self, moved):
        super().__init__()
        pack = self.pack_hook
        self.pack_hook = lambda value: moved.append(value) or pack(value.clone())


def offloaded_bytes(rank, world, budget):
    """Bytes of activations that went to the CPU; no unsharded parameter did."""
    moved = []

    def loss(model, step, rank):
        if model._compiled_call_impl is None:
            return model(normal(step, rank, 32, WIDTH))
        moved.clear()
        with Watched(moved):
            return model(normal(step, rank, 32, WIDTH))

    prepare = functools.partial(compiled, options={"activation_memory_budget": budget})
    model = train_beside(rank, world, prepare, make=lambda: Blocks(3), loss=loss, steps=3)
    whole = {parameter.shape for parameter in model.parameters()}
    assert moved and not [value.shape for value in moved if value.shape in whole]
    return sum(value.nbytes for value in moved)


def test_save_on_cpu_around_compiled_code_moves_activations_alone(rank, world):
    assert offloaded_bytes(rank, world, 0.1) < 0.5 * offloaded_bytes(rank, world, 1.0)


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("inductor")])
def test_rematerialized_is_what_products_read_of_pointwise_kernels(inner):
    """The results of norms and of the gated activation are not saved, and gradients stay the same."""
    size, saved, gradients = replace(SIZE, layers=2), [], []
    tokens = torch.randint(0, size.vocabulary, (2, 25), generator=torch.Generator().manual_seed(0))
    for rematerialize in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Llama(size)
        model.compile(backend="zcompile", options={"inner": inner, "rematerialize": rematerialize})
        saved.append(saved_bytes(model, tokens)[0])
        gradients.append([parameter.grad for parameter in model.parameters()])
    rows, width = 2 * 24, 4
    made_again = size.layers * rows * (2 * size.width + size.hidden) + rows * size.width
    attended = size.layers * rows * size.width  # Inductor's copy of what attention returns, with its heads side by side
    assert saved[0] - saved[1] == (made_again + attended * (inner == "inductor")) * width
    exact = {"rtol": 0, "atol": 0} if inner == "aot_eager" else {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(gradients[1], gradients[0], **exact)


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_dropout_is_not_drawn_again_in_backward(budget):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.5)) for _ in range(6)))
    x = normal(0, 0, 64, WIDTH)
    options, gradients = {"inner": "aot_eager", "activation_memory_budget": budget}, []
    for loss_of in (model, torch.compile(model, backend="zcompile", options=options)):
        torch.manual_seed(0)
        gradients.append(torch.autograd.grad(loss_of(x).square().mean(), list(model.parameters())))
    torch.testing.assert_close(gradients[1], gradients[0])


ROWS, COUNT = 2048, 6


def peak_bytes(step):
    """The most that `step` had allocated at once."""
    with torch.profiler.profile(profile_memory=True) as profiler:
        step()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())))


class Mixture(nn.Module):
    """A language model with experts, which returns its logits, too, and saves slices of products."""

    def __init__(self):
        super().__init__()
        names = ("hidden_size", "intermediate_size", "moe_intermediate_size", "q_lora_rank", "kv_lora_rank")
        sizes = dict.fromkeys(names, WIDTH) | {"num_attention_heads": 4, "num_hidden_layers": 3, "vocab_size": 512}
        self.model = deepseek_v3.model_of("grouped_mm", deepseek_v3.SIZES | sizes)

    def forward(self, x):
        out = self.model(inputs_embeds=x[None], labels=x.new_zeros(1, len(x), dtype=torch.long))
        return out.loss, out.logits


def peak_under(limit, inner, rank, rows=ROWS, make=None, param_dtype=None, **of_model):
    """The peak of a forward and a backward beside what the model has all the time, and the gradients."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = make() if make else Blocks(COUNT, **of_model)
    model = compiled(model, inner=inner, param_dtype=param_dtype, options={"memory_limit": limit} if limit else {})
    x = normal(0, rank, rows, WIDTH)
    step = lambda: tree_leaves(model(x))[0].backward()
    step()  # compiles
    model.zero_grad()
    torch.manual_seed(1)
    peak = peak_bytes(step)
    return peak, [each.grad.full_tensor() for each in model.parameters() if each.grad is not None]


@pytest.mark.parametrize("inner", ["aot_eager", slow_case("inductor")])
def test_a_step_keeps_to_the_limit_and_uses_it(rank, world, inner):
    state_bytes = 12 * sum(parameter.numel() for parameter in Blocks(COUNT).parameters()) // world
    free_bytes, expected = peak_under(None, inner, rank)
    for share in (1.1, 0.8, 0.6):
        peak, grads = peak_under(state_bytes + round(share * free_bytes), inner, rank)
        assert 0.7 * min(1, share) * free_bytes <= peak <= share * free_bytes, (share, peak, free_bytes)
        torch.testing.assert_close(grads, expected)


@pytest.mark.parametrize("world", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("dtype", [None, slow_case(torch.bfloat16)])
@pytest.mark.parametrize("again, make", [(6, None), *(slow_case(n, make) for make in (None, Mixture) for n in (0, 3))])
def test_the_planned_peak_is_that_of_a_step_under_inductor(rank, world, again, make, dtype):
    """With `again` of the blocks computed again in backward. The planned peak includes the margin of 3 %."""
    planned, peak_of = {}, memory_limit._peak_bytes

    def only_again(plan, joint, limit, split):
        count = plan.recomputed[0]
        planned[count] = peak_of(plan, joint, limit, split) - memory_limit.MARGIN * limit.state_bytes
        return 1 if count >= again else 2 << 30

    uncached = torch._functorch.config.patch(enable_autograd_cache=False)  # so that the backend plans
    with uncached, mock.patch.object(memory_limit, "_peak_bytes", only_again):
        peak, _ = peak_under("1GiB", "inductor", rank, make=make, param_dtype=dtype)
    peak += 0 if dtype else ROWS * WIDTH * 4  # the input; forward saves its copy in bf16 instead
    assert peak < planned[again] < 1.08 * peak, (peak, planned)


def least_limit(call):
    """MiB, as the error of a limit that no plan keeps to says."""
    with pytest.raises(Exception, match=r"to memory_limit, \d+\.0 MiB\. The least found is \d+\.\d MiB: ") as raised:
        call()
    return float(str(raised.value).split("The least found is ")[1].split()[0])


@pytest.mark.parametrize("world", [1, slow_case(2)])
def test_the_least_limit_takes_little_more_than_checkpointed_blocks(rank, world):
    """An error names that limit before anything runs. Gradients are bitwise those without a limit, dropout too."""
    checkpointed, _ = peak_under(None, "aot_eager", rank, dropout=0.5, checkpointing=True)
    _, expected = peak_under(None, "aot_eager", rank, dropout=0.5)
    limit = 1
    for trials in (2, 15):  # a limit far below is refused after two trials, one near it after all
        torch._dynamo.reset()
        model = compiled(Blocks(COUNT, dropout=0.5), inner="aot_eager", options={"memory_limit": f"{limit}MiB"})
        with mock.patch.object(memory_limit, "_peak_bytes", wraps=memory_limit._peak_bytes) as trial:
            least = least_limit(lambda model=model: model(normal(0, rank, ROWS, WIDTH)))
        assert trial.call_count == trials and zcompile.stats(model)["gathers"] == 0, limit
        limit = int(0.85 * least)
    peak, grads = peak_under(f"{least + 0.1:.1f}MiB", "aot_eager", rank, dropout=0.5)
    assert peak < 1.1 * checkpointed, (peak, checkpointed)
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def eager_gradients(rank, world, kind):
    """Of the unsharded model, in the second of two passes."""
    torch.manual_seed(0)
    model = Blocks(COUNT, kind=kind)
    for _ in range(2):
        model.zero_grad()
        model(normal(0, rank, ROWS, WIDTH)).backward()
    grads = [parameter.grad / world for parameter in model.parameters()]
    for grad in grads:
        torch.distributed.all_reduce(grad)
    return grads


def test_state_is_neither_advanced_nor_read_again_in_backward(rank, world):
    global calls_of_op
    calls_of_op = 0
    expected = eager_gradients(rank, world, Stateful)
    peaks, grads = [], []
    for limit in (None, "18MiB"):
        calls_of_op = 0
        for to, value in zip((peaks, grads), peak_under(limit, "aot_eager", rank, kind=Stateful), strict=True):
            to.append(value)
        assert calls_of_op == 2 * COUNT, (limit, calls_of_op)
    assert peaks[1] < 0.9 * peaks[0], peaks
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    torch.testing.assert_close(grads[0], expected)


@pytest.mark.parametrize("make", [Mixture, slow_case(functools.partial(Blocks, COUNT, dropout=0.5))])
def test_explain_plans_the_graphs_that_inductor_compiles(rank, world, make):
    x, planned, options, peak_of = normal(0, rank, ROWS, WIDTH), [], {"memory_limit": "1MiB"}, memory_limit._peak_bytes
    model = compiled(make(), inner="inductor", param_dtype=torch.bfloat16, options=options)
    with mock.patch.object(memory_limit, "_peak_bytes", lambda *args: planned.append(peak_of(*args)) or planned[-1]):
        for call in (model, functools.partial(zcompile.explain, model, options=options)):
            least_limit(functools.partial(call, x))
    assert len(planned) == 4 and planned[2:] == pytest.approx(planned[:2], rel=0.001)


def test_ranks_with_different_sizes_agree_on_what_is_computed_again(rank, world):
    """Rank 1 could save all activations. Unless all ranks computed again alike, their gathers would differ."""
    rows = (ROWS, ROWS // 4)[rank]
    free_bytes, expected = peak_under(None, "aot_eager", rank, rows)
    peak, grads = peak_under("12MiB", "aot_eager", rank, rows)
    assert peak < (12 << 20, 0.8 * free_bytes)[rank]
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


def test_layers_compiled_alone_share_the_limit(rank, world):
    """Forward of each saves activations in proportion to its parameters."""
    saved = []
    for limit in (None, "18MiB"):
        torch._dynamo.reset()
        model = zcompile.shard(Blocks(COUNT))
        for block in model.blocks:
            options = {"inner": "aot_eager"} | ({"memory_limit": limit} if limit else {})
            block.compile(backend="zcompile", options=options)
        saved.append(saved_bytes(model, normal(0, rank, ROWS, WIDTH))[0])
    assert saved[1] <= (18 << 20) < saved[0], saved


@pytest.mark.parametrize("offload, nbytes", [(None, 12), ("moments", 4), ("states", 2)])
def test_states_in_host_memory_do_not_count(rank, world, offload, nbytes):
    """`nbytes` of each parameter of this rank do."""
    for spare, fits in ((8 << 20, False), (9 << 20, True)):  # gradients, parameters and gloo's buffers take 8.4 MiB
        model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
        limit = nbytes * sum(parameter.numel() for parameter in model.parameters()) // world + spare
        compiled(model, options={"memory_limit": limit}, param_dtype=torch.bfloat16)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        zcompile.fuse_optimizer(model, optimizer, offload=offload)
        with contextlib.nullcontext() if fits else pytest.raises(Exception, match="keeps to memory_limit"):
            model(torch.ones(2, 512)).sum().backward()


def test_a_graph_of_few_parameters_is_limited_by_its_own_bytes(rank, world):
    """Before a graph break, a norm saves far more for each parameter than the rest of the model."""

    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.blocks = nn.LayerNorm(WIDTH), Blocks(COUNT)

        def forward(self, x):
            x = self.norm(x)
            torch._dynamo.graph_break()
            return self.blocks(x)

    model = compiled(Broken(), fullgraph=False, options={"memory_limit": "1GiB"})
    model(normal(0, rank, ROWS, WIDTH)).backward()
    assert model.norm.weight.grad is not None
