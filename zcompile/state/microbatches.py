"""The block of `zcompile.accumulate` that a sharded model is in."""

import enum
from dataclasses import dataclass


class Deferred(enum.Enum):
    """The part of a reduce that microbatches leave to the end of the block. The value is its name in the runtime."""

    NOTHING = ""
    REPLICAS = "replicas"  # sums over replicas, inside of accumulate(reduce="shards")
    HOSTS = "hosts"  # sums over hosts where these share main parameters, inside of the same
    REDUCES = "reduces"  # all reduces, inside of accumulate(reduce="last")


@dataclass
class Microbatches:
    """
    Attributes:
        accumulates: whether the model is inside of the block, where gradients add up and parameters do not change.
        reduce: the block's argument `reduce`.
        deferred: the part of each reduce that the block's end makes up for.
        cache_bytes: the option `microbatch_cache_bytes` of the last compile.
    """

    accumulates: bool = False
    reduce: str = "each"
    deferred: Deferred = Deferred.NOTHING
    cache_bytes: int | None = None

    @property
    def adds_up(self) -> bool:
        """Whether the runtime adds up gradients until the block's end, and `.grad` is ones meanwhile."""
        return self.accumulates and self.deferred in (Deferred.REDUCES, Deferred.HOSTS)
