"""The passes, in the order in which they run. Each is a function of a graph; the runner knows nothing of any of them."""

from collections.abc import Callable, Sequence
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

# On the joint graph, before it is split into forward and backward.
JOINT: tuple[Pass, ...] = (unify, sum_reduces, downcast, narrow_reduces, recompute)

def schedule(in_flight_bytes: int, bucket_bytes: int) -> tuple[Pass, ...]:
    """Passes on each of the graphs that come of it.

    Downcast again: a parameter that forward reads in fp32 too may be bf16 in backward.
    """
    return (
        downcast,
        sink,
        partial(overlap, in_flight_bytes=in_flight_bytes),
        partial(bucket, bucket_bytes=bucket_bytes),
    )


def run(graph: Graph, passes: Sequence[Pass]) -> None:
    """Run `passes` in order; verify the graph after each, and the widths at the end.

    Raises:
        VerificationError: a pass left a graph that breaks an invariant; names the pass and the node.
    """
    for one in passes:
        one(graph)
        verify(graph, after=getattr(one, "func", one).__name__)
    verify_widths(graph)
    graph.lint()
