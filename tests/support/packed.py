"""Frozen weights of other dtypes than floating-point ones, as a quantized base has them."""

import torch
from torch import nn

FP8 = torch.float8_e4m3fn


def frozen(values: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(values, requires_grad=False)


class PackedLinear(nn.Module):
    """A linear layer whose weight has 4 bits an element, two in one byte, and a scale for each row."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.packed = frozen(torch.randint(0, 256, (out, width // 2), dtype=torch.uint8))
        self.scales = frozen(torch.rand(out, 1) / 8)
        self.bias = nn.Parameter(torch.randn(out))

    def weight(self) -> torch.Tensor:
        """The dequantized weight, in the dtype of the scales: [out, width]."""
        packed, scales = self.packed, self.scales
        elements = torch.cat([packed & 15, packed >> 4], dim=1).to(scales.dtype)
        return (elements - 7.5) * scales

    def forward(self, x):
        return nn.functional.linear(x, self.weight(), self.bias)


class Quantized(nn.Module):
    """Layers over frozen parameters of many dtypes, and a trained one beside them. Sizes do not divide by 2 or 4."""

    def __init__(self):
        super().__init__()
        self.first, self.second = PackedLinear(6, 7), PackedLinear(14, 5)
        self.adapter = nn.Linear(6, 5, bias=False)
        self.order = frozen(torch.randperm(7, dtype=torch.int32))
        self.mask = frozen(torch.rand(7) > 0.3)
        self.signs = frozen(torch.tensor([1, -1, 1, 1, -1], dtype=torch.int8))
        self.eighths = frozen((torch.randn(3, 5) / 2).to(FP8))
        self.shift = frozen(torch.tensor(2, dtype=torch.int64))

    def forward(self, x):
        hidden = self.first(x)
        hidden = torch.cat([hidden[:, self.order] * self.mask, hidden.tanh()], dim=1)
        out = self.second(hidden) * self.signs + self.adapter(x)
        return out + self.eighths.to(x.dtype).sum(0) / self.shift


def quantized_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(next(model.parameters()).device)).float().square().mean()
