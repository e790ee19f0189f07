"""Rank processes that live for the whole test session: a test pays for what it runs, not for importing torch."""

import contextlib
import datetime
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import os
import sys
import time
import traceback
from multiprocessing import forkserver
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch._inductor import config as inductor_config
from torch.distributed import distributed_c10d
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.support.time_limits import scaled
from zcompile.sharding import class_swap

TIMEOUT_SECONDS = 180  # on a quiet machine
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
slow = pytest.mark.slow  # `make test-all` alone runs it
slow_case = functools.partial(pytest.param, marks=slow)  # a case of `parametrize`
LINEAR = torch.nn.functional.linear  # DeepSpeed's zero.Init replaces it for good


class Ranks:
    """`world` processes in one process group, gloo on CPU or NCCL on GPUs, on which `run` calls a function."""

    def __init__(self, world: int, backend: str = "gloo"):
        self.world = world
        self.backend = backend
        self._processes: list = []
        self._pipes: list = []
        self._store: dist.TCPStore | None = None  # of the ranks' rendezvous

    def run(self, function, *args, timeout: float = TIMEOUT_SECONDS, allow_failure: bool = False):
        """Call `function(rank, world, *args)` on every rank; the list of what they return.

        With `allow_failure`, a rank that raises returns the exception as a string, and all ranks start anew afterwards.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function.__module__, function.__qualname__, args))
        timeout = scaled(timeout)
        deadline = time.monotonic() + timeout
        results, errors = [], []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(max(0.0, deadline - time.monotonic())):
                errors.append(f"rank {rank}: no answer within {timeout:.0f} s")
                results.append(errors[-1])
                continue
            try:
                ok, result = pipe.recv()
            except EOFError:
                ok, result = False, "the process died"
            results.append(result)
            if not ok:
                errors.append(f"rank {rank}: {result}")
        if errors:
            self.stop()
            if not allow_failure:
                raise AssertionError("\n".join(errors))
        for pipe in self._pipes:
            pipe.send(None)  # no rank waits for another one any more
        return results

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._store = [], [], None

    def host_of(self, rank: int) -> Any:
        """The emulated host of a rank; None: all are on this machine. See hosts.py."""
        return None

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # on a free port
        context = mp.get_context("spawn" if self.backend == "nccl" else "forkserver")
        for rank in range(self.world):
            ours, theirs = context.Pipe()
            arguments = rank, self.world, self.backend, self._store.port, theirs, dict(os.environ), self.host_of(rank)
            process = context.Process(target=_serve, args=arguments, daemon=False)
            if self.backend == "nccl":
                process.start()
            else:
                connect = fork_server(rank % 2).connect_to_new_process
                with mock.patch.object(forkserver, "connect_to_new_process", connect):
                    process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)


@functools.cache
def fork_server(number: int) -> forkserver.ForkServer:
    """A process that has imported torch and forks ranks: one of two, since users' ranks hash strings differently."""
    server = forkserver.ForkServer()
    server.set_forkserver_preload(["tests.support.ranks", "torch._dynamo", "torch._inductor.compile_fx", "zcompile"])
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    with mock.patch.dict(os.environ, PYTHONHASHSEED=str(number), PYTHONPATH=path):
        server.ensure_running()
    return server


def on_ranks(world: int | None = None, timeout: float = TIMEOUT_SECONDS, fixture: str = "ranks", needs: str = ""):
    """Make a test of a function (rank, world, ...): all ranks of a pool call it, with the values of its parameters.

    tests/conftest.py does so without this, on two ranks or as many as the parameter `world` of the test says. Here, the
    test says so if `world` is None. `fixture` has the pools; without the package `needs` the test is skipped."""

    def decorate(function):
        parameters = list(inspect.signature(function).parameters.values())

        def test(**values):
            if needs:
                pytest.importorskip(needs)
            pool = values[fixture](values["world"] if world is None else world)
            pool.run(function, *(values[each.name] for each in parameters[2:]), timeout=timeout)

        test.__name__, test.__doc__, test.__module__ = function.__name__, function.__doc__, function.__module__
        of_pools = inspect.Parameter(fixture, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([of_pools, *parameters[1 if world is None else 2 :]])
        test.on_rank = function
        function.__qualname__ += ".on_rank"  # by which ranks find it
        return test

    return decorate


on_gpus = functools.partial(on_ranks, fixture="gpus")


def _serve(rank: int, world: int, backend: str, port: int, pipe, environment: dict[str, str], host: Any) -> None:
    os.environ.update(environment)
    master = "127.0.0.1"
    if host is not None:
        host.enter()
        master, port = host.master, host.port
    os.environ.update(MASTER_ADDR=master, MASTER_PORT=str(port))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    mp.set_start_method("fork", force=True)  # the default of a program
    torch.set_num_threads(1)
    faulthandler.enable()  # says where a rank crashed
    if backend == "nccl":
        take_gpu(rank, world)
    timeout = datetime.timedelta(seconds=scaled(TIMEOUT_SECONDS / 2))
    store = dist.TCPStore(master, port, is_master=host is not None and rank == 0, wait_for_workers=False)
    dist.init_process_group(backend, rank=rank, world_size=world, timeout=timeout, store=store)
    _, store = distributed_c10d._world.pg_map[dist.group.WORLD]
    settings = inductor_config.get_config_copy()
    for number in itertools.count():
        gc.collect()  # also closes groups
        gc.freeze()  # else a collection looks at torch's objects for 0.3 s; DeepSpeed asks for many collections
        try:
            module, name, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            answer = True, function(rank, world, *args)
        except BaseException as error:
            answer = False, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        pipe.send(answer)
        with contextlib.suppress(EOFError):
            pipe.recv()
        torch._dynamo.reset()
        torch.nn.functional.linear = LINEAR
        inductor_config.load_config(settings)  # which torchao's quantization changes for good
        _close_groups(dist.PrefixStore(str(number), store))


def take_gpu(rank: int, world: int) -> None:
    """A GPU of its own, or one that ranks share: NCCL allows that if it is told so, and then works over sockets."""
    gpus = torch.cuda.device_count()
    if gpus < world:
        os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    torch.cuda.set_device(rank % gpus)


def _close_groups(store) -> None:
    """Close the groups that a test opened, whose gloo threads wake ten times a second.

    Names of closed groups come again, so later groups look in `store`, not at old addresses. DTensor caches results of
    ops by mesh, for each thread, of which autograd has one of its own for a GPU."""
    _clear_sharding_prop_cache()
    class_swap._sharded_class.cache_clear()  # holds meshes, and so their groups, as the next caches do
    _redistribute._planner_cache.clear()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    if dist.get_backend() == "nccl":
        leaf = torch.zeros((), device="cuda", requires_grad=True)
        leaf.register_hook(lambda _: _clear_sharding_prop_cache())
        leaf.backward()
    theirs = vars(sys.modules.get("deepspeed.utils.groups", object)).values()  # of the process, not of an engine
    groups, world = distributed_c10d._world.pg_map, dist.group.WORLD
    for group in list(groups):
        if group is not world and not any(group is other for other in theirs):
            dist.destroy_process_group(group)
    groups[world] = groups[world][0], store
