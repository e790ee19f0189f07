import atexit
import fcntl
import inspect
import os
import shutil
import tempfile
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")

# Files of `zcompile calibrate` on this machine would change plans that tests expect.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="zcompile-tests-")

# One Inductor cache for the session: its workers, their ranks and the programs that tests start inherit the variables.
# Most of the time of a small compile goes into C++ kernels, precompiled headers and the probe for vector instructions.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="zcompile-inductor-")
    os.environ["TORCHINDUCTOR_VEC_ISA_OK"] = "1"

try:
    import zcompile
except ImportError as error:
    raise pytest.UsageError(f"tests need an installed zcompile: run `make install` first ({error})") from error

if Path(zcompile.__file__).resolve().parents[1] != Path(__file__).resolve().parents[1]:
    raise pytest.UsageError("tests must run on this source: run `pip install -e . --no-build-isolation` here")

from tests.support import time_limits
from tests.support.ranks import Ranks, fork_server

time_limits.measure()
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
if "PYTEST_XDIST_WORKER" not in os.environ:
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)

# DeepSpeed's ops are built here. A process that is killed while it builds one leaves a lock, and all others would wait
# for that lock for ever. If no other session is at work in this checkout, whoever held the lock is gone.
BUILT = Path(__file__).resolve().parents[1] / "build/torch_extensions"
EXTENSIONS = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(BUILT)))

# Files that take long, longest first, those of `make test-all` alone before others. Workers take whole files in this
# order: a long file that came last would run alone.
LONG = (
    "distributed/test_architectures deepspeed/test_deepspeed_leaf_modules deepspeed/test_deepspeed_step "
    "distributed/test_reads distributed/test_training profile/test_profile_report deepspeed/test_deepspeed_training "
    "distributed/test_cuda_graphs distributed/test_chaos distributed/test_order_check distributed/test_lifetimes "
    "distributed/test_module_edits distributed/test_docs distributed/test_compose_matrix distributed/test_accumulate "
    "profile/test_profile_engines distributed/test_artifact distributed/test_precompile distributed/test_compose "
    "distributed/test_examples"
)
TESTS = Path(__file__).resolve().parent


def pytest_collection_modifyitems(items):
    place = {TESTS / f"{name}.py": i for i, name in enumerate(LONG.split())}
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_sessionstart(session):
    if "PYTEST_XDIST_WORKER" in os.environ:  # which import torch while tests are collected
        fork_server(0), fork_server(1)
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


@pytest.fixture
def rank(ranks):
    """Asked for by tests that ranks call: see `pytest_pyfunc_call`. Here, in no rank, it gives the ranks."""
    return ranks


@pytest.fixture
def world():
    """How many ranks call a test of `rank` and `world`, unless it is parametrized by `world`."""
    return 2


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """A test whose first parameters are `rank` and `world` is called by all ranks, with the values of the others."""
    names = list(inspect.signature(pyfuncitem.obj).parameters)
    if names[:2] != ["rank", "world"]:
        return None
    values = pyfuncitem.funcargs
    values["rank"](values["world"]).run(pyfuncitem.obj, *(values[name] for name in names[2:]))
    return True


@pytest.fixture(scope="session")
def inductor_cache():
    """The folder of the session's Inductor cache."""
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
