"""What changes after a file was loaded is an error or a compile, never old code."""

import contextlib
import re

import pytest
import torch
from torch import nn

import zcompile
from tests.support import artifacts
from tests.support.artifacts import cache_in, make_file, sharded, tokens_of
from zcompile.artifact import program
from zcompile.artifact.aot import lacking
from zcompile.state.sharded_model import state_of

pytestmark = pytest.mark.skipif(bool(lacking()), reason=lacking())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("artifact") / "model.zc"
    make_file(path, 1)
    return path


@contextlib.contextmanager
def replaced(owner, name, value):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def freeze(model):
    model.down.weight.requires_grad_(False)
    return model, contextlib.nullcontext()


def freeze_by_attribute(model):
    model.down.weight.requires_grad = False
    return model, contextlib.nullcontext()


def unfreeze(model):
    model.up.bias.requires_grad_(True)
    return model, contextlib.nullcontext()


def evaluate(model):
    return model.eval(), contextlib.nullcontext()


def evaluate_one_module(model):
    model.drop.eval()
    return model, contextlib.nullcontext()


def no_grad(model):
    return model, torch.no_grad()


def autocast(model):
    return model, torch.autocast("cpu", torch.bfloat16)


def deterministic(model):
    @contextlib.contextmanager
    def on():
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)

    return model, on()


def other_function(model):
    return model, replaced(artifacts, "squared_relu", torch.relu)


def other_forward(model):
    return model, replaced(artifacts.Mixed, "forward", lambda self, tokens: self.head(self.embed(tokens)))


def other_forward_of_one_module(model):
    model.down.forward = lambda x: nn.functional.linear(x, model.down.weight)
    return model, contextlib.nullcontext()


def other_buffer(model):
    model.offset = torch.zeros(6, dtype=torch.float64)
    return model, contextlib.nullcontext()


def new_hook(model):
    model.down.register_forward_hook(lambda module, args, output: 2 * output)
    return model, contextlib.nullcontext()


def other_dtype(model):
    model.double()
    return model, contextlib.nullcontext()


CHANGES = {
    freeze: "'down.weight' was frozen",
    freeze_by_attribute: "'down.weight' was frozen",
    unfreeze: "'up.bias' was unfrozen",
    evaluate: "training",
    evaluate_one_module: "training",
    no_grad: "grad",
    autocast: "autocast",
    deterministic: "deterministic",
    other_function: "a function that the model calls, or a process group, was replaced",
    other_forward: "the forward of Mixed was replaced",
    other_forward_of_one_module: "forward",
    other_buffer: "offset",
    new_hook: "hook",
    other_dtype: "torch.float64",
}


def rank_changes(rank, world, path, name):
    """The error of a call after the change."""
    change = next(each for each in CHANGES if each.__name__ == name)
    model = zcompile.compile(sharded(), artifact=path, require=True)
    model(tokens_of(0, rank))
    assert zcompile.stats(model)["compiled"].startswith("loaded")
    model, context = change(model)
    try:
        with context:
            model(tokens_of(0, rank))
    except RuntimeError as error:
        return str(error)
    finally:
        torch._dynamo.reset()
    return "no error"


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_after_loading_is_noticed(ranks, file, change):
    (error,) = ranks(1).run(rank_changes, file, change.__name__)
    assert "does not serve a call on rank 0" in error and CHANGES[change] in error


def rank_loads_where(rank, world, path, owner, name, value):
    with replaced(owner, name, value):
        model = zcompile.compile(sharded(), artifact=path, require=True)
        try:
            model(tokens_of(0, rank))
        except RuntimeError as error:
            return str(error)
    return "no error"


def rank_loads_beside_another_function(rank, world, path):
    return rank_loads_where(rank, world, path, artifacts, "squared_relu", artifacts.as_bytes)


def rank_loads_beside_another_forward(rank, world, path):
    return rank_loads_where(rank, world, path, artifacts.Mixed, "forward", lambda self, tokens: tokens)


def rank_loads_beside_an_edited_source(rank, world, path):
    lines = program._source_lines.__wrapped__

    def edited(module):
        return [line.replace("x.relu()", "x.sigmoid()") for line in lines(module)]

    return rank_loads_where(rank, world, path, program, "_source_lines", edited)


def rank_loads_in_another_environment(rank, world, path):
    """torch lies in another folder, and the program was started in another."""
    with replaced(torch._dynamo.config, "debug_dir_root", "/elsewhere"):
        return rank_loads_where(rank, world, path, torch._dynamo.config, "base_dir", "/elsewhere")


def test_a_file_is_loaded_in_another_virtual_environment(ranks, file):
    assert ranks(1).run(rank_loads_in_another_environment, file) == ["no error"]


@pytest.mark.parametrize(
    "load, expected",
    [
        (rank_loads_beside_another_function, "was made with another .*squared_relu"),
        (rank_loads_beside_another_forward, "modules: made for"),
        (rank_loads_beside_an_edited_source, r"lines \d+ to \d+ of module tests.support.artifacts have changed since"),
    ],
)
def test_a_file_is_not_loaded_beside_other_code(ranks, file, load, expected):
    (error,) = ranks(1).run(load, file)
    assert re.search(f"is required and cannot be used.*{expected}", error), error


def freeze_inside(wrapper):
    wrapper.model.down.weight.requires_grad = False


class Wrapper(nn.Module):
    """Is not sharded itself."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens).sum()


def rank_wraps(rank, world, folder, path):
    with cache_in(folder):
        for _ in range(2):
            wrapper = zcompile.compile(Wrapper(sharded()), artifact=path)
            wrapper(tokens_of(0, rank)).backward()
        assert zcompile.stats(wrapper)["compiled"] == f"loaded from {path}"
        freeze_inside(wrapper)
        with (
            pytest.warns(UserWarning, match="'down.weight' was frozen"),
            pytest.raises(RuntimeError, match="requires_grad"),
        ):
            wrapper(tokens_of(0, rank))


@pytest.mark.slow
def test_a_wrapper_around_a_sharded_model_is_loaded_and_sees_what_is_frozen(ranks, inductor_cache, tmp_path):
    ranks(1).run(rank_wraps, inductor_cache, tmp_path / "model.zc")


def rank_calls_with_another_length(rank, world, folder, path):
    with cache_in(folder):
        model = zcompile.compile(sharded(), artifact=path)
        model(tokens_of(0, rank))
        with pytest.warns(UserWarning, match="does not serve a call on rank 0.*size mismatch"):
            longer = model(tokens_of(1, rank, length=7))
        with torch.compiler.set_stance("force_eager"):
            expected = model(tokens_of(1, rank, length=7))
        assert torch.allclose(longer, expected, atol=1e-6)
        program = model._compiled_call_impl.program
        assert not program.changed(model, (tokens_of(0, rank),), {}), "the first length still runs what was loaded"


def test_another_length_is_compiled(ranks, inductor_cache, file):
    ranks(1).run(rank_calls_with_another_length, inductor_cache, file)


def rank_frees(rank, world, path):
    import gc
    import weakref

    model = zcompile.compile(sharded(), artifact=path, require=True)
    model(tokens_of(0, rank)).sum().backward()
    gc.disable()
    try:
        state = weakref.ref(state_of(model))
        del model
        assert state() is None
    finally:
        gc.enable()


def test_the_last_reference_to_a_model_frees_what_it_loaded(ranks, file):
    ranks(1).run(rank_frees, file)
