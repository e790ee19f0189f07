"""Rates that `zcompile calibrate` measured: stored as JSON in ~/.cache/zcompile, and merged with shipped rates.

A file is for one type of device and one number of ranks, and valid only with the driver and torch versions in it.
Passes plan transfers by a measured rate only if it differs by more than a quarter from the shipped rate, so that a
second measurement seldom changes plans, whose compiled graphs are in caches. `zcompile explain` predicts by all
measured rates. machine.py reads the file when a model is sharded.
"""

import ctypes
import json
import math
import os
import platform
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from zcompile.costs.hardware import CPU, Hardware, Points, Wire, table_of_name
from zcompile.whole_files import write

VERSION = 4  # of the file format: raised when other rates are measured
DIFFERS = 0.25  # in plans, a measured rate replaces the shipped one if it differs by more than this share
UNEVEN = 1.15  # `Calibration.pace_ratio` above which users get a warning
DIGITS = 2  # significant digits that are kept: the others change from run to run


@dataclass(frozen=True)
class Calibration:
    """The measured rates of one machine, in the units of `zcompile.costs.hardware.Hardware`."""

    device: str  # torch's name of the GPU; for a CPU, its model and the number of threads of a rank
    driver: str  # CUDA version that the GPU's driver supports; empty for CPUs
    torch: str  # version of torch
    world: int  # number of ranks between which transfers were measured
    memory_bytes: int  # total memory of one GPU, or of the host
    matmul_flops_s: tuple[tuple[str, float], ...]  # (dtype, such as "bfloat16", operations per second of matmuls)
    grouped_share: float | None  # speed of bf16 grouped matmuls divided by that of plain ones; None: not measured
    attention_flops_s: tuple[tuple[str, float], ...]  # (kernel of `hardware.ATTENTION_SHARES`, operations per second)
    bytes_s: float  # bytes per second that a pointwise kernel reads and writes
    adam_bytes_s: float  # bytes per second that fused AdamW reads and writes
    kernel_s: float  # seconds that a kernel on a tiny tensor takes
    wires: tuple[Wire, ...]  # times of transfers, one `Wire` for each transport
    # The longest time of a matmul, timed before, between and after the other measurements, divided by its shortest, on
    # the rank where this ratio is largest. If it is far above 1, the machine's speed varied: the rates are unreliable.
    pace_ratio: float = 1.0

    def to_json(self) -> str:
        return json.dumps({"version": VERSION, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Calibration":
        """Raises ValueError if `text` is not from `to_json`. Callers that read a file add its path and the remedy."""
        try:
            read = json.loads(text)
        except ValueError:
            raise ValueError("the file is no JSON") from None
        if not isinstance(read, dict) or read.pop("version", None) != VERSION:
            raise ValueError(f"the file's format is not version {VERSION}")
        try:
            wires = tuple(Wire(**_with_tuples(wire)) for wire in read.pop("wires"))
            made = cls(**_with_tuples(read), wires=wires)
            figures = [made.world, made.memory_bytes, made.grouped_share or 1.0, made.bytes_s, made.adam_bytes_s]
            figures += [made.kernel_s, made.pace_ratio]
            figures += dict(made.matmul_flops_s + made.attention_flops_s).values()
            for wire in wires:
                figures += [wire.world, *chain(*wire.gather, *wire.reduce)]
            wrong = [figure for figure in figures if not 0 < figure < math.inf]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the file's figures are incomplete or malformed ({error})") from None
        if wrong:
            raise ValueError(f"the file has the figure {wrong[0]}, which is not a positive number")
        return made

    @property
    def pace_warning(self) -> str:
        """A warning for users if the machine's speed varied during the measurement (`pace_ratio`); otherwise empty."""
        if self.pace_ratio <= UNEVEN:
            return ""
        return (
            f"a matmul took up to {self.pace_ratio:.1f} x as long at one time as at another: other work ran, or this "
            "machine's speed varies. Predictions may be off by as much, or more: measure again without other work."
        )

    @property
    def shipped(self) -> Hardware:
        """The shipped rates of this GPU or, without any, of its stand-in (`table_of_name`); on CPUs, those of `CPU`."""
        return table_of_name(self.device)[0] if self.driver else CPU


def _with_tuples(read: dict[str, Any]) -> dict[str, Any]:
    def tuples(value: Any) -> Any:
        return tuple(map(tuples, value)) if isinstance(value, list) else value

    return {name: tuples(value) for name, value in read.items()}


def rounded(figure: float) -> float:
    return float(f"{figure:.{DIGITS}g}")


def merged(shipped: Hardware, calibration: Calibration, differs: float = DIFFERS) -> Hardware:
    """Return `shipped` with each rate replaced whose measured value differs by more than `differs` (0.25: a quarter).

    Plans use the default, so that small differences do not change them; predictions use 0.
    The result may be `shipped` itself.
    """
    changed: list[str] = []

    def taken(name: str, old: float, measured: float) -> float:
        if abs(measured - old) <= differs * old:
            return old
        changed.append(name)
        return rounded(measured)

    matmuls = dict(shipped.matmul_flops_s)
    for name, rate in calibration.matmul_flops_s:
        dtype = getattr(torch, name)
        old = shipped.matmul_rate(dtype)
        if (new := taken(name, old, rate)) != old:
            matmuls[dtype] = new
    flash, kernels = shipped.attention_flops_s, dict(shipped.attention_by_kernel)
    for kernel, rate in calibration.attention_flops_s:
        old = shipped.attention_rate(kernel)
        if kernel == "flash":
            flash = taken("attention", old, rate)
        elif (new := taken(f"{kernel} attention", old, rate)) != old:
            kernels[kernel] = new
    adam, share = shipped.adam_bytes_s, shipped.grouped_share
    if differs == 0:  # only predictions use this rate
        adam = taken("fused AdamW", shipped.adam_rate(), calibration.adam_bytes_s)
    memory = taken("memory", shipped.bytes_s, calibration.bytes_s)
    launches = taken("launches", shipped.kernel_s, calibration.kernel_s)
    grouped = taken("grouped matmuls", share, calibration.grouped_share or share)
    wires, domain = {(wire.transport, wire.world): wire for wire in shipped.wires}, shipped.domain
    for wire in calibration.wires:
        if _differs(shipped, wire, differs):
            changed.append(f"transfers over {wire.transport}")
            wires[wire.transport, wire.world] = _rounded_wire(wire)
            domain = max(domain, calibration.world)
    if not changed:
        return shipped
    machine = calibration.device
    if differs == 0 and calibration.pace_warning:  # not for plans: keys of compile caches contain their text
        machine += f", whose speed varied by {calibration.pace_ratio:.1f} x"
    return replace(
        shipped,
        matmul_flops_s=tuple(matmuls.items()),
        attention_flops_s=flash,
        attention_by_kernel=tuple(sorted(kernels.items())),
        bytes_s=memory,
        adam_bytes_s=adam,
        kernel_s=launches,
        grouped_share=grouped,
        wires=tuple(wires.values()),
        domain=domain,
        memory_bytes=calibration.memory_bytes,
        source=f"{', '.join(changed)} measured by zcompile calibrate on {machine}; else {shipped.source}",
    )


def tables_of(shipped: Hardware, calibration: Calibration) -> tuple[Hardware, Hardware]:
    """Return `shipped` with measured rates, for plans (only rates that differ much) and for predictions (all rates)."""
    return merged(shipped, calibration), merged(shipped, calibration, differs=0.0)


def _differs(table: Hardware, wire: Wire, differs: float) -> bool:
    if wire.transport not in {known.transport for known in table.wires}:
        return True
    link = table.over(wire.transport, wire.world)

    def far(time_s: Callable[[int], float], points: Points) -> bool:
        whole = [(nbytes * wire.world // (wire.world - 1), seconds) for nbytes, seconds in points]
        return any(abs(seconds - time_s(nbytes)) > differs * time_s(nbytes) for nbytes, seconds in whole)

    return far(link.gather_s, wire.gather) or far(link.reduce_s, wire.reduce)


def _rounded_wire(wire: Wire) -> Wire:
    gather, reduce = (tuple((nbytes, rounded(s)) for nbytes, s in points) for points in (wire.gather, wire.reduce))
    return replace(wire, gather=gather, reduce=reduce, interference=rounded(wire.interference))


def device_name(device: torch.device) -> str:
    """Return torch's name of a GPU; for a CPU, its model and the number of threads of a rank."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{next(iter(models), platform.machine())}, {torch.get_num_threads()} threads"


def driver_of(device: torch.device) -> str:
    """Return the CUDA version that a GPU's driver supports, or "unknown" if it cannot be read; empty for CPUs."""
    if device.type != "cuda":
        return ""
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version))
    except OSError:
        failed = 1
    return "unknown" if failed else str(version.value)


def cache_folder() -> Path | None:
    """Return the folder of calibration files; None for a user without a home directory."""
    folder = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(folder) if folder else Path.home() / ".cache") / "zcompile"
    except RuntimeError:
        return None


def calibration_file(device: str, world: int) -> Path | None:
    """Return the path of a calibration file; None for a user without a home directory."""
    folder = cache_folder()
    slug = re.sub(r"[^A-Za-z0-9]+", "-", device).strip("-")
    return None if folder is None else folder / f"calibration-{slug}-x{world}.json"


def write_calibration(calibration: Calibration, file: Path | None = None) -> Path:
    """Write `calibration` atomically to `file` (None: a file in the user's cache), and return the file's path.

    Raises OSError if the file cannot be written, or if the user has no home directory for the cache.
    """
    file = file or calibration_file(calibration.device, calibration.world)
    if file is None:
        raise OSError("there is no home directory: set XDG_CACHE_HOME, or give --output FILE")
    write(file, calibration.to_json().encode())
    return file


def read_calibration(device: torch.device, world: int) -> tuple[Calibration | None, str]:
    """Return the saved rates of `device` for `world` ranks, and "". If none can be used: None, and why (or "")."""
    name, again = device_name(device), "run `zcompile calibrate` again"
    file = calibration_file(name, world)
    if file is None:
        return None, ""
    try:
        calibration = Calibration.from_json(file.read_text())
    except FileNotFoundError:
        pattern = f"{file.name.removesuffix(f'{world}.json')}*.json"
        others = " and ".join(sorted(each.stem.rpartition("x")[2] for each in file.parent.glob(pattern)))
        if not others:
            return None, ""
        line = f"a calibration of this machine is for {others} ranks and not for {world}"
        return None, f"{line}: run `zcompile calibrate --ranks {world}`"
    except (OSError, ValueError) as error:
        return None, f"the calibration in {file} is not used, because {error}: {again}"
    expected = {"device": name, "driver": driver_of(device), "torch": torch.__version__, "world": world}
    for what, value in expected.items():
        if (theirs := getattr(calibration, what)) != value:
            return None, f"the calibration in {file} is not used, because its {what} is {theirs}, not {value}: {again}"
    return calibration, ""
