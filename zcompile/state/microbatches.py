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
    """
    Attributes:
        accumulates: whether the model is inside of the `with` block: gradients add up, and parameters do not change.
        reduce: the argument `reduce` of `zcompile.accumulate`.
        deferred: the part of each gradient reduce that is done once, at the end of the `with` block.
        cache_bytes: the option `microbatch_cache_bytes` of the last compile of the model.
    """

    accumulates: bool = False
    reduce: str = "each"
    deferred: Deferred = Deferred.NOTHING
    cache_bytes: int | None = None

    @property
    def adds_up(self) -> bool:
        """Whether the runtime sums gradients until the end of the `with` block, while `.grad` holds ones."""
        return self.accumulates and self.deferred in (Deferred.REDUCES, Deferred.HOSTS)
