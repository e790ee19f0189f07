"""Sources that only a build with CUDA takes still compile. Skipped without nvcc; nothing is run."""

import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

NVCC = shutil.which("nvcc")
SOURCES = Path(__file__).parents[2] / "csrc"

pytestmark = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def compile_with(command):
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]


def kernels():
    for source in sorted(SOURCES.rglob("*.cu")):
        yield pytest.param(source, id=source.name, marks=[] if source.name == "cast.cu" else pytest.mark.slow)


@pytest.mark.parametrize("source", kernels())
def test_kernels_compile_without_warnings(source, tmp_path):
    flags = ["-std=c++20", f"-I{SOURCES}", "-arch=sm_90", "-Werror", "all-warnings"]
    compile_with([NVCC, *flags, "-c", source, "-o", tmp_path / "kernels.o"])


@pytest.mark.slow
@pytest.mark.parametrize("source", sorted(SOURCES.rglob("*.cpp")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_sources_have_no_errors_in_a_build_with_cuda(source, tmp_path):
    """Syntax and types. A CPU build of torch has the CUDA headers but for one that says how libraries are linked."""
    toolkit = Path(NVCC).resolve().parent.parent / "include"
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include"), toolkit, "/usr/local/cuda/include"]
    if torch.version.cuda is None:
        generated = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
        generated.parent.mkdir(parents=True)
        generated.write_text("#pragma once\n")
        includes.append(tmp_path)
    flags = ["-std=c++20", "-fsyntax-only", f"-I{SOURCES}", "-Wall", "-Wno-interference-size"]
    flags += ["-DUSE_DISTRIBUTED", "-DZCOMPILE_CUDA", '-DZCOMPILE_TORCH_VERSION="any"']
    flags += [part for path in includes for part in ("-isystem", path)]
    compile_with(["g++", *flags, source])
