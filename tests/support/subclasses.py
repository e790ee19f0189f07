"""Tensor subclasses with FSDP2's all-gather hooks, and models whose weights they are."""

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_map_only

from tests.support.blocks import shard_in_blocks
from tests.support.compiling import OPTIONS
from tests.support.reference import losses_of

aten = torch.ops.aten
# Results of these are of the class of the tensor that they are called with. FSDP2 shards by them.
KEEPING = {
    aten.detach.default,
    aten.split.Tensor,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.empty_like.default,
    aten._to_copy.default,
}


class Wrapped(torch.Tensor):
    """A weight that has its values in a plain tensor."""

    @staticmethod
    def __new__(cls, values):
        sizes = {"strides": values.stride(), "storage_offset": values.storage_offset()}
        how = {"dtype": values.dtype, "device": values.device, "requires_grad": values.requires_grad}
        return torch.Tensor._make_wrapper_subclass(cls, values.size(), **sizes, **how)

    def __init__(self, values):
        self.values_ = values

    def __tensor_flatten__(self):
        return ["values_"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, metadata, size, stride):
        return cls(inner["values_"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        args, kwargs = tree_map_only(Wrapped, lambda each: each.values_, (args, kwargs or {}))
        result = func(*args, **kwargs)
        return tree_map_only(torch.Tensor, cls, result) if func in KEEPING else result


class Plain(Wrapped):
    """Without hooks."""


class Half(Plain):
    """With one of the two hooks."""

    def fsdp_pre_all_gather(self, mesh):
        return (self.values_,), None


class Rows8(Wrapped):
    """Each row travels as int8 and a scale, and is dequantized on arrival."""

    def fsdp_pre_all_gather(self, mesh):
        assert mesh.ndim == 1
        scale = self.values_.abs().amax(1, keepdim=True).clamp(min=1e-9) / 127
        return ((self.values_ / scale).round().to(torch.int8), scale.float()), "rows"

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        rows, scale = gathered
        assert metadata == "rows" and (rows.dtype, scale.dtype) == (torch.int8, torch.float32)
        if out is None:
            made = (rows * scale).to(param_dtype)
            return made, (*gathered, made)
        with torch.no_grad(), _unsafe_preserve_version_counter(out):
            out.copy_(rows * scale)


class Dequantizing(torch.Tensor):
    """Rows of int8 with scales, which ops read as the product of both."""

    @staticmethod
    def __new__(cls, rows, scale, dtype):
        return torch.Tensor._make_wrapper_subclass(cls, rows.size(), dtype=dtype, device=rows.device)

    def __init__(self, rows, scale, dtype):
        self.rows, self.scale = rows, scale

    def __tensor_flatten__(self):
        return ["rows", "scale"], self.dtype

    @staticmethod
    def __tensor_unflatten__(inner, dtype, size, stride):
        return Dequantizing(inner["rows"], inner["scale"], dtype)

    @classmethod
    def __torch_dispatch__(cls, func, types, args, kwargs=None):
        if func in (aten.detach.default, aten.as_strided.default):
            return Dequantizing(args[0].rows, args[0].scale, args[0].dtype)
        plain = tree_map_only(cls, lambda each: (each.rows * each.scale).to(each.dtype), (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Kept8(Rows8):
    """The same, but it arrives as a tensor that every op dequantizes."""

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        if out is None:
            return Dequantizing(*gathered, param_dtype), gathered
        assert (out.rows.data_ptr(), out.scale.data_ptr()) == tuple(each.data_ptr() for each in gathered)


class Half16(Wrapped):
    """Travels as bfloat16, padded to equal shards, and is read in the dtype of the policy."""

    pads = True

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        assert isinstance(module, nn.Module) and isinstance(mp_policy, MixedPrecisionPolicy)
        assert outer_stride == torch.empty(outer_size, device="meta").stride()
        rows = -(-outer_size[0] // mesh.size()) if self.pads else self.values_.size(0)
        padded = torch.zeros(rows, *outer_size[1:], dtype=torch.bfloat16, device=self.device)
        padded[: self.values_.size(0)].copy_(self.values_)
        return (padded,), None

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        if out is not None:
            with torch.no_grad(), _unsafe_preserve_version_counter(out):
                out.copy_(gathered[0].narrow(0, 0, out.size(0)))
            return None
        made = gathered[0].to(param_dtype, copy=True)
        return made, (gathered[0], made)


class Unpadded16(Half16):
    pads = False


class Block(nn.Module):
    def __init__(self, kind, width, hidden):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)
        for layer in (self.up, self.down):
            layer.weight = nn.Parameter(kind(layer.weight.detach()))

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Sequential):
    """Three blocks whose weights are of class `kind`."""

    def __init__(self, kind=Rows8, width=12, hidden=20):
        super().__init__(*(Block(kind, width, hidden) for _ in range(3)))


def seeded(kind=Rows8, **sizes):
    torch.manual_seed(0)
    return Stack(kind, **sizes)


def by_fsdp2(model, policy=None, mesh=None):
    """`model`, each of whose children FSDP2 shards."""
    policy = policy or MixedPrecisionPolicy()
    for block in model:
        fully_shard(block, mp_policy=policy, mesh=mesh)
    return fully_shard(model, mp_policy=policy, mesh=mesh)


def by_zcompile(model, policy=None, mesh=None):
    policy = policy or MixedPrecisionPolicy()
    return shard_in_blocks(model, mesh, param_dtype=policy.param_dtype, reduce_dtype=policy.reduce_dtype)


def batch_loss(model, step, rank, width=12):
    x = torch.randn(5, width, generator=torch.Generator().manual_seed(100 * step + rank))
    return model(x.to(next(model.parameters()).device)).float().square().mean()


def adam_losses(model, rank, steps=4, loss=batch_loss, fuse=lambda model, optimizer: optimizer, **settings):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, **settings)
    return losses_of(model, loss, rank, steps, fuse(model, optimizer))


def same_as_fsdp2(rank, ours, theirs, loss=batch_loss):
    """Losses of some steps are equal bit by bit, and so are gradients, and parameters afterwards."""
    assert torch.equal(adam_losses(ours, rank, loss=loss), adam_losses(theirs, rank, loss=loss))
    for model in (ours, theirs):
        loss(model, 9, rank).backward()
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert type(mine.to_local()) is type(other.to_local()) and mine.placements == other.placements, name
        assert type(mine.grad.to_local()) is torch.Tensor and mine.grad.dtype == other.grad.dtype, name
        assert torch.equal(mine.grad.to_local(), other.grad.to_local()), name
        assert torch.equal(plain(mine), plain(other)), name


def plain(parameter):
    local = parameter.detach().to_local()
    return local.values_ if isinstance(local, Wrapped) else local


# How the layers of a model, or the model, are compiled.
COMPILED = {
    "layers": lambda model, **how: [layer.compile(backend="aot_eager", fullgraph=True) for layer in model],
    "layers, planned": lambda model: [layer.compile(**OPTIONS, fullgraph=True) for layer in model],
    "model": lambda model: model.compile(**OPTIONS),
}
