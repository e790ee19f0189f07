"""The state of a sharded model inside of `with zcompile.accumulate(model)`."""

import enum
from dataclasses import dataclass


class Deferred(enum.Enum):
    """The part of each reduce that `accumulate` defers to the end of its `with` block. Values: names in the runtime."""

    NOTHING = ""
    REPLICAS = "replicas"  # the all-reduce over replicas, with accumulate(reduce="shards")
    HOSTS = "hosts"  # the sum over hosts, with accumulate(reduce="shards") and main parameters sharded over hosts
    REDUCES = "reduces"  # the whole reduce, with accumulate(reduce="last")


@dataclass
class Microbatches:
    accumulates: bool = False  # inside of the `with` block: gradients add up, and parameters do not change
    reduce: str = "each"  # the argument `reduce` of `zcompile.accumulate`
    deferred: Deferred = Deferred.NOTHING
    cache_bytes: int | None = None  # the option `microbatch_cache_bytes` of the last compile of the model

    @property
    def adds_up(self) -> bool:
        """Whether gradients add up outside of `.grad` until the `with` block ends. Meanwhile, `.grad` is a tensor of
        ones: if the program scales it, the sum is multiplied by it at the end; see `defer_grad`."""
        return self.accumulates and self.deferred in (Deferred.REDUCES, Deferred.HOSTS)
