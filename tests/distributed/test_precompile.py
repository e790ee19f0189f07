"""`zcompile precompile` makes, in one process, the file that the ranks of a training program load."""

import contextlib
import hashlib
import io
import linecache
import runpy
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_reduce
from torch.distributed.tensor import DTensor, Replicate, Shard

import zcompile
from tests.support import parallel
from tests.support.artifacts import cache_in, compiler_counts, train
from tests.support.meshes import as_rank
from tests.support.parallel import TOKENS
from tests.support.ranks import slow_case
from zcompile.artifact import precompile
from zcompile.artifact.file_format import ArtifactError, decode
from zcompile.artifact.program import _source_lines, make
from zcompile.cli import main
from zcompile.compiler.backend import parse_options

PROGRAM = """
import sys, torch, torch.distributed as dist, zcompile
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x, scale=1.0):
        return self.b(activation(self.a(x))) * scale

def activation(x):
    return opaque(x.relu())

@torch.compiler.allow_in_graph
def opaque(x):  # Dynamo does not trace it
    return x * 1.5

def build():
    torch.manual_seed(0)
    return Net(), lambda step, rank: torch.full((2, 5), 1.0 + step + rank), loss

def loss(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        return model(x, scale=2.0).float().square().mean()

def build_without_call():
    return Net(), lambda step, rank: torch.ones(2, 5), lambda model, x: x.sum()

class Breaks(Net):
    def forward(self, x, scale=1.0):
        torch._dynamo.graph_break()
        return super().forward(x)

def build_with_break():
    return Breaks(), lambda step, rank: torch.ones(2, 5), loss

number = 3

if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, batch, loss = build()
    zcompile.compile(zcompile.shard(model), artifact=sys.argv[1], require=True)
    value = loss(model, batch(0, dist.get_rank()))
    value.backward()
    counted = {name for name, counts in torch._dynamo.utils.counters.items() if counts}
    assert not counted, counted
    print(f"loss {value.item():.6f}\\n{zcompile.stats(model)['compiled']}", flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    path = tmp_path_factory.mktemp("program") / "a_training_program.py"
    path.write_text(PROGRAM)
    return path


def run(capsys, program, function, out, *more):
    more = more if "--mesh" in more else ("--ranks", "2", *more)
    code = main(["precompile", "--module", f"{program}:{function}", "--out", str(out), *more])
    return code, capsys.readouterr()


def rank_runs(rank, world, program, file, folder):
    """The program as torchrun starts it, in a process that has its group already; returns the text that it prints."""
    torch._dynamo.utils.counters.clear()
    with pytest.MonkeyPatch.context() as patch, cache_in(folder), contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(program), str(file)])
        patch.setattr(dist, "init_process_group", lambda backend: None)
        patch.setattr(dist, "destroy_process_group", lambda: None)
        runpy.run_path(str(program), run_name="__main__")
    return printed.getvalue()


def test_ranks_of_the_program_load_what_one_process_made(ranks, program, inductor_cache, tmp_path, capsys):
    file = tmp_path / "model.zc"
    with cache_in(inductor_cache):
        for how in ("compiled", "kept"):
            code, printed = run(capsys, program, "build", file)
            assert code == 0 and f"program 1 for all ranks: {how}" in printed.err
    assert f"SHA-256 {hashlib.sha256(file.read_bytes()).hexdigest()}" in printed.out
    for printed in ranks(2).run(rank_runs, program, file, tmp_path / "empty"):
        assert f"loaded from {file}" in printed and "loss " in printed


EDITS = {  # (text, its replacement), further options, how the program is made
    "comment": (("    return self.b", "    # a comment\n        return self.b"), (), "kept"),
    "traced function": (("x.relu()", "x.tanh()"), (), "compiled"),
    "function in the graph": (("x * 1.5", "x * 2.5"), (), "compiled"),
    "loss": (("scale=2.0", "scale=3.0"), (), "compiled"),
    "shape": (("(2, 5)", "(3, 5)"), (), "compiled"),
    "setting": (("", ""), ("--options", '{"skip_passes": ["bucket"]}'), "compiled"),
    "ranks": (("", ""), ("--mesh", "dp=4"), "compiled"),
}


def test_a_second_run_keeps_the_code_of_equal_graphs_alone(inductor_cache, tmp_path, capsys, monkeypatch):
    source, program, made = PROGRAM.replace("def build():", "def build(dp=2):"), tmp_path / "edited.py", {}
    for name, ((old, new), more, how) in {"first": (("", ""), (), "compiled"), **EDITS}.items():
        program.write_text(source.replace(old, new))
        file = tmp_path / f"{name}.zc"
        if made:
            file.write_bytes((tmp_path / "first.zc").read_bytes())
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        _source_lines.cache_clear()
        linecache.clearcache()
        with cache_in(inductor_cache):
            code, printed = run(capsys, program, "build", file, *more)
        assert code == 0 and f"program 1 for all ranks: {how}" in printed.err, (name, printed.err)
        (facts,) = decode(file.read_bytes(), name).facts["programs"]
        made[name] = facts["code"]
    assert made.pop("comment") == made["first"] and len({*made.values()}) == len(made)


@pytest.mark.parametrize(
    "function, more, reason",
    [
        ("build", ("--mesh", "dp=2,tp=1"), "must take the sizes of --mesh"),
        ("build", ("--mesh", "dp=2,ep=4"), "2 ranks, which groups of ep=4 do not divide"),
        ("build", ("--mesh", "dp=two"), "takes sizes such as dp=4,tp=2"),
        ("build", ("--mesh", "dp=2,dp=2"), "takes sizes such as dp=4,tp=2"),
        ("build", ("--dynamic", "-1"), "the index of a dimension, at least 0"),
        ("build", ("--dynamic", "9"), "has this dimension"),
        ("build", ("--dynamic", "1", "--steps", "0,1"), "exclude each other"),
        ("nowhere", (), "has no function 'nowhere'"),
        ("number", (), "has no function 'number'"),
        ("build_without_call", (), "did not call the model"),
        ("build", ("--replicas", "3"), "no multiple of --replicas 3"),
        ("build", ("--options", "{"), "takes a JSON object"),
        ("build", ("--options", '{"bucket": 1}'), "unknown option 'bucket'"),
    ],
)
def test_bad_input_is_one_line(program, tmp_path, capsys, function, more, reason):
    with pytest.raises(SystemExit) as stopped:
        run(capsys, program, function, tmp_path / "model.zc", *more)
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and reason in error and error.count("\n") == 1
    assert not (tmp_path / "model.zc").exists()


def test_graph_breaks_are_an_error(program, tmp_path, capsys):
    code, printed = run(capsys, program, "build_with_break", tmp_path / "model.zc")
    assert code == 1 and "the model has graph breaks" in printed.err
    assert not (tmp_path / "model.zc").exists()


class Reducing(nn.Linear):
    def forward(self, x):
        return all_reduce(super().forward(x), "sum", self.group)


class Numbered(nn.Linear):
    def forward(self, x):
        return super().forward(x + dist.get_rank())


class Sliced(nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        whole = DTensor.from_local(y.detach(), self.mesh, [Replicate()], run_check=False)
        return y * whole.redistribute(placements=[Shard(0)]).to_local()


@pytest.mark.parametrize(
    "kind, told",
    [
        (Sliced, r"its forward uses the mesh \('tp',\)"),
        (Reducing, "a collective is over group"),
        (Numbered, r"line \d+ of module .*`return super\(\).forward\(x . dist.get_rank\(\)\)`"),
    ],
)
def test_code_with_other_groups_or_the_rank_is_in_no_file(inductor_cache, kind, told):
    with cache_in(inductor_cache), as_rank(1, 4), pytest.raises(ArtifactError, match=told):
        model = kind(4, 4)
        model.group, model.mesh = dist.new_group(), parallel.mesh_of("cpu", dp=2, tp=2)["tp"]
        make(zcompile.shard(model), parse_options(None), None, (torch.ones(2, 4),), {})


def test_a_unit_is_in_no_file():
    told = r"'layers\.0\.experts' gathers parameters in eager.*blocks=\[layer\.attention"
    with as_rank(0, 2), pytest.raises(ArtifactError, match=told):
        make(parallel.looped(), parse_options(None), None, (), {})


PARALLEL = """
import torch
from tests.support.parallel import TOKENS, whole_loss, {build}

def build(**sizes):
    torch.manual_seed(0)
    return {build}(**sizes), lambda step, rank: (step, rank, TOKENS + step), lambda model, at: whole_loss(model, *at)

def build_alone(dp):
    return build()
"""


def rank_trains(rank, world, build, sizes, blocks, lengths, file, folder):
    """Losses and gradients of five steps, from `file` if there is one. Ranks of "tp" have one batch."""
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    with cache_in(folder):
        model = getattr(parallel, build)(**sizes)
        modules = precompile.modules_of(model, blocks)
        if file is not None:
            zcompile.compile(model, artifact=file, require=True, blocks=modules if blocks else ())
        for each in modules if file is None else ():
            each.compile(backend="zcompile", fullgraph=True, dynamic=False)
        loss = lambda model, step, rank: parallel.whole_loss(model, step, rank, TOKENS + step % lengths)
        seen = train(model, rank // (2 if world > 2 else 1), loss)
    assert bool(compiler_counts()) == (file is None)
    return seen


# Compiles one or two programs here and in a child, and again on all ranks: most of a minute on a quiet machine.
@pytest.mark.parametrize(
    "build, world, sizes, blocks, more, programs",
    [
        # Each rank of "tp" has its own slice of tokens, and rows of uneven layers.
        slow_case("sequence_parallel", 4, {}, "", (), ["tp 0", "tp 1"]),
        slow_case("deepseek_v3", 8, {"dp": 4, "tp": 2, "ep": 4}, "", (), ["tp 0", "tp 1"]),
        ("three_blocks", 2, {}, "blocks", ("--steps", "0,1"), ["", ""]),  # equal ones have one program
        slow_case("three_blocks", 2, {}, "", ("--dynamic", "1"), [""]),
        slow_case(  # with units between them
            *("looped", 2, {}, "layers.*.norm,layers.*.router", ("--dynamic", "0"), ["", ""])
        ),
    ],
)
def test_one_file_serves_all_positions_and_shapes(
    ranks, inductor_cache, tmp_path, capsys, build, world, sizes, blocks, more, programs
):
    program, file = tmp_path / f"program_{tmp_path.name}.py", tmp_path / "model.zc"
    program.write_text(PARALLEL.format(build=build))
    mesh = ",".join(f"{name}={size}" for name, size in (sizes or {"dp": world}).items())
    with cache_in(inductor_cache):
        arguments = ["--mesh", mesh, *(["--blocks", blocks] if blocks else ()), *more]
        code, printed = run(capsys, program, "build" if sizes else "build_alone", file, *arguments)
    assert code == 0, printed.err
    assert printed.err.count(": compiled in ") == programs.count(programs[0])  # other processes have their own stderr
    assert [each["position"] for each in decode(file.read_bytes(), "model.zc").facts["programs"]] == programs
    lengths = 3 if "--dynamic" in more else len(programs) if "--steps" in more else 1
    loaded = ranks(world).run(rank_trains, build, sizes, blocks, lengths, file, tmp_path / "empty")
    assert loaded == ranks(world).run(rank_trains, build, sizes, blocks, lengths, None, inductor_cache)
