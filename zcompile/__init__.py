"""ZeRO-3 training as a torch.compile backend: see README.md and docs/design.md."""

import torch

from zcompile import _C

if _C.built_for_torch != torch.__version__:
    raise ImportError(
        f"zcompile was built for torch {_C.built_for_torch}, but torch {torch.__version__} is installed: "
        "run `pip install --no-build-isolation --force-reinstall --no-deps .` in zcompile's source again."
    )

from zcompile.planning.explain import explain
from zcompile.sharding.accumulation import accumulate
from zcompile.sharding.counters import reset_stats, stats
from zcompile.sharding.fused_optimizer import fuse_optimizer
from zcompile.sharding.shard import shard
from zcompile_flag import watch

watch()

__all__ = ["accumulate", "explain", "fuse_optimizer", "reset_stats", "shard", "stats"]
