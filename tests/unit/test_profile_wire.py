"""Bytes on the wire, as the profiler counts them in a trace."""

from tests.support.trace_events import ranged
from zcompile.profile.timeline import wire_bytes


def test_bytes_on_the_wire():
    """On eight ranks: a gather to 8 x 100 in bf16, a scatter of 800 in fp32, a sum of 10.

    Barriers and broadcasts do not count.
    """

    def nccl(name, into, out, dtype):
        args = {"Collective name": name, "In msg nelems": into, "Out msg nelems": out, "dtype": dtype}
        return ranged("record_param_comms", 0, 1, **args)

    counted = [
        nccl("_allgather_base", 100, 800, "BFloat16"),
        nccl("_reduce_scatter_base", 800, 100, "Float"),
        nccl("allreduce", 10, 10, "Float"),
    ]
    others = [nccl("barrier", 1, 1, "Byte"), nccl("broadcast", 5, 5, "Float")]
    assert wire_bytes({"traceEvents": counted + others}, 8) == 1600 + 3200 + 40

    def gloo(name, elements, dtype):
        return ranged(f"gloo:{name}", 0, 1, **{"Input Dims": [[elements // 2, 2]], "Input type": [dtype]})

    events = [gloo("all_gather", 100, "c10::BFloat16"), gloo("all_reduce", 810, "float"), gloo("broadcast", 4, "float")]
    assert wire_bytes({"traceEvents": events}, 8) == 1600 + 3240
    messages = [gloo(name, 200, "byte") for name in ("send", "recv") for _ in range(7)]  # a gather to 8 x 100 in bf16
    assert wire_bytes({"traceEvents": messages}, 8) == 1600
