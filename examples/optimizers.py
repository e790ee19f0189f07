"""Optimizers over the whole matrices of a sharded model: see docs/recipes.md. For a 1-D mesh of all ranks."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import distribute_tensor


def orthogonal(update: torch.Tensor) -> torch.Tensor:
    """The Newton-Schulz iterations of torch.optim.Muon."""
    x = update.T if update.shape[0] > update.shape[1] else update
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.T if update.shape[0] > update.shape[1] else x).contiguous()


class DistributedMuon(torch.optim.Optimizer):
    """Muon of matrices. One rank computes the update of a matrix, while others compute those of other matrices."""

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            lr, beta, mine = group["lr"], group["momentum"], {}
            matrices = [p for p in group["params"] if p.grad is not None]
            for i, p in enumerate(matrices):
                momentum = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - beta)
                whole = p.grad.lerp(momentum, beta).bfloat16().full_tensor()  # all ranks
                if i % world == rank:
                    mine[i] = orthogonal(whole)
            for i, p in enumerate(matrices):
                whole = mine.pop(i) if i in mine else torch.empty(p.shape, dtype=torch.bfloat16, device=p.device)
                update = distribute_tensor(whole, p.device_mesh, p.placements, src_data_rank=i % world)
                p.mul_(1 - lr * group["weight_decay"])
                p.add_(update, alpha=-lr * max(1, p.shape[0] / p.shape[1]) ** 0.5)


class StepsWhole(torch.optim.Optimizer):
    """`kind(params, **options)` on whole parameters: one rank steps on each, and keeps its states in `inner`."""

    def __init__(self, params, kind, **options):
        super().__init__(params, options)
        self.kind, self.inner = kind, {}

    @torch.no_grad()
    def step(self):
        rank, world = dist.get_rank(), dist.get_world_size()
        for group in self.param_groups:
            options = {name: group[name] for name in self.defaults}
            for i, p in enumerate(group["params"]):
                if p.grad is None:
                    continue
                value, grad = p.full_tensor(), p.grad.full_tensor()  # all ranks
                if i % world == rank:
                    if p not in self.inner:
                        self.inner[p] = self.kind([torch.nn.Parameter(value)], **options)
                    own = self.inner[p].param_groups[0]
                    own.update(options)  # a scheduler may have changed some
                    own["params"][0].data, own["params"][0].grad = value, grad
                    self.inner[p].step()
                    own["params"][0].data, own["params"][0].grad = value.new_empty(0), None  # the state stays
                p.copy_(distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=i % world))
