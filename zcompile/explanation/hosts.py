"""Predicted steps for each way to shard a model over several hosts: ZeRO-3, HSDP and `states="global"`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from zcompile.costs.hardware import Hosts, Link
from zcompile.explanation.explanation import GIB, table_text
from zcompile.explanation.planned_step import PlannedStep

COLUMNS = ("step ms", "exposed ms", "peak GiB", "GiB from other hosts", "")


@dataclass(frozen=True)
class OnHosts:
    """A predicted step on several hosts. `crossing_bytes`: bytes that a rank receives from other hosts in the step."""

    hosts: int
    gpus: int  # of a host
    mode: str
    step_ms: float
    exposed_ms: float
    peak_bytes: int
    crossing_bytes: int
    fits: bool  # within the limit of memory

    @classmethod
    def of(cls, mode: str, hosts: int, link: Link, step: PlannedStep, parameters: int, limit_bytes: int) -> "OnHosts":
        """Return the row of one way to shard, `mode`. `parameters`: elements of all parameters."""
        shard = -(-parameters // link.world)
        if link.hosts is None:
            crossing_bytes = link.outside_bytes(step.moved_bytes)
        else:
            crossing_bytes = link.hosts.gathered_bytes(shard) + link.hosts.summed_bytes(shard)
        fits = step.peak_bytes <= limit_bytes
        gpus = link.world if link.hosts else link.world // hosts
        return cls(hosts, gpus, mode, step.step_ms, step.exposed_ms, step.peak_bytes, crossing_bytes, fits)


def links_over_hosts(whole: Link, inside: Link, hosts: int, microbatches: int, dtype: torch.dtype) -> dict[str, Link]:
    """Return the `Link` (hardware, transport and ranks) for each way to shard over hosts, by its name.

    Args:
        whole: the link of the ranks of all hosts.
        inside: the link of the ranks of one host.
        microbatches: number per step. If there are several, gradients are summed over hosts once, after the last one.
        dtype: the dtype of all-gathers.
    """
    replicas = Hosts(hosts, shards_states=False, sums_once=microbatches > 1, itemsize=dtype.itemsize)
    sharded = replace(replicas, shards_states=True)
    return {"ZeRO-3": whole, "HSDP": replace(inside, hosts=replicas), 'states="global"': replace(inside, hosts=sharded)}


def table_of_hosts(rows: Sequence[OnHosts]) -> str:
    """Return `rows` as a table of text that marks, for each number of hosts, the fastest row that fits in memory."""
    best = {row.hosts: row for row in sorted(rows, key=lambda row: -row.step_ms) if row.fits}
    return table_text(
        "hosts x GPUs, mode",
        COLUMNS,
        [
            (
                f"{row.hosts} x {row.gpus}, {row.mode}",
                f"{row.step_ms:.1f}",
                f"{row.exposed_ms:.1f}",
                f"{row.peak_bytes / GIB:.1f}",
                f"{row.crossing_bytes / GIB:.2f}",
                "fastest that fits" if row is best.get(row.hosts) else "",
            )
            for row in rows
        ],
    )
