"""Torch's own caches as a file, for a model with graph breaks: each rank traces the model, but compiles no graph.

A program in a file needs one graph. Between several graphs there is Python, so Dynamo runs on every rank. The results
of the stages after Dynamo are looked up by a hash of the graph: Inductor's, and AOTAutograd's as far as torch can save
them. A rank whose shards have other sizes finds nothing under its hash, and compiles. Each machine compiles C++ kernels
once more.
"""

from collections.abc import Mapping

import torch

from zcompile.artifact.file_format import Artifact, ArtifactError, encode

PART = "caches"


def keep(fingerprint: Mapping[str, str], memory_bytes: int) -> bytes:
    """The file with all that this process compiled, or found in its caches.

    Args:
        memory_bytes: that plans were made for.

    Raises:
        ArtifactError: torch's caches are off.
    """
    saved = torch.compiler.save_cache_artifacts()
    if saved is None:
        raise ArtifactError("zcompile: there is no artifact, for torch's caches are off.")
    return encode(fingerprint, {"memory_bytes": memory_bytes}, {PART: saved[0]})


def load(artifact: Artifact) -> None:
    """Put what `keep` saved into this process's cache folder. Unpickles, so all checks of `artifact` must have passed.

    Raises:
        ArtifactError: torch cannot read it.
    """
    if torch.compiler.load_cache_artifacts(artifact.parts[PART]) is None:
        raise ArtifactError("zcompile: torch cannot read what it compiled elsewhere.")
