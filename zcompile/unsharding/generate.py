"""`model.generate()` of a sharded model: each rank generates until its own text ends.

[Note: generation]
Each forward all-gathers parameters, which needs every rank, but ranks have different prompts and finish after different
numbers of tokens. So sharded modules get another `generate`. In it, before each forward, ranks exchange which module
they call, or that they have finished. A rank that has finished joins the all-gathers of the other ranks, and returns
when all ranks have finished. To join, it computes nothing, and repeats the all-gathers of its own last forward of the
module that the others call: a module's all-gathers have the same order and grouping on all ranks.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from zcompile.ranks.host_barrier import GENERATE, Meeting
from zcompile.ranks.process_groups import is_fake
from zcompile.sharding.class_swap import Contributor, contribute
from zcompile.state.attributes import STATE
from zcompile.state.forward_scope import announces, announcing
from zcompile.state.sharded_model import ShardedModel
from zcompile.unsharding.unshard import sharded_parameters_in

gather_group_start = torch.ops.zcompile.gather_group_start.default
gather_wait = torch.ops.zcompile.gather_wait.default

# Before a forward, each rank tells the others one of these numbers. _FAILED: the rank raised. _DONE: it has finished.
# _DONE_WITHOUT_FORWARD: it has finished, and ran no forward. _FIRST_MODULE + i: it calls module i of the model that
# generates. _FOREIGN: it calls a module outside of this model.
_FAILED, _DONE, _DONE_WITHOUT_FORWARD, _FOREIGN, _FIRST_MODULE = range(5)

Recording = list[tuple[list[int], torch.dtype]]  # of each transfer: indices of its parameters, and the dtype


def agreeing_generate(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `generate`, so that a rank whose text has ended joins the gathers of others; see [Note: generation]."""

    @functools.wraps(generate)
    def agreeing(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "disable_compile" not in kwargs and _compiles_by_itself(self, args, kwargs):
            kwargs["disable_compile"] = True
        if torch.compiler.is_compiling() or announces() or not _gathers(self):
            return generate(self, *args, **kwargs)
        return Generation(self).run(lambda: generate(self, *args, **kwargs))

    return agreeing


def _compiles_by_itself(module: nn.Module, args: Any, kwargs: Any) -> bool:
    """Whether transformers may compile forwards of `module` by itself, with CUDA graphs, in which no gather can run."""
    if not any(each.__name__ == "GenerationMixin" for each in type(module).__mro__):
        return False
    configs = [*args, kwargs.get("generation_config"), getattr(module, "generation_config", None)]
    chosen = kwargs.get("compile_config") or any(getattr(each, "compile_config", None) for each in configs)
    return not chosen and kwargs.get("cache_implementation") != "paged"


def _gathers(module: nn.Module) -> bool:
    """Whether forwards of `module` gather (not inside of `zcompile.unshard`), so that ranks must agree on them."""
    state: ShardedModel = module.__dict__[STATE]
    # False for a unit, because a finished rank cannot repeat a unit's gathers. If a program calls a unit outside of the
    # model's forward, it must call the unit equally often on all ranks.
    if state.runtime.world == 1 or state.are_units or is_fake(state.mesh):
        return False
    return not all(each.is_whole for each in sharded_parameters_in(module))


class Generation:
    """One call of `generate` on this rank."""

    def __init__(self, module: nn.Module):
        self.state: ShardedModel = module.__dict__[STATE]
        self.meeting = Meeting(self.state, GENERATE)
        self.numbers = {id(each): _FIRST_MODULE + i for i, each in enumerate(module.modules())}
        # A finished rank can repeat only gathers of leaves over the first mesh. It cannot repeat gathers of units, over
        # other meshes, or of components (tensors that `fsdp_pre_all_gather` returns, or int8).
        hooks = any(each.extension is not None for each in self.state.parameters.values())
        self.needs_forwards = bool(self.state.others) or self.state.units is not None or hooks
        self.recordings: dict[int, Recording] = {}  # module number -> gathers of its last forward
        self.last = 0  # number of the module with which `announce` was last called
        self.is_over = False  # whether an exchange of numbers raised, so that all ranks raise

    def run(self, generate: Callable[[], Any]) -> Any:
        """Return the result of `generate()` when all ranks have finished. Raises if one failed, or if they disagree."""
        try:
            with announcing(self.announce):
                result = generate()
        except Exception:
            self.keep_recording()
            if not self.is_over:  # raise this rank's error, not one about the other ranks
                with contextlib.suppress(RuntimeError):
                    self.meet(_FAILED)
            raise
        self.keep_recording()
        self.wait_for_others()
        return result

    def announce(self, module: nn.Module) -> None:
        """Wait for the other ranks before a forward of `module`. Record its gathers, for `replay`."""
        self.keep_recording()
        self.last = self.numbers.get(id(module), _FOREIGN)
        self.meet(self.last)
        self.state.runtime.record_gathers()

    def keep_recording(self) -> None:
        """Store the gathers recorded since the last `announce`, for `replay` after this rank has finished."""
        if self.last:
            self.recordings[self.last] = self.state.runtime.stop_recording()
        self.last = 0

    def wait_for_others(self) -> None:
        """Take part in the gathers of other ranks until all have finished."""
        done = _DONE if self.recordings else _DONE_WITHOUT_FORWARD
        while running := [number for number in self.meet(done) if number >= _FOREIGN]:
            if running[0] not in self.recordings:
                raise RuntimeError(
                    f"zcompile: rank {dist.get_rank()} has finished generate(), but other ranks call a module that "
                    "this rank has not called in it. Generate inside of zcompile.unshard(model), where ranks need "
                    "not agree."
                )
            self.replay(self.recordings[running[0]])

    def meet(self, number: int) -> list[int]:
        """Wait until all ranks call this. Return the numbers of all ranks. Raises the errors of `check`.

        `number`: of the module that this rank runs next, or a state such as `_DONE`.
        """
        try:
            said = self.meeting.meet(number)
            if number != _FAILED:
                self.check(said)
        except BaseException:
            self.is_over = True
            raise
        return said

    def check(self, said: list[int]) -> None:
        """Raise on all ranks if one raised, if they call different modules, or if a finished rank cannot join them."""
        if _FAILED in said:
            raise RuntimeError(
                f"zcompile: rank {said.index(_FAILED)} of the mesh raised inside of generate(), which ends generate() "
                f"on rank {dist.get_rank()}, too. See the error on the rank that raised."
            )
        running = {number for number in said if number >= _FOREIGN}
        through = [rank for rank, number in enumerate(said) if number < _FOREIGN]
        if running and through and self.needs_forwards:
            raise RuntimeError(
                f"zcompile: rank {through[0]} of the mesh has finished generate(), but other ranks have not (error on "
                f"rank {dist.get_rank()}). This model has units (zcompile.shard), tensor subclasses, int8 gathers, or "
                "parameters over several meshes, which need a forward on every rank: pass synced_gpus=True to "
                "generate, or generate inside of zcompile.unshard(model)."
            )
        if len(running) > 1 or (running and through and (_FOREIGN in running or _DONE_WITHOUT_FORWARD in said)):
            raise RuntimeError(
                f"zcompile: ranks call different modules in generate() (error on rank {dist.get_rank()}). All ranks "
                "must call the same modules in the same order, until each rank has finished. Or generate inside of "
                "zcompile.unshard(model), where ranks need not agree."
            )

    def replay(self, recording: Recording) -> None:
        """Repeat the gathers of a forward, and drop the results."""
        sharded = list(self.state.parameters.values())
        for indices, dtype in recording:
            each = [sharded[i] for i in indices]
            sizes = [size for one in each for size in one.shape]
            leaves, dims = [one.leaf for one in each], [len(one.shape) for one in each]
            for tensor in gather_group_start(leaves, sizes, dims, dtype):
                gather_wait(tensor)


contribute(
    Contributor(
        lambda base, kind: callable(getattr(base, "generate", None)),
        lambda base, kind: {"generate": agreeing_generate(cast(Any, base).generate)},
    )
)
