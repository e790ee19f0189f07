"""A sharded model beside the same model unsharded, in every rank process."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.models import Transformer, batch, loss_of

FP32 = 2e-5  # relative error of a gradient's norm: fp32 sums in another order, over a few steps
BF16 = 3e-2  # the same of two bf16 runs that sum in another order

ROUNDING = 2e-7  # of a gradient that is zero but for rounding, as of a bias before a normalization

Loss = Callable[[nn.Module, int, int], torch.Tensor]  # (model, step, rank) -> loss of that rank at that step


def lm_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """Language-model loss on the batch of `rank`."""
    return loss_of(model, batch(step, rank).to(next(model.parameters()).device))


def autocast_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """`lm_loss` under autocast to bf16 on the CPU."""
    with torch.autocast("cpu", torch.bfloat16):
        return lm_loss(model, step, rank)


def compiled(
    model: nn.Module, *, inner: str = "aot_eager", fullgraph: bool = True, options: dict | None = None, **how
) -> nn.Module:
    """Shard `model`, compile it in place."""
    zcompile.shard(model, **how)
    model.compile(backend="zcompile", options={"inner": inner, **(options or {})}, fullgraph=fullgraph)
    return model


def full(tensor):
    """A DTensor's whole value; any other tensor as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.dtype.is_floating_point and tensor.itemsize == 1:  # gloo knows no float8
        local, mesh, shape, stride = tensor.to_local(), tensor.device_mesh, tensor.shape, tensor.stride()
        as_bytes = local.view(torch.uint8)
        whole = DTensor.from_local(as_bytes, mesh, tensor.placements, run_check=False, shape=shape, stride=stride)
        return whole.full_tensor().view(tensor.dtype)
    return tensor.full_tensor()


def close(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float, name: str) -> None:
    """The error's norm is at most `tolerance` of the norm of what is right."""
    ours, theirs = full(ours).detach().double(), theirs.detach().double()
    error, norm = (ours - theirs).norm(), theirs.norm()
    assert error <= tolerance * norm + ROUNDING, f"{name}: error {error} of {norm}"


def same_grads(model: nn.Module, reference: nn.Module, tolerance: float = FP32) -> None:
    """Every gradient agrees, and is missing in one where it is missing in the other."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), f"gradient of {name}: {ours.grad} against {theirs.grad}"
        if ours.grad is not None:
            close(ours.grad, theirs.grad, tolerance, f"gradient of {name}")


def same_parameters(model: nn.Module, reference: nn.Module, tolerance: float = FP32) -> None:
    """Every parameter agrees."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(ours, theirs, tolerance, name)


def train_beside(
    rank: int,
    world: int,
    prepare: Callable[[nn.Module], nn.Module] = compiled,
    *,
    make: Callable[[], nn.Module] = Transformer,
    loss: Loss = lm_loss,
    steps: int = 4,
    microbatches: int = 1,
    tolerance: float = FP32,
    loss_tolerance: float | None = None,
    parameter_tolerance: float | None = None,
    after_step: Callable[[nn.Module, nn.Module, int], None] = lambda model, reference, step: None,
) -> nn.Module:
    """Train `prepare(make())` and `make()` on the same batches; compare losses, gradients and parameters at every step.

    The reference sees the batches of all ranks, one after the other. Returns the sharded model.

    Args:
        tolerance: of gradients, see `close`; of losses and of parameters too, unless those have one of their own.
    """
    loss_tolerance = tolerance if loss_tolerance is None else loss_tolerance
    parameter_tolerance = tolerance if parameter_tolerance is None else parameter_tolerance
    models = []
    for _ in range(2):  # and no copy: there are models that cannot be copied
        torch.manual_seed(0)
        models.append(make())
    reference, model = models[0], prepare(models[1])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (model, reference)]
    for step in range(steps):
        for microbatch in range(step * microbatches, (step + 1) * microbatches):
            ours = loss(model, microbatch, rank)
            ours.backward()
            theirs = [loss(reference, microbatch, other) for other in range(world)]
            (sum(theirs) / world).backward()
            close(ours, theirs[rank], loss_tolerance, "loss")
        same_grads(model, reference, tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after_step(model, reference, step)
    same_parameters(model, reference, parameter_tolerance)
    return model
