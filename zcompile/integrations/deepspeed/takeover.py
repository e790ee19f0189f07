"""Taking over and giving back: how a DeepSpeed ZeRO-3 engine begins to train through zcompile, and how that ends.

After *taking over* an engine, zcompile gathers its parameters and reduces its gradients. After *giving it back*,
DeepSpeed does both again. An engine whose config has a zcompile block (flag.py) is taken over at its first forward or
`compile()`. It is given back when it is destroyed, or after a failure.

[Note: what is taken over]
ZeRO-3 keeps a flat partition of every parameter in `param.ds_tensor` and leaves `param.data` empty. zcompile gathers
from the partitions' memory, and passes reduced gradients to DeepSpeed's optimizer. Meanwhile, DeepSpeed's module hooks
(which gather and release) and gradient hooks (which reduce) are removed. Everything else stays DeepSpeed's: loss
scaling, clipping, accumulation, the order of the step, checkpoints, `GatheredParameters`.

[Note: what may fail]
A failure must not end a training run that eager ZeRO-3 can continue. So zcompile gives the engine back
- if taking over, compiling, or a forward before the first gradient fails;
- if the compiler raises in a later forward (other errors are raised: they are the user's own, or a lack of memory);
- at the next forward, if a program puts a hook on a parameter, which expects the unsharded gradient before the reduce;
- if a step fails before the optimizer has begun. DeepSpeed then does that step.
An error in a backward is raised, because only the caller can compute the loss again. If only one rank fails, the others
wait until the timeout.
"""

import contextlib
import functools
import logging
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import TorchDynamoException
from torch.distributed.device_mesh import DeviceMesh

from zcompile.artifact.model import FromFile
from zcompile.calibration.machine import machine_of
from zcompile.compiler.backend import compile_graph, parse_options
from zcompile.compiler.inductor import wants_cuda_graphs
from zcompile.integrations.deepspeed.config import NO_CUDA_GRAPHS, without_effect
from zcompile.integrations.deepspeed.gradients import ReducedSquares, add
from zcompile.integrations.deepspeed.hooks import Hooks, hooked_parameter
from zcompile.integrations.deepspeed.leaf_modules import leaf_modules, unsupported_leaf_module
from zcompile.integrations.deepspeed.optimizer_step import LeanStep
from zcompile.integrations.deepspeed.partitions import Partition, ZeroParameter, add_partition, partition_grads
from zcompile.ranks.shared_errors import raised_on_all_ranks
from zcompile.sharding.class_swap import install_readers, remove_readers
from zcompile.state.sharded_model import ShardedModel, install_leaves, models_of
from zcompile.training.accumulate import begin_accumulating, end_accumulating
from zcompile.training.optimizer_steps import check_orders
from zcompile.units.blocks import make_blocks, order_blocks
from zcompile.units.order import make_units, order_units

log = logging.getLogger("zcompile")

REFUSED = "rank {} cannot train its partitions through zcompile"


class Takeover:
    """Lets a ZeRO-3 engine train through zcompile, from its first forward or `compile()` until `give_back()`.

    Before the takeover, `state` is None and `given_back` is empty. `state` is set while the engine is taken over. After
    `give_back()`, `given_back` is the reason, and the engine is never taken over again.
    """

    REPLACED = ("compile", "forward", "step", "destroy")  # methods of the engine that this class replaces

    def __init__(self, engine: Any, options: Mapping[str, Any]):
        """`engine` is a DeepSpeedEngine with ZeRO-3. `options` is a result of `config.options_of`."""
        self.engine = engine
        self.original = type(engine)  # has DeepSpeed's own methods
        self.options = {name: value for name, value in options.items() if name != "artifact"}
        self.artifact: str | None = options.get("artifact")
        self.in_int8 = bool(engine._config._param_dict["zero_optimization"].get("zero_quantized_weights"))
        self.hooks = Hooks(engine)
        self.state: ShardedModel | None = None
        self.given_back = ""  # the reason
        self.partitions: dict[int, Partition] = {}  # by `ds_id`
        self.trained: set[int] = set()  # `ds_id`s of the parameters of the optimizer
        self.lean_step: LeanStep | None = None
        self.delivered = False  # whether the optimizer has ever got a gradient
        engine.zcompile = self
        for name in self.REPLACED:
            setattr(engine, name, getattr(self, name))

    # --- Replacements of the engine's methods ---

    def compile(
        self, backend: Any = None, compile_kwargs: Mapping[str, Any] | None = None, *args: Any, **kwargs: Any
    ) -> None:
        """Replaces `DeepSpeedEngine.compile`. Ignores `backend`: the backend is zcompile's."""
        if self.state is not None or self.given_back:
            return
        try:
            self.take_over()
            self.compile_modules(compile_kwargs or {})
        except Exception as error:
            self.fail("taking the engine over", error)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Replaces `DeepSpeedEngine.forward`; takes the engine over at the first call."""
        if self.state is None and not self.given_back:
            self.compile()
        parameters = [partition.parameter for partition in self.partitions.values() if self.state is not None]
        if any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters):  # the program's
            self.fail("keeping the engine", RuntimeError(unsupported(self.engine)))
        if self.given_back:
            return self.original.forward(self.engine, *inputs, **kwargs)
        try:
            return self.compiled_forward(inputs, kwargs)
        except Exception as error:
            if self.delivered and not isinstance(error, TorchDynamoException):
                raise  # the user's own error, or a lack of memory
            self.fail("a forward", error)
        return self.original.forward(self.engine, *inputs, **kwargs)

    def compiled_forward(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward of the engine with the current values of its partitions."""
        assert self.state is not None
        self.hooks.remove_of_modules()
        for partition in self.partitions.values():
            if partition.moved():
                partition.state.follow_storage(partition)
        self.cache_across_microbatches(self.state)
        # Between forwards, DeepSpeed edits partitions without incrementing version counters: copy shards anew.
        for model in models_of(self.state):
            model.runtime.refresh()
        with self.hooks.around_forward(inputs, kwargs) as (inputs, kwargs):
            return self.original.forward(self.engine, *inputs, **kwargs)

    def cache_across_microbatches(self, state: ShardedModel) -> None:
        """With several microbatches a step, keep up to `microbatch_cache_bytes` unsharded bytes until the last one."""
        engine, microbatch_cache_bytes = self.engine, self.options.get("microbatch_cache_bytes")
        if not microbatch_cache_bytes or engine.gradient_accumulation_steps() == 1:
            return
        first = engine.micro_steps % engine.gradient_accumulation_steps() == 0
        # A program that marks the last microbatch itself may call `step` only then. As `micro_steps` counts calls of
        # `step`, it does not show which microbatch is the first.
        marks_last = getattr(engine, "_is_gradient_accumulation_boundary", None) is not None
        if first and state.microbatches.accumulates and not marks_last:
            end_accumulating(state)
        if torch.is_grad_enabled() and engine.module.training and not state.microbatches.accumulates:
            begin_accumulating(state, microbatch_cache_bytes)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Replaces `DeepSpeedEngine.step`. If the optimizer steps, empties the microbatch cache.

        Raises:
            RuntimeError: ranks started different gathers and reduces, so the step would use wrong gradients.
        """
        # Without managed accumulation (since 0.19), each call updates parameters.
        managed = getattr(self.engine, "managed_gradient_accumulation", lambda: True)()
        if self.state is not None and (not managed or self.engine.is_gradient_accumulation_boundary()):
            check_orders(models_of(self.state))
        steps_before = self.engine.global_steps
        try:
            return self.original.step(self.engine, *args, **kwargs)
        finally:
            if self.state is not None and self.engine.global_steps != steps_before:
                end_accumulating(self.state)

    def destroy(self) -> None:
        """Replaces `DeepSpeedEngine.destroy`; gives the engine back first."""
        self.give_back("the engine is destroyed", restore=False)
        self.original.destroy(self.engine)

    def fail(self, doing: str, error: Exception) -> None:
        log.warning("zcompile: %s failed, and training goes on in eager ZeRO-3: %s", doing, error)
        log.debug("zcompile: %s failed", doing, exc_info=error)
        self.give_back(f"{doing} failed: {error}")

    # --- Taking over and giving back ---

    def take_over(self) -> None:
        """Gather and reduce for the engine from now on, in place of DeepSpeed. A collective call."""
        optimizer, reason = self.engine.optimizer, unsupported(self.engine)
        if getattr(optimizer, "dp_process_group", None) is None:  # another class; all ranks raise
            raise RuntimeError(reason)
        mesh = DeviceMesh.from_group(optimizer.dp_process_group, self.engine.device.type)
        with raised_on_all_ranks(mesh, REFUSED):
            if reason:
                raise RuntimeError(reason)
        self.trained = {parameter.ds_id for parameters in optimizer.fp16_groups for parameter in parameters}
        self.hooks.release_parameters()
        self.state = state = ShardedModel(mesh, machine_of(mesh))
        self.shard_engine(state)
        if LeanStep.is_possible(optimizer):
            # The squares of each microbatch's gradient do not give the squares of the sum over microbatches.
            accumulates = self.engine.gradient_accumulation_steps() > 1
            squares = None if accumulates else ReducedSquares(models_of(state), self.partitions)
            self.lean_step = LeanStep(optimizer, self.fail, squares)
            self.lean_step.install()
        self.hooks.remove()
        _let_timer_synchronize(self.engine, False)
        install_leaves(state)
        install_readers(state, self.engine.module, {}, single_rank=False, units=state.units)
        log.info(
            "zcompile: trains this DeepSpeed engine, %d parameters, %d of them in leaf modules; transport %s: %s",
            len(self.partitions),
            len(state.units.parameters) if state.units is not None else 0,
            *state.transport,
        )
        if torch.distributed.get_rank() == 0 and (ignored := without_effect(self.engine._config._param_dict)):
            log.warning("zcompile: in the DeepSpeed config, %s", ignored)

    def shard_engine(self, state: ShardedModel) -> None:
        """Add the engine's partitions to `state`, and make leaf modules units. A collective call."""
        model, mesh = self.engine.module, state.mesh
        leaves = leaf_modules(model) if mesh.size() > 1 else {}
        if leaves:
            state.units = ShardedModel(mesh, state.machine, has_units=True)
        in_leaf = {below for leaf in leaves.values() for below in leaf.modules()}
        with raised_on_all_ranks(mesh, REFUSED) as progress:
            for path, module in model.named_modules():
                of_module = state.units if state.units is not None and module in in_leaf else state
                for attribute, parameter in module._parameters.items():
                    if parameter is not None:
                        name = f"{path}.{attribute}" if path else attribute
                        progress.at = f"parameter '{name}'"
                        self.add(of_module, name, module, attribute, parameter)
        units = make_units(state, self.engine.module, leaves)
        blocks = make_blocks(state, model) if self.in_int8 else []
        state.use_transport("auto")
        order_units(state, units)
        order_blocks(state, blocks)

    def add(self, state: ShardedModel, name: str, module: nn.Module, attribute: str, parameter: ZeroParameter) -> None:
        """Add `parameter`, the ZeRO-3 parameter `module.attribute`, to `state`. After an error, DeepSpeed trains."""
        known = self.partitions.get(parameter.ds_id)
        if known is not None:  # tied
            known.add_owner(module, attribute, known.leaf)
            return
        ranks_of = torch.distributed.get_process_group_ranks
        if ranks_of(parameter.ds_process_group) != ranks_of(self.engine.optimizer.dp_process_group):
            raise RuntimeError(f"'{name}' has a process group of its own, and expert parallelism is not supported")
        self.partitions[parameter.ds_id] = add_partition(
            state, name, parameter, (module, attribute), self.accept, self.in_int8
        )

    def compile_modules(self, compile_kwargs: Mapping[str, Any]) -> None:
        """Compile the modules that the program compiled with another backend; if there are none, the whole model."""
        compile_kwargs = {name: value for name, value in compile_kwargs.items() if name not in ("backend", "options")}
        if compile_kwargs.get("mode") in (None, "default"):
            compile_kwargs.pop("mode", None)
        if wants_cuda_graphs({}, compile_kwargs.get("mode")):
            raise ValueError(f"zcompile: mode {compile_kwargs['mode']!r}: {NO_CUDA_GRAPHS}")
        module = self.engine.module
        regions = [region for region in module.modules() if region._compiled_call_impl is not None]
        if self.artifact is not None and not regions:
            settings, mode = parse_options(self.options), compile_kwargs.get("mode")
            around_make = functools.partial(_without_deepspeeds_attributes, module)
            module._compiled_call_impl = FromFile(module, Path(self.artifact), settings, mode, around_make=around_make)
        else:
            if self.artifact is not None:
                log.warning(
                    "zcompile: artifact %s is not used: it holds a whole model, and this program compiles %d modules.",
                    *(self.artifact, len(regions)),
                )
            # One backend object for all regions, because Dynamo recompiles for a different one.
            backend = functools.partial(compile_graph, options=dict(self.options))
            for region in regions or [module]:
                region.compile(backend=backend, **compile_kwargs)
        self.engine._is_compiled = True
        self.engine._compile_kwargs = compile_kwargs

    @torch.no_grad()
    def accept(self, partition: Partition, grad: torch.Tensor) -> None:
        """Let the optimizer store or add the reduced gradient `grad`, [elements of the partition without padding]."""
        parameter, optimizer = partition.parameter, self.engine.optimizer
        if parameter.ds_id not in self.trained:
            return
        if getattr(optimizer, "_coalesce_grad_reduction", False):
            raise RuntimeError(
                "zcompile: engine.coalesce_grad_reduction() is not supported: set gradient_accumulation_steps instead."
            )
        padding = parameter.partition_numel() - grad.numel()
        if padding > 0:
            grad = nn.functional.pad(grad, (0, padding))
        self.delivered = True
        if self.lean_step is None:
            partition_grads(optimizer, parameter, grad)
        elif padding > 0:
            self.lean_step.accept(parameter, grad, add)
        else:
            self.lean_step.accept(parameter, grad, partition.add_grad)
            partition.let_reduce_add_to(self.lean_step.gradients[parameter.ds_id])

    def give_back(self, reason: str, restore: bool = True) -> None:
        """Let DeepSpeed gather and reduce again. `restore`: also restore its hooks and buffers."""
        if self.given_back:
            return
        self.given_back = reason
        self.engine._is_compiled = False
        for module in self.engine.module.modules():
            module._compiled_call_impl = None
        if self.state is not None:
            for order in self.state.orders:
                order.abandon()
            for model in models_of(self.state):
                remove_readers(model, self.engine.module)
            self.state = None
        try:
            _let_timer_synchronize(self.engine, True)
            if self.lean_step is not None:
                self.lean_step.remove(restore_buffers=restore)
        finally:
            if restore:
                self.hooks.restore()


@contextlib.contextmanager
def _without_deepspeeds_attributes(model: nn.Module) -> Iterator[None]:
    """Context manager that hides DeepSpeed's methods and local classes on modules: torch cannot pickle them."""
    taken: list[tuple[nn.Module, str, Any]] = []
    for module in model.modules():
        for name, value in list(module.__dict__.items()):
            if isinstance(value, (type, types.MethodType)) and (value.__module__ or "").startswith("deepspeed."):
                taken.append((module, name, module.__dict__.pop(name)))
    try:
        yield
    finally:
        for module, name, value in taken:
            module.__dict__[name] = value


def unsupported(engine: Any) -> str:
    """Return the reason why an existing engine cannot be taken over, or ""."""
    optimizer = engine.optimizer
    if type(engine).__name__ != "DeepSpeedEngine":
        return f"the engine is a {type(engine).__name__}, and only a DeepSpeedEngine is supported"
    if type(optimizer).__name__ == "DeepSpeedZeRoOffload":  # DeepSpeed's class without an optimizer
        return "it has no optimizer. To train, name one in the config or pass it to deepspeed.initialize"
    if type(optimizer).__name__ != "DeepSpeedZeroOptimizer_Stage3":
        return f"the optimizer is a {type(optimizer).__name__}, not DeepSpeedZeroOptimizer_Stage3"
    if getattr(optimizer, "use_muon", False):
        return "the optimizer is Muon, whose update needs whole gradients, and zcompile has partitions of them only"
    if name := hooked_parameter(engine):
        return f"parameter '{name}' has hooks, which expect its unsharded gradient before the reduce. Remove them"
    return unsupported_leaf_module(engine.module)


def _let_timer_synchronize(engine: Any, synchronize: bool) -> None:
    """Set whether DeepSpeed's timer waits for the device. It need not: each step waits to read the gradient norm."""
    timer, config = engine.tput_timer, engine._config
    if "synchronized" not in config._param_dict.get("timers", {}).get("throughput", {}):
        timer.config = timer.config.model_copy(update={"synchronized": synchronize})
