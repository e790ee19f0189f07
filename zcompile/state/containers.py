"""Find and replace the tensors in a module's arguments or results, which may be nested pytrees or dataclasses."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from zcompile.state.forward_scope import never_compiled_alone


@never_compiled_alone
def map_tensors(change: Callable[[torch.Tensor], torch.Tensor], container: Any) -> Any:
    """Replace each tensor in `container` by `change(tensor)`. Return `container` itself if no tensor changes."""
    values, structure = tree_flatten(container)
    is_changed = False
    for i, value in enumerate(values):
        values[i] = _map_leaf(change, value)
        is_changed |= values[i] is not value
    return tree_unflatten(values, structure) if is_changed else container


@never_compiled_alone
def _map_leaf(change: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return change(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # a dataclass that torch's pytree does not know
        old = {each.name: getattr(value, each.name) for each in dataclasses.fields(value) if each.init}
        new = {name: map_tensors(change, each) for name, each in old.items()}
        return value if all(new[name] is old[name] for name in old) else dataclasses.replace(value, **new)
    return value


def tensors_in(container: Any) -> list[torch.Tensor]:
    """Return the tensors in `container`, in the order in which `map_tensors` visits them."""
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    map_tensors(note, container)
    return found
