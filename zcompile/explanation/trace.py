"""Traces a model into the graphs of its forward and backward, before passes schedule the transfers."""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from zcompile.compiler.backend import compile_aot_eager
from zcompile.graph.ops import copied, dynamo_inputs, is_tangent
from zcompile.options import Plan
from zcompile.state.attributes import PLANS


@dataclass(frozen=True)
class Traced:
    """A forward or backward graph before passes schedule its transfers."""

    kind: str  # "forward" or "backward"
    graph: Graph
    names: Mapping[Node, str]  # input that is a shard -> name of the parameter
    activation_memory_budget: float = 1.0  # the share of activations that forward saves for backward
    recomputed_segments: int = 0  # number of segments of forward that backward recomputes, for a limit of memory


def trace(
    run: Callable[[], Any],
    plan: Plan,
    name_of: Callable[[Any], str | None],
    limited: Callable[[Plan, Sequence[Any]], Plan] = lambda plan, inputs: plan,
) -> list[Traced]:
    """Trace a forward and its backward.

    Args:
        run: runs the forward. It is called once.
        name_of: maps an input of a Dynamo graph to the name of the parameter whose shard it is, or to None.
        limited: maps `plan` and the inputs of a Dynamo graph to a plan with the limit of memory for that graph.

    Returns:
        For each of Dynamo's graphs, its forward and, if it has one, its backward, after the joint passes and before the
        schedule passes.
    """
    traced: list[Traced] = []

    def backend(gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        names = [name_of(example) for example in example_inputs]

        def look(graph: Graph, chosen: Plan) -> None:
            traced.append(_traced(graph, names, chosen))

        limit = limited(plan, example_inputs)
        return compile_aot_eager(gm, example_inputs, limit, look, simplify=plan.fused)

    setattr(backend, PLANS, True)
    # Dynamo compiles a code object only a limited number of times, so each trace has one of its own.
    fresh = types.FunctionType(_call.__code__.replace(), globals())
    with (
        torch._functorch.config.patch(force_non_lazy_backward_lowering=True),
        torch._dynamo.config.patch(recompile_limit=1000),
    ):
        torch.compile(fresh, backend=backend)(run)
    if not traced:
        raise RuntimeError(
            "zcompile: no graph was captured, so there is no plan: Dynamo skips the forward, for example because of "
            "torch.compiler.disable. Let Dynamo trace it."
        )
    return traced


@contextlib.contextmanager
def without_compiled_calls(model: nn.Module) -> Iterator[None]:
    """In the `with` block, calls of `model` and its modules run without the code that `module.compile()` made.

    Why: where Dynamo does not trace, eager code would call that code, and the trace would lack its graphs.
    """
    compiled = {each: each._compiled_call_impl for each in model.modules() if "_compiled_call_impl" in each.__dict__}
    for module in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call


def _call(run: Callable[[], Any]) -> Any:
    return run()


def _traced(graph: Graph, names: Sequence[str | None], plan: Plan) -> Traced:
    """Copy `graph`. `names`: for each input of its Dynamo graph, the name of the parameter, or None."""
    copy, copies = copied(graph)
    kind = "backward" if any(map(is_tangent, graph.find_nodes(op="placeholder"))) else "forward"
    names_of_inputs = {copies[node]: name for node, i in dynamo_inputs(graph).items() if (name := names[i]) is not None}
    return Traced(kind, copy, names_of_inputs, plan.activation_memory_budget, plan.recomputed[0])
