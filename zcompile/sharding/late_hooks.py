"""All-gather hooks that a program sets on local tensors of DTensors after `zcompile.shard`, as FSDP2 allows."""

from dataclasses import replace

import torch.distributed as dist

from zcompile.sharding.class_swap import follow_layouts
from zcompile.state.gather_extension import PRE, HookedGather, check_hooks, has_hooks, part_held_by
from zcompile.state.sharded_model import ShardedModel, models_of


def follow_hooks(state: ShardedModel) -> None:
    """Gather parameters by the hooks that their local tensors have now. Call this before the model's first forward.

    Raises TypeError or ValueError if hooks cannot gather their parameter; RuntimeError for a model with units or with
    `states="global"`.
    """
    parameters = [sharded for each in models_of(state) for sharded in each.in_modules()]
    late = [sharded for sharded in parameters if sharded.extension is None and has_hooks(sharded.parameter)]
    for sharded in late:
        if state.units is not None or state.over_hosts:
            raise RuntimeError(
                f"zcompile: parameter '{sharded.name}' has got {PRE} after zcompile.shard (rank {dist.get_rank()}), "
                "which a model with units or states='global' would ignore. Define both hooks in its class before you "
                "call zcompile.shard, or leave units and states out."
            )
        local, mesh = part_held_by(sharded.parameter), sharded.state.mesh
        error = check_hooks(sharded.name, local, sharded.shape, mesh, sharded.layout.dim)
        if error is not None:
            raise error
        sharded.extension = HookedGather(mesh, sharded.policy, local)
        sharded.layout = replace(sharded.layout, is_extended=True)
    if late:
        state.block_order.follow_extensions()
        modules = {module: None for sharded in parameters for module, _ in sharded.owners}
        openers = [block.opener() for block in state.block_order.units if block.opener is not None]
        follow_layouts(modules | {module: None for module in openers if module is not None})
