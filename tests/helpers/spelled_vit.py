"""A small ViT in plain torch whose parts can be written in many ways, all of which compute a plain ViT."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE, PATCH, WIDTH, HEADS, HIDDEN, BLOCKS, CLASSES = 12, 4, 24, 3, 40, 2, 5
HEAD = WIDTH // HEADS
GRID = IMAGE // PATCH
Function = Callable[..., Tensor]


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return layer(x)


def as_convolution(x: Tensor, layer: nn.Linear) -> Tensor:
    """A linear layer as a convolution of single pixels, as compilers for some chips want it."""
    return F.conv1d(x.transpose(1, 2), layer.weight[:, :, None], layer.bias).transpose(1, 2)


def by_conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.conv2d(x, weight, bias, stride=PATCH).flatten(2).transpose(1, 2)


def by_unfold(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.unfold(x, PATCH, stride=PATCH).transpose(1, 2) @ weight.flatten(1).T + bias


def by_reshape(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Patches cut by a transpose of six axes, their pixels with channels last."""
    cut = x.reshape(-1, 3, GRID, PATCH, GRID, PATCH).permute(0, 2, 4, 3, 5, 1).reshape(-1, GRID * GRID, 3 * PATCH**2)
    return F.linear(cut, weight.permute(0, 2, 3, 1).flatten(1), bias)


def split_by_reshape(qkv: Tensor) -> tuple[Tensor, ...]:
    return qkv.reshape(*qkv.shape[:2], 3, HEADS, HEAD).permute(2, 0, 3, 1, 4).unbind(0)


def split_by_chunk(qkv: Tensor) -> tuple[Tensor, ...]:
    return tuple(part.unflatten(2, (HEADS, HEAD)).transpose(1, 2) for part in qkv.chunk(3, dim=-1))


def split_interleaved(qkv: Tensor) -> tuple[Tensor, ...]:
    """Values first, and the heads of each feature beside each other."""
    parts = [qkv[..., i * WIDTH : (i + 1) * WIDTH].unflatten(2, (HEAD, HEADS)).permute(0, 3, 1, 2) for i in range(3)]
    return parts[1], parts[2], parts[0]


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) / math.sqrt(HEAD)).softmax(-1) @ v


def scaled_apart(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q * HEAD**-0.25 @ (k * HEAD**-0.25).transpose(-2, -1)).softmax(-1) @ v


def in_one_batch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of all images in one axis."""
    a, b, c = (x.reshape(-1, *x.shape[2:]) for x in (q, k, v))
    return torch.bmm(
        torch.baddbmm(torch.zeros(1), a, b.transpose(1, 2), beta=0, alpha=HEAD**-0.5).softmax(-1), c
    ).view_as(q)


def another_scale(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1)) * 0.5).softmax(-1) @ v


def gelu_by_erf(x: Tensor) -> Tensor:
    return x * (0.5 * (1 + torch.erf(x * 0.7071067811865476)))


def gelu_by_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)))


def gelu_by_power(x: Tensor) -> Tensor:
    return x * 0.5 * (torch.tanh((x + 0.044715 * torch.pow(x, 3.0)) * 0.7978845608028654) + 1)


def quick_gelu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-1.702 * x))


def norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, (WIDTH,), weight, bias, 1e-5)


def norm_written_out(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight + bias


def norm_by_power(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    square = ((x - mean) * (x - mean)).mean(-1, keepdim=True)
    return bias + weight * ((x - mean) * torch.pow(square + 1e-5, -0.5))


def rms_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weight


def mirrored_rotation(x: Tensor) -> Tensor:
    """Rotary embedding whose pairs are the first and the last feature, the second and the last but one, and so on."""
    angles = torch.arange(GRID * GRID)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
    cos, sin = (torch.cat([f(angles), f(angles).flip(-1)], dim=-1) for f in (torch.cos, torch.sin))
    sign = torch.tensor([-1.0] * (HEAD // 2) + [1.0] * (HEAD // 2))
    patches = x[:, :, 1:]
    return torch.cat([x[:, :, :1], patches * cos + patches[..., [7, 6, 5, 4, 3, 2, 1, 0]] * sign * sin], dim=2)


class SpelledViT(nn.Module):
    """A ViT with a class token; every argument is one way to write a part of it."""

    def __init__(
        self,
        patches: Function = by_conv,
        split: Callable[[Tensor], tuple[Tensor, ...]] = split_by_reshape,
        attend: Function = plain,
        activation: Function = F.gelu,
        norm: Function = norm,
        layer: Function = linear,
        rotate: Function | None = None,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        self.patches, self.split, self.attend, self.activation = patches, split, attend, activation
        self.norm, self.layer, self.rotate, self.interleaved = norm, layer, rotate, interleaved
        sizes = {"qkv": (WIDTH, 3 * WIDTH), "proj": (WIDTH, WIDTH), "fc1": (WIDTH, HIDDEN), "fc2": (HIDDEN, WIDTH)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict({name: nn.Linear(*size) for name, size in sizes.items()}) for _ in range(BLOCKS)
        )
        self.norms = nn.ParameterList(torch.zeros(2, WIDTH) for _ in range(2 * BLOCKS + 1))
        self.patch = nn.Conv2d(3, WIDTH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.zeros(1, 1 + GRID * GRID, WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x, self.patch.weight, self.patch.bias)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        for i, block in enumerate(self.blocks):
            q, k, v = self.split(self.layer(self.norm(x, *self.norms[2 * i]), block["qkv"]))
            if self.rotate is not None:
                q, k = self.rotate(q), self.rotate(k)
            z = self.attend(q, k, v)  # (B, heads, T, h)
            z = (z.permute(0, 2, 3, 1) if self.interleaved else z.transpose(1, 2)).flatten(2)
            x = x + self.layer(z, block["proj"])
            hidden = self.activation(self.layer(self.norm(x, *self.norms[2 * i + 1]), block["fc1"]))
            x = self.layer(hidden, block["fc2"]) + x
        return self.head(self.norm(x, *self.norms[-1])[:, 0])
