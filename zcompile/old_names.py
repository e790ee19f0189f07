"""Names of zcompile 0.1 that still work for one release, each with a FutureWarning. Delete this file then."""

import warnings
from collections.abc import Mapping
from typing import Any

OPTIONS = {
    "keep_bytes": "microbatch_cache_bytes",
    "persist_bytes": "save_for_backward_bytes",
    "disable_passes": "skip_passes",
}

PASSES = {
    "unify": "dedup_gathers",
    "sum_reduces": "merge_reduces",
    "downcast": "narrow_gathers",
    "rows": "embedding_rows",
    "recompute": "tag_recompute",
    "persist": "save_for_backward",
    "sink": "sink_gathers",
    "fit": "regather",
    "split": "split_collectives",
    "defer": "defer_reduce_waits",
    "keep": "cache_across_microbatches",
}

STATS = {"peak_full_bytes": "peak_unsharded_bytes"}


def renamed(kind: str, old: str, new: str) -> str:
    """`new`, after a FutureWarning that `old` will not work any more."""
    warnings.warn(
        f"zcompile: {kind} {old!r} is now {new!r}; the old name works for one more release.",
        FutureWarning,
        stacklevel=3,
    )
    return new


def current_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """`options` of the backend under their names of today; also the names of passes in `skip_passes`.

    Raises:
        ValueError: an option is given under its old and its new name.
    """
    current = dict(options or {})
    for old, new in OPTIONS.items():
        if old not in current:
            continue
        if new in current:
            raise ValueError(f"zcompile: options {old!r} and {new!r} are one option; give {new!r} alone.")
        current[renamed("option", old, new)] = current.pop(old)
    passes = current.get("skip_passes")
    if isinstance(passes, (list, tuple)):
        current["skip_passes"] = [
            renamed("pass", name, PASSES[name]) if isinstance(name, str) and name in PASSES else name for name in passes
        ]
    return current


class Stats(dict[str, Any]):
    """A dict that also knows counters by the names that they had."""

    def __missing__(self, name: str) -> Any:
        if name not in STATS:
            raise KeyError(name)
        return self[renamed("counter", name, STATS[name])]
