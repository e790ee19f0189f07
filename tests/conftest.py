import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# What `zcompile calibrate` measured on this machine would change plans that tests expect.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="zcompile-tests-")

try:
    import zcompile
except ImportError as error:
    raise pytest.UsageError(f"tests need an installed zcompile: run `make install` first ({error})") from error

if Path(zcompile.__file__).resolve().parents[1] != Path(__file__).resolve().parents[1]:
    raise pytest.UsageError("tests must run on this source: run `pip install -e . --no-build-isolation` here")

from tests.support import time_limits
from tests.support.ranks import Ranks

time_limits.measure()
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)

# DeepSpeed's ops are built here. A process that is killed while it builds one leaves a lock, and all others would wait
# for that lock for ever. If no other session is at work in this checkout, whoever held the lock is gone.
EXTENSIONS = Path(
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(__file__).resolve().parents[1] / "build/torch_extensions"))
)


# Files that take minutes, longest first. Workers take whole files in this order: a long file that came last would run
# alone.
LONG = (
    "distributed/test_numerics.py",
    "deepspeed/test_deepspeed_step.py",
    "distributed/test_lifetimes.py",
    "profile/test_profile_report.py",
    "deepspeed/test_deepspeed_edits.py",
    "distributed/test_training.py",
    "distributed/test_fuzz.py",
    "deepspeed/test_deepspeed_accumulation.py",
    "distributed/test_accumulate.py",
    "distributed/test_embedding_rows.py",
    "deepspeed/test_deepspeed_training.py",
    "distributed/test_ops.py",
    "profile/test_profile_failures.py",
)
TESTS = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    place = {TESTS / name: i for i, name in enumerate(LONG)}
    items.sort(key=lambda item: place.get(item.path, len(LONG)))


def pytest_sessionstart(session):
    EXTENSIONS.mkdir(parents=True, exist_ok=True)
    session.at_work = (EXTENSIONS / "at_work").open("w")  # open, and so locked, to the end of the session
    try:
        fcntl.flock(session.at_work, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in EXTENSIONS.glob("*/lock"):
            lock.unlink()
    except BlockingIOError:
        pass
    fcntl.flock(session.at_work, fcntl.LOCK_SH)


_pools: dict[int, Ranks] = {}


@pytest.fixture(scope="session")
def ranks():
    """ranks(world) -> Ranks, shared by the session."""

    def get(world: int) -> Ranks:
        return _pools.setdefault(world, Ranks(world))

    yield get
    for pool in _pools.values():
        pool.stop()


@pytest.fixture(scope="session")
def inductor_folder(tmp_path_factory):
    """A folder for Inductor's caches that tests share: most of the time of a small compile goes into C++ kernels."""
    return tmp_path_factory.mktemp("inductor")


@pytest.fixture(scope="module")
def inductor_cache(inductor_folder):
    """The same folder as Inductor's cache, for all compiles of a file, those on ranks too."""
    from tests.support.artifacts import cache_in

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")
        with cache_in(inductor_folder):
            yield inductor_folder
