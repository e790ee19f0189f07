"""Full parameters that may stay for the next micro-step."""

from torch.fx import Graph

from zcompile.graph import GATHER_KEPT_START, GATHER_START, calls
from zcompile.windows import Windows


def keep(graph: Graph) -> None:
    """gather_start -> gather_kept_start, whose memory the runtime may keep while micro-steps accumulate.

    Not what the graph returns for backward: a backward may take over the memory of what was saved for it. Nor groups of small ones,
    which cost little. Which of the others are kept is decided when they are gathered, in order, by what memory there is.
    """
    returned = {window.start for window in Windows(graph).windows if window.returned}
    for start in calls(graph, GATHER_START):
        if start not in returned:
            start.target = GATHER_KEPT_START
