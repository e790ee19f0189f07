import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

try:
    import zcompile
except ImportError as error:
    raise pytest.UsageError(f"tests need an installed zcompile: run `make install` first ({error})") from error

if Path(zcompile.__file__).resolve().parents[1] != Path(__file__).resolve().parents[1]:
    raise pytest.UsageError("tests must run on this source: run `pip install -e . --no-build-isolation` here")

from ranks import Ranks  # noqa: E402

_pools: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def ranks():
    """ranks(world) -> Ranks, shared by the session."""

    def get(world: int) -> Ranks:
        return _pools.setdefault(world, Ranks(world))

    yield get
    for pool in _pools.values():
        pool.stop()
