"""Train a small mixture of experts in the manner of DeepSeek-V3 on the text of train.py, and draw each expert's load.

    torchrun --standalone --nproc-per-node 2 examples/moe.py --experts grouped

`--experts grouped` keeps all experts of a layer in one weight, and one product computes them all. `--experts looped`
keeps each expert as a module of its own, and a loop calls those that this rank's tokens hit. Both begin with the same
values. Each run writes OUT/moe-ENGINE-EXPERTS.json, and draws all runs of OUT into OUT/loss.png and OUT/load.png.

With `--ep 2`, ranks divide the experts of a layer: tokens travel to their experts and back, over two ranks each.

The model follows arXiv:2412.19437: sigmoid affinities, the best few experts for each token, one shared expert, a dense
first layer, and a balance by a bias that no gradient reaches (arXiv:2408.15664). Attention is that of train.py.
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from train import LanguageModel, SwiGLU, Training, make_parser, run

import zcompile
from zcompile.cli import require

STD = 0.02  # of initial values


def arguments() -> argparse.Namespace:
    """The command line of train.py and what only a mixture has."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--experts", choices=["grouped", "looped"], default="grouped", help="one product over all, or a loop over hits")
    add("--routed", type=int, default=16, help="experts of a layer, without the shared one")
    add("--active", type=int, default=2, help="of the routed experts, for each token")
    add("--ep", type=int, default=1, help="ranks that divide the experts of a layer; grouped ones only")
    add("--hidden", type=int, default=128, help="of an expert")
    add("--dense-layers", type=int, default=1, help="the first ones, which have no experts")
    add("--balance", type=float, default=3e-3, help="step of the bias that evens out the load; 0: none")
    args = parser.parse_args()
    if not 1 <= args.active <= args.routed:
        parser.error(f"--active must be from 1 to the {args.routed} experts of --routed, not {args.active}")
    if not 0 <= args.dense_layers < args.layers:
        parser.error(f"--dense-layers must be less than the {args.layers} of --layers, not {args.dense_layers}")
    if args.ep > 1 and (args.experts != "grouped" or args.engine == "fsdp2" or args.routed % args.ep):
        parser.error("--ep needs --experts grouped, an engine of zcompile, and --routed to be a multiple of it")
    return args


class Router(nn.Module):
    """Sends each token to the experts for which its affinity and their bias add up to most.

    Attributes:
        bias: [experts]. It decides which experts are chosen, and is no part of their weights.
        load: [experts], how many times each was chosen on this rank since `MixtureTraining` last looked.
    """

    def __init__(self, dim: int, experts: int, active: int):
        super().__init__()
        self.active = active
        self.centroids = nn.Parameter(torch.empty(experts, dim))
        self.register_buffer("bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For x of [tokens, dim], the chosen experts and their weights, which add up to 1: both [tokens, active]."""
        with torch.autocast(x.device.type, enabled=False):
            affinity = F.linear(x.float(), self.centroids).sigmoid()
        chosen = (affinity + self.bias).topk(self.active).indices
        if self.training:
            self.load += F.one_hot(chosen, len(self.bias)).sum((0, 1))
        weights = affinity.gather(1, chosen)
        return chosen, weights / weights.sum(1, keepdim=True)


class LoopedExperts(nn.Module):
    """Each expert is a module, which runs if a token of this rank chose it. So ranks run different experts."""

    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.experts = nn.ModuleList(SwiGLU(dim, hidden) for _ in range(experts))

    def matrices(self) -> list[torch.Tensor]:
        """Gate, up and down of each expert in turn."""
        return list(self.parameters())

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, dim], what the chosen experts make of it, summed up by their weights: [tokens, dim]."""
        y = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            tokens, place = torch.where(chosen == i)
            if len(tokens):
                y = y.index_add(0, tokens, (expert(x[tokens]) * weights[tokens, place, None]).to(y.dtype))
        return y


class GroupedExperts(nn.Module):
    """All experts are slices of three weights. Tokens are sorted by expert, and one product computes all groups."""

    def __init__(self, dim: int, hidden: int, experts: int):
        super().__init__()
        self.count = experts
        self.mesh: DeviceMesh | None = None  # of the ranks that divide them
        self.gate = nn.Parameter(torch.empty(experts, hidden, dim))
        self.up = nn.Parameter(torch.empty(experts, hidden, dim))
        self.down = nn.Parameter(torch.empty(experts, dim, hidden))

    def spread(self, mesh: DeviceMesh) -> None:
        """Keep this rank's part of the experts. Values are those of all ranks, which are alike."""
        self.mesh = mesh
        for name, whole in list(self.named_parameters()):
            setattr(self, name, nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)])))

    def matrices(self) -> list[torch.Tensor]:
        """Gate, up and down of each expert in turn."""
        return [matrix for expert in zip(self.gate, self.up, self.down) for matrix in expert]

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Of x [tokens, dim], what the chosen experts make of it, summed up by their weights: [tokens, dim]."""
        order = chosen.flatten().argsort(stable=True)
        counts = F.one_hot(chosen.flatten(), self.count).sum(0)
        rows = x[order // chosen.shape[1]]
        made = self.compute(rows, counts) if self.mesh is None else self.travel(rows, counts, self.mesh)
        made = made[order.argsort()].unflatten(0, chosen.shape)
        return (made * weights[..., None]).sum(1).to(x.dtype)

    def compute(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What experts make of rows that are sorted by expert, `counts` of them for each."""
        ends = counts.cumsum(0).to(torch.int32)
        made = F.silu(grouped(rows, self.gate, ends)) * grouped(rows, self.up, ends)
        return grouped(made, self.down, ends)

    def travel(self, rows: torch.Tensor, counts: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """The same, where each rank has some of the experts: rows go to them, and what they make comes back."""
        group, ranks = mesh.get_group(), mesh.size()
        theirs = funcol.all_to_all_single(counts, None, None, group)  # of each rank, for each expert here
        sent, received = (each.view(ranks, -1).sum(1).tolist() for each in (counts, theirs))
        rows = funcol.all_to_all_single_autograd(rows, received, sent, group)
        here = self.count // ranks
        experts = torch.arange(len(theirs), device=rows.device) % here
        by_expert = experts.repeat_interleave(theirs).argsort(stable=True)
        made = self.compute(rows[by_expert], theirs.view(ranks, here).sum(0))[by_expert.argsort()]
        return funcol.all_to_all_single_autograd(made, sent, received, group)


def grouped(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply each group of rows with the transpose of its own matrix, in autocast's dtype if that is on.

    Args:
        rows: [rows, k], sorted by group.
        weight: [groups, n, k].
        ends: int32 [groups], the index of the row behind each group.

    Returns:
        [rows, n].
    """
    device = rows.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else rows.dtype
    if dtype == torch.bfloat16:
        return F.grouped_mm(rows.to(dtype), weight.to(dtype).mT, offs=ends)
    return grouped_product(rows.to(dtype), weight.to(dtype), ends)


# torch.compile takes `F.grouped_mm` in bf16 alone. For other dtypes, these hide it from the compiler.


@torch.library.custom_op("zcompile_moe::grouped_product", mutates_args=())
def grouped_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """As `grouped`, in the dtype of both."""
    return F.grouped_mm(rows, weight.mT, offs=ends)


@torch.library.custom_op("zcompile_moe::grouped_gradient", mutates_args=())
def grouped_gradient(grad: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight, [groups, n, k], from that of the result, [rows, n]."""
    return F.grouped_mm(grad.mT, rows, offs=ends)


@grouped_product.register_fake
def _(rows, weight, ends):
    return rows.new_empty(rows.shape[0], weight.shape[1])


@grouped_gradient.register_fake
def _(grad, rows, ends):
    return rows.new_empty(ends.shape[0], grad.shape[1], rows.shape[1])


def grouped_backward(ctx, grad):
    rows, weight, ends = ctx.saved_tensors
    grad = grad.contiguous()
    return grouped_product(grad, weight.mT, ends), grouped_gradient(grad, rows, ends), None


grouped_product.register_autograd(
    grouped_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


class MixtureOfExperts(nn.Module):
    """A shared expert for every token, and beside it those that the router chooses."""

    def __init__(self, args: argparse.Namespace, generator: torch.Generator):
        super().__init__()
        self.router = Router(args.dim, args.routed, args.active)
        self.shared = SwiGLU(args.dim, args.hidden)
        kind = GroupedExperts if args.experts == "grouped" else LoopedExperts
        self.experts = kind(args.dim, args.hidden, args.routed)
        # In one order for both kinds, so that they begin with the same values.
        for matrix in (self.router.centroids, *self.shared.parameters(), *self.experts.matrices()):
            nn.init.normal_(matrix, std=STD, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [sequences, tokens, dim], as is the result."""
        tokens = x.flatten(0, 1)
        routed = self.experts(tokens, *self.router(tokens))
        return self.shared(x) + routed.view_as(x)


class Mixture(LanguageModel):
    """The language model of train.py, whose later layers have experts. Its forward returns the loss."""

    def __init__(self, args: argparse.Namespace):
        super().__init__(args.dim, args.layers, args.heads, args.tokens)
        generator = torch.Generator().manual_seed(args.seed)
        for block in self.blocks[args.dense_layers :]:
            block.mlp = MixtureOfExperts(args, generator)


def build(args: argparse.Namespace, device: torch.device) -> nn.Module:
    """The sharded model. Every rank seeds alike: each keeps its slice of its own initial values."""
    torch.manual_seed(args.seed)
    model = Mixture(args)
    if args.engine == "fsdp2":
        model.to(device)
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        if args.experts == "looped":  # else ranks that ran different experts reduce different gradients
            if not hasattr(model, "set_reduce_scatter_unused_params"):
                raise SystemExit("--engine fsdp2 --experts looped needs torch 2.13, whose FSDP2 reduces unused experts")
            model.set_reduce_scatter_unused_params(True)
        return model
    experts = [module for module in model.modules() if args.ep > 1 and isinstance(module, GroupedExperts)]
    if dist.get_world_size() % args.ep:
        raise SystemExit(f"--ep {args.ep} must divide the {dist.get_world_size()} ranks")
    shape = (dist.get_world_size() // args.ep, args.ep)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("efsdp", "ep"))
    for module in experts:
        module.to(device).spread(mesh["ep"])
    if experts:
        model.to(device)
    spread = {parameter for module in experts for parameter in module.parameters()}
    of_experts = zcompile.Placement(Shard(0), mesh["efsdp"], local=True)
    zcompile.shard(model, shard_placement_fn=lambda parameter: of_experts if parameter in spread else None)
    if args.engine == "zcompile":
        model.compile(backend="zcompile", options={"inner": args.inner, "transport": args.transport})
    return model


class MixtureTraining(Training):
    """Training that evens out and records the load of experts.

    Attributes:
        counts: [layers with experts, experts], choices of all ranks since the last record.
    """

    def __init__(self, args: argparse.Namespace, model: nn.Module):
        super().__init__(args, model)
        self.name = f"moe-{args.engine}-{args.experts}" + (f"-ep{args.ep}" if args.ep > 1 else "")
        self.routers = [module for module in model.modules() if isinstance(module, Router)]
        self.counts = torch.zeros_like(torch.stack([router.load for router in self.routers]))

    def train_step(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = super().train_step(inputs, targets)
        load = torch.stack([router.load for router in self.routers])
        dist.all_reduce(load)
        self.counts += load
        less_than_even = (load.mean(1, keepdim=True) - load).sign()
        for router, direction in zip(self.routers, less_than_even, strict=True):
            router.bias += self.args.balance * direction
            router.load.zero_()
        return loss

    def measured(self) -> dict:
        """The load of each expert of each layer since the last record, as a multiple of an even one."""
        load = self.counts / self.counts.mean(1, keepdim=True)
        self.counts.zero_()
        return {"load": [[round(share, 3) for share in layer] for layer in load.tolist()]}

    def draw(self) -> list[Path]:
        return [*super().draw(), draw_load(self.args.out)]


def draw_load(out: Path) -> Path:
    """A row for each run of a mixture in `out`, a heat map in it for each layer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    runs = {path.stem: json.loads(path.read_text())["records"] for path in sorted(out.glob("moe-*.json"))}
    layers = max(len(record["load"]) for records in runs.values() for record in records)
    size = (1 + 3.5 * layers, 0.5 + 2.8 * len(runs))
    figure, grid = pyplot.subplots(len(runs), layers, figsize=size, squeeze=False, layout="constrained")
    for axes in grid.flat:
        axes.set_axis_off()
    for row, (name, records) in zip(grid, runs.items(), strict=True):
        steps = [record["step"] for record in records]
        for i, axes in enumerate(row[: len(records[0]["load"])]):
            load = torch.tensor([record["load"][i] for record in records]).T
            mesh = axes.pcolormesh(steps, range(len(load)), load, cmap="RdBu_r", vmin=0, vmax=2, shading="nearest")
            axes.set_axis_on()
            axes.set(title=f"{name}, mixture {i + 1}", xlabel="step", ylabel="expert")
    figure.colorbar(mesh, ax=grid, label="load (1: even)", extend="max")
    figure.savefig(out / "load.png", dpi=120)
    return out / "load.png"


def main() -> None:
    require("examples/moe.py", "train", "matplotlib", "tqdm")
    run(arguments(), build, MixtureTraining)


if __name__ == "__main__":
    main()
