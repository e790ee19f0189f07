"""Triton kernels of a user in graphs that are traced without a GPU: `zcompile explain`.

To know which tensors a kernel writes, torch compiles it to Triton's first representation, and Triton asks its driver
for which GPU. Where there is none, torch takes every argument for written, and graphs have copies that nobody makes.
"""

import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

import torch

CAPABILITY, WARP_THREADS = 90, 32  # of Hopper; which arguments are written is the same for every GPU


class _Driver:
    """As much of a driver of Triton as tracing asks for."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", CAPABILITY, WARP_THREADS)


@contextlib.contextmanager
def triton_without_gpu() -> Iterator[None]:
    """Inside, Triton kernels can be traced, though not run, on a machine without a GPU. With one, nothing changes."""
    if torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
        yield
        return
    from triton.runtime import driver

    driver.set_active(_Driver())
    try:
        yield
    finally:
        driver.set_active(None)  # it looks for GPUs anew
