"""Reduces that `zcompile.accumulate` defers to the end of its block: sums over replicas or hosts, or all reduces.

FSDP2's `set_requires_all_reduce(False)` defers sums over replicas; `set_requires_gradient_sync(False)`, all reduces.
At the block's end, ranks first exchange which parameters have a gradient on any rank. A rank without a gradient for
such a parameter contributes zeros.
"""

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from zcompile.ranks.process_groups import all_gather_over_mesh, is_fake
from zcompile.state.microbatches import Deferred
from zcompile.state.sharded_model import ShardedModel
from zcompile.state.sharded_parameter import ShardedParameter

BUCKET_BYTES = 64 << 20  # most bytes of shards that one collective sums over replicas


class Deferral:
    """The reduces that an `accumulate` block defers to its end. This base class defers none."""

    def __init__(self, states: Sequence[ShardedModel]):
        self.states = states

    def defer(self, what: Deferred) -> None:
        """Let reduces of microbatches leave out the part `what` from now on."""
        for state in self.states:
            state.microbatches.deferred = what
            state.runtime.defer(what.value)

    def begin(self) -> None:
        """Begin the `accumulate` block: defer reduces."""

    def finish(self) -> None:
        """After the block, do the deferred reduces. A collective call."""

    def drop(self) -> None:
        """After an exception in the block, restore earlier gradients. No collective: perhaps only this rank raised."""


class DeferredReplicas(Deferral):
    """Microbatches reduce-scatter inside of a replica. The block's end sums over replicas, in replica order.

    Two kinds of gradients are summed over replicas already, so they are kept apart until the end: `earlier`, from
    before the block, and `own`, which autograd adds to a DTensor, as for a loss with `parameter.square().sum()`.
    """

    def __init__(self, states: Sequence[ShardedModel]):
        super().__init__([state for state in states if state.mesh.ndim == 2 and not is_fake(state.mesh)])
        self.earlier: list[tuple[nn.Parameter, torch.Tensor]] = []
        self.own: dict[nn.Parameter, torch.Tensor] = {}
        # Autograd's node that accumulates into each DTensor, and its prehook. Without a reference to the node, backward
        # would make another, without the prehook.
        self.nodes: list[tuple[Node, RemovableHandle]] = []

    def begin(self) -> None:
        self.defer(Deferred.REPLICAS)
        for state in self.states:
            for sharded in state.parameters.values():
                parameter = sharded.parameter
                if parameter.grad is not None:
                    self.earlier.append((parameter, parameter.grad))
                    parameter.grad = None
                if parameter.requires_grad and parameter.numel():  # of an empty DTensor, torch has no gradient edge
                    node = get_gradient_edge(parameter).node
                    self.nodes.append((node, node.register_prehook(functools.partial(self._keep_own, parameter))))

    def _keep_own(self, parameter: Any, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Autograd prehook for losses that read the DTensor itself: add the gradient to `own`, and zeros to `.grad`."""
        # This gradient is summed over replicas already. The block's end sums `.grad` over replicas.
        grad: Any = grads[0]
        if grad.placements != parameter.placements:
            grad = grad.redistribute(placements=parameter.placements)
        if parameter.grad is None:  # also if the program has set it to None, which drops the gradients so far
            self.own.pop(parameter, None)
        self.own[parameter] = self.own[parameter] + grad if parameter in self.own else grad.clone()
        return (torch.zeros_like(grad),)

    def _end(self) -> None:
        self.defer(Deferred.NOTHING)
        for _, handle in self.nodes:
            handle.remove()
        self.nodes.clear()

    def finish(self) -> None:
        self._end()
        own = [(parameter, grad) for parameter, grad in self.own.items() if parameter.grad is not None]
        for state in self.states:
            _sum_over_replicas(state)
        for parameter, grad in [*own, *self.earlier]:
            added = parameter.grad
            parameter.grad = grad if added is None else grad.add_(added)

    def drop(self) -> None:
        self._end()
        for state in self.states:
            for sharded in state.parameters.values():
                sharded.parameter.grad = None
        for parameter, grad in self.earlier:
            parameter.grad = grad


class DeferredReduces(Deferral):
    """Microbatches add up unsharded gradients; the block's end reduces each sum once. Units reduce in each microbatch.

    With one rank, nothing is deferred, because compiled graphs may have no reduces then.
    """

    def __init__(self, states: Sequence[ShardedModel]):
        super().__init__([state for state in states if not state.are_units and state.mesh.size() > 1])

    def begin(self) -> None:
        self.defer(Deferred.REDUCES)

    def finish(self) -> None:
        self.defer(Deferred.NOTHING)
        for state in self.states:
            _reduce(state, _over_all)

    def drop(self) -> None:
        self.defer(Deferred.NOTHING)
        for state in self.states:
            for sharded in state.parameters.values():
                sharded.take_unreduced()
                if sharded.has_deferred:
                    sharded.parameter.grad = sharded.earlier_grad
                    sharded.forget_deferred()


class DeferredHosts(DeferredReduces):
    """Microbatches sum gradients over the ranks of a host, and add these sums up. The block's end sums over hosts."""

    def __init__(self, states: Sequence[ShardedModel]):
        Deferral.__init__(self, states)

    def begin(self) -> None:
        self.defer(Deferred.HOSTS)

    def finish(self) -> None:
        self.defer(Deferred.NOTHING)
        for state in self.states:
            _reduce(state, _over_hosts)


def deferral_of(reduce: str, states: Sequence[ShardedModel]) -> Deferral:
    """Return the `Deferral` for `accumulate(reduce=...)`."""
    of_shards = DeferredHosts if states[0].over_hosts else DeferredReplicas
    kinds = {"each": Deferral, "shards": of_shards, "last": DeferredReduces}
    if reduce not in kinds:
        raise ValueError(f"zcompile.accumulate: reduce must be one of {', '.join(map(repr, kinds))}, not {reduce!r}.")
    return kinds[reduce](states)


Reduces = Callable[[ShardedModel, list[ShardedParameter], list[torch.Tensor | None]], Iterable[torch.Tensor]]


def _reduce(state: ShardedModel, reduce: Reduces) -> None:
    """Reduce the gradients that added up in the block, by `reduce`, in the order of the parameters."""
    unreduced = {each: each.take_unreduced() for each in state.parameters.values()}
    own = [each.index for each, grad in unreduced.items() if grad is not None]
    used = {index for of_rank in all_gather_over_mesh(state.mesh, own) for index in of_rank}
    for bucket in _buckets([each for each in unreduced if each.index in used]):
        factors = [sharded.take_deferred() for sharded in bucket]
        with torch.no_grad():
            grads = reduce(state, bucket, [unreduced.pop(sharded) for sharded in bucket])
        for sharded, factor, grad in zip(bucket, factors, grads, strict=True):
            leaf = sharded.leaf
            leaf.grad = grad if factor is None else grad.mul_(factor)
            sharded.post_accumulate_grad(leaf, is_late=True)


def _over_all(
    state: ShardedModel, bucket: list[ShardedParameter], sums: list[torch.Tensor | None]
) -> Iterator[torch.Tensor]:
    """Yield this rank's shard of each reduced gradient. `sums`: this rank's unsharded gradients; None for zeros."""
    for sharded, whole in zip(bucket, sums, strict=True):
        with torch.no_grad():
            own = sharded.leaf.new_zeros(sharded.shape) if whole is None else whole
            yield torch.ops.zcompile.reduce(own, sharded.leaf, state.domain)


def _over_hosts(
    state: ShardedModel, bucket: list[ShardedParameter], sums: list[torch.Tensor | None]
) -> list[torch.Tensor]:
    """Return this rank's shard of each reduced gradient. `sums`: gradients summed over this host; None: zeros."""
    return state.runtime.reduce_over_hosts([sharded.index for sharded in bucket], sums)


def _sum_over_replicas(state: ShardedModel) -> None:
    group = state.mesh.get_group(0)
    parameters = list(state.parameters.values())
    if not parameters:
        return
    device = parameters[0].leaf.device
    has_grad = torch.tensor([each.parameter.grad is not None for each in parameters], device=device)
    used = torch.stack(_over_replicas(has_grad.byte(), group)).any(0).tolist()
    for bucket in _buckets([each for each, is_used in zip(parameters, used) if is_used]):
        locals_ = [_local_grad(each) for each in bucket]
        flat = torch.cat([local.flatten() for local in locals_])
        total, received_bytes = _summed(flat, group)
        state.runtime.count_replicas(received_bytes)
        for local, part in zip(locals_, total.split([local.numel() for local in locals_])):
            local.copy_(part.view(local.shape))


def _summed(flat: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, int]:
    """Return the sum of `flat` over replicas, and the bytes received. Three or more replicas sum a part each."""
    count = group.size()
    if count <= 2:
        return _sum(_over_replicas(flat, group)), (count - 1) * flat.nbytes
    pieces = flat.new_zeros(count, -(-flat.numel() // count))
    pieces.view(-1)[: flat.numel()] = flat
    rows = torch.empty_like(pieces)
    dist.all_to_all_single(rows, pieces, group=group)
    dist.all_gather(list(pieces), _sum(rows).to(flat.dtype), group=group)
    return pieces.view(-1)[: flat.numel()], 2 * (count - 1) * pieces[0].nbytes


def _sum(rows: Sequence[torch.Tensor] | torch.Tensor) -> torch.Tensor:
    """Return the sum of `rows`, added in their order, in float32 or wider. May overwrite the first row."""
    total = rows[0].float() if rows[0].dtype.itemsize < 4 else rows[0]
    for row in rows[1:]:
        total += row
    return total


def _over_replicas(tensor: torch.Tensor, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """All-gather `tensor` over replicas. Return one tensor for each, in replica order."""
    rows = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(rows, tensor, group=group)
    return rows


def _local_grad(sharded: ShardedParameter) -> torch.Tensor:
    """Return this rank's shard of `.grad`. If there is no `.grad`, set it to zeros first."""
    parameter: Any = sharded.parameter
    if parameter.grad is None:
        local = sharded.local()
        zeros = torch.zeros(local.shape, dtype=local.dtype, device=local.device)  # plain, also for a subclass
        parameter.grad = DTensor(zeros, parameter._spec, requires_grad=False)
    return cast(torch.Tensor, sharded.sharded_grad()._local_tensor)


def _buckets(parameters: Sequence[ShardedParameter]) -> Iterator[list[ShardedParameter]]:
    """Yield lists of parameters of one dtype, in order, with up to BUCKET_BYTES of shards; the same on all ranks."""
    bucket: list[ShardedParameter] = []
    nbytes = 0
    for sharded in parameters:
        dtype, own = sharded.leaf.dtype, math.prod(sharded.shape) // sharded.state.groups.world * sharded.leaf.itemsize
        if bucket and (nbytes + own > BUCKET_BYTES or bucket[0].leaf.dtype != dtype):
            yield bucket
            bucket, nbytes = [], 0
        bucket.append(sharded)
        nbytes += own
    if bucket:
        yield bucket
