"""Checks that all ranks plan to shard the model alike, before any parameter is sharded."""

import hashlib
import itertools
from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.calibration.machine import Machine, common_machine, local_machine
from zcompile.ranks.process_groups import all_gather_over_mesh


def agree(mesh: DeviceMesh, error: Exception | None, description: Sequence[str]) -> Machine:
    """Check that all ranks shard the model alike. Return the rates and memory of the hardware, the same on all ranks.

    Args:
        error: why this rank cannot shard the model, or None. It is raised after the other ranks have got its text.
        description: `ShardPlan.description`, which must be equal on all ranks.

    Raises:
        RuntimeError: another rank has an error or a different description.
    """
    digest = hashlib.sha256("\n".join(description).encode()).hexdigest()
    rank = dist.get_rank()
    mine = (rank, digest, None if error is None else str(error), None if error is not None else local_machine(mesh))
    reports = all_gather_over_mesh(mesh, mine)
    if error is not None:
        raise error
    for other, _, message, _ in reports:
        if message is not None:
            raise RuntimeError(f"zcompile.shard: rank {other} refused the model: {message}")
    if any(report[1] != digest for report in reports):
        _raise_first_difference(all_gather_over_mesh(mesh, (rank, list(description))))
    return common_machine(mesh, [machine for *_, machine in reports])


def _raise_first_difference(descriptions: Sequence[tuple[int, list[str]]]) -> None:
    base_rank, base = descriptions[0]
    for other, theirs in descriptions:
        for base_line, other_line in itertools.zip_longest(base, theirs, fillvalue="nothing"):
            if base_line != other_line:
                raise RuntimeError(
                    f"zcompile.shard: ranks disagree on the model. First difference: rank {base_rank} has {base_line}, "
                    f"rank {other} has {other_line}. Build the same model with the same options on every rank."
                )
