"""One run of the profiler over several kinds of engines: its results, its traces, and its report."""

import gzip
import html
import json
import re

import pytest
from PIL import Image

from tests.support.browser import NoBrowser, look
from tests.support.commands import SHORT, results_in
from tests.support.ranks import slow_case
from zcompile.cli import main
from zcompile.explanation.workloads import load
from zcompile.profile import figures, report
from zcompile.profile.engines import file_name
from zcompile.profile.timeline import wire_bytes

OURS = "zcompile:inner=aot_eager"  # Inductor would take most of this module's time
trained = lambda results: [name for name in results["engines"] if name != "deepcompile"]


@pytest.fixture(
    scope="module", params=[[OURS, "fsdp2"], slow_case([OURS, "limit", "fsdp2", "deepcompile"])], ids=["two", "all"]
)
def profiled(tmp_path_factory, inductor_cache, request):
    """A folder with the report on the engines. Each has two processes, which take some 10 s to start."""
    folder = tmp_path_factory.mktemp("profile")
    (folder / "runs").mkdir()
    (folder / "runs/limit-cache").symlink_to(inductor_cache)  # else Inductor would begin with headers and probes
    batches = ["--tokens", "32", "--batch", "2", "--accumulation", "2", "--trace", "--output", str(folder)]
    assert main(["profile", *SHORT, "--engines", ",".join(request.param), *batches]) == 0
    return folder


@pytest.fixture
def results(profiled):
    return results_in(profiled)


def events_of(folder, engine):
    return json.loads(gzip.decompress((folder / f"{file_name(engine)}.trace.json.gz").read_bytes()))["traceEvents"]


def test_results(results):
    engines = results["engines"]
    assert list(engines) in ([OURS, "fsdp2"], [OURS, "limit", "fsdp2", "deepcompile"])
    for name in trained(results):
        engine = engines[name]
        low, high = engine["step_ms"]["quartiles"]
        assert 0 < low <= engine["step_ms"]["median"] <= high and engine["peak_bytes"] > 0
        parts = engine["parts"]
        assert parts["compute_ms"] > 0.01 * parts["step_ms"]  # ranks wait for each other on busy CPUs
        assert (parts["communication_ms"] > 0) == (name != "limit")
    assert len(engines[OURS]["losses"]) == 5
    assert engines[OURS]["losses"] == pytest.approx(engines["fsdp2"]["losses"], rel=1e-5)
    assert not engines[OURS]["strays"]
    if "limit" in engines:
        assert "needs CUDA" in engines["deepcompile"]["skipped"]
        assert "strays" not in engines["limit"] and engines["limit"]["x_limit"] == 1.0
    parameters = results["workload"]["parameters"]
    # For each of two microbatches, forward gathers all parameters. Backward gathers all but the embedding, which it
    # does not read, and the head and the norm before it, which are saved for it. All gradients are reduced.
    embedding, saved = 2048 * 192, 2048 * 192 + 192
    assert engines[OURS]["wire_bytes"] == 2 * 4 * (3 * parameters - embedding - saved)
    assert engines[OURS]["tokens"] == 2 * 2 * 2 * 32
    # Twice three for each token and weight, and attention.
    assert results["workload"]["flops"] > 6 * 2 * 64 * (parameters - embedding)


def test_traces_are_of_two_steps(profiled, results):
    for name in trained(results):
        events = events_of(profiled, name)
        assert sum(event.get("name") == "zcompile.profile::step" for event in events) == 2


def test_bytes_on_the_wire_by_trace_and_by_arithmetic(profiled, results):
    """FSDP2 gathers blocks twice a microbatch, and other parameters once. zcompile's own count is that of the trace."""
    model = load("tiny", None, 2, 32, False).model
    sizes = {name: padded(parameter) for name, parameter in model.named_parameters()}
    blocks = sum(size for name, size in sizes.items() if name.startswith("blocks."))
    assert results["engines"]["fsdp2"]["wire_bytes"] == 2 * 4 * (2 * sum(sizes.values()) + blocks)
    traced_bytes = wire_bytes({"traceEvents": events_of(profiled, OURS)}, 2) / 2
    assert traced_bytes == pytest.approx(results["engines"][OURS]["wire_bytes"], rel=1e-3)
    assert "limit" not in results["engines"] or results["engines"]["limit"]["wire_bytes"] == 0


def padded(parameter):
    """Its elements, with the rows that two equal shards need."""
    rows = parameter.shape[0]
    return parameter.numel() // rows * (rows + rows % 2)


def test_predictions_stand_in_the_report(profiled, results):
    (prediction,) = report.predictions(results)
    plan = results["engines"][OURS]["plan"]
    assert f"predicted a step of {plan['step_ms']:.1f} ms" in prediction and plan["rests_on"] in prediction
    saved = f"Forward saves {plan['saved_bytes'] / 2**20:,.1f} MiB for backward (activation_memory_budget 1)"
    assert plan["saved_bytes"] > 4 * 2 * 32 * 2048 and saved in prediction  # logits among it
    assert prediction in html.unescape((profiled / "report.html").read_text())


def host_bound(results, host_ms, parts):
    """What the report says of a step of 100 ms."""
    changed = {"host_ms": host_ms, "parts": parts, "step_ms": {"median": 100.0}}
    results["engines"] = {OURS: results["engines"][OURS] | changed}
    return [each for each in report.predictions(results) if "to issue a step" in each]


@pytest.mark.parametrize(("host_ms", "idle_ms"), [(None, 30.0), (89.0, 30.0), (99.0, 4.0)])
def test_a_host_that_is_ahead_of_the_gpu_is_not_mentioned(results, host_ms, idle_ms):
    assert not host_bound(results, host_ms, {"idle_ms": idle_ms, "step_ms": 100.0})


@pytest.mark.parametrize(("parts", "waits"), [({"idle_ms": 6.0, "step_ms": 100.0}, "waits"), (None, "may wait")])
def test_a_host_that_the_gpu_waits_for_is_mentioned(results, parts, waits):
    expected = f"The host takes 91.0 ms to issue a step of {OURS}, so the GPU {waits} for the host. The prediction "
    assert host_bound(results, 91.0, parts) == [expected + "leaves this wait out."]


def look_at_page(page, folder):
    """What `page` tells a browser's console; and each picture's width, height, and number of colored pixels."""
    places = (
        "[...document.querySelectorAll('figure svg')].map(picture => "
        "{const r = picture.getBoundingClientRect(); return [r.x, r.y, r.right, r.bottom]})"
    )
    script = f"<script>document.body.dataset.places = JSON.stringify({places})</script></body>"
    (folder / "page.html").write_text(page.replace("</body>", script))
    try:
        console, dom = look(folder / "page.html", folder / "page.png")
    except NoBrowser as reason:
        pytest.skip(f"no browser: {reason}")
    shown = Image.open(folder / "page.png").convert("RGB")
    pictures = []
    for place in json.loads(re.search(r'data-places="([^"]*)"', dom)[1]):
        seen = shown.crop(tuple(round(edge) for edge in place))
        colors = seen.getcolors(maxcolors=1 << 20)
        colored = sum(count for count, channels in colors if max(channels) - min(channels) > 40)
        pictures.append((seen.width, seen.height, colored))
    return console, pictures


@pytest.mark.slow
def test_report_in_a_browser(profiled, tmp_path):
    """Every picture has something in it, and the page reports no error. This test would see both if it were not so."""
    page = (profiled / "report.html").read_text()
    console, pictures = look_at_page(page, tmp_path)
    assert not console and len(pictures) == len(figures.PICTURES)
    for width, height, colored in pictures:
        assert width > 400 and height > 50 and colored > 200, pictures
    broken = re.sub(r"(<figure id=\"memory\"><svg[^>]*>).*?(?=</svg>)", r"\1", page, flags=re.DOTALL)
    console, emptied = look_at_page(broken.replace("</body>", "<script>absent()</script></body>"), tmp_path)
    assert "absent is not defined" in console
    assert [colored > 200 for *_, colored in emptied] == [name != "memory" for name in figures.PICTURES]
