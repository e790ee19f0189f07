"""A sharded model beside the same model unsharded, in every rank process."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

import zcompile
from tests.support.models import Transformer, batch, loss_of
from zcompile.state.sharded_model import models_of, state_of

FP32 = 2e-5  # relative error of a gradient's norm: fp32 sums in another order, over a few steps
BF16 = 3e-2  # the same of two bf16 runs that sum in another order
ROUNDING = 2e-7  # of a gradient that is zero but for rounding, as of a bias before a normalization

# Rounding is below RIGHT, another result's values are above WRONG: tests must not take one for the other.
RIGHT, WRONG = 1e-5, 1e-2

Optimizer = torch.optim.Optimizer
Make, Prepare = Callable[[], nn.Module], Callable[[nn.Module], nn.Module]
Loss = Callable[[nn.Module, int, int], torch.Tensor]  # (model, step, rank) -> loss of that rank at that step


def lm_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    return loss_of(model, batch(step, rank).to(next(model.parameters()).device))


def autocast_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    with torch.autocast(next(model.parameters()).device.type, torch.bfloat16):
        return lm_loss(model, step, rank)


def compiled(
    model: nn.Module,
    *,
    inner: str = "aot_eager",
    fullgraph: bool = True,
    dynamic: bool | None = None,
    options: dict | None = None,
    **how,
) -> nn.Module:
    """Shard `model`, compile it in place."""
    zcompile.shard(model, **how)
    options = {"inner": inner, **(options or {})}
    model.compile(backend="zcompile", options=options, fullgraph=fullgraph, dynamic=dynamic)
    return model


def over(transport: str, model: nn.Module) -> nn.Module:
    """`model`, with all its parameters over `transport`, one of the runtime's names."""
    for state in models_of(state_of(model)):
        state.runtime.use_transport(transport)
        if "p2p" in transport:
            state.agreement = None  # of NCCL, which was taken before
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


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the error relative to the norm of `expected`; infinite for NaN."""
    return float(((result - expected).norm() / expected.norm()).nan_to_num(float("inf")))


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
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        close(ours, theirs, tolerance, name)


def same_values(ours: nn.Module | Mapping | Iterable, theirs: nn.Module | Mapping | Iterable) -> None:
    """The tensors of two models, of two state dicts or of two sequences are equal bit by bit, DTensors as a whole."""
    mine, others = (dict(each.named_parameters()) if isinstance(each, nn.Module) else each for each in (ours, theirs))
    mine, others = (each if isinstance(each, Mapping) else dict(enumerate(each)) for each in (mine, others))
    for (name, value), other in zip(mine.items(), others.values(), strict=True):
        assert value.dtype == other.dtype and torch.equal(full(value.detach()), full(other.detach())), name


def finish_step(optimizer: Optimizer, loss: torch.Tensor) -> torch.Tensor:
    """Backward of `loss`, then a step, after which no gradients are left. Returns the loss, detached."""
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def losses_of(model: nn.Module, loss: Loss, rank: int, steps: int, optimizer: Optimizer | None = None) -> torch.Tensor:
    """Losses of steps of an optimizer, by default of `sgd`: [steps]."""
    optimizer, losses = optimizer or sgd(model.parameters()), []
    for step in range(steps):
        losses.append(finish_step(optimizer, loss(model, step, rank)))
    return torch.stack(losses)


def pair(make: Make, prepare: Prepare = compiled) -> tuple[nn.Module, nn.Module]:
    """`make()` as it is, and prepared; both have the same values."""
    models = []
    for _ in range(2):  # and no copy: there are models that cannot be copied
        torch.manual_seed(0)
        models.append(make())
    return models[0], prepare(models[1])


def backward_beside(
    rank: int, world: int, model: nn.Module, reference: nn.Module, loss: Loss, step: int = 0, divisor: float = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Backwards of both, of the reference on all ranks' batches; returns both losses on this rank's batch.

    The sum of all ranks' gradients is divided by `divisor`, or by `world`."""
    ours = loss(model, step, rank)
    ours.backward()
    theirs = [loss(reference, step, other) for other in range(world)]
    (sum(theirs) / (divisor or world)).backward()
    return ours, theirs[rank]


def same_backward(
    rank: int, world: int, model: nn.Module, reference: nn.Module, loss: Loss, step: int = 0, tolerance: float = FP32
) -> None:
    """One backward of both has the same loss and gives the same gradients."""
    model.zero_grad(), reference.zero_grad()
    close(*backward_beside(rank, world, model, reference, loss, step), tolerance, "loss")
    same_grads(model, reference, tolerance)


def same_bits(models: Sequence[nn.Module], loss: Loss, rank: int, steps: int = 5) -> None:
    """Losses, gradients and parameters of steps of all `models` are equal bit by bit."""
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(steps):
        losses = [loss(model, step, rank) for model in models]
        for each, optimizer in zip(losses, optimizers, strict=True):
            assert torch.equal(each, losses[0]), (step, losses)
            each.backward()
            optimizer.step()
        for (name, first), *others in zip(*(model.named_parameters() for model in models), strict=True):
            for _, other in others:
                assert torch.equal(first.grad.to_local(), other.grad.to_local()), f"step {step}: gradient of {name}"
                assert torch.equal(first.to_local(), other.to_local()), f"step {step}: {name}"
        for optimizer in optimizers:
            optimizer.zero_grad()


def clipped_steps(model: nn.Module, loss: Loss, rank: int, max_norm: float, steps: int) -> Iterator[tuple]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003)
    for step in range(steps):
        value = loss(model, step, rank)
        value.backward()
        norm = zcompile.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield value.detach(), norm


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Momentum makes each step depend on those before."""
    return torch.optim.SGD(parameters, lr=0.02, momentum=0.9)


def train_beside(
    rank: int,
    world: int,
    prepare: Prepare = compiled,
    *,
    make: Make = Transformer,
    loss: Loss = lm_loss,
    steps: int = 4,
    microbatches: int = 1,
    tolerance: float = FP32,
    loss_tolerance: float | None = None,
    parameter_tolerance: float | None = None,
    divisor: float = 0,
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd,
    before_step: Callable[[nn.Module, nn.Module], None] = lambda model, reference: None,
    after_step: Callable[[nn.Module, nn.Module, int], None] = lambda model, reference, step: None,
) -> nn.Module:
    """Train `prepare(make())` and `make()` on the same batches; compare losses, gradients and parameters at every step.

    Returns the sharded model. `tolerance` of gradients, see `close`, is that of losses and of parameters too, unless
    those have one of their own. `divisor`: see `backward_beside`."""
    loss_tolerance = tolerance if loss_tolerance is None else loss_tolerance
    parameter_tolerance = tolerance if parameter_tolerance is None else parameter_tolerance
    reference, model = pair(make, prepare)
    optimizers = [optimizer(each.parameters()) for each in (model, reference)]
    for step in range(steps):
        for microbatch in range(step * microbatches, (step + 1) * microbatches):
            losses = backward_beside(rank, world, model, reference, loss, microbatch, divisor)
            close(*losses, loss_tolerance, "loss")
        same_grads(model, reference, tolerance)
        before_step(model, reference)
        for each in optimizers:
            each.step()
            each.zero_grad()
        after_step(model, reference, step)
    same_parameters(model, reference, parameter_tolerance)
    return model
