"""Raise an error of one rank on all ranks."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile.ranks.process_groups import all_gather_over_mesh


@dataclass
class Progress:
    """The item on which a `with raised_on_all_ranks(...)` block works, for the text of an error."""

    at: str = ""  # such as "parameter 'a.weight'"


@contextlib.contextmanager
def raised_on_all_ranks(
    mesh: DeviceMesh, failure: str = "zcompile.shard: rank {} could not shard the model"
) -> Iterator[Progress]:
    """Context manager that raises RuntimeError on all ranks if its `with` block raised on one. All ranks enter it.

    The block must contain no collective call. The error's text begins with `failure`, where {} stands for the rank that
    raised. Then come that rank's `Progress.at` and exception.
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
