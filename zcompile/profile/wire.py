"""Bytes that a traced engine gathered and reduced."""

import math
from typing import Any

# Bytes of a dtype, by its names in the events of gloo and of NCCL.
BYTES = {"double": 8, "long int": 8, "long": 8, "float": 4, "int": 4, "half": 2, "bfloat16": 2}
ONE_TO_ALL = ("broadcast", "barrier", "wait", "init", "send", "recv")  # what sets up or waits
MESSAGE = "gloo:send"  # to one of the others, of zcompile on CPUs


def wire_bytes(trace: dict[str, Any], ranks: int) -> int:
    """Bytes of unsharded tensors that this rank gathered and reduced in all of the trace.

    They are outputs of all-gathers, and inputs of reduce-scatters, all-reduces and all-to-alls. `zcompile.stats`
    counts the same, without what else an engine sends, such as norms of gradients. What really crosses a link is
    (W - 1) / W of it, and twice that of an all-reduce. Messages are what crosses. `ranks` is W of the groups in which
    gloo gathers, whose events do not tell.
    """
    total = sent = 0
    for event in trace["traceEvents"]:
        name, args = event.get("name", ""), event.get("args", {})
        if name == "record_param_comms" and "Collective name" in args:
            if not any(word in args["Collective name"] for word in ONE_TO_ALL):
                elements = max(args.get("In msg nelems", 0), args.get("Out msg nelems", 0))
                total += elements * _width(args["dtype"])
        elif name.startswith("gloo:") and args.get("Input Dims"):
            nbytes = sum(math.prod(dims) * _width(dtype) for dims, dtype in zip(args["Input Dims"], args["Input type"]))
            if name == MESSAGE:
                sent += nbytes
            elif not name.endswith(ONE_TO_ALL):
                total += nbytes * (ranks if name == "gloo:all_gather" else 1)
    return total + sent * ranks // max(ranks - 1, 1)


def _width(dtype: str) -> int:
    return BYTES.get(dtype.lower().removeprefix("c10::"), 1)
