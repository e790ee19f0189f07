"""The rivals with the strongest settings that this torch has, each named in `Engine.settings`."""

import importlib.util
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from zcompile.profile.torch_engines import Fsdp2Compile, SimpleFsdp, blocks_of

ZERO_CTA_POLICY = {"NCCL_CTA_POLICY": "2"}  # gathers by copy engines, where their buffers are symmetric memory
PREFETCHED_BLOCKS = 2
INPUT_BUFFERS = 2  # of reduces


class Fsdp2Tuned(Fsdp2Compile):
    """FSDP2 with compiled blocks and all that its users can set.

    Gathers from symmetric memory, reduces on a communicator of their own from two input buffers, two blocks prefetched
    each way, and no reshard of the last block after its forward.
    """

    def prepare(self, model: nn.Module) -> nn.Module:
        model = super().prepare(model)
        blocks: list[FSDPModule] = [block for block in blocks_of(model) if isinstance(block, FSDPModule)]
        has_links = torch.cuda.is_available() and 1 < dist.get_world_size() <= torch.cuda.device_count()
        if has_links and os.environ.get("NCCL_CTA_POLICY") == "2":
            self._set(blocks, "set_symm_mem_for_comm")
        elif has_links:
            self.settings.append("without symmetric memory: NCCL_CTA_POLICY=2 was not set")
        self._set([model], "set_separate_reduce_scatter_group", True)
        self._set([model], "set_reduce_scatter_max_input_buffers", INPUT_BUFFERS)
        for i, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 1 + PREFETCHED_BLOCKS])
            block.set_modules_to_backward_prefetch(blocks[max(0, i - PREFETCHED_BLOCKS) : i][::-1])
        if blocks:
            blocks[-1].set_reshard_after_forward(False)
        self.settings.append(f"{PREFETCHED_BLOCKS} blocks prefetched each way, the last block kept for backward")
        return model

    def _set(self, modules: Sequence[Any], name: str, *args: Any) -> None:
        """Call a setter of FSDP2 on each module, if this torch has it."""
        if not hasattr(FSDPModule, name):
            self.settings.append(f"{name}: not in torch {torch.__version__}")
            return
        for module in modules:
            getattr(module, name)(*args)
        self.settings.append(f"{name}({', '.join(map(str, args))})")


# Settings of torch._inductor.config.aten_distributed_optimizations.
OVERLAP = {
    "enable_overlap_scheduling": True,
    "collective_bucketing": True,
    "insert_overlap_deps": True,
    "enable_low_contention_collectives": True,
}


class SimpleFsdpTuned(SimpleFsdp):
    """SimpleFSDP under Inductor's overlap scheduler, which also buckets, with collectives that leave SMs free."""

    def compile(self, model: nn.Module) -> None:
        known = torch._inductor.config.get_config_copy()
        options: dict[str, Any] = {"reorder_for_compute_comm_overlap": False}
        for name, value in OVERLAP.items():
            key = f"aten_distributed_optimizations.{name}"
            if key not in known:
                self.settings.append(f"{name}: not in torch {torch.__version__}")
            elif importlib.util.find_spec("triton") is None:  # the scheduler times kernels and asks Triton for devices
                self.settings.append(f"{name}: needs Triton")
            elif name == "enable_low_contention_collectives" and not torch.cuda.is_available():
                self.settings.append(f"{name}: needs CUDA")
            else:
                options[key] = value
                self.settings.append(name)
        model.compile(options=options)
