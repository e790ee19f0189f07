"""Decide if a read of `module.weight` all-gathers the parameter: it does inside of a forward, also a recomputed one.

[Note: inside of a forward]
Outside of every forward, `module.weight` is the sharded DTensor, as under FSDP2: `hasattr`, `print` and checks of a
dtype need no other rank, and writes reach the parameter. Inside of a forward, a read all-gathers. To know which holds,
`__call__` of each module counts the forwards that its thread is inside of. Dynamo compiles only code that `__call__`
calls, so the count is also right in eager code after a graph break. A read that Dynamo traces always all-gathers. In
backward, a read all-gathers if grad mode is on: then activation checkpointing recomputes a forward. Hooks run with grad
mode off, so they see the DTensor.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch._dynamo.eval_frame import skip_code

from zcompile.state.attributes import AROUND, PLANS, SHARDED, STATE
from zcompile.state.sharded_model import ShardedModel


def never_compiled_alone(function: Any) -> Any:
    """Keep Dynamo from compiling `function` on its own. Dynamo still inlines it into callers. Return `function`.

    Why: modules read a parameter through a property. If Dynamo has given up on the code with the read, it would compile
    the property's getter by itself, once for each shape, up to its recompile limit.
    """
    skip_code(function.__code__)
    return function


class _Thread(threading.local):
    forwards = 0  # the number of nested forwards that this thread is inside of
    models: tuple[ShardedModel, ...] = ()  # the models whose outermost forward this thread is inside of
    is_eager = False  # inside of `call_eagerly`
    looks_again = False  # whether the next call of a module must check all parameters of its model for replaced ones
    announced_depth = -1  # `announce` is called with each module whose forward begins at this value of `forwards`
    announce: Callable[[Any], None]


_thread = _Thread()


@never_compiled_alone
def is_in_forward() -> bool:
    """Whether a read of a parameter all-gathers it now; see [Note: inside of a forward]."""
    return _thread.forwards > 0 or (torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled())


@never_compiled_alone
def look_again() -> None:
    """Let the next module call look for replaced parameters, because eager code got `_parameters`, and may edit it."""
    if _thread.forwards > 0 and callable(get_eval_frame_callback()):
        _thread.looks_again = True


@never_compiled_alone
def is_transformed() -> bool:
    """Whether a transform of `torch.func`, such as `grad` or `vmap`, is active."""
    return torch._C._are_functorch_transforms_active()


def announces() -> bool:
    """Whether a forward that begins now is outermost in a `with announcing(...)` block, and so is announced."""
    return _thread.forwards == _thread.announced_depth


@contextlib.contextmanager
def announcing(announce: Callable[[Any], None]) -> Iterator[None]:
    """Context manager: call `announce(module)` before each outermost forward that begins in the `with` block."""
    before = _thread.announced_depth, getattr(_thread, "announce", None)
    _thread.announced_depth, _thread.announce = _thread.forwards, announce
    try:
        yield
    finally:
        _thread.announced_depth, _thread.announce = before  # type: ignore[assignment]


@never_compiled_alone
def is_compiled_call(module: Any) -> bool:
    """Whether a call of `module` would now run compiled code, or call functions that Dynamo may compile."""
    if _thread.is_eager:
        return False
    callback: Any = get_eval_frame_callback()
    return module._compiled_call_impl is not None or (callback is not None and callback is not False)


@never_compiled_alone
def is_planned_call(module: Any) -> bool:
    """Whether a call of `module` would now run graphs of zcompile, which gather and free parameters themselves."""
    if not is_compiled_call(module):
        return False
    backend: Any = get_eval_frame_callback()
    if module._compiled_call_impl is not None:
        get_config = getattr(module._compiled_call_impl, "get_compiler_config", None)
        if get_config is None:  # code of an artifact
            return True
        backend = get_config.__closure__[0].cell_contents.callback  # of torch's OptimizeContext
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    backend = getattr(backend, "compiler_fn", backend)  # torch wraps backends that are not Inductor
    return hasattr(getattr(backend, "func", backend), PLANS)  # `backend` may be a functools.partial


@never_compiled_alone
def _run(around: Callable[..., Any], call: Callable[..., Any], module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return around(call, module, args, kwargs)


def with_around(around: Callable[[Any, Any, Any, Any], Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `call(module, *args)` in `around`. Dynamo traces the wrapper."""
    return functools.partial(_run, around, call)


@torch.compiler.disable
def _enter(*states: ShardedModel) -> bool:
    """Prepare `states` for an outermost or compiled forward. Return whether this forward must run in eager."""
    return sum(state.enter_forward() for state in states) > 0  # a sum, not any(): all states must be prepared


@torch.compiler.disable
def _prepare_call(module: Any, checks_all: bool) -> bool:
    """Before a call of `module`, check its parameters or, with `checks_all`, all of its model. Return whether the call
    must run in eager."""
    state: ShardedModel = module.__dict__[STATE]
    return state.enter_forward() if checks_all else state.enter_module(module)


@never_compiled_alone
def _is_outermost(module: Any) -> bool:
    """Whether a call of `module` now would begin a forward of its model, and be in no other forward of that model.

    Modules of units have a ShardedModel of their own (`are_units`). Inside of any forward, a call of them begins none.
    """
    state: ShardedModel = module.__dict__[STATE]
    return _thread.forwards == 0 or not (state.are_units or state in _thread.models)


def counting_call(
    base: type[nn.Module], is_root: bool, around: Callable[[Any, Any, Any, Any], Any] | None
) -> Callable[..., Any]:
    """Return a `__call__` for a subclass of `base` that counts this thread's forwards; [Note: inside of a forward].

    Args:
        is_root: whether the module is a whole model that has units; see [Note: order of units] in units/order.py.
        around: called as `around(call, module, args, kwargs)`; it runs `call(module, *args, **kwargs)`. For a block or
            unit, it gathers before this call and frees after it. None: the forward runs as it is.
    """
    # Dynamo traces the plain call, even if the module has a compiled call.
    traced_call = nn.Module._call_impl if base.__call__ is nn.Module.__call__ else base.__call__

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return traced_call(self, *args, **kwargs) if around is None else around(traced_call, self, args, kwargs)
        if not _thread.is_eager:
            if not is_root and _thread.forwards == _thread.announced_depth:
                _thread.announce(self)
            checks_all = _is_outermost(self) or _thread.looks_again
            enters = checks_all or self._compiled_call_impl is not None
            _thread.looks_again = False
            # A transform, such as `jacrev`, may batch the backward of compiled code, which could not gather then.
            if enters and (_prepare_call(self, checks_all) or is_transformed()):
                return call_eagerly(__call__, (self, *args), kwargs)
        models, call_outermost = _thread.models, None
        if _is_outermost(self):
            _thread.models, call_outermost = (*models, self.__dict__[STATE]), self.__dict__[STATE].call_outermost
        _thread.forwards += 1
        try:
            call = base.__call__  # looked up at each call, because tracers of modules patch it
            if call_outermost is not None:
                return call_outermost(call if around is None else with_around(around, call), self, args, kwargs)
            return call(self, *args, **kwargs) if around is None else around(call, self, args, kwargs)
        finally:
            _thread.forwards -= 1
            _thread.models = models

    def call_root(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return __call__(self, *args, **kwargs)
        if _thread.forwards == _thread.announced_depth:  # first, because `announce` may raise
            _thread.announce(self)
        if not _is_outermost(self):
            return __call__(self, *args, **kwargs)
        order = self.__dict__[STATE].unit_order
        order.enter_root()
        try:
            result = __call__(self, *args, **kwargs)
        except BaseException:
            order.leave_root_by_error()
            raise
        order.leave_root(result)
        return result

    never_compiled_alone(__call__)
    return never_compiled_alone(call_root) if is_root else __call__


def checking_requires_grad(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `compiled`, the code of one graph: raise if `requires_grad` of a leaf differs from its parameter's.

    A call of the model copies `requires_grad` from parameters to leaves, which graphs read. If a compiled function
    calls the model, Dynamo reads the leaves before that copy.
    """

    def run(*args: Any) -> Any:
        if _thread.forwards == 0:
            for arg in args:
                sharded: Any = getattr(arg, SHARDED, lambda: None)()
                if sharded is not None and sharded.parameter.requires_grad is not arg.requires_grad:
                    raise RuntimeError(
                        f"zcompile: requires_grad of parameter '{sharded.name}' was set as an attribute (rank "
                        f"{dist.get_rank()}), which a compiled function that calls the model does not see. Call "
                        f"parameter.requires_grad_({sharded.parameter.requires_grad}), or compile the model instead."
                    )
        return compiled(*args)

    return run


@torch.compiler.disable
def call_eagerly(call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    was_eager, _thread.is_eager = _thread.is_eager, True
    try:
        with torch.compiler.set_stance("force_eager"):
            return call(*args, **kwargs)
    finally:
        _thread.is_eager = was_eager


def _without_module(method: Callable[..., Any]) -> Callable[..., Any]:
    return never_compiled_alone(lambda module, /, *args, **kwargs: method(*args, **kwargs))


def register_forward_method(module: nn.Module, name: str) -> None:
    """Let `module.name(...)` read parameters as a forward does, as `register_fsdp_forward_method` does for FSDP2.

    Outside of forwards, `module.weight` is the sharded DTensor. So register each method that computes with parameters
    and that your program calls directly, such as `model.encode(x)`. Calls of modules (`module(x)`) work without this.

    Args:
        module: a module of a sharded model, or one that contains sharded models. Other modules are left unchanged.
        name: the name of the method. It is replaced on this one module.

    Raises:
        ValueError: the module has no such method.
    """
    method = getattr(module, name, None)
    if not callable(method):
        raise ValueError(f"zcompile.register_forward_method: {type(module).__name__} has no method '{name}'.")
    states = {each.__dict__[STATE] for each in module.modules() if STATE in each.__dict__}
    if not states:
        return

    around = getattr(module, AROUND, None)
    call = _without_module(method)

    @functools.wraps(method)
    def counted(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return method(*args, **kwargs) if around is None else around(call, module, args, kwargs)
        if not _thread.is_eager:
            if _thread.forwards == _thread.announced_depth:
                _thread.announce(module)
            if _enter(*states):
                return call_eagerly(counted, args, kwargs)
        models, call_outermost = _thread.models, None
        if STATE in module.__dict__ and _is_outermost(module):
            _thread.models, call_outermost = (*models, module.__dict__[STATE]), module.__dict__[STATE].call_outermost
        _thread.forwards += 1
        try:
            if call_outermost is not None:
                return call_outermost(call if around is None else with_around(around, call), module, args, kwargs)
            return method(*args, **kwargs) if around is None else around(call, module, args, kwargs)
        finally:
            _thread.forwards -= 1
            _thread.models = models

    setattr(module, name, never_compiled_alone(counted))
