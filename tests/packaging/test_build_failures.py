"""A build that lacks something ends in one sentence with the remedy. Stand-ins for torch and CUDA compile nothing."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[2]
# setup.py passes its findings to torch's cpp_extension, and this one says what it got.
CPP_EXTENSION = """
import os
from setuptools import Extension
from setuptools.command.build_ext import build_ext

def CppExtension(name, sources, **settings):
    return Extension(name, sources)

def CUDAExtension(name, sources, **settings):
    module = Extension(name, sources)
    module.cuda_home = os.environ["CUDA_HOME"]
    return module

class BuildExtension(build_ext):
    @classmethod
    def with_options(cls, **options):
        return cls

    def run(self):
        print("built with", getattr(self.distribution.ext_modules[0], "cuda_home", "CPU"))
"""
NVCC = """#!/bin/sh
case "$*" in
*--version*) echo "Cuda compilation tools, release {version}, V{version}.88" ;;
*--dryrun*) echo "#\\$ TOP={top}" >&2 ;;
esac
"""
HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h")


def write(path: Path, text: str = "", mode: int = 0o644) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


class Machine:
    """A torch, tools and a folder for toolkits, and none of what this machine really has."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.path = folder / "bin"
        self.environment: dict[str, str] = {}
        for tool in ("ninja", "c++"):
            write(self.path / tool, "#!/bin/sh\n", 0o755)
        self.torch("2.15.0", "13.0")

    def torch(self, version: str, cuda: str | None) -> None:
        package = self.folder / "site" / "torch"
        write(package / "__init__.py", f"from torch import version\n__version__ = {version!r}\n")
        write(package / "version.py", f"cuda = {cuda!r}\n")
        write(package / "utils" / "__init__.py")
        write(package / "utils" / "cpp_extension.py", CPP_EXTENSION)

    def toolkit(self, name: str, headers=HEADERS, version: str = "13.0") -> Path:
        folder = self.folder / name
        write(folder / "bin" / "nvcc", NVCC.format(version=version, top=folder), 0o755)
        write(folder / "lib64" / "libcudart.so")
        for header in headers:
            write(folder / "include" / header)
        return folder

    def build(self, command: str = "build_ext", **environment: str) -> subprocess.CompletedProcess:
        """`setup.py COMMAND` with nothing on the PATH but this machine's tools."""
        own = ("CUDA_HOME", "CUDA_PATH", "ZCOMPILE_CUDA", "CXX", "PYTHONPATH")
        clean = {name: value for name, value in os.environ.items() if name not in own}
        everything = clean | {"PYTHONPATH": str(self.folder / "site"), "PATH": str(self.path)} | environment
        setup = [sys.executable, ROOT / "setup.py", "--quiet", "egg_info", "--egg-base", self.folder, command]
        return subprocess.run(setup, cwd=ROOT, env=everything, capture_output=True, text=True)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    return Machine(tmp_path)


def sentence_of(done: subprocess.CompletedProcess) -> str:
    """What a failed build says of itself: its last line, without a traceback."""
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert done.stderr.count("zcompile: ") == 1, done.stderr
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("command", ["build_ext", "dist_info"])  # by the latter, pip learns it before it downloads
def test_without_torch_the_build_names_the_command(machine, command):
    write(machine.folder / "site" / "torch" / "__init__.py", "raise ModuleNotFoundError(\"No module named 'torch'\")")
    said = sentence_of(machine.build(command))
    assert "pip install 'torch>=2.11,<2.16' 'setuptools>=77' ninja && pip install --no-build-isolation ." in said


@pytest.mark.parametrize("version", ["2.10.1", "2.16.0", "3.0.0"])
def test_another_torch_is_refused(machine, version):
    machine.torch(version, None)
    assert f"torch {version} is installed. Run: pip install 'torch>=2.11,<2.16'" in sentence_of(machine.build())


def test_torch_versions_are_those_of_pyproject():
    (said,) = re.findall(r'dependencies = \["torch([^"]*)"', (ROOT / "pyproject.toml").read_text())
    assert said == ">=2.11,<2.16" and "((2, 11), (2, 16))" in (ROOT / "setup.py").read_text()


def test_an_old_setuptools_is_refused(machine):
    write(machine.folder / "site" / "sitecustomize.py", "import setuptools\nsetuptools.__version__ = '65.5.0'\n")
    assert "setuptools 65.5.0 is too old. Run: pip install 'setuptools>=77' &&" in sentence_of(machine.build())
    assert 'requires = ["setuptools>=77"]' in (ROOT / "pyproject.toml").read_text()


def test_without_a_compiler_the_build_names_the_command(machine):
    said = sentence_of(machine.build(CXX="no-such-compiler -O2"))
    assert "no C++ compiler 'no-such-compiler'" in said and "apt-get install g++" in said


def test_without_ninja_the_build_names_the_command(machine):
    (machine.path / "ninja").unlink()
    hidden = "from importlib import metadata\ndef files(name): raise metadata.PackageNotFoundError(name)\n"
    write(machine.folder / "site" / "sitecustomize.py", hidden + "metadata.files = files\n")
    assert "pip install ninja && " in sentence_of(machine.build())


def test_ninja_is_found_in_an_environment_that_is_not_activated(machine):
    (machine.path / "ninja").unlink()
    pytest.importorskip("ninja")
    done = machine.build(ZCOMPILE_CUDA="0")
    assert done.returncode == 0 and "built with CPU" in done.stdout, done.stderr


def test_cuda_is_built_with_a_whole_toolkit(machine):
    toolkit = machine.toolkit("cuda")
    done = machine.build(CUDA_HOME=str(toolkit))
    assert done.returncode == 0 and f"built with {toolkit}" in done.stdout, done.stderr


def test_nvcc_on_the_path_without_headers_is_asked_for_its_toolkit(machine):
    toolkit = machine.toolkit("cuda")
    shutil.copy(toolkit / "bin" / "nvcc", machine.path)
    done = machine.build()
    assert done.returncode == 0 and f"built with {toolkit}" in done.stdout, done.stderr


INCOMPLETE = {
    "headers": ({"headers": HEADERS[:1]}, "has no cuda_runtime.h, cuda_runtime_api.h, cuda_bf16.h, cuda_fp16.h in"),
    "version": ({"version": "12.4"}, "is of CUDA 12 and torch of CUDA 13.0"),
}


@pytest.mark.parametrize("toolkit, reason", INCOMPLETE.values(), ids=INCOMPLETE)
def test_an_incomplete_toolkit_gives_a_build_for_cpus_and_a_sentence(machine, toolkit, reason):
    done = machine.build(CUDA_HOME=str(machine.toolkit("cuda", **toolkit)))
    assert done.returncode == 0 and "built with CPU" in done.stdout, done.stderr
    (said,) = [line for line in done.stderr.splitlines() if line.startswith("zcompile: ")]
    assert reason in said and "apt-get install cuda-toolkit-13-0 && CUDA_HOME=/usr/local/cuda-13.0" in said


@pytest.mark.parametrize("toolkit, reason", INCOMPLETE.values(), ids=INCOMPLETE)
def test_where_cuda_is_asked_for_an_incomplete_toolkit_ends_the_build(machine, toolkit, reason):
    said = sentence_of(machine.build(CUDA_HOME=str(machine.toolkit("cuda", **toolkit)), ZCOMPILE_CUDA="1"))
    assert reason in said and "for CPUs: ZCOMPILE_CUDA=0 pip install" in said


def test_where_cuda_is_asked_for_a_torch_without_it_ends_the_build(machine):
    machine.torch("2.13.0+cpu", None)
    assert "torch 2.13.0+cpu is built without CUDA" in sentence_of(machine.build(ZCOMPILE_CUDA="1"))


def test_zcompile_cuda_0_builds_for_cpus_without_a_word(machine):
    done = machine.build(CUDA_HOME=str(machine.toolkit("cuda")), ZCOMPILE_CUDA="0")
    assert done.returncode == 0 and "built with CPU" in done.stdout and "zcompile:" not in done.stderr


def test_another_value_of_zcompile_cuda_is_refused(machine):
    assert "ZCOMPILE_CUDA is 'yes'. Set it to 1" in sentence_of(machine.build(ZCOMPILE_CUDA="yes"))


FOUND_NVCC = shutil.which("nvcc")
SOURCES = Path(__file__).parents[2] / "csrc"

needs_nvcc = pytest.mark.skipif(FOUND_NVCC is None, reason="needs nvcc")


def compile_with(command):
    finished = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr[-4000:]


def kernels():
    for source in sorted(SOURCES.rglob("*.cu")):
        yield pytest.param(source, id=source.name, marks=[] if source.name == "cast.cu" else pytest.mark.slow)


@needs_nvcc
@pytest.mark.parametrize("source", kernels())
def test_kernels_compile_without_warnings(source, tmp_path):
    flags = ["-std=c++20", f"-I{SOURCES}", "-arch=sm_90", "-Werror", "all-warnings"]
    compile_with([FOUND_NVCC, *flags, "-c", source, "-o", tmp_path / "kernels.o"])


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("source", sorted(SOURCES.rglob("*.cpp")), ids=lambda path: str(path.relative_to(SOURCES)))
def test_sources_have_no_errors_in_a_build_with_cuda(source, tmp_path):
    """Syntax and types. A CPU build of torch has the CUDA headers but for one that says how libraries are linked."""
    toolkit = Path(FOUND_NVCC).resolve().parent.parent / "include"
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
