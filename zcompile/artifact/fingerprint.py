"""The fingerprint of an artifact: named texts that must be equal where the file is made and where it is loaded.

An error prints both values of each text that differs. So a long value is replaced by the number of its lines and their
hash (`_digest`).
"""

import dataclasses
import functools
import hashlib
import platform
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zcompile.artifact import kernels
from zcompile.artifact.groups import meshes_of
from zcompile.compiler.backend import link_of
from zcompile.options import Settings
from zcompile.source_hash import cache_key
from zcompile.state.attributes import RECIPE
from zcompile.state.sharded_model import ShardedModel, models_of, state_of
from zcompile.state.sharded_parameter import ShardedParameter

NUMBER = "device number"  # the GPU's; only in files whose code contains it, see `kernels.names_device_number`
ANY = "any_size"  # stands for a dynamic size or stride of an input
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def fingerprint(
    model: nn.Module, settings: Settings, mode: str | None, memory_bytes: int, args: Any, kwargs: Any
) -> dict[str, str]:
    """Return the fingerprint of this machine, the settings, a sharded model and its call.

    `memory_bytes` is a rank's memory, from which the plan takes the bytes that passes may use.
    """
    return {**surroundings(model, settings, mode, memory_bytes), **of_call(model, args, kwargs)}


def surroundings(model: nn.Module, settings: Settings, mode: str | None, memory_bytes: int) -> dict[str, str]:
    """Return the fingerprint fields of this machine and of the settings, which all programs of a file share."""
    state = state_of(model)
    return {**machine(state.mesh.device_type), **settings_of(state, settings, mode, memory_bytes)}


def of_call(model: nn.Module, args: Any, kwargs: Any) -> dict[str, str]:
    """Return the fingerprint fields of one compiled program: of `model` and of its call `model(*args, **kwargs)`."""
    with _outside_of_forward(model):
        return {**structure(model, state_of(model)), **modes(model), "inputs": inputs(args, kwargs)}


@contextmanager
def _outside_of_forward(model: nn.Module) -> Iterator[None]:
    """Context manager in which reads of parameters return sharded DTensors, as outside of a forward: no gathers."""
    state = state_of(model)
    before, state.in_compiled = state.in_compiled, False
    try:
        yield
    finally:
        state.in_compiled = before


def machine(device_type: str) -> dict[str, str]:
    """Return fingerprint fields: versions of software, and the GPU or processor for which code is compiled."""
    fields = {
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "zcompile": cache_key(),
        "cuda": str(torch.version.cuda),
        "triton": _triton_version(),
    }
    if device_type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        device = f"{torch.cuda.get_device_name()}, capability {major}.{minor}"
        remedy = "which torch writes into code: let each rank see one GPU (CUDA_VISIBLE_DEVICES)"
        return {**fields, "device": device, NUMBER: f"{torch.cuda.current_device()}, {remedy}"}
    instructions = f"{torch.backends.cpu.get_cpu_capability()}, flags {_processor_flags()}"
    device = f"{platform.machine()}, {instructions}"
    return {**fields, "device": device, "threads": str(torch.get_num_threads())}


@functools.cache
def _triton_version() -> str:
    return str(getattr(sys.modules.get("triton"), "__version__", None))


def _processor_flags() -> str:
    """Hash the names of this processor's instruction sets, because C++ kernels are compiled for them."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:  # not on Linux
        return platform.processor()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    return _digest(sorted(flags.split()))


def settings_of(state: ShardedModel, settings: Settings, mode: str | None, memory_bytes: int) -> dict[str, str]:
    """Return fingerprint fields: meshes, zcompile's settings, the plan that passes follow, and torch's settings."""
    options = {name: value for name, value in vars(settings).items() if name != "inductor"}
    return {
        "mesh": " and ".join(
            f"{list(mesh.shape)} on {mesh.device_type}" for mesh in dict.fromkeys(mesh for _, mesh in meshes_of(state))
        ),
        "plan": str(settings.plan(link_of(state, settings), memory_bytes)),
        "settings": str(options),
        "mode": str(mode),
        "inductor": str(dict(sorted(settings.inductor.items()))),
        "shard": state.provenance.shard_options,
        **_torch_settings(),
    }


# Not in the fingerprint, because they depend on the virtual environment, the working directory or the variable CI.
_NO_FIELDS = (
    "torch._dynamo.config.base_dir",
    "torch._dynamo.config.debug_dir_root",
    "torch._functorch.config.error_on_custom_op_aliasing",
)


def _torch_settings() -> dict[str, str]:
    """Return the settings of Dynamo, AOTAutograd and Inductor that torch's own caches have in their keys."""
    return {
        f"{config}.{name}": str(sorted(value, key=str) if isinstance(value, (set, frozenset)) else value)
        for config, settings in (
            ("torch._dynamo.config", torch._dynamo.config.save_config_portable()),
            ("torch._functorch.config", torch._functorch.config.save_config_portable()),
            ("torch._inductor.config", kernels.inductor_settings()),
        )
        for name, value in settings.items()
        if f"{config}.{name}" not in _NO_FIELDS
    }


def parameters_of(model: nn.Module) -> list[tuple[str, ShardedParameter, int]]:
    """Return (name, parameter, number of its domain) of each sharded parameter of `model`."""
    with _outside_of_forward(model):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        (names[id(sharded.parameter)], sharded, each.domain)
        for each in models_of(state_of(model))
        for sharded in each.in_modules()
        if id(sharded.parameter) in names
    ]


def structure(model: nn.Module, state: ShardedModel) -> dict[str, str]:
    """Return fingerprint fields: hashes of the modules and their code, of parameters, buffers and hooks."""
    parameters = [
        f"{name} {list(sharded.global_shape)} {sharded.leaf.dtype} requires_grad={sharded.leaf.requires_grad} "
        f"cut along {sharded.layout.dim} in domain {domain}{_spread(sharded)}"
        for name, sharded, domain in parameters_of(model)
    ]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    reads = [
        f"{path}.{attribute} is {names[id(parameter)]}"
        for path, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]
    sharded = {id(each.parameter) for part in models_of(state) for each in part.parameters.values()}
    others = [
        f"{name} {described(parameter)}" for name, parameter in model.named_parameters() if id(parameter) not in sharded
    ]
    return {
        "modules": _digest(_modules(model)),
        "parameters": _digest(parameters),
        "ties": _digest(reads),
        "unsharded parameters": _digest(others),
        "buffers": _digest(f"{name} {described(buffer)}" for name, buffer in model.named_buffers()),
        "hooks": _digest(hooks_of(model)),
    }


def _spread(sharded: ShardedParameter) -> str:
    """Describe the placements of a parameter under tensor or expert parallelism; "" for any other parameter."""
    parameter, layout = sharded.parameter, sharded.layout
    if not isinstance(parameter, DTensor) or not (layout.inner or layout.local):
        return ""
    return f" as {parameter.placements} over {parameter.device_mesh.mesh_dim_names} local={layout.local}"


def _modules(model: nn.Module) -> list[str]:
    """Return a line for each module: its class, the subclass that `zcompile.shard` made, and hashes of its forward."""
    lines = []
    for path, module in model.named_modules():
        base, kind = getattr(type(module), RECIPE, (type(module), None))
        if kind is not None:  # without the shapes in `kind`, which may differ between ranks
            layouts = [(name, dataclasses.replace(layout, shape=(), inner=None)) for name, layout in kind.layouts]
            kind = dataclasses.replace(kind, layouts=tuple(layouts))
        forwards = f"{code_hash(type(module).forward)} {code_hash(base.forward)}"  # the subclass's may call the base's
        lines.append(f"{path} {module_name(base)}.{base.__qualname__} {kind} {forwards}")
    return lines


def module_name(value: Any) -> str:
    """Return the module of a class or function; for `__main__`, the name of the program's file."""
    name = getattr(value, "__module__", None) or ""
    if name == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return Path(file).stem if file else name
    return name


def code_hash(function: Callable[..., Any] | types.CodeType) -> str:
    """Hash the bytecode, names and constants of a function, without its file and line."""
    code = function if isinstance(function, types.CodeType) else getattr(function, "__code__", None)
    return hashlib.sha256(_code_text(code).encode()).hexdigest()[:16] if code is not None else str(function)


def _code_text(code: types.CodeType) -> str:
    constants = [_code_text(each) if isinstance(each, types.CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars} {constants}"


def hooks_of(model: nn.Module) -> list[str]:
    """List the hooks of all modules, because Dynamo traces them."""
    return [
        f"{path} {kind} {_function_name(hook)}"
        for path, module in model.named_modules()
        for kind in HOOKS
        for hook in getattr(module, kind).values()
    ]


def _function_name(function: Any) -> str:
    inner = getattr(function, "func", function)  # of a functools.partial
    return f"{module_name(inner)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"


def modes(model: nn.Module) -> dict[str, str]:
    """Return fingerprint fields: torch's state that changes compiled code, and which modules are in training mode."""
    kinds = ("cpu", "cuda")
    autocast = [
        f"{kind} {torch.get_autocast_dtype(kind)} cache={torch.is_autocast_cache_enabled()}"
        for kind in kinds
        if torch.is_autocast_enabled(kind)
    ]
    backends: Any = torch.backends
    precisions = (backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul)
    reduced = (
        backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        backends.cuda.matmul.allow_fp16_accumulation,
    )
    return {
        "training": _digest(path for path, module in model.named_modules() if module.training),
        "autocast": ", ".join(autocast) or "off",
        "gradients": f"grad={torch.is_grad_enabled()} inference={torch.is_inference_mode_enabled()}",
        "determinism": f"{torch.get_deterministic_debug_mode()} cudnn={torch.backends.cudnn.deterministic}",
        "precision": f"{[each.fp32_precision.replace('none', 'ieee') for each in precisions]} {reduced}",
        "default dtype": str(torch.get_default_dtype()),
    }


def inputs(args: Any, kwargs: Any) -> str:
    leaves, shape = torch.utils._pytree.tree_flatten((args, kwargs))
    return f"{', '.join(map(described, leaves))} in {shape}"


def described(value: Any) -> str:
    """Describe a tensor by class, layout, dtype and device type, a plain value by `repr`, other objects by class."""
    if isinstance(value, torch.Tensor):
        layout = f"{list(value.shape)} stride {list(value.stride())}" if value.layout is torch.strided else value.layout
        if dynamic := getattr(value, "_dynamo_weak_dynamic_indices", ()):  # set by torch._dynamo.maybe_mark_dynamic
            sizes = ", ".join(ANY if i in dynamic else str(size) for i, size in enumerate(value.shape))
            layout = f"[{sizes}] stride [{', '.join('1' if stride == 1 else ANY for stride in value.stride())}]"
        return f"{type(value).__name__} {layout} {value.dtype} {value.device.type} requires_grad={value.requires_grad}"
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype)):
        return repr(value)
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _digest(lines: Iterable[str]) -> str:
    lines = list(lines)
    return f"{len(lines)}, SHA-256 {hashlib.sha256(chr(10).join(lines).encode()).hexdigest()[:16]}"


def differences(made: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return a line for each fingerprint field that differs between a file (`made`) and this process (`here`).

    The GPU's number is compared only if the file has it. `ANY` equals every size: guards check dynamic sizes.
    """
    return [
        f"{name}: made for {made.get(name, 'nothing')}; here {here.get(name, 'nothing')}"
        for name in {**made, **here}
        if not _equal(made.get(name), here.get(name)) and (name != NUMBER or name in made)
    ]


def _equal(made: str | None, here: str | None) -> bool:
    if made is None or here is None or ANY not in made:
        return made == here
    return re.fullmatch(re.escape(made).replace(ANY, rf"(\d+|{ANY})"), here) is not None
