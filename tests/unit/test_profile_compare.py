"""How the profiler compares engines: losses that stray, and runs that are interrupted."""

from zcompile.cli import COMMANDS, Parser
from zcompile.profile import compare
from zcompile.profile.command import job_of


def test_a_loss_that_strays_is_marked():
    last = {"one": 2.0, "two": 2.0, "other": 2.1, "limit": 3.0, "none": float("nan")}
    # Engines that differ in options alone count as one.
    last |= {f"other:fit={i}": 2.1 for i in range(3)}
    engines = {name: {"losses": [3.0, loss]} for name, loss in last.items()}
    compare.mark_strays(engines, 1e-3)
    strays = {name: engine.get("strays") for name, engine in engines.items() if ":" not in name}
    assert strays == {"one": False, "two": False, "other": True, "limit": None, "none": True}


def test_an_interruption_keeps_what_there_is(tmp_path, monkeypatch):
    def run(job):
        if job.engine == "ddp":
            raise KeyboardInterrupt
        counts = {"peak_bytes": 1}
        return {"step_ms": [1.0, 3.0, 2.0], "losses": [2.0, 1.0], "tokens": 8, "about": "2 x CPU", **counts}

    monkeypatch.setattr(compare, "run", run)
    job, engines = job_of(Parser("profile", COMMANDS["profile"]).parse_args(["--engines", "eager,ddp,fsdp2"]))
    results = compare.compare(job, {"parameters": None, "flops": None}, engines, 2, tmp_path)["engines"]
    assert results["eager"]["step_ms"]["median"] == 2.0 and results["eager"]["step_ms"]["repeats"] == [2.0]
    assert results["ddp"] == results["fsdp2"] == {"failed": "interrupted"}
