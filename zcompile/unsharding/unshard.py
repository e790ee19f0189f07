"""`zcompile.unshard`: whole parameters for a while, to read, save, generate with or edit."""

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

HASHED_ELEMENTS = 1 << 22  # at a time: what a hash needs beside the parameter is 64 MiB


@contextlib.contextmanager
def unshard(
    module_or_params: nn.Module | torch.Tensor | Iterable[torch.Tensor], writeback: bool = False
) -> Iterator[list[nn.Parameter]]:
    """Inside, modules have whole parameters in place of the sharded ones; all ranks enter and leave together.

    There, `module.weight`, `parameters()`, `state_dict()` and `load_state_dict()` are about plain tensors of the
    unsharded shape, on every rank, as inside of DeepSpeed's `GatheredParameters` and FSDP1's `summon_full_params`.
    Forwards work and gather nothing, `generate()` of transformers too. A model that is compiled runs in eager. The
    DTensors, which optimizers hold, stay as they are. Each rank needs the memory of all the whole parameters at once:
    to go through a large model, unshard one module after the other.

    Args:
        module_or_params: a sharded model, a module of one, or parameters that `model.parameters()` yields.
        writeback: whether each rank stores its slice of the whole parameters afterwards. All ranks must then have the
            same values, which a hash compares. Not for tensor subclasses with FSDP2's all-gather hooks: their hooks
            make the whole ones, from other values. Without it, changes are discarded, and are an error; those through
            `.data` are not seen.

    Yields:
        The whole parameters, in the order of `module.parameters()`, or in that of the parameters given.

    Raises:
        ValueError: a parameter is not one of a sharded model.
        RuntimeError: at the beginning: inside of a forward, of a backward, or of `zcompile.accumulate` with
            `writeback`; a parameter is whole already. At the end, on all ranks, after the shards are back in place: the
            block raised on a rank; without `writeback`, a whole parameter was written to; with it, ranks differ on one,
            and then none is stored. In a backward: it is one of a forward with whole parameters.
    """
    with whole_parameters(_selected(module_or_params), writeback, compare=True) as whole:
        yield whole


@contextlib.contextmanager
def whole_parameters(selected: list[ShardedParameter], writeback: bool, compare: bool) -> Iterator[list[nn.Parameter]]:
    """As `unshard`; `compare`: whether all ranks must have the same values to store."""
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
    except BaseException:  # an interrupt, which ends the program: ranks do not meet again
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
    """Those of `module` and of the modules below it; one that several modules read comes several times."""
    return [sharded for each in module.modules() for sharded in sharded_parameters_of(each)]


def on_whole_parameters(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method` of a module, which changes parameters of it and of modules below it, for modules of sharded models.

    It runs with whole parameters, of which each rank stores its slice. All ranks call it together.
    """

    @functools.wraps(method)
    def on_whole(self: Any, *args: Any, **kwargs: Any) -> Any:
        sharded = {id(each): each for each in sharded_parameters_in(self) if not each.is_whole}
        with whole_parameters(list(sharded.values()), writeback=True, compare=False):
            return method(self, *args, **kwargs)

    return on_whole


def _selected(module_or_params: Any) -> list[ShardedParameter]:
    """The sharded parameters that are meant, each once."""
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
                f"zcompile.unshard: {where} is asked for inside of a forward or backward. Do it outside."
            )
        if sharded.layout.inner is not None:
            raise RuntimeError(
                f"zcompile.unshard: {where} is spread over {sharded.layout.inner.mesh.mesh_dim_names}, too, by tensor "
                "or expert parallelism. Take parameter.full_tensor() instead."
            )
        if sharded.is_whole:
            raise RuntimeError(f"zcompile.unshard: {where} is whole already: an outer block has unsharded it.")
        if writeback and (hooks := sharded.of_subclass) is not None:
            raise RuntimeError(
                f"zcompile.unshard: {where} is a {name_of(type(hooks.local))}, whose unsharded form has "
                "other values than its shards, so it cannot be written back. Change the DTensor in "
                "model.parameters(), under torch.no_grad(), or the parameter before zcompile.shard."
            )
        if writeback and sharded.state.microbatches.accumulates:
            raise RuntimeError(
                f"zcompile.unshard: {where} would change inside of zcompile.accumulate. Write back behind that block."
            )


@torch.no_grad()
def _gather(sharded: ShardedParameter) -> nn.Parameter:
    """The whole parameter, in memory that nobody else has."""
    leaf = sharded.leaf
    if (hooks := sharded.of_subclass) is not None:
        unsharded = hooks.whole(sharded)
    elif sharded.state.over_hosts:  # whose ranks gather copies in `param_dtype`
        unsharded = cast(DTensor, sharded.parameter.detach()).full_tensor().clone()
    elif sharded.state.runtime.world == 1:
        unsharded = leaf.clone()
    else:
        layout = sharded.layout
        gathered = torch.ops.zcompile.gather.default(leaf, list(layout.shape), leaf.dtype, layout.domain)
        unsharded = layout.as_read(gathered).data
        if unsharded.untyped_storage().nbytes() != unsharded.nbytes:  # padded, which would be saved, too
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
    """Let the owners of `selected` have `parameters`."""
    for sharded, parameter in zip(selected, parameters, strict=True):
        for module, attribute in sharded.owners:
            module._parameters[attribute] = parameter
        sharded.is_whole = parameter is not sharded.parameter
        sharded.state.runtime.forbid_gathers(sharded.index, sharded.is_whole)


def _problem(selected: list[ShardedParameter], whole: list[nn.Parameter], versions: list[int] | None) -> str:
    """What this rank did wrong inside of the block; `versions`: those of parameters that nobody may change."""
    for i, (sharded, parameter) in enumerate(zip(selected, whole, strict=True)):
        if versions is not None and parameter._version != versions[i]:
            return f"parameter '{sharded.name}' was written to. To store it, pass writeback=True"
        same_dtype = sharded.of_subclass is not None or parameter.dtype == sharded.leaf.dtype
        if parameter.shape != sharded.parameter.shape or not same_dtype:
            return (
                f"parameter '{sharded.name}' is {tuple(parameter.shape)}, {parameter.dtype} now. It must stay "
                f"{tuple(sharded.parameter.shape)}, {sharded.leaf.dtype}"
            )
    return ""


def _tell(selected: list[ShardedParameter], problem: str) -> list[tuple[int, str]]:
    """Each rank and its problem, which is empty where there is none."""
    return all_gather_over_mesh(selected[0].state.mesh, (dist.get_rank(), problem)) if selected else []


def _agree(selected: list[ShardedParameter], problem: str) -> None:
    """Raise on all ranks if one of them has a problem."""
    for rank, theirs in _tell(selected, problem):
        if theirs:
            raise RuntimeError(f"zcompile.unshard: on rank {rank}, {theirs}.")


def _compare(selected: list[ShardedParameter], whole: list[nn.Parameter]) -> None:
    """Raise on all ranks if the values of a parameter are not the same on all of them."""
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
    """A number that depends on the bits of `tensor` and their order: sum of bits times odd factors, modulo 2^64."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    total = 0
    for i, bits in enumerate(tensor.detach().contiguous().view(-1).view(integers).split(HASHED_ELEMENTS)):
        position = torch.arange(bits.numel(), device=bits.device) + i * HASHED_ELEMENTS
        total += int((bits.to(torch.int64) * (position * 0x1E3779B97F4A7C15 | 1)).sum())
    return total % 2**64


@torch.no_grad()
def _store(sharded: ShardedParameter, whole: nn.Parameter) -> None:
    """Let this rank's shard be its slice of `whole`."""
    sharded.local().copy_(sharded.state.local_shard(whole.detach(), sharded.layout.dim))


def _reset_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
    """The module's own `reset_parameters`, on whole parameters, of which each rank stores its slice; all ranks
    together. Ranks that are seeded alike get the values of the unsharded module."""
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
    Contributor(  # of PEFT, whose merges change its base layer
        lambda base, kind: any(each.__name__ == "BaseTunerLayer" for each in base.__mro__),
        lambda base, kind: {name: on_whole_parameters(getattr(base, name)) for name in ("merge", "unmerge")},
    )
)
