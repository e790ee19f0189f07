"""Builds zcompile._C for the torch that is installed, with CUDA where torch and nvcc have it."""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"


def extension():
    """The compiled runtime; csrc/cuda joins in when this torch has CUDA and nvcc is there."""
    with_cuda = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    folders = [CSRC, CSRC / "cuda"] if with_cuda else [CSRC]
    sources = sorted(path for folder in folders for path in folder.iterdir() if path.suffix in (".cpp", ".cu"))
    macros = [("ZCOMPILE_TORCH_VERSION", f'"{torch.__version__}"'), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)]
    flags = ["-std=c++20", "-O2", "-g0", "-Wall", "-Wno-unknown-pragmas", "-Wno-interference-size", "-fvisibility=hidden"]
    make = cpp_extension.CppExtension
    if with_cuda:
        make = cpp_extension.CUDAExtension
        macros.append(("ZCOMPILE_CUDA", None))
        flags = {"cxx": flags, "nvcc": ["-std=c++20", "-O3"]}
        os.environ.setdefault("TORCH_CUDA_ARCH_LIST", "8.0;9.0+PTX")
    return make(
        "zcompile._C",
        [str(path.relative_to(ROOT)) for path in sources],
        extra_compile_args=flags,
        define_macros=macros,
        depends=[str(path.relative_to(ROOT)) for path in CSRC.rglob("*.h")],
    )


setup(
    packages=["zcompile", "zcompile.profile", "zcompile.passes", "zcompile_flag"],
    package_dir={"zcompile": "zcompile", "zcompile.passes": "passes", "zcompile_flag": "zcompile/flag"},
    package_data={"zcompile.profile": ["*.j2"]},
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
)
