"""transformers' own plans for tensor and expert parallelism, with zcompile in place of FSDP2."""

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel
from transformers.distributed import DistributedConfig
from transformers.distributed.expert_parallel import apply_expert_parallelism
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.distributed.utils import TransformersDeviceMesh, initialize_distributed_mesh

from zcompile.sharding.shard import shard
from zcompile.state.placement import Placement

# The style of replicated parameters of which each rank of "tp" computes a part of the gradient, from its own heads.
PARTIAL = "replicated_with_grad_allreduce"


def distribute(model: PreTrainedModel, distributed_config: DistributedConfig, **options: Any) -> nn.Module:
    """Apply the plans of `model` for tensor and expert parallelism, then shard it with zcompile, in place.

    This is `from_pretrained(..., distributed_config=...)` with zcompile in place of FSDP2: dense layers are sharded
    over "fsdp", experts over "efsdp", and gradients are means over the `dp_replicate_size * fsdp_size` batches. Ranks
    of one "tp" group must train on the same batch. The model may be on the meta device; otherwise, each rank keeps its
    slice of its own initial values, as in `zcompile.shard`.

    Args:
        model: a model of transformers, on one device.
        distributed_config: sizes and plans. `dp_replicate_size * fsdp_size * tp_size` must be the number of ranks.
        options: options of `zcompile.shard` other than `mesh`, `shard_placement_fn` and `gradient_divide_factor`.

    Returns:
        `model`. Its meshes are `model._mesh_manager.get_mesh(names)`, with transformers' names.

    Raises:
        ValueError: `distributed_config` has pipeline parallelism, a setting only for FSDP2, or a size without a plan.
        RuntimeError: the sizes do not fit the number of ranks.
    """
    _check(distributed_config, options)
    _, meshes = initialize_distributed_mesh(distributed_config)
    if meshes is None:
        return shard(model, **options)
    tp_plan, ep_plan = _plans(model, distributed_config)
    partial = {name for name, style in tp_plan.items() if style == PARTIAL}
    local = _local_parts(model, tp_plan)
    apply_tensor_parallelism(model, meshes.get_mesh("tp"), {n: s for n, s in tp_plan.items() if n not in partial})
    if ep_plan:
        tp_mesh, how = meshes.get_mesh("tp"), distributed_config.ep_implementation
        apply_expert_parallelism(model, meshes.get_mesh("ep"), tp_mesh, ep_plan, ep_implementation=how)
    _tell(model, distributed_config, meshes)
    return shard(
        model,
        _mesh_of(meshes, distributed_config, "fsdp"),
        shard_placement_fn=_placements(model, meshes, distributed_config, ep_plan, partial, local),
        **options,
    )


def _check(config: DistributedConfig, options: dict[str, Any]) -> None:
    where = "zcompile.integrations.huggingface.distribute:"
    for name in ("fsdp_cpu_offload", "fsdp_mixed_precision", "fsdp_plan"):
        if getattr(config, name):
            raise ValueError(f"{where} {name} is for FSDP2: leave it out. For bf16, call distribute(param_dtype=...).")
    if config.pp_size != 1:
        raise ValueError(f"{where} pp_size={config.pp_size}: pipeline parallelism is not supported.")
    for name in ("mesh", "shard_placement_fn", "gradient_divide_factor"):
        if name in options:
            raise ValueError(f"{where} distributed_config sets {name}. Omit {name}, or call zcompile.shard instead.")


def _plans(model: PreTrainedModel, config: DistributedConfig) -> tuple[dict[str, str], dict[str, str]]:
    """Return the plans of tensor and expert parallelism: name of a parameter or module -> style."""
    without_data = copy.copy(config)  # with `fsdp_size` > 1, transformers would ask for a plan of FSDP2
    without_data.fsdp_size = without_data.dp_replicate_size = 1
    tp_plan, ep_plan, _ = model._resolve_parallel_plans(without_data)
    return tp_plan, ep_plan


def _local_parts(model: nn.Module, plan: dict[str, str]) -> set[str]:
    """Return the names of parameters whose module computes with local tensors, not with DTensors, in training."""
    modules = dict(model.named_modules())
    names = set()
    with torch.enable_grad():
        for path, style in plan.items():
            if path in modules and ALL_PARALLEL_STYLES[style].should_use_local_tensors(modules[path]):
                names |= {f"{path}.{name}" for name, _ in modules[path].named_parameters(recurse=False)}
    return names


def _mesh_of(meshes: TransformersDeviceMesh, config: DistributedConfig, name: str) -> Any:
    """Return the mesh `name`, "fsdp" or "efsdp"; if there are replicas, the 2-D mesh (replicas x `name`)."""
    return meshes.get_mesh(name if config.dp_replicate_size == 1 else ("dp_replicate", name))


def _placements(
    model: nn.Module,
    meshes: TransformersDeviceMesh,
    config: DistributedConfig,
    ep_plan: dict[str, str],
    partial: set[str],
    local: set[str],
) -> Any:
    """Return the `shard_placement_fn`. It shards parameters in `partial` over "tp", too: reduces then sum over "tp"."""
    every = meshes.get_mesh(("fsdp", "tp"))._flatten("fsdp_tp") if partial else None
    if every is not None and config.dp_replicate_size != 1:
        every = meshes.get_mesh(("dp_replicate", "fsdp_tp"))
    experts = _mesh_of(meshes, config, "efsdp") if ep_plan else None
    chosen = {}
    for name, parameter in model.named_parameters():
        if name in partial:
            chosen[parameter] = Placement(Shard(0), every)
        elif name in ep_plan and isinstance(parameter, DTensor):
            chosen[parameter] = Placement(Shard(0), experts, local=True)
        elif name in local and isinstance(parameter, DTensor):
            chosen[parameter] = Placement(Shard(0), local=True)
    return chosen.get


def _tell(model: Any, config: DistributedConfig, meshes: TransformersDeviceMesh) -> None:
    """Set the attributes that `from_pretrained` would set, for `save_pretrained` and `generate`."""
    model.config.distributed_config = config
    model._mesh_manager, model._device_mesh = meshes, meshes.get_mesh(("pp", "fsdp", "tp"))
    model._is_distributed_loading_by_transformers = True
    model._tp_size, model._fsdp_size = config.tp_size, config.fsdp_size
