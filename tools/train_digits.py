"""Train the bundled model: a small plain timm ViT on scikit-learn's digits.

    python tools/train_digits.py                # about 12 minutes on 2 cores

The image grows while it learns: 32, 64, then 112 pixels, always in patches of 8. From 196 patches and 1297 images a
ViT learns next to nothing; from 16 patches it learns digits in a minute, and the larger grids then only refine that.
Prints the held-out accuracy and writes the two files that the package ships: weights in fp16 safetensors, and how to
build the module around them.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import timm
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.data import create_transform
from timm.layers import build_sincos2d_pos_embed

from snapvit_export.calibration import digits

ARCHITECTURE = "vit_tiny_patch16_224"
# 197 tokens of 192 features in 8 blocks: 1.6 GFLOPs, some 14-24 ms on one core of a server CPU, 7.3 MB in fp16.
KWARGS = dict(img_size=112, patch_size=8, embed_dim=192, depth=8, num_heads=6, num_classes=10)
PREPROCESSING = dict(
    input_size=[3, 112, 112], interpolation="bicubic", crop_pct=1.0, crop_mode="center", mean=[0.5] * 3, std=[0.5] * 3
)
STAGES = ((32, 40, 5e-4), (64, 8, 3e-4), (112, 6, 3e-4))  # pixels, epochs, peak learning rate
HERE = Path(__file__).resolve().parent.parent / "snapvit_export" / "bundled"


def tensors(split: digits.Split) -> tuple[torch.Tensor, torch.Tensor]:
    transform = create_transform(**{**PREPROCESSING, "input_size": tuple(PREPROCESSING["input_size"])})
    images, labels = digits.load(split)
    return torch.stack([transform(image) for image in images]), torch.tensor(labels)


def jitter(images: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Turn, stretch and shift each digit a little; the background stays black (-1 after normalising)."""
    n = len(images)
    draw = lambda low, high: torch.empty(n).uniform_(low, high, generator=generator)  # noqa: E731
    angle, shear = draw(-0.2, 0.2), draw(-0.15, 0.15)
    sx, sy = draw(0.85, 1.2), draw(0.85, 1.2)
    theta = torch.zeros(n, 2, 3)
    theta[:, 0, 0], theta[:, 0, 1], theta[:, 0, 2] = sx * angle.cos(), -sy * angle.sin() + shear, draw(-0.15, 0.15)
    theta[:, 1, 0], theta[:, 1, 1], theta[:, 1, 2] = sx * angle.sin(), sy * angle.cos(), draw(-0.15, 0.15)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images + 1, grid, align_corners=False) - 1


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    model.eval()
    hits = [(model(x).argmax(1) == y).float() for x, y in zip(images.split(50), labels.split(50))]
    return float(torch.cat(hits).mean())


def resized(images: torch.Tensor, size: int) -> torch.Tensor:
    return F.interpolate(images, size=(size, size), mode="bilinear", antialias=True)


def train(model, images, labels, epochs: int, peak_lr: float, generator: torch.Generator) -> None:
    batch = 64
    steps, step = epochs * (len(images) // batch), 0
    optimiser = torch.optim.AdamW(model.parameters(), lr=peak_lr, weight_decay=0.05)
    for epoch in range(epochs):
        model.train()
        order = torch.randperm(len(images), generator=generator)
        for rows in order[: len(order) // batch * batch].split(batch):
            lr = peak_lr * min(1.0, (step + 1) / 40) * 0.5 * (1 + math.cos(math.pi * step / steps))
            optimiser.param_groups[0]["lr"] = lr
            loss = F.cross_entropy(model(jitter(images[rows], generator)), labels[rows], label_smoothing=0.1)
            optimiser.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            step += 1
        print(f"{images.shape[-1]} px  epoch {epoch + 1}/{epochs}  loss {loss.item():.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = timm.create_model(ARCHITECTURE, **{**KWARGS, "img_size": STAGES[0][0]}, drop_path_rate=0.1)
    grid = build_sincos2d_pos_embed(list(model.patch_embed.grid_size), dim=KWARGS["embed_dim"])
    model.pos_embed.data[0, 1:] = grid  # learning positions from noise would take hours
    images, labels = tensors("train")
    for size, epochs, peak_lr in STAGES:
        model.set_input_size((size, size))
        train(model, resized(images, size), labels, epochs, peak_lr, generator)

    half = {name: value.half() for name, value in model.state_dict().items()}
    model.load_state_dict({name: value.float() for name, value in half.items()})
    held_out = accuracy(model, *tensors("held-out"))
    print(f"held-out accuracy of the fp16 weights: {held_out:.4f}")
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(half, args.out / "model.safetensors")
    description = dict(
        format_version=1,
        name="digits-vit",
        architecture=ARCHITECTURE,
        kwargs=KWARGS,
        preprocessing=PREPROCESSING,
        labels=[str(digit) for digit in range(10)],
    )
    (args.out / "model.json").write_text(json.dumps(description, indent=1) + "\n")


if __name__ == "__main__":
    main()
