"""`zcompile.full_parameters`: unsharded tensors one by one, for an inference engine, without all of them in memory."""

import contextlib
import hashlib
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zcompile.options import TRAINABLE
from zcompile.ranks.host_barrier import EXPORT, Meeting
from zcompile.ranks.process_groups import is_fake, shard_group_of
from zcompile.state.attributes import SHARDED
from zcompile.state.forward_scope import is_in_forward
from zcompile.state.sharded_model import ShardedModel, state_of
from zcompile.state.sharded_parameter import ShardedParameter

_LEFT, _FIRST = 0, 1  # numbers that ranks exchange before a bucket: "this rank has left the loop"; _FIRST + its index


@dataclass
class _Bucket:
    """Consecutive entries of the state dict. The sharded parameters among them are all-gathered together."""

    key: Any  # model and dtype of the gather, or the name of a parameter gathered alone; None if none is sharded
    entries: list[tuple[str, torch.Tensor, ShardedParameter | None]] = field(default_factory=list)
    nbytes: int = 0


def full_parameters(
    model: nn.Module, dtype: torch.dtype | None = None, bucket_bytes: int = 256 << 20
) -> Iterator[tuple[str, torch.Tensor]]:
    """Iterate over names and unsharded tensors of a sharded model on every rank, as an inference engine loads them.

    Parameters are gathered in buckets of up to `bucket_bytes`, and each bucket is freed before the next one. So a rank
    needs memory for one bucket and for the tensor that the loop still holds. All ranks iterate together, to the end.

        for name, tensor in zcompile.full_parameters(model, dtype=torch.bfloat16):
            engine.load_weights([(name, tensor)])

    Args:
        model: a sharded model, or a module of one. Parameters inside of `zcompile.unshard` need no gather.
        dtype: the dtype of the yielded float16, bfloat16, float32 and float64 tensors; other tensors keep theirs. A
            parameter is cast before its all-gather or, if `dtype` is wider than its own, after it. Default: the main
            parameters' dtypes.
        bucket_bytes: the most bytes that one bucket gathers, in the dtype of the all-gather. A larger parameter is
            gathered alone. Must be the same on all ranks.

    Yields:
        The names and tensors of `model.state_dict()`, in its order: parameters of the unsharded shape, and persistent
        buffers as they are on each rank. A tied parameter comes under each of its names, and is gathered each time.
        Only read the tensors: those that need no gather may be the model's own memory.

    Raises:
        RuntimeError: when called: `model` is not sharded, or a forward or backward is running. In the loop: another
            rank has left its loop early, or iterates over other tensors. The rank that left early gets a warning.
        ValueError: `dtype` is not floating-point, or `bucket_bytes` is not positive.
    """
    state = state_of(model)
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"zcompile.full_parameters: dtype must be floating-point, not {dtype}.")
    if bucket_bytes <= 0:
        raise ValueError(f"zcompile.full_parameters: bucket_bytes must be positive, not {bucket_bytes}.")
    if is_in_forward() or torch._C._current_graph_task_id() != -1:
        raise RuntimeError(
            f"zcompile.full_parameters: called inside of a forward or backward (rank {dist.get_rank()}). Do it outside."
        )
    return _iterate(state, _buckets(model, dtype, bucket_bytes), dtype)


def _buckets(model: nn.Module, dtype: torch.dtype | None, bucket_bytes: int) -> list[_Bucket]:
    buckets = [_Bucket(None)]
    for name, value in model.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor):
            continue  # extra state of a module
        sharded: ShardedParameter | None = getattr(value, SHARDED, lambda: None)()
        bucket, key, nbytes = buckets[-1], None, 0
        if sharded is not None:
            wire = _dtype_on_wire(sharded, dtype)
            key = name if _is_whole_by_dtensor(sharded) else (id(sharded.state), wire)
            nbytes = sharded.parameter.numel() * wire.itemsize
        if key is not None and bucket.key is not None and (key != bucket.key or bucket.nbytes + nbytes > bucket_bytes):
            bucket = _Bucket(None)
            buckets.append(bucket)
        bucket.key = bucket.key if key is None else key
        bucket.nbytes += nbytes
        bucket.entries.append((name, value, sharded))
    return buckets


def _dtype_on_wire(sharded: ShardedParameter, dtype: torch.dtype | None) -> torch.dtype:
    own = sharded.leaf.dtype
    return own if dtype is None or own not in TRAINABLE or dtype.itemsize > own.itemsize else dtype


def _is_whole_by_dtensor(sharded: ShardedParameter) -> bool:
    """Whether `DTensor.full_tensor` gathers `sharded`: for tensor subclasses, and with tp, ep or shards over hosts."""
    return sharded.layout.inner is not None or sharded.hooked is not None or sharded.state.over_hosts


def _iterate(
    state: ShardedModel, buckets: list[_Bucket], dtype: torch.dtype | None
) -> Iterator[tuple[str, torch.Tensor]]:
    several = (state.runtime.world > 1 or state.over_hosts) and not is_fake(state.mesh)
    meeting = Meeting(state, EXPORT) if several else None
    _check_same(meeting, buckets, dtype)
    name = ""
    for i, bucket in enumerate(buckets):
        _check_others(meeting, _FIRST + i, bucket.entries[0][0] if bucket.entries else "", is_end=False)
        tensors = _gather(bucket, dtype)
        try:
            for name, value, sharded in bucket.entries:
                whole = value if sharded is None else tensors.pop(0)
                if dtype is not None and whole.dtype in TRAINABLE:
                    whole = whole.to(dtype)
                yield name, whole.detach()
                del whole
        except GeneratorExit:
            if i + 1 < len(buckets):
                _leave(meeting, name)
                raise
    _check_others(meeting, _FIRST + len(buckets), "", is_end=True)


@torch.no_grad()
def _gather(bucket: _Bucket, dtype: torch.dtype | None) -> list[torch.Tensor]:
    found = [sharded for _, _, sharded in bucket.entries if sharded is not None]
    if not found:
        return []
    wire = _dtype_on_wire(found[0], dtype)
    if _is_whole_by_dtensor(found[0]):
        parameter: Any = found[0].parameter
        return [(parameter if found[0].hooked is not None else parameter.to(wire)).full_tensor()]
    if found[0].state.runtime.world == 1:
        return [each.layout.as_read(each.leaf.detach().view(each.shape)).to(wire, copy=True) for each in found]
    started = [_start_gather(each, wire) for each in found]
    for _, work in started:
        if work is not None:
            work.wait()
    return [each.layout.as_read(tensor) for each, (tensor, _) in zip(found, started, strict=True)]


def _start_gather(sharded: ShardedParameter, wire: torch.dtype) -> tuple[torch.Tensor, dist.Work | None]:
    """Start to gather a parameter in dtype `wire`. Return it unsharded, and the `Work` to wait for if there is one.

    Uses the process group, because the p2p transport would keep a copy of each shard in dtype `wire` from then on.
    """
    shape, world, rank = sharded.shape, sharded.state.runtime.world, sharded.state.groups.rank
    local = sharded.leaf.detach().reshape(-1).to(wire)
    if not shape:
        return local.clone().view(shape), None
    row = math.prod(shape[1:])
    chunk = -(-shape[0] // world) * row
    padded = torch.empty(world * chunk, dtype=wire, device=local.device)
    piece = padded.narrow(0, rank * chunk, chunk)
    piece.narrow(0, 0, local.numel()).copy_(local)
    unsharded = padded.narrow(0, 0, shape[0] * row).view(shape)
    sharded.state.runtime.count_gather(unsharded)
    if chunk == 0:
        return unsharded, None
    group = shard_group_of(sharded.state.mesh)
    as_bytes = padded.view(torch.uint8), piece.view(torch.uint8)
    return unsharded, dist.all_gather_into_tensor(*as_bytes, group=group, async_op=True)


def _check_same(meeting: Meeting | None, buckets: list[_Bucket], dtype: torch.dtype | None) -> None:
    """Raise on all ranks if they iterate over different tensors, dtypes or buckets."""
    if meeting is None:
        return
    described = [[(name, tuple(value.shape), str(value.dtype)) for name, value, _ in each.entries] for each in buckets]
    digest = hashlib.sha256(f"{described} {dtype}".encode()).digest()
    said = meeting.meet(int.from_bytes(digest[:4], "big"))
    if len(set(said)) > 1:
        raise RuntimeError(
            "zcompile.full_parameters: ranks iterate over different tensors, dtypes or buckets (error on rank "
            f"{dist.get_rank()}). Pass the same model, dtype and bucket_bytes on all ranks."
        )


def _check_others(meeting: Meeting | None, number: int, name: str, is_end: bool) -> None:
    """Wait for the other ranks. Raise if one has left the loop early, unless this rank is at the loop's end."""
    said = meeting.meet(number) if meeting is not None else []
    left = [rank for rank, theirs in enumerate(said) if theirs == _LEFT]
    if left and not is_end:
        raise RuntimeError(
            f"zcompile.full_parameters: rank {left[0]} of the mesh has left the loop before '{name}', which rank "
            f"{dist.get_rank()} would gather from it. All ranks must iterate to the end, or leave at the same tensor."
        )


def _leave(meeting: Meeting | None, name: str) -> None:
    """Tell the other ranks that this rank has left the loop after tensor `name`. Wait for them; warn if they go on."""
    if meeting is None:
        return
    said = [_LEFT]
    with contextlib.suppress(RuntimeError):  # the other ranks stopped
        said = meeting.meet(_LEFT)
    if any(theirs != _LEFT for theirs in said):
        warnings.warn(
            f"zcompile.full_parameters: rank {dist.get_rank()} left the loop after '{name}', and other ranks go on, "
            "which is an error there. All ranks must iterate to the end, or leave at the same tensor.",
            stacklevel=3,
        )
