"""`zcompile.calibrate`: measures the kernels and the transfers of the machine on which the ranks of a mesh run."""

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from statistics import quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zcompile import _C
from zcompile.calibration.measure_compute import (
    MOST_AHEAD_S,
    hold_device,
    measure_compute,
    pace_s,
    square_product,
    warm_up,
)
from zcompile.calibration.memory import host_memory_bytes
from zcompile.calibration.results import Calibration, device_name, driver_of, write_calibration
from zcompile.costs.hardware import MIB, Points, Wire
from zcompile.ranks.process_groups import all_gather_object, default_mesh, device_of, groups_of, shard_group_of
from zcompile.state.transport_choice import choose

log = logging.getLogger("zcompile")

ops = torch.ops.zcompile

# Bytes of the unsharded tensors. Each rank receives the parts that other ranks hold.
GPU_BYTES = tuple(MIB * mib for mib in (1, 4, 16, 64, 128, 256))
CPU_BYTES = tuple(1024 * kib for kib in (16, 64, 256, 1024, 4096, 16384))
GPU_PRODUCT, CPU_PRODUCT = 4096, 256  # rows of the matmuls that run beside transfers
SEVERAL = 8  # GPU transfers below LARGE_BYTES that are timed in a row, because one alone is short
CPU_GROUP = 8  # tensors per transfer on CPUs, because packing them takes time
LARGE_BYTES = 8 * MIB
ROUNDS = 15  # of calls; the lower quartile counts


@torch.inference_mode(False)
@torch.enable_grad()
def calibrate(mesh: DeviceMesh | None = None, *, write: bool = True) -> Calibration:
    """Measure the rates by which passes plan transfers: matmuls, attention, memory, and transfers between the ranks.

    All ranks must call this, with nothing else running on the machine. It takes less than 20 s. Afterwards,
    `zcompile.shard` uses each measured rate that differs by more than a quarter from the rate that zcompile ships for
    this device. All ranks use the first rank's rates. One matmul is timed three times. If its times differ too much for
    reliable rates, `pace_warning` of the result says so.

    Args:
        mesh: the ranks to measure; parameters will be sharded over its last dimension. Default: all ranks, on GPUs if
            the process group's backend is NCCL.
        write: whether the first rank saves the result in the user's cache (`XDG_CACHE_HOME`, or `~/.cache`). If it
            cannot, it warns and gives the reason.

    Returns:
        The measured rates, the same on all ranks.

    Raises:
        RuntimeError: there is no process group.
    """
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "zcompile.calibrate needs a process group: call torch.distributed.init_process_group() first, or run "
            "`zcompile calibrate`."
        )
    if mesh is None:
        mesh = default_mesh()
    group, device = shard_group_of(mesh), device_of(mesh)
    all_gather_object(group, None)  # all ranks measure at once: as in a step, CPU ranks share memory and cores
    warm_up(device)
    paces = [pace_s(device)]
    compute = measure_compute(device)
    paces.append(pace_s(device))
    wires = tuple(_wires(mesh, device)) if group.size() > 1 else ()
    paces.append(pace_s(device))
    on_gpu = device.type == "cuda"
    memory = torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory_bytes()
    measured = Calibration(
        device=device_name(device),
        driver=driver_of(device),
        torch=torch.__version__,
        world=group.size(),
        memory_bytes=memory,
        **compute,
        wires=wires,
        pace_ratio=max(paces) / min(paces),
    )
    of_ranks: list[Calibration] = all_gather_object(group, measured)
    calibration = replace(of_ranks[0], pace_ratio=max(each.pace_ratio for each in of_ranks))
    if write and dist.get_rank() == 0:
        if warning := calibration.pace_warning:
            log.warning("zcompile: %s", warning)
        try:
            log.info("zcompile: the measured rates are in %s", write_calibration(calibration))
        except OSError as error:
            log.warning("zcompile: the measured rates could not be kept for later runs: %s", error)
    return calibration


def _wires(mesh: DeviceMesh, device: torch.device) -> list[Wire]:
    """Measure transfers over each transport (NCCL, peer to peer, gloo) that works on this mesh."""
    groups = groups_of(mesh)
    wires = []
    for name in ["nccl", "p2p"] if device.type == "cuda" else ["gloo"]:
        problem = ""
        try:
            choose(name, mesh, groups.make_runtime_to_measure)
            transport = _Transport(name, groups.make_runtime_to_measure(), mesh, device)
            transport.runtime.use_transport("p2p" if name == "p2p" else "c10d")
        except (ValueError, RuntimeError) as error:
            problem = str(error).splitlines()[0]
        if failed := next(filter(None, all_gather_object(shard_group_of(mesh), problem)), ""):
            log.info("zcompile: transfers over %s are not measured: %s", name, failed)
        else:
            wires.append(transport.wire())
    return wires


class _Transport:
    """Measures transfers over one transport. The caller must select it in `runtime` before `wire`."""

    def __init__(self, name: str, runtime: _C.Model, mesh: DeviceMesh, device: torch.device):
        self.name, self.runtime, self.device = name, runtime, device
        self.group = shard_group_of(mesh)
        self.world = self.group.size()
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.together = 1 if device.type == "cuda" else CPU_GROUP  # tensors per transfer
        self.shards: list[list[torch.Tensor]] = []
        self.grads: list[list[torch.Tensor]] = []
        for i, nbytes in enumerate(GPU_BYTES if device.type == "cuda" else CPU_BYTES):
            chunk = max(1, nbytes // self.dtype.itemsize // self.world // self.together)
            shape = [self.world, chunk]
            self.shards.append([torch.randn(chunk, device=device) for _ in range(self.together)])
            self.grads.append([torch.randn(shape, device=device, dtype=self.dtype) for _ in range(self.together)])
            for k, shard in enumerate(self.shards[-1]):
                label = f"measured{i}.{k}"
                runtime.add(name=label, shard=shard, shape=shape, chunk=chunk, replicated=False, reduce_dtype=None)

    def wire(self) -> Wire:
        """Measure the times of all-gathers and reduces of several sizes, and how much a transfer slows compute."""
        for i in 2 * list(range(len(self.grads))):  # p2p caches shards from the second forward on
            self._start_gather(i)()

        def gathers() -> tuple[Points, float]:
            points = self._points(self._start_gather)
            return points, self._interference(points[-1][1])

        # In a backward: elsewhere, p2p takes a repeated gather for a new forward, and refreshes cached shards first.
        gather, interference = _in_backward(gathers)
        return Wire(self.name, self.world, gather, self._points(self._start_reduce), interference)

    def _start_gather(self, i: int) -> Callable[[], Any]:
        shards, shape = self.shards[i], list(self.grads[i][0].shape)
        if self.together == 1:  # as a large parameter, which is in no group
            started = [ops.gather_start(shards[0], shape, self.dtype)]
        else:
            started = ops.gather_group_start(shards, self.together * shape, self.together * [2], self.dtype)
        return lambda: [ops.gather_wait(tensor) for tensor in started]

    def _start_reduce(self, i: int) -> Callable[[], Any]:
        shards, grads = self.shards[i], self.grads[i]
        started = ops.reduce_group_start(grads, shards)
        return lambda: [ops.reduce_wait(tensor, grad) for tensor, grad in zip(started, grads)]

    def _points(self, start: Callable[[int], Callable[[], Any]]) -> Points:
        """Measure, for each size of transfer, (bytes that a rank receives, seconds on the slowest rank).

        A transfer that took longer than a larger one was disturbed, and gets the larger one's time.
        """

        def transfer(i: int) -> None:
            start(i)()

        points: list[tuple[int, float]] = []
        for i in reversed(range(len(self.grads))):
            nbytes = sum(grad.nbytes for grad in self.grads[i])
            count = SEVERAL if self.device.type == "cuda" and nbytes < LARGE_BYTES else 1
            seconds = self._slowest(self._seconds(partial(transfer, i), count))
            received = nbytes // self.world * (self.world - 1)
            points.append((received, min(seconds, points[-1][1] if points else seconds)))
        return tuple(points[::-1])

    def _interference(self, transfer_s: float) -> float:
        """Return the seconds, from 0 to 1, by which one second of transfers delays matmuls that run beside them."""
        on_gpu = self.device.type == "cuda"
        dtype, rows = (torch.bfloat16, GPU_PRODUCT) if on_gpu else (torch.float32, CPU_PRODUCT)
        product = square_product(self.device, dtype, rows)
        alone_s = self._slowest(self._seconds(product))
        count = max(1, round(2 * transfer_s / max(alone_s, 1e-7)))  # twice as long as the transfer

        def products(beside: bool) -> None:
            wait = self._start_gather(len(self.grads) - 1) if beside else None
            for _ in range(count):
                product()
            if wait is not None:
                wait()

        quiet_s, beside_s = (self._slowest(self._seconds(partial(products, beside))) for beside in (False, True))
        return min(1.0, max(0.0, (beside_s - quiet_s) / transfer_s))

    def _seconds(self, call: Callable[[], Any], count: int = 1) -> float:
        """Return the seconds of one `call()`, timed over `count` calls that all ranks begin at about the same time.

        On GPUs, an untimed call comes first: if it is a collective, the devices of all ranks then begin together.
        """
        times = []
        host_s = MOST_AHEAD_S  # a first guess of the time in which the host launches a round, while the device waits
        for _ in range(ROUNDS + 2):
            all_gather_object(self.group, None)
            if self.device.type == "cuda":
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
                hold_device(host_s)
                begin_s = time.perf_counter()
                call()
                begin.record()
                for _ in range(count):
                    call()
                end.record()
                host_s = time.perf_counter() - begin_s
                torch.cuda.synchronize()
                times.append(begin.elapsed_time(end) / 1e3 / count)
            else:
                begin_s = time.perf_counter()
                for _ in range(count):
                    call()
                times.append((time.perf_counter() - begin_s) / count)
        return quantiles(times[2:], n=4)[0]  # disturbances only make a transfer longer

    def _slowest(self, seconds: float) -> float:
        return float(max(all_gather_object(self.group, seconds)))


def _in_backward(measure: Callable[[], Any]) -> Any:
    """Return `measure()`, called in an autograd backward."""
    measured: list[Any] = []
    result = torch.zeros((), requires_grad=True).clone()
    result.register_hook(lambda grad: measured.append(measure()))
    with torch.autograd.set_multithreading_enabled(False):
        result.backward()
    return measured[0]
