"""Raise an error of one rank on all ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks.process_groups import all_gather_over_mesh


@dataclass
class Progress:
    """The item on which the block of `raised_on_all_ranks` works, for the text of an error."""

    at: str = ""  # such as "parameter 'a.weight'"


@contextlib.contextmanager
def raised_on_all_ranks(
    mesh: DeviceMesh, failure: str = "zcompile.shard: rank {} could not shard the model"
) -> Iterator[Progress]:
    """Context manager that raises on all ranks if its `with` block raised on one of them. All ranks enter it.

    The block must contain no collective call. The text of the RuntimeError begins with `failure`, where {} is replaced
    by the number of the rank that raised, and names its `Progress` and exception.
    """
    progress, error = Progress(), None
    try:
        yield progress
    except Exception as raised:
        error = raised
    text = None if error is None else f"{type(error).__name__}: {error}"
    for rank, at, message in all_gather_over_mesh(mesh, (dist.get_rank(), progress.at, text)):
        if message is not None:
            where = f", at {at}" if at else ""
            raise RuntimeError(f"{failure.format(rank)}{where}: {message}") from error
