"""What may fail, and what happens then.

[Note: what may fail]
A failure must not end a training run that eager ZeRO-3 can go on with. What happens depends on what was done until
then:

- *Taking over and compiling.* Any failure gives the engine back: hooks and readers are restored.
- *A hook on a parameter.* Compiled code does not make what it sees under ZeRO-3, the whole gradient before it is
  reduced. The next forward gives the engine back.
- *A forward before the first backward has succeeded.* Any failure gives the engine back. DeepSpeed then runs that
  forward, with the random numbers as they were.
- *A later forward.* Only what the compiler raises gives the engine back. Other errors are the user's own, or a lack of
  memory, and raise.
- *The first backward.* If the loss is an output of the engine's forward, the engine is given back, and forward and
  backward run again in eager. Otherwise only the caller can compute the loss again, so the error raises. It also raises
  where this backward may have added to gradients of an earlier microbatch: to run it again would add twice.
- *Later backwards.* They raise, because gradients may have been added up by then.
- *A step.* What fails before the optimizer has begun gives the engine back, and DeepSpeed does that step.

Ranks are expected to fail alike. A rank that fails alone leaves the others waiting until the timeout.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from zcompile.integrations.deepspeed.hooks import hooked_parameter
from zcompile.integrations.deepspeed.leaf_modules import unsupported_leaf_module


class Attempt:
    """What it takes to run one forward of the engine again."""

    def __init__(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]):
        self.inputs, self.kwargs = inputs, kwargs
        self.outputs: list[Callable[[], Any]] = []  # weak references: a graph must not live longer because of them
        self.random_state = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def rewind(self) -> None:
        """Set the random state to what it was before the forward."""
        cpu, cuda = self.random_state
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    def note_outputs(self, outputs: Any) -> None:
        """Remember which tensors the forward returned."""
        self.outputs = [
            weakref.ref(output) if isinstance(output, torch.Tensor) else lambda: None for output in tree_leaves(outputs)
        ]

    def index_of(self, loss: torch.Tensor) -> int | None:
        """The index of `loss` among the leaves of the forward's outputs; None if it is none of them."""
        return next((i for i, output in enumerate(self.outputs) if output() is loss), None)


def unsupported(engine: Any) -> str:
    """Why an engine that was made cannot be taken over; empty if it can."""
    optimizer = engine.optimizer
    if type(engine).__name__ != "DeepSpeedEngine":
        return f"a {type(engine).__name__} has a forward of its own"
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        return f"the optimizer is a {type(optimizer).__name__}, not that of stage 3"
    if getattr(optimizer, "use_muon", False):
        return "Muon updates gradients where zcompile does not reduce them"
    if name := hooked_parameter(engine):
        return f"parameter '{name}' has hooks, which under ZeRO-3 see its whole gradient before it is reduced"
    return unsupported_leaf_module(engine.module)
