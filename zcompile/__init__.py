"""ZeRO-3 training as a torch.compile backend: see README.md and docs/architecture.md."""

import importlib
import os
from typing import TYPE_CHECKING, Any

import torch

# Torch's symmetric memory would make NVLink multicast objects. zcompile does not use them, and on a shared host, a
# process that dies with one can put the NVLink domain out of service. Torch reads the variable in C++, so it is set
# here, before other threads may read the environment.
os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")

from zcompile import _C

__version__ = "0.2.0"

if _C.built_for_torch != torch.__version__:
    raise ImportError(
        f"zcompile was built for torch {_C.built_for_torch}, but torch {torch.__version__} is installed: "
        "run `pip install --no-build-isolation --force-reinstall --no-deps .` in zcompile's source again."
    )

from zcompile.calibration.measure_machine import calibrate
from zcompile.costs.formulas.registry import register_cost
from zcompile.costs.formulas.work import TensorSize, Work
from zcompile.integrations.deepspeed.flag import watch
from zcompile.sharding.precision import MixedPrecision
from zcompile.sharding.shard import shard
from zcompile.state.forward_scope import register_forward_method
from zcompile.state.placement import Placement
from zcompile.state.stats import reset_stats, stats
from zcompile.training.accumulate import accumulate
from zcompile.training.clip import clip_grad_norm_
from zcompile.training.fused_optimizer import fuse_optimizer
from zcompile.unsharding.full_parameters import full_parameters
from zcompile.unsharding.unshard import unshard

if TYPE_CHECKING:
    from zcompile.artifact.model import compile
    from zcompile.explanation.explain import explain

watch()

__all__ = [
    "MixedPrecision",
    "Placement",
    "TensorSize",
    "Work",
    "__version__",
    "accumulate",
    "calibrate",
    "clip_grad_norm_",
    "compile",
    "explain",
    "full_parameters",
    "fuse_optimizer",
    "register_cost",
    "register_forward_method",
    "reset_stats",
    "shard",
    "stats",
    "unshard",
]


def __getattr__(name: str) -> Any:
    """Import `zcompile.explain` or `zcompile.compile` at its first use, because their modules import Inductor."""
    if name == "explain":
        return importlib.import_module("zcompile.explanation.explain").explain
    if name == "compile":
        return importlib.import_module("zcompile.artifact.model").compile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
