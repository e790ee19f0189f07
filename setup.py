"""Builds zcompile._C for the torch that is installed, with CUDA if torch and a toolkit have it.

`ZCOMPILE_CUDA=1` insists on CUDA, `ZCOMPILE_CUDA=0` builds for CPUs. `ZCOMPILE_EXTENSION=0` leaves the extension out of
an editable install, for `make install`, which builds it in place.
"""

import importlib.metadata
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

import setuptools
from setuptools import Extension, setup

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
CPU_FOLDERS = (".", "runtime", "transport", "kernels", "p2p/schedule")  # of csrc; a build with CUDA compiles all of it
TORCH = ((2, 11), (2, 16))  # the first version, and the first that is too new; as in pyproject.toml
SETUPTOOLS = 77  # the first version that accepts pyproject.toml's license
INSTALL = "pip install --no-build-isolation ."
CUDA_HEADERS = ("cuda.h", "cuda_runtime.h", "cuda_runtime_api.h", "cuda_bf16.h", "cuda_fp16.h")  # of csrc and nvcc
# Commands that compile, and `dist_info`, so that pip reports a missing tool before it downloads dependencies.
COMPILING = {"bdist_wheel", "build", "build_ext", "develop", "dist_info", "editable_wheel", "install"}


def fail(sentence: str) -> NoReturn:
    """End the build with one line."""
    sys.exit(f"zcompile: {sentence}")


def import_torch() -> Any:
    """Import the torch to build for."""
    # Stops torch from loading packages that register with it: an earlier zcompile may be installed, and broken.
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    wanted = ",".join(f"{sign}{major}.{minor}" for sign, (major, minor) in zip((">=", "<"), TORCH, strict=True))
    try:
        import torch
    except (ImportError, OSError) as error:
        fail(
            f"the build needs the torch that zcompile will run with ({error}). "
            f"Run: pip install 'torch{wanted}' 'setuptools>={SETUPTOOLS}' ninja && {INSTALL}"
        )
    if not TORCH[0] <= tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2]) < TORCH[1]:
        fail(f"torch {torch.__version__} is installed. Run: pip install 'torch{wanted}' && {INSTALL}")
    return torch


def check_tools() -> None:
    """End the build without ninja, a C++ compiler or Python's headers. Adds ninja, if a package has it, to PATH."""
    if shutil.which("ninja") is None:
        try:
            files = importlib.metadata.files("ninja") or []
        except importlib.metadata.PackageNotFoundError:
            fail(f"the build needs ninja. Run: pip install ninja && {INSTALL}")
        folders = [Path(file.locate()).resolve().parent for file in files if file.name == "ninja" and not file.suffix]
        os.environ["PATH"] = os.pathsep.join([*map(str, folders), os.environ.get("PATH", os.defpath)])
    compiler = shlex.split(os.environ.get("CXX", "c++"))[0]
    if shutil.which(compiler) is None:
        fail(
            f"there is no C++ compiler {compiler!r}. Run: apt-get install g++ (on Fedora and RHEL: dnf install "
            "gcc-c++), or set CXX to another one."
        )
    headers = Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        fail(
            f"Python.h is not in {headers}. Run: apt-get install python3-dev (on Fedora and RHEL: dnf install "
            "python3-devel)."
        )


def toolkits() -> list[Path]:
    """Return folders where a CUDA toolkit may be: CUDA_HOME, or otherwise nvcc's folders and /usr/local/cuda."""
    said = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if said:
        return [Path(said)]
    found = []
    if nvcc := shutil.which("nvcc"):
        found = [Path(nvcc).parents[1], Path(nvcc).resolve().parents[1]]
        # nvcc on the PATH may be a script that calls a toolkit's nvcc, whose dry run prints the toolkit's folder.
        steps = subprocess.run([nvcc, "--dryrun", "-x", "cu", os.devnull], capture_output=True, text=True).stderr
        found += [Path(top).resolve() for top in re.findall(r"^#\$ TOP=(.+)$", steps, flags=re.MULTILINE)]
    return [*found, Path("/usr/local/cuda")]


def missing_in(toolkit: Path, cuda: str) -> str:
    """Return why `toolkit` cannot build for a torch of CUDA version `cuda`; empty if it can."""
    nvcc = toolkit / "bin" / "nvcc"
    if not nvcc.is_file():
        return f"there is no {nvcc}"
    headers = [name for name in CUDA_HEADERS if not (toolkit / "include" / name).is_file()]
    if headers:
        return f"{nvcc} has no {', '.join(headers)} in {toolkit / 'include'}"
    libraries = [toolkit / "lib64", toolkit / "lib", toolkit / "lib" / str(sysconfig.get_config_var("MULTIARCH"))]
    if not any((folder / "libcudart.so").exists() for folder in libraries):
        return f"{nvcc} has no libcudart.so in {libraries[0]}"
    said = subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout
    version = re.search(r"release (\d+)\.", said)
    if version is None or version[1] != cuda.partition(".")[0]:
        return f"{nvcc} is of CUDA {version[1] if version else '?'} and torch of CUDA {cuda}"
    return ""


def find_cuda(torch: Any) -> Path | None:
    """Return the toolkit to build with; None for a build without CUDA."""
    asked = os.environ.get("ZCOMPILE_CUDA", "")
    if asked not in ("", "0", "1"):
        fail(f"ZCOMPILE_CUDA is {asked!r}. Set it to 1 (with CUDA) or 0 (for CPUs), or unset it.")
    if asked == "0" or (torch.version.cuda is None and not asked):
        return None
    if torch.version.cuda is None:
        fail(
            f"ZCOMPILE_CUDA=1, but torch {torch.__version__} is built without CUDA. Install a torch with CUDA "
            f"(https://pytorch.org/get-started), or run: ZCOMPILE_CUDA=0 {INSTALL}"
        )
    candidates = toolkits()
    reasons = [missing_in(toolkit, torch.version.cuda) for toolkit in candidates]
    if "" in reasons:
        return candidates[reasons.index("")]
    package = f"cuda-toolkit-{torch.version.cuda.replace('.', '-')}"
    home = f"CUDA_HOME=/usr/local/cuda-{torch.version.cuda}"
    mend = f"{reasons[0]}. Run: apt-get install {package} && {home} ZCOMPILE_CUDA=1 {INSTALL}"
    if asked:
        fail(f"ZCOMPILE_CUDA=1, but {mend}, or for CPUs: ZCOMPILE_CUDA=0 {INSTALL}")
    print(f"zcompile: this build is without CUDA, for {mend}", file=sys.stderr)
    return None


def sources(with_cuda: bool) -> list[str]:
    """Return the files to compile, as paths below the root."""
    if with_cuda:
        paths = [*CSRC.rglob("*.cpp"), *CSRC.rglob("*.cu")]
    else:
        paths = [path for folder in CPU_FOLDERS for path in (CSRC / folder).glob("*.cpp")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def cxx_runtime() -> list[str]:
    """Return the C++ runtime that torch has loaded into this process, to be linked first.

    Otherwise, some compilers link a static one, and a process with both crashes when zcompile formats a number.
    """
    mapped = [line.split(maxsplit=5)[-1].strip() for line in Path("/proc/self/maps").read_text().splitlines()]
    return [path for path in mapped if Path(path).name.startswith("libstdc++.so.6")][:1]


def extension() -> dict[str, Any]:
    """Return the arguments of `setup` for the compiled runtime. With CUDA, it includes csrc/p2p and the GPU kernels."""
    torch = import_torch()
    check_tools()
    toolkit = find_cuda(torch)
    if toolkit is not None:
        os.environ["CUDA_HOME"] = str(toolkit)  # which cpp_extension reads when it is imported
    from torch.utils import cpp_extension

    macros = [("ZCOMPILE_TORCH_VERSION", f'"{torch.__version__}"'), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)]
    warnings = ["-Wall", "-Wno-unknown-pragmas", "-Wno-interference-size"]
    flags: Any = ["-std=c++20", "-O2", "-g0", *warnings, "-fvisibility=hidden"]
    make = cpp_extension.CppExtension
    if toolkit is not None:
        make = cpp_extension.CUDAExtension
        macros.append(("ZCOMPILE_CUDA", None))
        flags = {"cxx": flags, "nvcc": ["-std=c++20", "-O3"]}
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    module = make(
        "zcompile._C",
        sources(toolkit is not None),
        include_dirs=[str(CSRC)],
        extra_compile_args=flags,
        extra_link_args=cxx_runtime(),
        define_macros=macros,
        depends=[str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h")],
    )
    build_ext = cpp_extension.BuildExtension.with_options(use_ninja=True)
    return {"ext_modules": [module], "cmdclass": {"build_ext": build_ext}}


def extension_modules() -> dict[str, Any]:
    """Return the arguments of `setup` for the extension: only its name, if no command compiles."""
    if os.environ.get("ZCOMPILE_EXTENSION") == "0":
        return {"ext_modules": []}
    return extension() if COMPILING & set(sys.argv) else {"ext_modules": [Extension("zcompile._C", [])]}


if int(setuptools.__version__.partition(".")[0]) < SETUPTOOLS:
    fail(f"setuptools {setuptools.__version__} is too old. Run: pip install 'setuptools>={SETUPTOOLS}' && {INSTALL}")

PACKAGES = setuptools.find_packages(include=["zcompile", "zcompile.*"], exclude=["zcompile.passes"])

setup(
    packages=[*PACKAGES, "zcompile.passes"],
    package_dir={"zcompile.passes": "passes"},  # in the checkout, zcompile/passes is a link to it
    package_data={"zcompile": ["py.typed", "*.pyi"], "zcompile.profile": ["*.j2"]},
    **extension_modules(),
)
