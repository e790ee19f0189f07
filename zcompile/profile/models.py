"""What is trained: a built-in decoder in several sizes, a Hugging Face config with random weights, or a user's own module."""

import importlib.util
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint


class BadInput(ValueError):
    """What a user asked for is not possible; the text is one sentence."""


@dataclass
class Workload:
    """A model whose forward takes a batch and returns its loss, and where batches come from."""

    model: nn.Module
    batch: Callable[[int, int], Any]  # (step, rank) -> that rank's batch, on the CPU
    tokens: int | None  # in one batch; None if that has no meaning


@dataclass(frozen=True)
class Size:
    """Sizes of the built-in model, Llama's shape: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    layers: int
    width: int
    hidden: int
    heads: int
    kv_heads: int
    vocabulary: int
    tokens: int  # per sequence, unless the command line says otherwise
    sequences: int = 1  # of a rank's batch, likewise


SIZES = {
    "tiny": Size(layers=4, width=192, hidden=512, heads=6, kv_heads=2, vocabulary=2048, tokens=128, sequences=8),
    "125m": Size(layers=12, width=768, hidden=2048, heads=12, kv_heads=4, vocabulary=32_000, tokens=1024),
    "2b": Size(layers=8, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048),
    "7b": Size(layers=32, width=4096, hidden=14_336, heads=32, kv_heads=8, vocabulary=32_000, tokens=2048),
}


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn pairs (x[i], x[i + d / 2]) of [batch, heads, tokens, d] by their position's angle (arXiv:2104.09864)."""
    a, b = x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self, size: Size):
        super().__init__()
        width, self.heads, self.kv_heads = size.width, size.heads, size.kv_heads
        head = width // size.heads
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, size.kv_heads * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, size.hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(size.hidden, width, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, _ = x.shape
        h = self.attention_norm(x)
        q = rotate(self.query(h).view(batch, tokens, self.heads, -1).transpose(1, 2), cos, sin)
        k = rotate(self.key(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2), cos, sin)
        v = self.value(h).view(batch, tokens, self.kv_heads, -1).transpose(1, 2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, -1))
        h = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """Its forward returns the loss, so that compiled graphs hold that too."""

    def __init__(self, size: Size, checkpointing: bool = False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.RMSNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        half = size.width // size.heads // 2
        angles = torch.outer(torch.arange(size.tokens), 10_000.0 ** (-torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        """Mean next-token loss of int64 tokens [batch, tokens + 1]."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.embedding(inputs)
        for block in self.blocks:
            if self.checkpointing:
                x = checkpoint(block, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), targets.flatten())


class HuggingFace(nn.Module):
    """A causal language model of transformers, whose forward takes tokens and returns the loss."""

    def __init__(self, config: Any, checkpointing: bool):
        from transformers import AutoModelForCausalLM

        super().__init__()
        for name in vars(config):
            if name.endswith(("dropout", "pdrop")) and isinstance(getattr(config, name), float):
                setattr(config, name, 0.0)  # engines draw their random numbers differently
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
        self.model.config.use_cache = False
        if checkpointing:
            self.model.gradient_checkpointing_enable()

    def forward(self, tokens):
        tokens = tokens[:, :-1]
        return self.model(input_ids=tokens, labels=tokens).loss


class WithLoss(nn.Module):
    """A user's model and loss as one module."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], torch.Tensor]):
        super().__init__()
        self.model = model
        self.loss = loss

    def forward(self, batch):
        return self.loss(self.model, batch)


def draw_tokens(vocabulary: int, sequences: int, tokens: int, step: int, rank: int) -> torch.Tensor:
    """int64 [sequences, tokens + 1] from a skewed distribution, which a model learns in a few dozen steps."""
    generator = torch.Generator().manual_seed((step << 16) + rank)
    return (vocabulary * torch.rand(sequences, tokens + 1, generator=generator) ** 4).long()


def load(name: str, module: str | None, sequences: int | None, tokens: int | None, checkpointing: bool) -> Workload:
    """The workload that the command line asks for, on the default device, in fp32, from the default generator.

    Args:
        name: one of SIZES, or what `transformers.AutoConfig` takes.
        module: "file.py:build", which is taken instead; `build()` returns a module, `batch(step, rank)`, and `loss(module, batch)`.
        sequences, tokens: of a batch of the first two, if not what is usual for them.

    Raises:
        BadInput: there is no such model.
    """
    if module:
        made = function_of(module)()
        if not isinstance(made, tuple) or len(made) != 3:
            raise BadInput(f"{module} must return a module, batch(step, rank) and loss(module, batch)")
        model, batch, loss = made
        return Workload(WithLoss(model, loss), batch, None)
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
    if (
        re.fullmatch(r"[\d.]+[kmbt]", name.lower()) and not Path(name).exists()
    ):  # a size, which no hub need be asked for
        raise BadInput(f"no model of size {name!r}: {known}")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise BadInput(f"no model {name!r}: {known}, for which transformers is not installed") from None
    try:
        return AutoConfig.from_pretrained(name)
    except (OSError, ValueError) as error:
        raise BadInput(f"no model {name!r}: {known} ({_first_line(error)})") from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def function_of(where: str) -> Callable[[], Any]:
    """The function that "file.py:function" names.

    Raises:
        BadInput: there is none.
    """
    file, _, function = where.rpartition(":")
    if not file or not Path(file).is_file():
        raise BadInput(f"--module takes file.py:function, and there is no file {file or where!r}")
    specification = importlib.util.spec_from_file_location(f"zcompile_profiled_{Path(file).stem}", file)
    if specification is None:
        raise BadInput(f"--module takes a Python file, and {file} is none")
    loaded = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = loaded  # where pickle and dataclasses look
    try:
        specification.loader.exec_module(loaded)
    except Exception as error:
        raise BadInput(f"{file} cannot be imported: {type(error).__name__}: {_first_line(error)}") from None
    if not callable(getattr(loaded, function, None)):
        raise BadInput(f"{file} has no function {function!r}")
    return getattr(loaded, function)


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What FSDP2 shards and compiles one by one: members of the outermost lists and sequences; the model if it has none."""

    def inside(module: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        for child in module.children():
            found += list(child) if isinstance(child, (nn.ModuleList, nn.Sequential)) else inside(child)
        return [block for block in found if any(True for _ in block.parameters())]

    return inside(model) or [model]
