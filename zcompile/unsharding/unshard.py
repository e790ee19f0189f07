"""`zcompile.unshard`: whole (unsharded) parameters inside of a `with` block, to read, save, generate with or edit."""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.ranks.process_groups import all_gather_over_mesh
from zcompile.sharding.class_swap import Contributor, contribute, sharded_parameters_of
from zcompile.state.attributes import SHARDED
from zcompile.state.forward_scope import is_in_forward
from zcompile.state.gather_extension import name_of
from zcompile.state.sharded_parameter import ShardedParameter

HASHED_ELEMENTS = 1 << 22  # so many are hashed at a time, which takes 64 MiB of memory


@contextlib.contextmanager
def unshard(
    module_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor], writeback: bool = False
) -> Iterator[list[nn.Parameter]]:
    """Give modules whole parameters in place of the sharded ones, inside of a `with` block that all ranks enter.

    Inside, `module.weight`, `parameters()`, `state_dict()` and `load_state_dict()` use plain tensors of the unsharded
    shape on every rank, as with DeepSpeed's `GatheredParameters` and FSDP1's `summon_full_params`. Forwards, and
    `generate()` of transformers, work and gather nothing; a compiled model runs in eager. The DTensors, which
    optimizers hold, stay as they are. Each rank needs memory for all the whole parameters at once. To go through a
    large model, unshard one module after the other. All ranks also leave the block together.

    Args:
        module_or_params: a sharded model, a module of one, or parameters that `model.parameters()` yields.
        writeback: if True, each rank stores its slice of the whole parameters when the block ends. All ranks must then
            have the same values, which a hash compares. Tensor subclasses with FSDP2's all-gather hooks cannot be
            stored, because their unsharded values differ from their shards'. If False, changes are discarded and raise
            an error, except changes through `.data`, which are not noticed.

    Yields:
        The whole parameters, in the order of `module.parameters()` or of the parameters given.

    Raises:
        ValueError: a parameter does not belong to a sharded model.
        RuntimeError: when the block begins: a forward or backward is running, a parameter is already whole, or
            `writeback` is True inside of `zcompile.accumulate`. When it ends, on all ranks: the block raised on some
            rank; a parameter was written to without `writeback`; or, with `writeback`, ranks have different values, and
            none is stored. Later: a backward reaches a forward that ran inside of the block.
    """
    with whole_parameters(_selected(module_or_params), writeback, compare=True) as whole:
        yield whole


@contextlib.contextmanager
def whole_parameters(selected: list[ShardedParameter], writeback: bool, compare: bool) -> Iterator[list[nn.Parameter]]:
    """Context manager: unshard `selected`. If `compare`, raise unless all ranks would store the same values."""
    _check_entry(selected, writeback)
    for state in {each.state for each in selected}:
        state.close_tables()
    whole = [_gather(sharded) for sharded in selected]
    versions = [parameter._version for parameter in whole]
    _exchange(selected, whole)
    try:
        yield whole
    except Exception as error:
        _exchange(selected, [sharded.parameter for sharded in selected])
        _tell(selected, f"{type(error).__name__}: {error}")
        raise
    except BaseException:  # an interrupt, which ends the program: no collective calls, as others may not join them
        _exchange(selected, [sharded.parameter for sharded in selected])
        raise
    _exchange(selected, [sharded.parameter for sharded in selected])
    _agree(selected, _problem(selected, whole, None if writeback else versions))
    if not writeback:
        return
    if compare:
        _compare(selected, whole)
    for sharded, parameter in zip(selected, whole, strict=True):
        _store(sharded, parameter)


def sharded_parameters_in(module: nn.Module) -> list[ShardedParameter]:
    """Return the sharded parameters of `module` and its submodules. A tied one is listed once for each module."""
    return [sharded for each in module.modules() for sharded in sharded_parameters_of(each)]


def on_whole_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `method` of a module: it runs on whole parameters, then each rank stores its slice. A collective call."""

    @functools.wraps(method)
    def on_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = {id(each): each for each in sharded_parameters_in(self) if not each.is_whole}
        with whole_parameters(list(sharded.values()), writeback=True, compare=False):
            return method(self, *args, **kwargs)

    return on_whole


def _selected(module_or_params: Any) -> list[ShardedParameter]:
    found: list[Any]
    if isinstance(module_or_params, nn.Module):
        found = sharded_parameters_in(module_or_params)
    else:
        params = [module_or_params] if isinstance(module_or_params, torch.Tensor) else list(module_or_params)
        found = [getattr(param, SHARDED, lambda: None)() for param in params]
    selected = list({id(sharded): sharded for sharded in found}.values())
    for i, sharded in enumerate(found):
        if sharded is None or not isinstance(sharded.parameter, DTensor):
            raise ValueError(
                f"zcompile.unshard: parameter number {i} is not one that zcompile.shard made. Pass a sharded model, a "
                "module of it, or DTensors from model.parameters(). For a DeepSpeed engine, use "
                "deepspeed.zero.GatheredParameters."
            )
    return selected


def _check_entry(selected: list[ShardedParameter], writeback: bool) -> None:
    for sharded in selected:
        where = f"parameter '{sharded.name}' on rank {dist.get_rank()}"
        if is_in_forward() or torch._C._current_graph_task_id() != -1:
            raise RuntimeError(
                f"zcompile.unshard: {where} cannot be unsharded inside of a forward or backward. Do so before or after."
            )
        if sharded.layout.inner is not None:
            raise RuntimeError(
                f"zcompile.unshard: {where} is spread over {sharded.layout.inner.mesh.mesh_dim_names}, too, by tensor "
                "or expert parallelism. Take parameter.full_tensor() instead."
            )
        if sharded.is_whole:
            raise RuntimeError(f"zcompile.unshard: {where} is unsharded already by an outer call: leave it out here.")
        if writeback and (hooks := sharded.hooked) is not None:
            raise RuntimeError(
                f"zcompile.unshard: {where} is a {name_of(type(hooks.local))}, whose unsharded form has "
                "other values than its shards, so it cannot be written back. Change the DTensor in "
                "model.parameters(), under torch.no_grad(), or the parameter before zcompile.shard."
            )
        if writeback and sharded.state.microbatches.accumulates:
            raise RuntimeError(
                f"zcompile.unshard: {where} would change inside of zcompile.accumulate. Write to it outside."
            )


@torch.no_grad()
def _gather(sharded: ShardedParameter) -> nn.Parameter:
    """All-gather the parameter into new memory, which is not shared with the model."""
    leaf = sharded.leaf
    if (hooks := sharded.hooked) is not None:
        unsharded = hooks.whole(sharded)
    elif sharded.state.over_hosts:  # the runtime gathers copies in `param_dtype` there
        unsharded = cast(DTensor, sharded.parameter.detach()).full_tensor().clone()
    elif sharded.state.runtime.world == 1:
        unsharded = leaf.clone()
    else:
        layout = sharded.layout
        gathered = torch.ops.zcompile.gather.default(leaf, list(layout.shape), leaf.dtype, layout.domain)
        unsharded = layout.as_read(gathered).data
        if unsharded.untyped_storage().nbytes() != unsharded.nbytes:  # padded: torch.save would save the padding
            unsharded = unsharded.clone()
    whole = nn.Parameter(unsharded, requires_grad=False)

    def refuse(grad: torch.Tensor) -> NoReturn:
        raise RuntimeError(
            f"zcompile.unshard: a backward reaches parameter '{sharded.name}', which was whole in its forward (rank "
            f"{dist.get_rank()}); its gradient would be lost. Train outside of zcompile.unshard."
        )

    if sharded.parameter.requires_grad:
        whole.requires_grad_(True).register_hook(refuse)
    return whole


def _exchange(selected: list[ShardedParameter], parameters: list[nn.Parameter]) -> None:
    for sharded, parameter in zip(selected, parameters, strict=True):
        for module, attribute in sharded.owners:
            module._parameters[attribute] = parameter
        sharded.is_whole = parameter is not sharded.parameter
        sharded.state.runtime.forbid_gathers(sharded.index, sharded.is_whole)


def _problem(selected: list[ShardedParameter], whole: list[nn.Parameter], versions: list[int] | None) -> str:
    """Describe a forbidden change of `whole`, or return "". `versions`: old version counters; None allows writes."""
    for i, (sharded, parameter) in enumerate(zip(selected, whole, strict=True)):
        if versions is not None and parameter._version != versions[i]:
            return f"parameter '{sharded.name}' was written to. To store it, pass writeback=True"
        same_dtype = sharded.hooked is not None or parameter.dtype == sharded.leaf.dtype
        if parameter.shape != sharded.parameter.shape or not same_dtype:
            return (
                f"parameter '{sharded.name}' is {tuple(parameter.shape)}, {parameter.dtype} now. It must stay "
                f"{tuple(sharded.parameter.shape)}, {sharded.leaf.dtype}"
            )
    return ""


def _tell(selected: list[ShardedParameter], problem: str) -> list[tuple[int, str]]:
    """All-gather (rank, problem), where the problem is the text of an error, or ""."""
    return all_gather_over_mesh(selected[0].state.mesh, (dist.get_rank(), problem)) if selected else []


def _agree(selected: list[ShardedParameter], problem: str) -> None:
    """Raise on all ranks if one of them passes a `problem`, the text of an error, and not ""."""
    for rank, theirs in _tell(selected, problem):
        if theirs:
            raise RuntimeError(f"zcompile.unshard: on rank {rank}, {theirs}.")


def _compare(selected: list[ShardedParameter], whole: list[nn.Parameter]) -> None:
    """Raise on all ranks if their values of a whole parameter differ."""
    if not selected:
        return
    hashes = [hash_of(parameter) for parameter in whole]
    reports = all_gather_over_mesh(selected[0].state.mesh, (dist.get_rank(), hashes))
    base_rank, base = reports[0]
    for rank, theirs in reports[1:]:
        for sharded, ours, other in zip(selected, base, theirs, strict=True):
            if ours != other:
                raise RuntimeError(
                    f"zcompile.unshard: parameter '{sharded.name}' has other values on rank {rank} than on rank "
                    f"{base_rank}, and nothing was stored. Make the same changes on all ranks, or broadcast them from "
                    "one."
                )


@torch.no_grad()
def hash_of(tensor: torch.Tensor) -> int:
    """Return a hash of the elements and their order: the sum of each element's bits times an odd factor, mod 2^64."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    total = 0
    for i, bits in enumerate(tensor.detach().contiguous().view(-1).view(integers).split(HASHED_ELEMENTS)):
        position = torch.arange(bits.numel(), device=bits.device) + i * HASHED_ELEMENTS
        total += int((bits.to(torch.int64) * (position * 0x1E3779B97F4A7C15 | 1)).sum())
    return total % 2**64


@torch.no_grad()
def _store(sharded: ShardedParameter, whole: nn.Parameter) -> None:
    sharded.local().copy_(sharded.state.local_shard(whole.detach(), sharded.layout.dim))


def _reset_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `reset_parameters` on the module's own parameters, made whole. Collective; all ranks need the same seed."""
    reset = super(type(self), self).reset_parameters
    sharded = [each for each in sharded_parameters_of(self) if not each.is_whole]
    with whole_parameters(sharded, writeback=True, compare=False):
        return reset(*args, **kwargs)


contribute(
    Contributor(
        lambda base, kind: bool(kind.layouts) and hasattr(base, "reset_parameters"),
        lambda base, kind: {"reset_parameters": _reset_parameters},
    )
)
contribute(
    Contributor(  # PEFT: a merge changes the base layer
        lambda base, kind: any(each.__name__ == "BaseTunerLayer" for each in base.__mro__),
        lambda base, kind: {name: on_whole_parameters(getattr(base, name)) for name in ("merge", "unmerge")},
    )
)
