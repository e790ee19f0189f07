"""accelerate's `Accelerator`, for models that zcompile shards. See [Note: accelerate's FSDP2 mode] in __init__.py."""

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import accelerate
import torch
import torch.distributed as dist
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, TorchDynamoPlugin
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from zcompile.integrations.huggingface.adapter import (
    CompilePlugin,
    ShardedPlugin,
    compile_plugin_of,
    refuse_settings,
    settings_of,
)
from zcompile.sharding.shard import shard
from zcompile.sharding.validate import is_sharded
from zcompile.state.sharded_model import ShardedModel, state_of
from zcompile.training.accumulate import begin_accumulating, end_accumulating
from zcompile.training.clip import clip_grad_norm_
from zcompile.training.fused_optimizer import fuse_optimizer


class Accelerator(accelerate.Accelerator):
    """`accelerate.Accelerator` whose `prepare` shards models over all ranks with `zcompile.shard`.

    Takes accelerate's arguments, and also `dynamo_backend="zcompile"`, or a `CompilePlugin` with options of that
    backend. A model that the program has sharded by `zcompile.shard` before stays as it is. `save_state` writes one
    shard per rank, which any number of ranks can load.

    `zcompile.shard` gets the dtypes in `mixed_precision_policy` of an `fsdp_plugin` for FSDP2. If the plugin has no
    policy, and `mixed_precision` is "bf16", all are bfloat16. With `cpu_offload`, AdamW with `fused=True` keeps its
    states in host memory, by `fuse_optimizer(offload="states")`, or "moments" if there is no `param_dtype`.

    Raises:
        ValueError: `fsdp_plugin` is for FSDP1 or has a setting that zcompile lacks; or the environment asks for FSDP
            (ACCELERATE_USE_FSDP); or arguments or the environment ask for DeepSpeed, Megatron-LM,
            `parallelism_config`, fp16, fp8 or another compile backend.
    """

    _shard_options: Mapping[str, Any] = {}
    _offload: str | None = None  # the argument of `fuse_optimizer`

    def __init__(
        self,
        *args: Any,
        dynamo_backend: str | None = None,
        dynamo_plugin: TorchDynamoPlugin | None = None,
        **kwargs: Any,
    ) -> None:
        fsdp_plugin = kwargs.pop("fsdp_plugin", None)
        for name in ("deepspeed_plugin", "deepspeed_plugins", "megatron_lm_plugin"):
            if kwargs.get(name) is not None:
                raise ValueError(
                    f"zcompile: Accelerator shards the model with zcompile, so it takes no {name}. Leave it out."
                )
        super().__init__(*args, dynamo_plugin=compile_plugin_of(dynamo_plugin, dynamo_backend), **kwargs)
        self._become_sharded(fsdp_plugin)

    @staticmethod
    def adopt(
        accelerator: accelerate.Accelerator, plugin: CompilePlugin, fsdp_plugin: FullyShardedDataParallelPlugin | None
    ) -> "Accelerator":
        """Turn `accelerator`, which must have prepared nothing yet, into an object of this class, and return it."""
        accelerator.__class__ = Accelerator
        adopted = cast(Accelerator, accelerator)
        adopted.state.dynamo_plugin = plugin
        adopted._become_sharded(fsdp_plugin)
        return adopted

    def _become_sharded(self, fsdp_plugin: FullyShardedDataParallelPlugin | None) -> None:
        refuse_settings(self)
        if not isinstance(getattr(self.state, "fsdp_plugin", None), ShardedPlugin):
            self.state.fsdp_plugin = ShardedPlugin()
        if fsdp_plugin is not None:
            self._shard_options, self._offload = settings_of(fsdp_plugin, self.mixed_precision)
            self.state.fsdp_plugin.set_state_dict_type(fsdp_plugin.state_dict_type.name)
        self._caching: list[ShardedModel] = []
        self._step_hook: Any = None

    @property
    def distributed_type(self) -> DistributedType:
        """FSDP, so that accelerate runs its code for FSDP2; but DeepSpeed or Megatron-LM if the program asks for it."""
        kind = self.state.distributed_type
        return kind if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) else DistributedType.FSDP

    @property
    def is_fsdp2(self) -> bool:
        """Always True; see [Note: accelerate's FSDP2 mode] in __init__.py."""
        return True

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shard and compile models, and prepare the other arguments as accelerate does.

        An optimizer gets the sharded parameters in place of those that it holds, if this call shards their model. So
        pass an optimizer in the same call as its model, or build it afterwards.

        Raises:
            ValueError: an optimizer has taken steps already, or holds no parameter of the models.
            RuntimeError: see `zcompile.shard`.
        """
        places = device_placement or [None] * len(args)  # type: ignore[list-item]
        if len(places) != len(args):
            raise ValueError(f"zcompile: device_placement has {len(places)} entries, not one per object ({len(args)}).")
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        for each in args:
            if isinstance(each, nn.Module):
                self.shard_once(each, optimizers)
        prepared = [
            self._prepare_one(each, first_pass=True, device_placement=place) for each, place in zip(args, places)
        ]
        prepared = [self._prepare_one(each) for each in prepared]  # schedulers, after their optimizers
        self._offload_states()
        ours = (*self._dataloaders, *self._models, *self._optimizers, *self._schedulers)
        for each in prepared:
            if any(each is known for known in ours):
                each._is_accelerate_prepared = True
        return tuple(prepared) if len(prepared) > 1 else prepared[0]

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shard `model`, if not in `evaluation_mode`. accelerate then applies mixed precision and `torch.compile`."""
        if not evaluation_mode:
            self.shard_once(model)
        place = False if is_sharded(model) else device_placement
        prepared: nn.Module = super().prepare_model(model, device_placement=place, evaluation_mode=True)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:
        """Prepare `optimizer` as accelerate does.

        Raises:
            ValueError: `optimizer` holds no parameter of the models that were prepared.
        """
        trained = {id(parameter) for model in self._models for parameter in model.parameters()}
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if trained and held and not any(id(parameter) in trained for parameter in held):
            raise ValueError(
                f"zcompile: {type(optimizer).__name__} holds no parameter of the models that were prepared "
                f"(rank {self.process_index}); its first one has shape {tuple(held[0].shape)}. It was built from "
                "parameters that sharding has replaced. Build it after zcompile.shard, or pass model and optimizer "
                "to one call of prepare."
            )
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        self._offload_states()
        return prepared

    def _offload_states(self) -> None:
        """If `fsdp_plugin` has `cpu_offload`, let prepared optimizers keep their states in host memory."""
        if self._offload is None:
            return
        for model in (getattr(each, "_orig_mod", each) for each in self._models):
            trained = {id(parameter) for parameter in model.parameters()}
            for optimizer in (each.optimizer for each in self._optimizers):
                held = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
                if is_sharded(model) and not trained.isdisjoint(held):
                    fuse_optimizer(model, optimizer, offload=self._offload)

    @contextlib.contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Context manager around each microbatch but the last: keeps parameters unsharded until the last one ends.

        accelerate's `accumulate` calls it. Each microbatch still reduces gradients, so a rank holds only their shards.
        """
        if is_sharded(model):
            state = state_of(model)
            if not state.microbatches.accumulates:
                begin_accumulating(state, state.microbatch_cache_limit())
                self._caching.append(state)
                if self._step_hook is None:
                    self._step_hook = register_optimizer_step_pre_hook(lambda *_: self._end_caching())
        yield

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run accelerate's `backward`. After the last microbatch, free the unsharded parameters that `no_sync` kept."""
        super().backward(loss, **kwargs)
        if self.sync_gradients:
            self._end_caching()
            if self._step_hook is not None:  # not removed by the hook, which cannot remove itself while it runs
                self._step_hook.remove()
                self._step_hook = None

    def _end_caching(self) -> None:
        while self._caching:
            end_accumulating(self._caching.pop())

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip gradients by `zcompile.clip_grad_norm_`, by one norm over all ranks and meshes."""
        return clip_grad_norm_(parameters, max_norm, norm_type)

    def free_memory(self, *objects: Any) -> Any:
        """Free the unsharded parameters that `no_sync` kept, and run accelerate's `free_memory`."""
        self._end_caching()
        return super().free_memory(*objects)

    def shard_once(self, model: nn.Module, optimizers: Iterable[Optimizer] = ()) -> None:
        """Shard `model` if it is not sharded yet, with the dtypes of `fsdp_plugin`. `optimizers` get its parameters.

        Raises:
            ValueError: an optimizer has taken steps with a parameter of `model`.
            RuntimeError: other code has sharded parameters of `model`; or an error of `zcompile.shard`.
        """
        if is_sharded(model):
            return
        inner = getattr(model, "_orig_mod", model)
        names = {id(parameter): name for name, parameter in inner.named_parameters()}
        foreign = next((name for name, each in inner.named_parameters() if isinstance(each, DTensor)), None)
        if foreign is not None:
            raise RuntimeError(
                f"zcompile: parameter '{foreign}' is a DTensor already (rank {dist.get_rank()}), so other code has "
                "sharded the model. Pass the model unsharded, or call zcompile.shard(model, mesh) before prepare, with "
                "the dimensions that the DTensor's mesh does not have."
            )
        places = _places_in(optimizers, names)
        held = {name: params[i] for params, i, name in places}
        for params, i, _ in places:
            params[i] = torch.empty(0)
        try:
            shard(inner, **self._shard_options)
            held = dict(inner.named_parameters())
        finally:
            for params, i, name in places:
                params[i] = held[name]


def _places_in(optimizers: Iterable[Optimizer], names: dict[int, str]) -> list[tuple[list[torch.Tensor], int, str]]:
    """Return each place in `optimizers` of a parameter in `names` (id -> name): (list, index in the list, name)."""
    places = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for i, parameter in enumerate(group["params"]):
                name = names.get(id(parameter))
                if name is None:
                    continue
                if optimizer.state.get(parameter):
                    raise ValueError(
                        f"zcompile: {type(optimizer).__name__} has a state of parameter '{name}' already, but the "
                        "parameter is not sharded yet. Prepare model and optimizer before the first step, and load "
                        "states by Accelerator.load_state afterwards."
                    )
                places.append((group["params"], i, name))
    return places
