"""Models spread by tensor, sequence and expert parallelism, for tests of zcompile beside them."""

from collections.abc import Iterable

import torch
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import parallel as styles
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module

import zcompile
from tests.support import mixtures
from tests.support.architectures import hugging_face
from tests.support.compiling import checkpoint_each
from tests.support.models import mean_square, normal
from zcompile.explanation.workloads import draw_tokens

WIDTH, HIDDEN, EXPERTS, TOP, TOKENS = 12, 22, 4, 2, 6


class Attention(nn.Module):
    """Causal attention whose heads tensor parallelism divides. Context parallelism replaces `attend`."""

    def __init__(self, heads: int = 2):
        super().__init__()
        self.head = WIDTH // heads
        self.q, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k = nn.Linear(WIDTH, WIDTH, bias=False)  # a bias would have no effect, and a gradient of rounding alone

    def forward(self, x):
        q, k, v = (project(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for project in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(-2))

    def attend(self, q, k, v):
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)


class FeedForward(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x):
        return self.down(nn.functional.gelu(self.up(x)))


class DenseBlock(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.feed = nn.LayerNorm(WIDTH), FeedForward(hidden)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class Blocks(nn.Module):
    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.enter, self.blocks = nn.Linear(WIDTH, WIDTH), nn.ModuleList(blocks)
        self.leave = nn.Linear(WIDTH, 3)

    def forward(self, x, *args):
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, *args)
        return self.leave(x)


class Dense(Blocks):
    def __init__(self, blocks: int = 2, hidden: int = HIDDEN):
        super().__init__(DenseBlock(hidden) for _ in range(blocks))


TENSOR_PLAN = {name: ColwiseParallel() for name in ("attention.q", "attention.k", "attention.v", "feed.up")}
TENSOR_PLAN |= {name: RowwiseParallel() for name in ("attention.out", "feed.down")}
SEQUENCE_PLAN = {
    **TENSOR_PLAN,
    **dict.fromkeys(("norm1", "norm2"), styles.SequenceParallel()),
    "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "feed": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed.down": RowwiseParallel(output_layouts=Shard(1)),
}


def spread_dense(model: Dense, mesh: DeviceMesh, sequence: bool, **output) -> Dense:
    """`model` under tensor parallelism, and under sequence parallelism between its blocks' products."""
    for block in model.blocks:
        parallelize_module(block, mesh, SEQUENCE_PLAN if sequence else TENSOR_PLAN)
    if sequence:
        parallelize_module(model, mesh, {"enter": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))})
        output = output or {"output_layouts": Replicate()}
        parallelize_module(model, mesh, {"leave": ColwiseParallel(input_layouts=Shard(1), **output)})
    return model


class Experts(nn.Module):
    """Experts whose weights expert parallelism divides. Tokens travel to their experts and back."""

    def __init__(self, sorts: bool, count: int):
        super().__init__()
        self.sorts, self.count = sorts, count
        self.up = nn.Parameter(torch.randn(count, WIDTH, HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(count, HIDDEN, WIDTH) / 4)
        self.group = None  # of the ranks that each have some experts
        self.ranks = 1

    def forward(self, x, chosen, weights):
        """x: [tokens, width]; chosen, weights: [tokens, experts of a token]."""
        return (self.forward_sorted if self.sorts else self.forward_slots)(x, chosen, weights)

    def forward_sorted(self, x, chosen, weights):
        """Tokens sorted by their experts, and no more rows than there are: shapes follow from values."""
        order = chosen.flatten().argsort(stable=True)
        rows = x[order // chosen.shape[1]]
        counts = torch.bincount(chosen.flatten(), minlength=self.count)
        sent, received = [len(rows)], [len(rows)]
        if self.group is not None:
            theirs = funcol.all_to_all_single(counts, None, None, self.group)
            sent, received = (each.view(self.ranks, -1).sum(1).tolist() for each in (counts, theirs))
            rows = funcol.all_to_all_single_autograd(rows, received, sent, self.group)
            counts = theirs
        here = torch.arange(counts.numel(), device=x.device) % (self.count // self.ranks)
        experts = here.repeat_interleave(counts)
        up, down = (w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down))
        out = torch.zeros_like(rows)
        for i in range(len(up)):
            at = torch.where(experts == i)[0]
            out = out.index_add(0, at, nn.functional.silu(rows[at] @ up[i]) @ down[i])
        if self.group is not None:
            out = funcol.all_to_all_single_autograd(out, sent, received, self.group)
        weighted = out * weights.flatten()[order, None]
        return torch.zeros_like(x).index_add(0, order // chosen.shape[1], weighted)

    def forward_slots(self, x, chosen, weights):
        """Each pair of a token and an expert has a slot of its own, so shapes are static."""
        slots = torch.zeros(self.count, *x.shape, dtype=x.dtype, device=x.device)
        picked = nn.functional.one_hot(chosen, self.count).sum(1).T.unsqueeze(-1)  # [experts, tokens, 1]
        slots = slots + picked * x
        if self.group is not None:  # [experts of all, tokens] -> [ranks, experts here, tokens]
            slots = funcol.all_to_all_single_autograd(slots.flatten(0, 1), None, None, self.group)
        slots = slots.reshape(self.ranks, -1, *x.shape).transpose(0, 1).flatten(1, 2)
        out = self.outputs(slots, *(w.to_local() if isinstance(w, DTensor) else w for w in (self.up, self.down)))
        out = out.reshape(-1, self.ranks, *x.shape).transpose(0, 1).flatten(0, 1)
        if self.group is not None:
            out = funcol.all_to_all_single_autograd(out.flatten(0, 1), None, None, self.group)
        out = out.reshape(self.count, *x.shape)
        share = torch.zeros(len(x), self.count, dtype=x.dtype, device=x.device).scatter(1, chosen, weights)
        return (out * share.T.unsqueeze(-1)).sum(0)

    def outputs(self, slots, up, down):
        return torch.bmm(nn.functional.silu(torch.bmm(slots, up)), down)


class GatedExperts(Experts):
    """Experts of a DeepSeek-V3 of transformers, computed in slots."""

    def __init__(self, experts: nn.Module):
        super().__init__(False, experts.num_experts)
        self.up, self.down = experts.gate_up_proj, experts.down_proj

    def outputs(self, slots, up, down):
        gate, value = torch.bmm(slots, up.mT).chunk(2, -1)
        return torch.bmm(nn.functional.silu(gate) * value, down.mT)


class MixtureBlock(nn.Module):
    def __init__(self, sorts: bool, experts: int):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.router, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, experts), Experts(sorts, experts)

    def forward(self, x, only=None):
        """`only`: whether tokens may choose each expert, a mask; default: all."""
        x = x + self.attention(self.norm1(x))
        tokens = self.norm2(x).flatten(0, 1)
        scores = self.router(tokens)
        if only is not None:
            scores = scores.where(only, -1e4)
        weights, chosen = scores.softmax(-1).topk(TOP, -1)
        return x + self.experts(tokens, chosen, weights).view_as(x)


class Mixture(Blocks):
    def __init__(self, blocks: int = 2, sorts: bool = False, experts: int = EXPERTS):
        super().__init__(MixtureBlock(sorts, experts) for _ in range(blocks))


def spread_experts(model: Mixture, mesh: DeviceMesh) -> Mixture:
    for experts in (each for each in model.modules() if isinstance(each, Experts)):
        experts.group, experts.ranks = mesh.get_group(), mesh.size()
        for name in ("up", "down"):
            whole = getattr(experts, name)
            spread = distribute_tensor(whole.detach(), mesh, [Shard(0)])
            setattr(experts, name, nn.Parameter(spread, requires_grad=whole.requires_grad))
    return model


def mesh_of(device: str, **sizes: int) -> DeviceMesh:
    """Ranks in dimensions of these names and sizes."""
    return init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def expert_placement(model: nn.Module, mesh: DeviceMesh, shard: Shard, local: bool = False):
    """A `shard_placement_fn`: experts of `model` over `mesh`."""
    experts = {parameter for each in model.modules() if isinstance(each, Experts) for parameter in each.parameters()}
    return lambda parameter: zcompile.Placement(shard, mesh, local) if parameter in experts else None


def token_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return mean_square(2, TOKENS, WIDTH)(model, step, rank)


def checkpointed(model: nn.Module) -> nn.Module:
    """`model`, each of whose blocks is checkpointed."""
    checkpoint_each(model.blocks)
    return model


def sequence_parallel() -> nn.Module:
    """On four ranks: tensor and sequence parallelism over two, of layers that do not divide; returns a DTensor."""
    mesh = mesh_of("cpu", dp=2, tp=2)
    model = spread_dense(Dense(1), mesh["tp"], True, output_layouts=Shard(-1), use_local_output=False)
    return zcompile.shard(model, mesh["dp"])


three_blocks = lambda: zcompile.shard(Dense(3))
looped = lambda: mixtures.sharded(mixtures.MixtureModel(layers=2))


def whole_loss(model: nn.Module, step: int, rank: int, tokens: int = TOKENS) -> torch.Tensor:
    """The mean square of the whole output, if it is a DTensor, too; of a language model, its own loss."""
    if hasattr(model, "lm_head"):
        ids = draw_tokens(model.config.vocab_size, 2, tokens, step, rank)
        return model(input_ids=ids, labels=ids).loss
    if isinstance(model, mixtures.MixtureModel):
        return mixtures.routed_loss(model, step, rank)
    out = model(normal(step, rank, 2, tokens, WIDTH))
    return (out.full_tensor() if isinstance(out, DTensor) else out).square().mean()


def deepseek_v3(dp: int, tp: int, ep: int) -> nn.Module:
    """A small DeepSeek-V3 of transformers on dp * tp ranks. `tp` of them divide the heads of attention, the dense and
    shared experts, and the vocabulary; `ep` of them the routed experts, to which each one sends a part of the tokens.
    """
    mesh, model = mesh_of("cpu", efsdp=dp * tp // ep, outer=ep // tp, tp=tp), hugging_face("deepseek_v3")
    inputs = {"input_layouts": (Replicate(),) * 3, "desired_input_layouts": (Shard(0),) * 3, "use_local_input": True}
    parts = styles.PrepareModuleInputOutput(**inputs, output_layouts=Shard(0), desired_output_layouts=Replicate())
    plan = {name: ColwiseParallel() for name in ("self_attn.q_b_proj", "self_attn.kv_b_proj")}
    plan["self_attn.o_proj"] = RowwiseParallel()
    for layer in model.model.layers:
        mixture = hasattr(layer.mlp, "experts")
        dense = "mlp.shared_experts" if mixture else "mlp"
        feed = {f"{dense}.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(layer, mesh["tp"], plan | feed | {f"{dense}.down_proj": RowwiseParallel()})
        if mixture:
            layer.mlp.experts = GatedExperts(layer.mlp.experts)
            parallelize_module(layer, mesh["tp"], {"mlp.experts": parts})
    parallelize_module(model, mesh["tp"], {"lm_head": ColwiseParallel(output_layouts=Replicate())})
    spread_experts(model, mesh["outer", "tp"]._flatten("ep"))
    placement = expert_placement(model, mesh["efsdp"], Shard(0), local=True)
    return zcompile.shard(model, mesh["efsdp", "outer"]._flatten("dp"), shard_placement_fn=placement)


def maybe_compiled(model: nn.Module, inner: str, fullgraph: bool = True) -> nn.Module:
    """`model`, compiled in place unless `inner` is "eager"."""
    if inner != "eager":
        model.compile(backend="zcompile", options={"inner": inner}, fullgraph=fullgraph)
    return model


def expert_parallel(
    device: str, inner: str, model: nn.Module, *, shard: Shard, local: bool = False, fullgraph: bool = True
) -> nn.Module:
    """`model` on four ranks: experts spread over two and sharded over two, the rest sharded over all."""
    mesh = mesh_of(device, efsdp=2, ep=2)
    spread_experts(model, mesh["ep"])
    placement = expert_placement(model, mesh["efsdp"], shard, local)
    return maybe_compiled(zcompile.shard(model, mesh._flatten("dp"), shard_placement_fn=placement), inner, fullgraph)
