"""Steps of an offloading optimizer during backward, which hides the copies of its states.

[Note: steps in backward]
With `fuse_optimizer(step_in_backward=True)`, backward updates a parameter after its gradient was delivered to `.grad`.
So the copies of states overlap with backward. No rank reads the parameter again in this backward: autograd adds up all
gradients of a leaf before it delivers their sum, and a reduced gradient needs the sums of all ranks.

Parameters are collected until their states fill several groups of [Note: streamed steps] in offload.py. All ranks must
collect the same ones, because the program may call `clip_grad_norm_`, a collective, on the rest. Then torch's own step
runs for these parameters alone, on a second stream, which waits for the gradients. Backward's stream does not wait for
the second stream; `optimizer.step()` does. The memory of a gradient is not freed before the second stream has read it,
since a later gradient of this backward could be written there.

`optimizer.step()` updates the parameters that are left after backward. If the program clips or scales their gradients
after backward, that is an error, because steps in backward used unclipped gradients. To detect the error, backward
copies some elements of the last gradient, and `optimizer.step()` compares gradient and copy on the device. Only the
next `optimizer.step()` reads the result and raises, so that no step waits for the device.

Steps in backward write narrow shards (main_parameters.py), but not the p2p transport's copies of shards, which may
share memory with gradients. The next gather casts the shards into these copies again.
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

GROUPS = 4  # a step in backward begins when the states of pending parameters fill so many groups
SEEN = 1024  # elements of the last gradient that are compared


class StepInBackward:
    """Updates parameters of one model in backward. Parameters refer to it; it refers to model and optimizer weakly."""

    def __init__(self, optimizer: torch.optim.Optimizer, offload: Offload, local: Any):
        self.optimizer, self.offload, self.local = weakref.ref(optimizer), offload, local
        self.pending: dict[Any, str] = {}  # parameters with a gradient that no step has taken yet -> names
        self.pending_bytes = 0  # of their states on an average rank, so that all ranks step the same parameters
        self.stepped: dict[Any, str] = {}  # parameters that have been stepped since the last `finish` -> names
        self.settings: list[dict[str, Any]] = []  # of each parameter group, as read by steps in backward
        self.gradients: deque[tuple[Any, list[torch.Tensor]]] = deque()  # (mark of their last read, gradients)
        self.seen: tuple[str, torch.Tensor, torch.Tensor] | None = None  # (name, elements of a gradient, their copy)
        self.changed: tuple[str, torch.Tensor, Any] | None = None  # (name, flag on the host, mark of the flag's copy)
        state = offload.model()
        held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for sharded in (each for model in models_of(state) for each in model.parameters.values()) if state else ():
            if id(sharded.parameter) in held:
                sharded.on_grad = self.add

    def add(self, sharded: "ShardedParameter") -> None:
        """Add a parameter with a complete `.grad` to the pending ones. If these fill `GROUPS` groups, first step them.

        A parameter is not added before the optimizer's first step, nor before its own: `optimizer.step()` runs these
        steps, because they allocate host memory. Raises RuntimeError if the parameter already got a gradient since the
        last `optimizer.step()`.
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
        """Make the program's stream wait for the steps in backward. `optimizer.step()` calls this first.

        Raises RuntimeError if gradients changed between the previous backward and the previous `optimizer.step()`. If
        this backward has stepped parameters, also raises if such a parameter got another gradient, if settings in
        `param_groups` changed, or if a GradScaler steps the optimizer.
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
            self._refuse("A GradScaler unscales gradients only in optimizer.step(). Train without a GradScaler")
        if settings != _settings_of(optimizer):
            self._refuse("Settings, such as lr, changed between backward and step(). Set them before backward")

    def _step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the pending parameters on the second stream, and drop their gradients."""
        pending, self.pending, self.pending_bytes = self.pending, {}, 0
        offload, link = self.offload, self.offload.link
        if not self.stepped:
            offload.wait()
            self.settings = _settings_of(optimizer)
            offload.open([*offload.trained(optimizer)])
        self.stepped |= pending
        gradients = [local_of(parameter.grad) for parameter in pending]
        with link.aside(), torch.no_grad(), _restricted(optimizer, pending), self.local.stepping_in_backward():
            # Call no hooks of a step here: `optimizer.step()` calls them once.
            inspect.unwrap(type(optimizer).step)(optimizer)
            self.gradients.append((link.mark(Queue.COMPUTE), gradients))
        for parameter in pending:
            parameter.grad = None
        while self.gradients and link.is_passed(self.gradients[0][0]):
            self.gradients.popleft()

    def _refuse_second(self, name: str) -> None:
        self._refuse(
            f"Parameter '{name}' got a second gradient, and the first may have updated it already. Run one "
            "backward for each optimizer.step(), or several inside of `with zcompile.accumulate(model):`, and no unit "
            "(see zcompile.shard) twice in a forward"
        )

    def _refuse(self, reason: str) -> None:
        raise RuntimeError(
            f"zcompile.fuse_optimizer(step_in_backward=True) may have updated parameters wrongly on rank "
            f"{dist.get_rank()}: load a checkpoint. {reason}; or leave step_in_backward out."
        )


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


@contextlib.contextmanager
def _restricted(optimizer: torch.optim.Optimizer, parameters: Collection[Any]) -> Iterator[None]:
    groups = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": [each for each in group["params"] if each in parameters]} for group in groups
    ]
    try:
        yield
    finally:
        optimizer.param_groups = groups
