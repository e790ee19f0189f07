"""`"zcompile": {"enabled": true}` in a DeepSpeed config. It and deepspeed_step.py alone know DeepSpeed (0.17 to 0.19).

[Note: what is taken over]
ZeRO-3 keeps a flat partition of every parameter in `param.ds_tensor` and leaves `param.data` empty. Its optimizer changes the
partitions in place and takes gradients of partitions. zcompile needs no more than that: it gathers from the partitions, over
the same memory, and hands reduced gradients to the optimizer. Module hooks, which gather and release, and gradient hooks,
which reduce, go away for as long as the engine is compiled. Everything else stays DeepSpeed's: loss scaling, clipping,
accumulation, the order of the step, checkpoints, `GatheredParameters`.

[Note: how the flag is seen]
`import zcompile` has `zcompile.flag` wrap `DeepSpeedEngine.__init__`, at once or when DeepSpeed is imported later. An engine
whose config has the flag gets methods of its own (`forward`, `backward`, `step`, `compile`, `destroy`); others are not touched.

[Note: what may fail]
Until a first backward has succeeded, whatever fails in taking over, compiling or a forward gives the engine back: hooks and
readers are restored, and DeepSpeed runs that forward; later, only what the compiler raises does. A failing first backward is run
again in eager if its loss came from the engine's forward; later ones raise, because gradients may have been added up by then.
In any step, what fails before the optimizer has begun gives the engine back, and DeepSpeed does that step.
Ranks are taken to fail alike: one that fails alone leaves the others waiting until the timeout.
"""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zcompile import _C
from zcompile.deepspeed.optimizer_step import LeanStep, ReducedSquares, add
from zcompile.sharding.attributes import MODEL
from zcompile.sharding.class_swap import install_readers, remove_readers
from zcompile.sharding.model_state import ShardedModel, ShardedParameter

log = logging.getLogger("zcompile")


@dataclass(eq=False, kw_only=True)
class Partition(ShardedParameter):
    """One ZeRO-3 parameter: the leaf lies over its partition, and gradients go to the engine's optimizer."""

    rank: int
    accept: Callable[["Partition", torch.Tensor], None]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.ds_shape)

    def local(self) -> torch.Tensor:
        return _without_padding(self.parameter, self.rank)

    def masters(self) -> list[torch.Tensor]:
        return [self.parameter.ds_tensor]

    def moved(self) -> bool:
        """Whether DeepSpeed has put the partition elsewhere."""
        return self.leaf.numel() > 0 and self.leaf.data_ptr() != self.parameter.ds_tensor.data_ptr()

    def deliver(self, leaf: torch.Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if grad is not None and self.parameter.requires_grad:
            self.accept(self, grad)


def _without_padding(parameter: nn.Parameter, rank: int) -> torch.Tensor:
    """The partition of `rank`, [elements that the parameter has there], over DeepSpeed's memory.

    Partitions of a whole group of parameters share one storage, and the runtime tells parameters by theirs: so it has its own.
    """
    partition, numel = parameter.ds_tensor, parameter.ds_numel
    length = min((rank + 1) * partition.ds_numel, numel) - min(rank * partition.ds_numel, numel)
    return _C.own_storage(partition.detach().narrow(0, 0, length))


class Takeover:
    """A ZeRO-3 engine that trains through zcompile, from its `compile()` until `give_back()`."""

    def __init__(self, engine: nn.Module, options: Mapping[str, Any]):
        self.engine = engine
        self.original = type(engine)  # has DeepSpeed's own methods
        self.options = options
        self.state: ShardedModel | None = None
        self.given_back = ""  # the reason
        self.partitions: dict[int, Partition] = {}  # by the id that DeepSpeed gives a parameter
        self.persistent: list[nn.Parameter] = []
        self.attempt: Attempt | None = None  # the last forward, until a backward has succeeded
        self.proven = False
        self.delivered = False  # a gradient, ever
        self.hooks_removed = False
        self.call_hooks: list[RemovableHandle] = []
        self.trained: set[int] = set()  # ids of the parameters that the optimizer has
        self.lean_step: LeanStep | None = None

    # --- the engine's methods ---------------------------------------------------------------------------------------

    def compile(self, backend=None, compile_kwargs: Mapping[str, Any] | None = None, *args, **kwargs) -> None:
        """Stands in for `DeepSpeedEngine.compile`: the backend is zcompile whatever is named."""
        if self.state is not None or self.given_back:
            return
        try:
            self.take()
            self.compile_modules(dict(compile_kwargs or {}))
        except Exception as error:
            self.fail("taking the engine over", error)

    def forward(self, *inputs, **kwargs):
        """Stands in for `DeepSpeedEngine.forward`."""
        if self.state is None and not self.given_back:
            self.compile()
        if self.given_back:
            return self.original.forward(self.engine, *inputs, **kwargs)
        if not self.proven:
            self.attempt = Attempt(inputs, kwargs)
        try:
            return self.compiled_forward(inputs, kwargs)
        except Exception as error:
            if self.proven and not isinstance(error, TorchDynamoException):  # the user's own, or a lack of memory
                raise
            self.fail("a forward", error)
        if self.attempt:
            self.attempt.rewind()
        return self.original.forward(self.engine, *inputs, **kwargs)

    def compiled_forward(self, inputs, kwargs):
        """A forward of the engine that gathers from its partitions as they are now."""
        self.proven = self.proven or self.delivered
        for partition in self.state.parameters.values():
            if partition.moved():
                self.state.refresh(partition)
            if partition.leaf.requires_grad != partition.parameter.requires_grad:
                partition.leaf.requires_grad_(partition.parameter.requires_grad)
        self.keep_over_micro_steps()
        self.state.runtime.renew()  # by now whoever edits partitions has; DeepSpeed does it in ways that no counter sees
        with self.around_forward(inputs, kwargs) as (inputs, kwargs):
            outputs = self.original.forward(self.engine, *inputs, **kwargs)
        if self.attempt:
            self.attempt.saw(outputs)
        return outputs

    def keep_over_micro_steps(self) -> None:
        """Let what this step's micro-steps gather stay full until its last one has stepped."""
        engine, microbatch_cache_bytes = self.engine, self.options.get("microbatch_cache_bytes")
        if not microbatch_cache_bytes or engine.gradient_accumulation_steps() == 1:
            return
        if (
            engine.micro_steps % engine.gradient_accumulation_steps() == 0
            and self.state.accumulates
            and not self.by_hand
        ):
            self.state.end_accumulating()
        if torch.is_grad_enabled() and engine.module.training and not self.state.accumulates:
            self.state.begin_accumulating(microbatch_cache_bytes)

    def step(self, *args, **kwargs):
        """Stands in for `DeepSpeedEngine.step`; after the optimizer's, what micro-steps kept is old."""
        before = self.engine.global_steps
        try:
            return self.original.step(self.engine, *args, **kwargs)
        finally:
            if self.state is not None and self.engine.global_steps != before:
                self.state.end_accumulating()

    @property
    def by_hand(self) -> bool:
        """Whether the program says by itself which micro-step is the last, as accelerate does, and may not call `step` in others."""
        return getattr(self.engine, "_is_gradient_accumulation_boundary", None) is not None

    def backward(self, loss, *args, **kwargs):
        """Stands in for `DeepSpeedEngine.backward`."""
        if self.state is None or self.proven:
            return self.original.backward(self.engine, loss, *args, **kwargs)
        attempt, self.attempt = self.attempt, None
        try:
            result = self.original.backward(self.engine, loss, *args, **kwargs)
            self.proven = True
            return result
        except Exception as error:
            at = attempt.place_of(loss) if attempt else None
            self.fail("the first backward", error)
            overwrites = self.engine.optimizer.micro_step_id == 0 or not self.delivered
            if at is None or not overwrites:  # only its caller can compute this loss again, or gradients were added up
                raise
        attempt.rewind()
        self.leave_backward()
        outputs = self.original.forward(self.engine, *attempt.inputs, **attempt.kwargs)
        return self.original.backward(self.engine, tree_leaves(outputs)[at], *args, **kwargs)

    def leave_backward(self) -> None:
        """What DeepSpeed does at the end of a backward that succeeds."""
        getattr(self.engine.optimizer, "exit_backward", lambda: None)()  # since 0.18
        for timers in (self.engine.engine_timers.backward_inner_timers, self.engine.engine_timers.backward_timers):
            with contextlib.suppress(AssertionError):  # not started
                self.engine._stop_timers(timers)

    def destroy(self) -> None:
        """Stands in for `DeepSpeedEngine.destroy`."""
        self.give_back("the engine is destroyed", hooks=False)
        self.original.destroy(self.engine)

    # --- taking over and giving back --------------------------------------------------------------------------------

    def take(self) -> None:
        """Gather from the engine's partitions; all ranks together."""
        engine, optimizer = self.engine, self.engine.optimizer
        reason = _unsupported(engine)
        if reason:
            raise RuntimeError(reason)
        self.trained = {parameter.ds_id for parameters in optimizer.fp16_groups for parameter in parameters}
        self.release_parameters()
        state = ShardedModel(DeviceMesh.from_group(optimizer.dp_process_group, engine.device.type))
        self.partitions = {}
        for path, module in engine.module.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self.add(state, f"{path}.{attribute}" if path else attribute, module, attribute, parameter)
        state.use_transport("auto")
        state.measure_memory()
        self.state = state
        if LeanStep.is_possible(optimizer):
            self.lean_step = LeanStep(optimizer, self.fail, self.reduced_squares(state))
            self.lean_step.install()
        self.remove_hooks()
        self.let_timer_synchronize(False)
        install_readers(state, None, alone=False)
        state.at_rest = True
        log.info(
            "zcompile: trains this DeepSpeed engine, %d parameters; transport %s: %s",
            len(self.partitions),
            *state.transport,
        )

    def reduced_squares(self, state: ShardedModel) -> ReducedSquares | None:
        """None where gradients of several micro-steps are added up, whose squares say nothing."""
        if self.engine.gradient_accumulation_steps() > 1:
            return None
        return ReducedSquares(state.runtime, {ds_id: partition.index for ds_id, partition in self.partitions.items()})

    def compile_modules(self, wanted: dict[str, Any]) -> None:
        """Compile the regions that were compiled with another backend before, or else the whole module."""
        from zcompile.backend import compile_graph  # imports Inductor

        wanted.pop("backend", None)
        wanted.pop("options", None)
        if wanted.get("mode") in (None, "default"):
            wanted.pop("mode", None)
        module = self.engine.module
        regions = [region for region in module.modules() if region._compiled_call_impl is not None]
        backend = functools.partial(compile_graph, options=dict(self.options))  # one: Dynamo compiles anew for another
        for region in regions or [module]:
            region.compile(backend=backend, **wanted)
        if (
            regions and module not in regions
        ):  # what is outside of them reads in eager, also when the module is called directly
            self.call_hooks = [
                module.register_forward_pre_hook(lambda *_: self.set_at_rest(False)),
                module.register_forward_hook(lambda *_: self.set_at_rest(True), always_call=True),
            ]
        self.engine._is_compiled = True
        self.engine._compile_kwargs = wanted

    def add(self, state: ShardedModel, name: str, module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
        """Make `module.attribute`, a ZeRO-3 parameter, one of `state`.

        Raises:
            RuntimeError: it is partitioned over other ranks than the model.
        """
        known = self.partitions.get(parameter.ds_id)
        if known is not None:  # tied
            known.owners.append((module, attribute))
            return
        ranks_of = torch.distributed.get_process_group_ranks
        if ranks_of(parameter.ds_process_group) != ranks_of(self.engine.optimizer.dp_process_group):
            raise RuntimeError(f"parameter '{name}' is partitioned over other ranks than the model, as experts are")
        rank = state.groups["rank"]
        leaf = nn.Parameter(_without_padding(parameter, rank), requires_grad=parameter.requires_grad)
        setattr(leaf, MODEL, weakref.ref(state))
        index = state.runtime.add(
            name=name,
            shard=leaf,
            shape=list(parameter.ds_shape),
            chunk=parameter.ds_tensor.ds_numel,
            replicated=False,
            reduce_dtype=None,
        )
        partition = Partition(name, index, parameter, leaf, [(module, attribute)], rank=rank, accept=self.accept)
        self.partitions[parameter.ds_id] = state.parameters[name] = partition

    def give_back(self, reason: str, hooks: bool = True) -> None:
        """Let DeepSpeed gather and reduce again; `hooks`: its hooks are wanted back."""
        if self.given_back:
            return
        self.given_back = reason
        self.engine._is_compiled = False
        for module in self.engine.module.modules():
            module._compiled_call_impl = None
        for hook in self.call_hooks:
            hook.remove()
        if self.state is not None:
            remove_readers(self.state)
            self.state = None
        try:
            self.let_timer_synchronize(True)
            if self.lean_step is not None:
                self.lean_step.remove(buffers=hooks)
        finally:
            if hooks:
                self.restore_hooks()

    def let_timer_synchronize(self, let: bool) -> None:
        """Whether DeepSpeed's throughput timer may wait for the device, twice a step; where the config says, it does as it says.

        The step waits for the gradients' norm in any case, so that the speeds it reports are right without.
        """
        timer, config = self.engine.tput_timer, self.engine._config
        if "synchronized" not in config._param_dict.get("timers", {}).get("throughput", {}):
            timer.config = timer.config.model_copy(update={"synchronized": let})

    def set_at_rest(self, at_rest: bool) -> None:
        if self.state is not None:
            self.state.at_rest = at_rest

    def fail(self, doing: str, error: Exception) -> None:
        log.warning("zcompile: %s failed, and training goes on in eager ZeRO-3: %s", doing, error, exc_info=error)
        self.give_back(f"{doing} failed: {error}")

    # --- DeepSpeed's hooks ------------------------------------------------------------------------------------------

    def release_parameters(self) -> None:
        """Leave nothing gathered: persistent parameters travel in groups with their neighbours instead."""
        optimizer = self.engine.optimizer
        self.persistent = list(optimizer.persistent_parameters)
        optimizer.persistent_parameters = []
        for parameter in self.persistent:
            parameter.ds_persist = False
        optimizer._partition_all_parameters()

    def remove_hooks(self) -> None:
        engine, optimizer = self.engine, self.engine.optimizer
        self.hooks_removed = True
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        optimizer.parameter_offload._remove_module_hooks()
        optimizer.parameter_offload.forward_hooks.clear()
        optimizer.parameter_offload.backward_hooks.clear()
        for hooks in (optimizer._grad_acc_hooks, optimizer._leaf_module_hooks):
            for hook in hooks:
                hook.remove()
            hooks.clear()

    def restore_hooks(self) -> None:
        engine, optimizer = self.engine, self.engine.optimizer
        if self.persistent:
            for parameter in self.persistent:
                parameter.ds_persist = True
            optimizer.persistent_parameters = self.persistent
        if not self.hooks_removed:
            return
        optimizer.parameter_offload.setup_zero_stage3_hooks()
        optimizer.create_reduce_and_remove_grad_hooks()
        engine.module_forward_pre_hook = engine._create_module_forward_pre_hook()
        engine.module_forward_post_hook = engine._create_module_forward_post_hook()

    # --- a step -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_forward(self, inputs, kwargs):
        """What DeepSpeed's forward hooks do besides gathering, outside of the compiled graph."""
        engine = self.engine
        inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
        for module in engine.module.modules():
            module._parameters._in_forward = False  # else ZeRO's own dictionaries would gather what Dynamo looks at
        self.set_at_rest(False)
        try:
            with _plain_linear():
                yield inputs, kwargs
        finally:
            self.set_at_rest(True)
            engine._forward_epilogue()

    @torch.no_grad()
    def accept(self, partition: Partition, grad: torch.Tensor) -> None:
        """Give a reduced gradient of this rank's partition to the optimizer, which keeps or adds it."""
        parameter = partition.parameter
        if parameter.ds_id not in self.trained:
            return
        optimizer = self.engine.optimizer
        if getattr(optimizer, "_coalesce_grad_reduction", False):
            raise RuntimeError(
                "zcompile: engine.coalesce_grad_reduction() is not supported; use gradient accumulation steps."
            )
        padding = parameter.partition_numel() - grad.numel()
        if padding > 0:
            grad = nn.functional.pad(grad, (0, padding))
        self.delivered = True
        if self.lean_step is not None:
            self.lean_step.accept(parameter, grad, add if padding > 0 else partition.added)
            if padding <= 0:
                partition.let_accumulate(self.lean_step.kept[parameter.ds_id])
        elif not grad.is_cuda:
            optimizer.partition_grads([parameter], [grad])
        else:
            stream = optimizer.reduce_and_partition_stream  # on which DeepSpeed looks at its buffer afterwards
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                optimizer.partition_grads([parameter], [grad])
            grad.record_stream(stream)


class Attempt:
    """What it takes to run a forward again."""

    def __init__(self, inputs: tuple, kwargs: dict[str, Any]):
        self.inputs, self.kwargs = inputs, kwargs
        self.outputs: list[Callable[[], Any]] = []  # weak: a graph must not live longer for it
        self.random = torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def rewind(self) -> None:
        """Let random numbers be drawn as they were."""
        cpu, cuda = self.random
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    def saw(self, outputs: Any) -> None:
        self.outputs = [
            weakref.ref(one) if isinstance(one, torch.Tensor) else lambda: None for one in tree_leaves(outputs)
        ]

    def place_of(self, loss: torch.Tensor) -> int | None:
        """Which of the outputs `loss` is."""
        return next((at for at, output in enumerate(self.outputs) if output() is loss), None)


@contextlib.contextmanager
def _plain_linear():
    """`zero.Init` exchanges `torch.nn.functional.linear` for one that expects ZeRO's hooks."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as patch

    functional, patched = nn.functional, nn.functional.linear
    functional.linear = getattr(patch, "linear_bk", patched)
    try:
        yield
    finally:
        functional.linear = patched


def _unsupported(engine: nn.Module) -> str:
    """Why an engine that was made cannot be taken over; empty if it can."""
    from deepspeed.utils import z3_leaf_module

    optimizer = engine.optimizer
    if type(engine).__name__ != "DeepSpeedEngine":
        return f"a {type(engine).__name__} has a forward of its own"
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        return f"the optimizer is a {type(optimizer).__name__}, not that of stage 3"
    if getattr(optimizer, "use_muon", False):
        return "Muon updates gradients where zcompile does not reduce them"
    if any(z3_leaf_module(module) for module in engine.module.modules()):
        return "z3 leaf modules reduce gradients of experts that a rank did not use, and zcompile does not yet"
    return ""


def attach(engine: nn.Module, options: Mapping[str, Any]) -> None:
    """Let `engine`, a DeepSpeedEngine with ZeRO-3, train through zcompile from its first forward or `compile()` on."""
    takeover = Takeover(engine, options)
    object.__setattr__(engine, "zcompile", takeover)
    for name in ("compile", "forward", "backward", "step", "destroy"):
        object.__setattr__(engine, name, getattr(takeover, name))
