"""What pages say of DeepSpeed programs and configs: the blocks of docs/deepspeed.md, and a table of docs/guide.md."""

import json
import re

import pytest

import zcompile
from tests.support.deepspeed import LanguageModel, assert_taken_over, is_taken_over, make_engine, train
from tests.support.deepspeed_config import BF16, config_of
from tests.support.pages import ROOT, blocks_of, check_config

WITHOUT_EFFECT = {
    "stage3_prefetch_bucket_size": 1, "stage3_max_reuse_distance": 1, "stage3_max_live_parameters": 1,
    "stage3_param_persistence_threshold": 10**6, "reduce_bucket_size": 100, "overlap_comm": False,
    "contiguous_gradients": False, "reduce_scatter": False,
}  # fmt: skip
ON_TOP = {"communication_data_type": "fp32"}


def trained(rank, **config):
    """Losses and norms of two steps, and what went over the wire."""
    engine = make_engine({}, **config)
    curve = train(engine, rank, end=2)
    assert_taken_over(engine)
    counted = zcompile.stats(engine.module)
    engine.destroy()
    return curve, counted


@pytest.mark.slow
def test_options_that_have_no_effect_change_nothing(rank, world):
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    expected = trained(rank, zero_optimization=zero, **BF16)
    assert expected[1]["reduced_bytes"].keys() == {"bfloat16"}
    assert trained(rank, zero_optimization=zero | WITHOUT_EFFECT, **BF16, **ON_TOP) == expected


def test_the_guide_names_the_options_that_have_no_effect():
    rows = re.findall(r"^\| (.*) \| no effect: ", (ROOT / "docs/guide.md").read_text(), re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == WITHOUT_EFFECT.keys() | ON_TOP.keys()


@pytest.mark.slow
def test_a_threshold_of_granularity_makes_units(rank, world):
    engine = make_engine({}, zero_optimization={"stage": 3, "stage3_module_granularity_threshold": 10**6})
    train(engine, rank, end=1)
    assert is_taken_over(engine) and engine.zcompile.state.units is not None
    engine.destroy()


@pytest.mark.slow
def test_the_page_runs(rank, world, tmp_path):
    found = blocks_of("docs/deepspeed.md")
    assert {block.language for block in found} == {"python", "json"}
    for block in found:
        if block.language == "json":
            check_config(block.text)
    blocks = {block.language: block.text for block in found}
    file = f"{tmp_path}/ds_config_{rank}.json"
    with open(file, "w") as config:
        json.dump(config_of(None) | json.loads(f"{{{blocks['json']}}}"), config)
    names = {"model": LanguageModel()}
    exec(compile(blocks["python"].replace("ds_config.json", file), "docs/deepspeed.md", "exec"), names)
    engine = names["engine"]
    assert engine.zcompile.options == {} and not engine.zcompile.given_back
    engine.destroy()
