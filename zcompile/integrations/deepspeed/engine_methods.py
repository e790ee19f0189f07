"""What stands in for a DeepSpeed engine's compile, forward, backward, step and destroy.

`EngineMethods` says when an engine is taken over, run and given back. Its subclass `Takeover` says how. See [Note: what
may fail] in fallback.py for what happens when a method fails.
"""

import abc
import contextlib
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_leaves

from zcompile.integrations.deepspeed.fallback import Attempt, unsupported
from zcompile.integrations.deepspeed.hooks import Hooks
from zcompile.integrations.deepspeed.partitions import Partition
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.training.accumulate import begin_accumulating, end_accumulating
from zcompile.training.optimizer_steps import check_orders

log = logging.getLogger("zcompile")


class EngineMethods(abc.ABC):
    """Stands in for five methods of one DeepSpeedEngine.

    An engine is first untouched (`state` is None and `given_back` is empty), then taken over (`state` is set), then
    given back (`given_back` is the reason). It is never taken over again.
    """

    REPLACED = ("compile", "forward", "backward", "step", "destroy")

    def __init__(self, engine: Any, options: Mapping[str, Any]):
        """
        Args:
            engine: a DeepSpeedEngine.
            options: the backend's options, see `zcompile.options.Settings`.
        """
        self.engine = engine
        self.original = type(engine)  # has DeepSpeed's own methods
        self.options = options
        self.hooks = Hooks(engine)
        self.state: ShardedModel | None = None
        self.given_back = ""  # the reason
        self.partitions: dict[int, Partition] = {}  # by `ds_id`
        self.attempt: Attempt | None = None  # the last forward, until a backward has succeeded
        self.backward_succeeded = False
        self.delivered = False  # whether the optimizer was ever given a gradient

    @abc.abstractmethod
    def take_over(self) -> None:
        """Gather from the engine's partitions; all ranks together."""

    @abc.abstractmethod
    def compile_modules(self, compile_kwargs: dict[str, Any]) -> None:
        """Compile the engine's module, or regions of it."""

    @abc.abstractmethod
    def give_back(self, reason: str, restore: bool = True) -> None:
        """Let DeepSpeed gather and reduce again; `restore`: with its hooks and buffers."""

    def compile(
        self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Stands in for `DeepSpeedEngine.compile`: the backend is zcompile whatever is named."""
        if self.state is not None or self.given_back:
            return
        try:
            self.take_over()
            self.compile_modules(dict(compile_kwargs or {}))
        except Exception as error:
            self.fail("taking the engine over", error)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Stands in for `DeepSpeedEngine.forward`."""
        if self.state is None and not self.given_back:
            self.compile()
        self.give_back_if_hooked()
        if self.given_back:
            return self.original.forward(self.engine, *inputs, **kwargs)
        if not self.backward_succeeded:
            self.attempt = Attempt(inputs, kwargs)
        try:
            return self.compiled_forward(inputs, kwargs)
        except Exception as error:
            if self.backward_succeeded and not isinstance(error, TorchDynamoException):
                raise  # the user's own error, or a lack of memory
            self.fail("a forward", error)
        if self.attempt:
            self.attempt.rewind()
        return self.original.forward(self.engine, *inputs, **kwargs)

    def give_back_if_hooked(self) -> None:
        """Give the engine back if the program has put hooks on a parameter since it was taken over."""
        for partition in self.partitions.values() if self.state is not None else ():
            parameter = partition.parameter
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                reason = unsupported(self.engine)
                log.warning("zcompile: training goes on in eager ZeRO-3: %s", reason)
                self.give_back(reason)
                return

    def compiled_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of the engine that gathers from its partitions as they are now."""
        assert self.state is not None
        # A delivered gradient means that a backward has succeeded, also where the program called `loss.backward()`.
        self.backward_succeeded = self.backward_succeeded or self.delivered
        for partition in self.partitions.values():
            if partition.moved():
                partition.state.follow_storage(partition)
        self.cache_across_microbatches(self.state)
        # DeepSpeed edits partitions in ways that no version counter sees. By now, whoever edits partitions has done so.
        for model in models_of(self.state):
            model.runtime.refresh()
        with self.hooks.around_forward(inputs, kwargs) as (inputs, kwargs):
            outputs = self.original.forward(self.engine, *inputs, **kwargs)
        if self.attempt:
            self.attempt.note_outputs(outputs)
        return outputs

    def cache_across_microbatches(self, state: ShardedModel) -> None:
        """Cache up to `microbatch_cache_bytes` of gathered parameters from this step's first microbatch to its last."""
        engine, microbatch_cache_bytes = self.engine, self.options.get("microbatch_cache_bytes")
        if not microbatch_cache_bytes or engine.gradient_accumulation_steps() == 1:
            return
        first = engine.micro_steps % engine.gradient_accumulation_steps() == 0
        if first and state.microbatches.accumulates and not self.program_marks_boundaries:
            end_accumulating(state)
        if torch.is_grad_enabled() and engine.module.training and not state.microbatches.accumulates:
            begin_accumulating(state, microbatch_cache_bytes)

    @property
    def program_marks_boundaries(self) -> bool:
        """Whether the program says which microbatch is the last, as accelerate does.

        Such a program may call `step` after the last microbatch alone.
        """
        return getattr(self.engine, "_is_gradient_accumulation_boundary", None) is not None

    @property
    def takes_a_step(self) -> bool:
        """Whether `DeepSpeedEngine.step` updates parameters now. Without managed accumulation (since 0.19), it does."""
        managed = getattr(self.engine, "managed_gradient_accumulation", lambda: True)()
        return bool(not managed or self.engine.is_gradient_accumulation_boundary())

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `DeepSpeedEngine.step`. The optimizer's step makes what microbatches cached out of date.

        Raises:
            RuntimeError: ranks started different gathers and reduces, so the step would use wrong gradients.
        """
        if self.state is not None and self.takes_a_step:
            check_orders(models_of(self.state))
        steps_before = self.engine.global_steps
        try:
            return self.original.step(self.engine, *args, **kwargs)
        finally:
            if self.state is not None and self.engine.global_steps != steps_before:
                end_accumulating(self.state)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Stands in for `DeepSpeedEngine.backward`."""
        if self.state is None or self.backward_succeeded:
            return self.original.backward(self.engine, loss, *args, **kwargs)
        attempt, self.attempt = self.attempt, None
        try:
            result = self.original.backward(self.engine, loss, *args, **kwargs)
            self.backward_succeeded = True
            return result
        except Exception as error:
            output_index = attempt.index_of(loss) if attempt else None
            self.fail("the first backward", error)
            overwrites = self.engine.optimizer.micro_step_id == 0 or not self.delivered
            if attempt is None or output_index is None or not overwrites:
                raise  # only its caller can compute this loss again, or gradients were added up
        attempt.rewind()
        self.end_failed_backward()
        outputs = self.original.forward(self.engine, *attempt.inputs, **attempt.kwargs)
        return self.original.backward(self.engine, tree_leaves(outputs)[output_index], *args, **kwargs)

    def end_failed_backward(self) -> None:
        """Do what DeepSpeed does at the end of a backward that succeeds."""
        getattr(self.engine.optimizer, "exit_backward", lambda: None)()  # since 0.18
        for timers in (self.engine.engine_timers.backward_inner_timers, self.engine.engine_timers.backward_timers):
            with contextlib.suppress(AssertionError):  # not started
                self.engine._stop_timers(timers)

    def destroy(self) -> None:
        """Stands in for `DeepSpeedEngine.destroy`."""
        self.give_back("the engine is destroyed", restore=False)
        self.original.destroy(self.engine)

    def fail(self, doing: str, error: Exception) -> None:
        """Warn that `doing` failed, and give the engine back."""
        log.warning("zcompile: %s failed, and training goes on in eager ZeRO-3: %s", doing, error)
        log.debug("zcompile: %s failed", doing, exc_info=error)
        self.give_back(f"{doing} failed: {error}")
