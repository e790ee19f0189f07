"""Builds zcompile._C for the torch that is installed, with CUDA where torch and nvcc have it."""

import os
from pathlib import Path

import torch
from setuptools import Extension, setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
CPU_FOLDERS = (".", "runtime", "transport", "kernels", "p2p/schedule")  # of csrc; a build with CUDA compiles all of it


def sources(with_cuda: bool) -> list[str]:
    """Paths below the root, as setuptools wants them."""
    if with_cuda:
        paths = [*CSRC.rglob("*.cpp"), *CSRC.rglob("*.cu")]
    else:
        paths = [path for folder in CPU_FOLDERS for path in (CSRC / folder).glob("*.cpp")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def extension() -> Extension:
    """The compiled runtime; csrc/p2p and the kernels for GPUs join in when this torch has CUDA and nvcc is there."""
    with_cuda = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    macros = [("ZCOMPILE_TORCH_VERSION", f'"{torch.__version__}"'), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)]
    flags = [
        "-std=c++20",
        "-O2",
        "-g0",
        "-Wall",
        "-Wno-unknown-pragmas",
        "-Wno-interference-size",
        "-fvisibility=hidden",
    ]
    make = cpp_extension.CppExtension
    if with_cuda:
        make = cpp_extension.CUDAExtension
        macros.append(("ZCOMPILE_CUDA", None))
        flags = {"cxx": flags, "nvcc": ["-std=c++20", "-O3"]}
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return make(
        "zcompile._C",
        sources(with_cuda),
        include_dirs=[str(CSRC)],
        extra_compile_args=flags,
        define_macros=macros,
        depends=[str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h")],
    )


PACKAGES = ["zcompile", *(f"zcompile.{name}" for name in ("analysis", "deepspeed", "planning", "profile", "sharding"))]

setup(
    packages=[*PACKAGES, "zcompile.passes"],
    package_dir={"zcompile.passes": "passes"},  # in the checkout, zcompile/passes is a link to it
    py_modules=["zcompile_flag"],
    package_data={"zcompile": ["py.typed", "*.pyi"], "zcompile.profile": ["*.j2"]},
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
)
