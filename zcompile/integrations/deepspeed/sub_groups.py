"""One sub-group of a stage-3 optimizer: DeepSpeed's flat fp32 tensor, updated one parameter at a time.

An elementwise optimizer, such as Adam, gets the same result if it updates each parameter's view of the flat tensor with
the parameter's own gradient. So gradients need not be concatenated.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn


class SubGroup:
    """DeepSpeed's flat main parameter and its optimizer state, with views of both for each parameter's partition."""

    def __init__(self, flat: nn.Parameter, state: dict[str, Any], lengths: list[int]):
        """`flat`: the main parameter, 1-D, of sum(`lengths`) elements. `lengths`: elements of each partition."""
        self.flat = flat
        self.state = state
        self.numbers = {name: value for name, value in state.items() if not isinstance(value, torch.Tensor)}
        self.views = flat.detach().split(lengths)
        self.states: list[dict[str, Any]] = [dict(self.numbers) for _ in lengths]
        self.counts: list[tuple[torch.Tensor, list[torch.Tensor]]] = []  # (count of steps, its copies)
        for name, value in state.items():
            if name in self.numbers:
                continue
            if value.shape == flat.shape:
                parts = list(value.split(lengths))
            else:  # a count must be increased once: the first view has it, the others have copies
                copies = list(value.new_empty(len(lengths) - 1, *value.shape))
                self.counts.append((value, copies))
                parts = [value, *copies]
            for view_state, part in zip(self.states, parts, strict=True):
                view_state[name] = part

    def update(self, inner: torch.optim.Optimizer, param_group: int, batches: Iterator[list[torch.Tensor]]) -> None:
        """Step with the gradients in `batches`.

        Args:
            inner: the optimizer inside of DeepSpeed's. It holds the views and their states only in this call. Otherwise
                it holds the flat states, which DeepSpeed saves, loads and offloads.
            param_group: index in `inner.param_groups` of the group that the sub-group belongs to.
            batches: lists of gradients, in the order of the parameters; `inner` steps once for each list.
        """
        for count, copies in self.counts:  # not earlier, because sub-groups may share a count
            torch._foreach_copy_(copies, [count] * len(copies))
        pairs = zip(self.views, self.states)
        for grads in batches:
            batch = [next(pairs) for _ in grads]
            try:
                for (view, state), grad in zip(batch, grads, strict=True):
                    view.grad = grad
                    inner.state[view] = state
                inner.param_groups[param_group]["params"] = [view for view, _ in batch]
                inner.step()
            finally:
                inner.param_groups[param_group]["params"] = []
                for view, _ in batch:
                    view.grad = None
                    inner.state.pop(view, None)
            last_state = batch[-1][1]  # FusedAdam increases the count of this one
            self.state.update({name: last_state[name] for name in self.numbers})


def cast_batches(
    gradients: list[torch.Tensor], dtype: torch.dtype, scale: float, cast_bytes: int
) -> Iterator[list[torch.Tensor]]:
    """Yield the gradients, cast to `dtype` and divided by `scale`, in order.

    A batch ends when it has `cast_bytes` bytes of gradients that were cast. The list `gradients` is emptied, so that
    each gradient is freed after its cast.
    """
    batch, batch_cast_bytes = [], 0
    gradients.reverse()
    while gradients:
        grad = gradients.pop()
        batch_cast_bytes += grad.numel() * dtype.itemsize if grad.dtype != dtype else 0
        batch.append(grad.to(dtype).contiguous())
        if batch_cast_bytes >= cast_bytes or not gradients:
            if scale != 1.0:
                torch._foreach_mul_(batch, 1.0 / scale)
            yield batch
            batch, batch_cast_bytes = [], 0
