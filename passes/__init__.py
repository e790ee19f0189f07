"""The passes, in the order in which they run. Each is a function of a graph; the runner knows nothing of any of them."""

from collections.abc import Callable, Collection, Sequence
from functools import partial

from torch.fx import Graph

from zcompile.passes.bucket import bucket
from zcompile.passes.downcast import downcast
from zcompile.passes.overlap import overlap
from zcompile.passes.recompute import recompute
from zcompile.passes.reduce import narrow_reduces, sum_reduces
from zcompile.passes.sink import sink
from zcompile.passes.unify import unify
from zcompile.passes.verify import verify, verify_widths

Pass = Callable[[Graph], None]

# What `options={"disable_passes": [...]}` may name. The others make what every graph must be: one gather and one reduce per
# parameter, and no full parameter saved.
OPTIONAL = ("downcast", "narrow_reduces", "sink", "overlap", "bucket")


def joint(disabled: Collection[str] = ()) -> tuple[Pass, ...]:
    """Passes on the joint graph, before it is split into forward and backward."""
    return _without(disabled, unify, sum_reduces, downcast, narrow_reduces, recompute)


def schedule(in_flight_bytes: int, bucket_bytes: int, disabled: Collection[str] = ()) -> tuple[Pass, ...]:
    """Passes on each of the graphs that come of it.

    Downcast again: a parameter that forward reads in fp32 too may be bf16 in backward.
    """
    return _without(
        disabled,
        downcast,
        sink,
        partial(overlap, in_flight_bytes=in_flight_bytes),
        partial(bucket, bucket_bytes=bucket_bytes),
    )


def name_of(one: Pass) -> str:
    return getattr(one, "func", one).__name__


def _without(disabled: Collection[str], *passes: Pass) -> tuple[Pass, ...]:
    return tuple(one for one in passes if name_of(one) not in disabled)


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order; verify the graph after each, and at the end the widths, if `downcast` ran.

    Raises:
        VerificationError: a pass left a graph that breaks an invariant; names the pass and the node.
    """
    for one in passes:
        one(graph)
        verify(graph, after=name_of(one))
    if downcast in passes:
        verify_widths(graph)
    graph.lint()
