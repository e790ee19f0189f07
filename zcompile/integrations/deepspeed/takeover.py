"""Taking over and giving back: how a DeepSpeed ZeRO-3 engine comes to train through zcompile, and how that ends.

To *take over* an engine is to gather its parameters and reduce its gradients by zcompile from then on. To *give it
back* is to let DeepSpeed do both again. An engine whose config has `"zcompile": {"enabled": true}` is taken over at its
first forward or `compile()`. It is given back when it is destroyed, or when something fails ([Note: what may fail] in
fallback.py).

[Note: what is taken over]
ZeRO-3 keeps a flat partition of every parameter in `param.ds_tensor` and leaves `param.data` empty. Its optimizer
changes the partitions in place and takes gradients of partitions. zcompile needs no more than that. It gathers from the
partitions, over the same memory, and hands reduced gradients to the optimizer. While the engine is taken over, module
hooks (which gather and release) and gradient hooks (which reduce) are gone. Everything else stays DeepSpeed's: loss
scaling, clipping, accumulation, the order of the step, checkpoints, `GatheredParameters`.

[Note: how the flag is seen]
`import zcompile` has `flag.watch` wrap `DeepSpeedEngine.__init__`, at once or when DeepSpeed is imported later. If
an engine's config has the flag (in "zero_optimization" or at its top), `attach` gives that engine methods of its own
(`forward`, `backward`, `step`, `compile`, `destroy`). Other engines are not touched.
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
from torch.distributed.device_mesh import DeviceMesh

from zcompile.artifact.model import install
from zcompile.calibration.machine import machine_of
from zcompile.compiler.backend import compile_graph, parse_options
from zcompile.integrations.deepspeed.config import without_effect
from zcompile.integrations.deepspeed.engine_methods import EngineMethods
from zcompile.integrations.deepspeed.fallback import unsupported
from zcompile.integrations.deepspeed.gradients import ReducedSquares, add
from zcompile.integrations.deepspeed.leaf_modules import leaf_modules
from zcompile.integrations.deepspeed.optimizer_step import LeanStep
from zcompile.integrations.deepspeed.partitions import Partition, ZeroParameter, add_partition, partition_grads
from zcompile.sharding.class_swap import install_readers, remove_readers
from zcompile.state.sharded_model import ShardedModel, models_of
from zcompile.units.order import make_units, order_units

log = logging.getLogger("zcompile")


def attach(engine: Any, options: Mapping[str, Any]) -> None:
    """Let `engine`, a DeepSpeedEngine with ZeRO-3, train through zcompile from its first forward or `compile()` on."""
    takeover = Takeover(engine, options)
    object.__setattr__(engine, "zcompile", takeover)
    for name in Takeover.REPLACED:
        object.__setattr__(engine, name, getattr(takeover, name))


class Takeover(EngineMethods):
    """A ZeRO-3 engine that trains through zcompile, from its `compile()` until `give_back()`."""

    def __init__(self, engine: Any, options: Mapping[str, Any]):
        super().__init__(engine, {name: value for name, value in options.items() if name != "artifact"})
        self.artifact: str | None = options.get("artifact")
        self.trained: set[int] = set()  # `ds_id`s of the parameters that the optimizer has
        self.lean_step: LeanStep | None = None

    def take_over(self) -> None:
        """Gather from the engine's partitions; all ranks together.

        Raises:
            RuntimeError: this engine is not supported.
        """
        optimizer = self.engine.optimizer
        reason = unsupported(self.engine)
        if reason:
            raise RuntimeError(reason)
        self.trained = {parameter.ds_id for parameters in optimizer.fp16_groups for parameter in parameters}
        self.hooks.release_parameters()
        mesh = DeviceMesh.from_group(optimizer.dp_process_group, self.engine.device.type)
        self.state = state = ShardedModel(mesh, machine_of(mesh))
        self.shard_engine(state)
        if LeanStep.is_possible(optimizer):
            self.lean_step = LeanStep(optimizer, self.fail, self.reduced_squares(state))
            self.lean_step.install()
        self.hooks.remove()
        _let_timer_synchronize(self.engine, False)
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
        """Make the engine's partitions those of `state`, and leaf modules its units; all ranks together."""
        model, mesh = self.engine.module, state.mesh
        leaves = leaf_modules(model) if mesh.size() > 1 else {}
        if leaves:
            state.units = ShardedModel(mesh, state.machine, has_units=True)
        in_leaf = {below for leaf in leaves.values() for below in leaf.modules()}
        self.partitions = {}
        for path, module in model.named_modules():
            of_module = state.units if state.units is not None and module in in_leaf else state
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    self.add(of_module, f"{path}.{attribute}" if path else attribute, module, attribute, parameter)
        units = make_units(state, self.engine.module, leaves)
        state.use_transport("auto")
        order_units(state, units)

    def add(self, state: ShardedModel, name: str, module: nn.Module, attribute: str, parameter: ZeroParameter) -> None:
        """Make `module.attribute`, a ZeRO-3 parameter, one of `state`.

        Raises:
            RuntimeError: it is partitioned over other ranks than the model.
        """
        known = self.partitions.get(parameter.ds_id)
        if known is not None:  # tied
            known.add_owner(module, attribute, known.leaf)
            return
        ranks_of = torch.distributed.get_process_group_ranks
        if ranks_of(parameter.ds_process_group) != ranks_of(self.engine.optimizer.dp_process_group):
            raise RuntimeError(f"parameter '{name}' is partitioned over other ranks than the model, as experts are")
        self.partitions[parameter.ds_id] = add_partition(state, name, parameter, (module, attribute), self.accept)

    def reduced_squares(self, state: ShardedModel) -> ReducedSquares | None:
        """None where gradients of several microbatches are added up: squares of each say nothing about their sum."""
        if self.engine.gradient_accumulation_steps() > 1:
            return None
        return ReducedSquares(models_of(state), self.partitions)

    def compile_modules(self, compile_kwargs: dict[str, Any]) -> None:
        """Compile the regions that were compiled with another backend before; if there are none, the whole module.

        Args:
            compile_kwargs: of `torch.compile`; backend and options are ignored. Is changed.
        """
        compile_kwargs.pop("backend", None)
        compile_kwargs.pop("options", None)
        if compile_kwargs.get("mode") in (None, "default"):
            compile_kwargs.pop("mode", None)
        module = self.engine.module
        regions = [region for region in module.modules() if region._compiled_call_impl is not None]
        if self.artifact is not None and not regions:
            settings = parse_options(self.options)
            around_make = functools.partial(_without_deepspeeds_attributes, module)
            install(module, Path(self.artifact), settings, compile_kwargs.get("mode"), around_make=around_make)
            self.engine._is_compiled = True
            self.engine._compile_kwargs = compile_kwargs
            return
        if self.artifact is not None:
            log.warning(
                "zcompile: %s is not used: it holds a whole module, and this program compiles %d regions of its own.",
                self.artifact,
                len(regions),
            )
        # All regions share one backend object: Dynamo compiles again for another one.
        backend = functools.partial(compile_graph, options=dict(self.options))
        for region in regions or [module]:
            region.compile(backend=backend, **compile_kwargs)
        self.engine._is_compiled = True
        self.engine._compile_kwargs = compile_kwargs

    @torch.no_grad()
    def accept(self, partition: Partition, grad: torch.Tensor) -> None:
        """Have the optimizer store or add a reduced gradient, [elements of the partition without padding].

        Raises:
            RuntimeError: inside of `engine.coalesce_grad_reduction()`.
        """
        parameter, optimizer = partition.parameter, self.engine.optimizer
        if parameter.ds_id not in self.trained:
            return
        if getattr(optimizer, "_coalesce_grad_reduction", False):
            raise RuntimeError(
                "zcompile: engine.coalesce_grad_reduction() is not supported; use gradient accumulation steps."
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
        """Let DeepSpeed gather and reduce again.

        Args:
            restore: whether to restore DeepSpeed's hooks and buffers. An engine that is destroyed needs none.
        """
        if self.given_back:
            return
        self.given_back = reason
        self.engine._is_compiled = False
        for module in self.engine.module.modules():
            module._compiled_call_impl = None
        if self.state is not None:
            if self.state.unit_order is not None:
                self.state.unit_order.abandon()
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
    """Around the making of an artifact, take from modules what DeepSpeed put there for its hooks: methods and local
    classes. No forward reads them, and torch, which saves guards on modules, can pickle neither."""
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


def _let_timer_synchronize(engine: Any, synchronize: bool) -> None:
    """Set whether DeepSpeed's throughput timer waits for the device, twice a step. A config that sets it is obeyed.

    The step waits for the norm of the gradients in any case, so the timer's speeds are right without.
    """
    timer, config = engine.tput_timer, engine._config
    if "synchronized" not in config._param_dict.get("timers", {}).get("throughput", {}):
        timer.config = timer.config.model_copy(update={"synchronized": synchronize})
