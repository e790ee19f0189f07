"""How Inductor treats the ways to say when an unsharded parameter dies: a test for each row of the lifetime table.

A functional `make` stands for a gather, and a pass after the partition rewrites it to the form under test, as
zcompile's own pass does. If torch changes its mind on one, the design may change with it."""

import functools
import re

import pytest
import torch
from torch._inductor.utils import run_and_get_code

from tests.support.reference import RIGHT, WRONG, relative_error

t = torch.ops.zcompile_test
library = torch.library.Library("zcompile_test", "DEF")


def define(schema, real, fake):
    name = library.define(schema)
    library.impl(name, real, "CPU")
    library.impl(name, fake, "Meta")


def poison(unsharded):
    unsharded.fill_(float("nan"))


# Storages of unsharded parameters: a runtime's own table, for the release that does not take the unsharded parameter.
unsharded_storages = []


def make(w):
    unsharded = w.clone()
    unsharded_storages.append(unsharded.untyped_storage())
    return unsharded


def shrink(w, reader):
    unsharded_storages.pop().resize_(0)


define("make(Tensor w) -> Tensor", make, torch.empty_like)
define("lying_wait(Tensor x) -> Tensor", lambda x: x, torch.empty_like)
define("honest_wait(Tensor(a) x) -> Tensor(a)", torch.ops.aten.alias, torch.ops.aten.alias)
define("release(Tensor(a!) x) -> ()", poison, lambda x: None)
define("threaded_release(Tensor x, Tensor[] readers) -> Tensor", lambda x, readers: (poison(x), readers[0].clone())[1],
       lambda x, readers: torch.empty_like(readers[0]))  # fmt: skip
define("shrinking_release(Tensor(a!) w, Tensor reader) -> ()", shrink, lambda w, reader: None)
define("returning_release(Tensor(a!) x) -> Tensor(a!)", lambda x: x, lambda x: x)


def rewrite(edit, graph):
    """Call `edit(graph, make)` on the one `make` of a graph."""
    (make,) = graph.find_nodes(op="call_function", target=t.make.default)
    edit(graph, make)


def run(function, edit, *args):
    """`function(*args)` under Inductor with `edit` applied: the result and the generated code."""
    torch._dynamo.reset()
    options = {"post_grad_custom_post_pass": functools.partial(rewrite, edit)}
    result, code = run_and_get_code(torch.compile(function, fullgraph=True, options=options), *args)
    return result, code[0]


def waits_with(op):
    def edit(graph, make):
        with graph.inserting_after(make):
            wait = graph.call_function(op, (make,))
        wait.meta["val"] = make.meta["val"]
        make.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait)

    return edit


def releases_with(op):
    """Release directly after the last reader in the graph's order."""

    def edit(graph, make):
        last = [node for node in graph.nodes if make in node.all_input_nodes][-1]
        with graph.inserting_after(last):
            graph.call_function(op, (make,))

    return edit


X, W = torch.randn(16, 16), torch.randn(16, 16)


def two_products(x, w):
    """Buffers of one size: any may be recycled as any other; of `-w`, since unaligned inputs are not recycled."""
    return t.make(-w) @ x @ x


def test_a_wait_that_lies_is_given_another_results_memory():
    with torch._functorch.config.patch(check_custom_op_aliasing=False):  # torch's own check, an error where CI is set
        _, code = run(two_products, waits_with(t.lying_wait.default), X, W)
    waited = re.search(r"lying_wait\.default\((\w+)\)", code)[1]  # what is read afterwards is this memory
    reused = re.search(rf"= {waited}; del {waited}  # reuse", code)
    assert reused and "extern_kernels.mm" in code[reused.end() :], "the hazard is gone: see the lifetime table"
    right, _ = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert relative_error(right, -W @ X @ X) < RIGHT


def test_a_wait_that_says_what_it_aliases_is_right_and_freed_after_its_last_reader():
    right, code = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert relative_error(right, -W @ X @ X) < RIGHT
    before, _, after = code.partition("torch.ops.zcompile_test.honest_wait.default(")
    code = f"honest_wait.default({after}"
    # Before torch 2.15, what the wait returns gets another name.
    made, renamed, waited = re.search(r"^\S+\((buf\d+)\)\n(?:\s+(buf\d+) = (buf\d+)\n)?", code).groups()
    waited = waited or before.split()[-2]
    unsharded = renamed or waited
    products = [call.start() for call in re.finditer(r"extern_kernels\.mm\(", code)]
    assert code[products[0] :].startswith(f"extern_kernels.mm({unsharded},") and len(products) == 2
    for name in (made, waited, unsharded):  # gone, or handed on to the second product, as soon as the first is done
        assert products[0] < re.search(rf"del {name}\b", code).start() < products[1], (name, code)
    for op in (torch.ops.zcompile.gather_wait, torch.ops.zcompile.reduce_wait):
        first = op.default._schema.arguments[0]
        assert first.alias_info.before_set == op.default._schema.returns[0].alias_info.before_set != set()
        assert not first.alias_info.is_write


def pointwise_reader(x, w):
    unsharded = t.make(w)
    early = unsharded + 1  # the reader, in the graph's order before the release, but fused into the kernel after it
    return (x @ x) * early


def test_a_mutating_release_runs_before_a_fused_reader_or_costs_the_fusion():
    expected = (X @ X) * (W + 1)
    result, code = run(pointwise_reader, releases_with(t.release.default), X, W)
    fused = run(pointwise_reader, lambda graph, make: None, X, W)[1].count("cpp_fused")
    unfused = code.count("cpp_fused") > fused
    assert relative_error(result, expected) > WRONG or unfused, "the hazard is gone: see the lifetime table"
    right, code = run(pointwise_reader, waits_with(t.honest_wait.default), X, W)
    assert relative_error(right, expected) < RIGHT and code.count("cpp_fused") == fused


def test_a_release_threaded_through_readers_costs_the_fusion():
    def edit(graph, make):
        (reader,) = make.users
        with graph.inserting_after(reader):
            release = graph.call_function(t.threaded_release.default, (make, [reader]))
        release.meta["val"] = reader.meta["val"]
        reader.replace_all_uses_with(release, delete_user_cb=lambda user: user is not release)

    result, threaded = run(pointwise_reader, edit, X, W)
    torch.testing.assert_close(result, (X @ X) * (W + 1))
    right, plain = run(pointwise_reader, waits_with(t.honest_wait.default), X, W)
    torch.testing.assert_close(right, result)
    assert threaded.count("cpp_fused") > plain.count("cpp_fused")


def test_a_release_that_shrinks_the_storage_takes_it_from_another_result():
    """The op has the unsharded parameter in its own table. To Inductor that memory was free, and is now a result's."""

    def edit(graph, make):
        waits_with(t.honest_wait.default)(graph, make)
        (result,) = graph.output_node().all_input_nodes
        (shard,) = (node for node in graph.find_nodes(op="placeholder") if make.args[0] in node.users)
        with graph.inserting_after(result):
            graph.call_function(t.shrinking_release.default, (shard, result))

    result, _ = run(two_products, edit, X, W.clone())
    assert result.untyped_storage().nbytes() == 0, "the hazard is gone: see the lifetime table"
    right, _ = run(two_products, waits_with(t.honest_wait.default), X, W)
    assert relative_error(right, -W @ X @ X) < RIGHT
    ours = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("zcompile::")]
    assert ours and not [name for name in ours if "release" in name or "free" in name or "resize" in name]


def test_an_alias_before_functionalisation_is_rejected():
    function = lambda x: t.honest_wait(x.cos()) @ x
    with pytest.raises(Exception, match="alias"):
        torch.compile(function, backend="aot_eager", fullgraph=True)(X)


def test_a_returned_mutable_alias_has_no_lowering():
    with pytest.raises(Exception, match=r"FallbackKernel for zcompile_test\.returning_release"):
        run(two_products, waits_with(t.returning_release.default), X, W)
    schemas = [op.default._schema for op in (torch.ops.zcompile.gather_wait, torch.ops.zcompile.reduce_wait)]
    assert not any(schema.is_mutable for schema in schemas)
