"""Steps of an offloading optimizer during backward, which hides the copies of its states.

[Note: steps in backward]
A step that streams states over the host's link takes longer than a forward, and backward uses the link for nothing.
So with `fuse_optimizer(step_in_backward=True)`, a parameter is stepped after its gradient was delivered to `.grad`.
Autograd adds up all of a backward's gradients of a leaf before it delivers the sum, and a reduced gradient needs those
of all ranks. So no rank reads the parameter again in this backward.

Parameters are collected until their states fill several groups of [Note: streamed steps]. All ranks collect the same
ones, because a norm of the gradients that are left after backward is a collective. Then torch's own step runs for these
parameters alone, on a second stream, which waits for the gradients. Backward's stream does not wait for it, and
`optimizer.step()` does. The memory of a gradient is not freed before the second stream has read it, since a later
gradient of this backward could be written there.

The parameters delivered last are left to `optimizer.step()`. If their gradients have changed by then, the program clips
or scales gradients, which came too late for the others. A copy of a few elements shows it. It is compared on the
device, and the next `optimizer.step()` raises, so that no step waits for the device.

Such steps write main parameters and narrow shards, and never the copies that peers gather: gradients of this backward
may lie in their memory. The next gather finds these copies out of date, and renews them.
"""

import contextlib
import inspect
import math
import weakref
from collections import deque
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from zcompile.state.sharded_model import models_of
from zcompile.training import streamed_groups
from zcompile.training.host_link import Queue
from zcompile.training.local_parts import local_of
from zcompile.training.offload import MOMENTS, Offload

if TYPE_CHECKING:
    from zcompile.state.sharded_parameter import ShardedParameter

GROUPS = 4  # a step in backward has the states of about as many groups
SEEN = 1024  # elements of the gradient that are compared


class StepInBackward:
    """Steps parameters of one model in backward. The model's parameters hold it; it holds neither model nor optimizer.

    Args:
        mode: the dispatch mode of the optimizer's steps, with an attribute `in_backward`.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Offload, mode: Any):
        self.optimizer, self.offload, self.mode = weakref.ref(optimizer), offload, mode
        self.pending: dict[Any, str] = {}  # parameters with a gradient that no step has taken yet -> names
        self.pending_bytes = 0  # of their states on an average rank, so that all ranks step the same parameters
        self.stepped: dict[Any, str] = {}  # parameters that have been stepped since the last `finish` -> names
        self.settings: list[dict[str, Any]] = []  # of each parameter group, as these steps have read them
        self.gradients: deque[tuple[Any, list[torch.Tensor]]] = deque()  # a mark that is passed when they were read
        self.seen: tuple[str, torch.Tensor, torch.Tensor] | None = None  # (name, elements of a gradient, their copy)
        self.changed: tuple[str, torch.Tensor, Any] | None = None  # (name, on the host: whether, mark of its copy)
        state = offload.model()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for sharded in (each for model in models_of(state) for each in model.parameters.values()) if state else ():
            if id(sharded.parameter) in held:
                sharded.on_grad = self.add

    def add(self, sharded: "ShardedParameter") -> None:
        """Step the parameter, now or with later ones; its `.grad` is complete.

        The first step of all, and the first one of a parameter, allocate host memory: they are left to
        `optimizer.step()`.

        Raises:
            RuntimeError: the parameter was stepped before, and `optimizer.step()` was not called since.
        """
        optimizer, parameter = self.optimizer(), cast(Any, sharded.parameter)
        if optimizer is None or not self.offload.has_stepped or parameter not in optimizer.state:
            return
        if parameter in self.stepped or parameter in self.pending:
            self._refuse_second(sharded.name)
        if self.pending_bytes >= GROUPS * streamed_groups.GROUP_BYTES:
            self._step(optimizer)
        self.pending[parameter] = sharded.name
        self.pending_bytes += (1 + len(MOMENTS)) * 4 * math.prod(sharded.global_shape) // sharded.state.groups.world
        elements = local_of(parameter.grad).view(-1)[:SEEN]
        self.seen = sharded.name, elements, elements.clone()

    def finish(self, optimizer: torch.optim.Optimizer) -> None:
        """Make the program wait for the steps in backward; `optimizer.step()`, which calls this, steps the others.

        Raises:
            RuntimeError: a stepped parameter has a gradient again; or settings of the optimizer changed since; or a
                GradScaler steps the optimizer; or gradients had changed between backward and the step before.
        """
        seen, link = self.seen, self.offload.link
        self.pending, self.pending_bytes, self.seen = {}, 0, None
        if self.changed is not None:
            name, changed, mark = self.changed
            self.changed = None
            link.synchronize(mark)
            if changed:
                self._refuse(
                    f"The gradient of '{name}' changed between backward and the last optimizer.step(). Do not clip or "
                    "scale gradients"
                )
        if not self.stepped:
            return
        if seen is not None:
            name, elements, copy = seen
            differs = (elements.view(torch.int32) != copy.view(torch.int32)).any()
            host = link.allocate(differs)
            host.copy_(differs, non_blocking=True)
            self.changed = name, host, link.mark(Queue.COMPUTE)
        stepped, settings = self.stepped, self.settings
        self.stepped, self.settings = {}, []
        link.join()
        self.gradients.clear()
        for parameter, name in stepped.items():
            if parameter.grad is not None:
                self._refuse_second(name)
        if getattr(optimizer, "found_inf", None) is not None:
            self._refuse("A GradScaler scales gradients, which must be divided before a step")
        if settings != _settings_of(optimizer):
            self._refuse("Settings of the optimizer, such as lr, changed between backward and optimizer.step()")

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the pending parameters on the second stream, and drop their gradients."""
        pending, self.pending, self.pending_bytes = self.pending, {}, 0
        offload, link = self.offload, self.offload.link
        if not self.stepped:
            offload.wait()  # until the moments of the last step are in host memory
            self.settings = _settings_of(optimizer)
            offload.open([*offload.trained(optimizer)])
        self.stepped |= pending
        gradients = [local_of(parameter.grad) for parameter in pending]
        with link.aside(), torch.no_grad(), _restricted(optimizer, pending), self.mode.stepping_in_backward():
            # Without the hooks of a step, which `optimizer.step()` calls once.
            inspect.unwrap(type(optimizer).step)(optimizer)
            self.gradients.append((link.mark(Queue.COMPUTE), gradients))
        for parameter in pending:
            parameter.grad = None
        while self.gradients and link.is_passed(self.gradients[0][0]):
            self.gradients.popleft()

    def _refuse_second(self, name: str) -> None:
        self._refuse(
            f"Parameter '{name}' got a second gradient before optimizer.step(), and its first one was applied. Run one "
            "backward for each optimizer.step(), or several inside of `with zcompile.accumulate(model):`, and no unit "
            "twice in a forward"
        )

    def _refuse(self, reason: str) -> None:
        raise RuntimeError(
            f"zcompile.fuse_optimizer(step_in_backward=True) has stepped parameters on rank {dist.get_rank()} that it "
            f"should not have: go on from a checkpoint. {reason}; or leave step_in_backward out."
        )


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@contextlib.contextmanager
def _restricted(optimizer: torch.optim.Optimizer, parameters: Collection[Any]) -> Iterator[None]:
    """Context manager in which `optimizer` has `parameters` alone."""
    groups = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": [each for each in group["params"] if each in parameters]} for group in groups
    ]
    try:
        yield
    finally:
        optimizer.param_groups = groups
