"""Names of zcompile 0.1 work for one release, with a warning that names the new one."""

import pytest

from zcompile.deepspeed.config import options_of
from zcompile.old_names import OPTIONS, PASSES, STATS, Stats
from zcompile.options import OPTIONAL_PASSES, Settings
from zcompile.passes import pipeline

OLD_VALUES = {"keep_bytes": 1 << 20, "persist_bytes": 0, "disable_passes": ["free"]}


@pytest.mark.parametrize("old", OPTIONS)
def test_old_option_sets_the_new_one(old):
    with pytest.warns(FutureWarning, match=f"option '{old}' is now '{OPTIONS[old]}'"):
        settings = Settings.parse({old: OLD_VALUES[old]})
    assert settings == Settings(**{OPTIONS[old]: OLD_VALUES[old]})


@pytest.mark.parametrize("old", OPTIONS)
def test_old_and_new_option_together_are_refused(old):
    with pytest.raises(ValueError, match=f"'{old}' and '{OPTIONS[old]}' are one option"):
        Settings.parse({old: OLD_VALUES[old], OPTIONS[old]: OLD_VALUES[old]})


@pytest.mark.parametrize("old", [old for old, new in PASSES.items() if new in OPTIONAL_PASSES])
@pytest.mark.parametrize("option", ["skip_passes", "disable_passes"])
def test_old_pass_name_skips_the_new_pass(old, option):
    with pytest.warns(FutureWarning, match=f"pass '{old}' is now '{PASSES[old]}'"):
        settings = Settings.parse({option: [old, "prefetch"]})
    assert list(settings.skip_passes) == [PASSES[old], "prefetch"]


@pytest.mark.parametrize("old", [old for old, new in PASSES.items() if new not in OPTIONAL_PASSES])
def test_old_name_of_a_pass_that_must_run_is_refused(old):
    with (
        pytest.warns(FutureWarning, match=PASSES[old]),
        pytest.raises(ValueError, match=f"'skip_passes' must be a list of .* not .*{PASSES[old]}"),
    ):
        Settings.parse({"skip_passes": [old]})


def test_new_pass_names_are_functions_of_the_pipeline():
    assert all(callable(getattr(pipeline, new)) for new in PASSES.values())


def test_new_names_do_not_warn(recwarn):
    Settings.parse({"microbatch_cache_bytes": 0, "save_for_backward_bytes": 0, "skip_passes": ["regather"]})
    assert not recwarn.list


def test_deepspeed_block_takes_old_names():
    config = {
        "zcompile": {"enabled": True, "keep_bytes": 5, "disable_passes": ["sink"]},
        "zero_optimization": {"stage": 3},
    }
    with pytest.warns(FutureWarning, match="'keep_bytes' is now 'microbatch_cache_bytes'"):
        options = options_of(config)
    assert options == {"microbatch_cache_bytes": 5, "skip_passes": ["sink_gathers"]}


@pytest.mark.parametrize("old", STATS)
def test_old_counter_reads_the_new_one(old):
    stats = Stats({STATS[old]: 7})
    with pytest.warns(FutureWarning, match=f"counter '{old}' is now '{STATS[old]}'"):
        assert stats[old] == 7
    with pytest.raises(KeyError, match="nothing"):
        stats["nothing"]
