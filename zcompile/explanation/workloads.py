"""Models with batches: the built-in decoder, a Hugging Face config with random weights, or a user's own module."""

import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zcompile.explanation.llama import SIZES, Llama, Size

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class BadInput(ValueError):
    """The user's command line is wrong or not possible. The text is for the user."""


@dataclass
class Workload:
    model: nn.Module  # its forward takes a batch and returns the loss
    batch: Callable[[int, int], Any]  # (step, rank) -> the batch of that rank, on the CPU
    tokens: int | None  # in one batch; None if it has none that can be counted


class HuggingFace(nn.Module):
    """A causal language model of transformers, without dropout, whose forward returns the loss."""

    def __init__(self, config: Any, checkpointing: bool):
        from transformers import AutoModelForCausalLM

        super().__init__()
        for name in vars(config):
            if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)  # engines draw random numbers differently, so losses would differ
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.model.config.use_cache = False
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean next-token loss of `tokens`, int64 [batch, tokens + 1], whose last token is not used."""
        tokens = tokens[:, :-1]  # as many inputs as `Llama` has; the model shifts labels, so it has one label fewer
        return self.model(input_ids=tokens, labels=tokens).loss


class WithLoss(nn.Module):
    """A user's model and loss as one module."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch: Any) -> torch.Tensor:
        return self.loss(self.model, batch)


def tokens_of(batch: Any) -> int | None:
    """Return the number of tokens of `batch`, an integer tensor or a mapping with `input_ids`; None for others."""
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else batch
    if not isinstance(ids, torch.Tensor) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        return None
    return ids.numel()


def draw_tokens(vocabulary: int, sequences: int, tokens: int, step: int, rank: int) -> torch.Tensor:
    """Return random int64 tokens [sequences, tokens + 1], mostly small, so that a model learns in a few dozen steps."""
    generator = torch.Generator().manual_seed((step << 16) + rank)
    return (vocabulary * torch.rand(sequences, tokens + 1, generator=generator) ** 4).long()


def load(name: str, module: str | None, sequences: int | None, tokens: int | None, checkpointing: bool) -> Workload:
    """Return the model and batches that the command line asks for, on torch's default device and in fp32.

    Args:
        name: a key of SIZES, or a name or path that `transformers.AutoConfig` takes.
        module: "file.py:build", used instead of `name`. `build()` returns a module, `batch(step, rank)`, and
            `loss(module, batch)`.
        sequences, tokens: sequences per batch, tokens per sequence. None: the model's defaults. Ignored with `module`.
    """
    if module:
        model, batch, loss = built_by(function_of(module), module)
        with torch.device("cpu"):  # batches are on the CPU, the model on torch's default device
            tokens_of_batch = tokens_of(batch(0, 0))
        return Workload(WithLoss(model, loss), batch, tokens_of_batch)
    if name in SIZES:
        size = SIZES[name]
        sequences, length = sequences or size.sequences, tokens or size.tokens
        model = Llama(Size(**{**vars(size), "tokens": length}), checkpointing)
        vocabulary = size.vocabulary
    else:
        config = _read_config(name)
        longest = getattr(config, "max_position_embeddings", None) or 1024
        sequences, length = sequences or 1, tokens or min(1024, longest)
        if length > longest:
            raise BadInput(f"--tokens {length} is more than the {longest} positions of {name!r}")
        try:
            model = HuggingFace(config, checkpointing)
        except ValueError as error:
            raise BadInput(f"{name!r} is no causal language model that can be trained: {_first_line(error)}") from None
        vocabulary = config.vocab_size
    return Workload(
        model, lambda step, rank: draw_tokens(vocabulary, sequences, length, step, rank), sequences * length
    )


def _read_config(name: str) -> Any:
    known = f"built in are {', '.join(SIZES)}; anything else must be a Hugging Face config"
    is_size = re.fullmatch(r"[\d.]+[kmbt]", name.lower())  # such a name is not looked up in the Hugging Face hub
    if is_size and not Path(name).exists():
        raise BadInput(f"no model of size {name!r}: {known}")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise BadInput(f"no model {name!r}: {known}, which needs transformers: pip install transformers") from None
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"no model {name!r}: {known} ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def import_alone(file: Path) -> ModuleType:
    """Return the Python module of `file`, imported under a name of its own."""
    specification = importlib.util.spec_from_file_location(f"zcompile_profiled_{file.stem}", file)
    if specification is None or specification.loader is None:
        raise BadInput(f"--module takes a Python file (.py), not {file}")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded  # where pickle and dataclasses look
    sys.path.insert(0, str(file.resolve().parent))  # as `python file.py` does
    specification.loader.exec_module(loaded)
    return loaded


def function_of(where: str, import_file: Callable[[Path], ModuleType] = import_alone) -> Callable[[], Any]:
    """Return the function that `where`, "file.py:function", names."""
    text, _, function = where.rpartition(":")
    file = Path(text)
    if not text or not file.is_file():
        raise BadInput(f"--module takes file.py:function, and there is no file {text or where!r}")
    try:
        module = import_file(file)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{file} cannot be imported: {type(error).__name__}: {_first_line(error)}") from None
    if not callable(getattr(module, function, None)):
        raise BadInput(f"{file} has no function {function!r}")
    return getattr(module, function)


def built_by(build: Callable[[], Any], where: str) -> Any:
    """Return `build()`, which must be (module, batch, loss). `where`: file and name of `build`, for errors."""
    made = build()
    if not isinstance(made, tuple) or len(made) != 3:
        raise BadInput(f"{where} must return a module, batch(step, rank) and loss(module, batch)")
    return made
