"""Builds zcompile._C for the torch that is installed, with CUDA where torch and nvcc have it."""

from pathlib import Path

import torch
from setuptools import setup
from torch.utils import cpp_extension

ROOT = Path(__file__).parent


def extension():
    """The compiled runtime; .cu files join in when this torch has CUDA and nvcc is there."""
    with_cuda = torch.version.cuda is not None and cpp_extension.CUDA_HOME is not None
    kernels = sorted((ROOT / "csrc").glob("*.cu")) if with_cuda else []
    sources = [str(path.relative_to(ROOT)) for path in [*sorted((ROOT / "csrc").glob("*.cpp")), *kernels]]
    make = cpp_extension.CUDAExtension if kernels else cpp_extension.CppExtension
    flags = ["-std=c++20", "-O2", "-g0", "-Wall", "-Wno-unknown-pragmas", "-fvisibility=hidden"]
    return make(
        "zcompile._C",
        sources,
        extra_compile_args={"cxx": flags, "nvcc": ["-std=c++20", "-O3"]} if kernels else flags,
        define_macros=[("ZCOMPILE_TORCH_VERSION", f'"{torch.__version__}"'), ("USE_DISTRIBUTED", None), ("USE_C10D_GLOO", None)],
        depends=[str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob("*.h")],
    )


setup(
    packages=["zcompile", "zcompile.passes"],
    package_dir={"zcompile": "zcompile", "zcompile.passes": "passes"},
    ext_modules=[extension()],
    cmdclass={"build_ext": cpp_extension.BuildExtension.with_options(use_ninja=True)},
)
