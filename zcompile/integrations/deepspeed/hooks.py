"""Removes DeepSpeed's hooks while zcompile trains an engine, and does the work of the engine's forward hooks.

Compiled graphs gather and reduce, so DeepSpeed's hooks must not. The engine's two forward hooks run timers, casts to
fp16 and profilers. They are removed, because they would be compiled with the module; `Hooks.around_forward` calls
their functions outside of the compiled graph.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

from zcompile.integrations.deepspeed.partitions import ZeroParameter


def hooked_parameter(engine: Any) -> str:
    """Return the name of a parameter with hooks of the program, or "". Compiled code would not call such hooks."""
    own = {handle.id for handle in engine.optimizer._grad_acc_hooks if hasattr(handle, "id")}
    for name, parameter in engine.module.named_parameters():
        if parameter._backward_hooks or any(id not in own for id in parameter._post_accumulate_grad_hooks or ()):
            return name
    return ""


class Hooks:
    def __init__(self, engine: Any):
        self.engine = engine
        self.persistent: list[ZeroParameter] = []  # small parameters that DeepSpeed would keep unsharded
        self.removed = False

    def release_parameters(self) -> None:
        """Partition all parameters, also small ones that DeepSpeed keeps unsharded."""
        optimizer = self.engine.optimizer
        self.persistent = list(optimizer.persistent_parameters)
        optimizer.persistent_parameters = []
        for parameter in self.persistent:
            parameter.ds_persist = False
        optimizer._partition_all_parameters()

    def remove(self) -> None:
        """Remove the hooks that gather, release and reduce, and the engine's forward hooks."""
        engine, optimizer = self.engine, self.engine.optimizer
        self.removed = True
        engine.module_forward_pre_hook.remove()
        engine.module_forward_post_hook.remove()
        self.remove_of_modules()
        for handles in (optimizer._grad_acc_hooks, optimizer._leaf_module_hooks):
            for handle in handles:
                handle.remove()
            handles.clear()

    def remove_of_modules(self) -> None:
        """Remove the hooks of modules. TRL registers them again after it has generated text."""
        offload = self.engine.optimizer.parameter_offload
        offload._remove_module_hooks()
        offload.forward_hooks.clear()
        offload.backward_hooks.clear()

    def restore(self) -> None:
        """Undo `release_parameters` and, if it was called, `remove`."""
        engine, optimizer = self.engine, self.engine.optimizer
        if self.persistent:
            for parameter in self.persistent:
                parameter.ds_persist = True
            optimizer.persistent_parameters = self.persistent
        if not self.removed:
            return
        optimizer.parameter_offload.setup_zero_stage3_hooks()
        optimizer.create_reduce_and_remove_grad_hooks()
        engine.module_forward_pre_hook = engine._create_module_forward_pre_hook()
        engine.module_forward_post_hook = engine._create_module_forward_post_hook()

    @contextlib.contextmanager
    def around_forward(
        self, inputs: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
        """Context manager that does the work of the engine's forward hooks, except gathers. Yields the inputs."""
        engine = self.engine
        inputs, kwargs = engine._forward_prologue(inputs, kwargs) or (inputs, kwargs)
        for module in engine.module.modules():
            # The prologue sets this flag. If it stayed, ZeRO-3's `_parameters` would gather each parameter when Dynamo
            # reads it.
            module._parameters._in_forward = False
        try:
            with _torch_linear():
                yield inputs, kwargs
        finally:
            engine._forward_epilogue()


@contextlib.contextmanager
def _torch_linear() -> Iterator[None]:
    """Context manager with torch's own `functional.linear`, because ZeRO-3's replacement needs ZeRO-3's hooks."""
    from deepspeed.runtime.zero.partition_parameters import InsertPostInitMethodToModuleSubClasses as patch

    functional: Any = nn.functional
    patched = functional.linear
    functional.linear = getattr(patch, "linear_bk", patched)
    try:
        yield
    finally:
        functional.linear = patched
