"""Options that several commands share, so that one name means one thing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Runtime = Annotated[Optional[str], typer.Option(help="As in export; without it, what the family was made for.")]
Threads = Annotated[
    Optional[int], typer.Option(min=1, max=1024, help="CPU threads; without it, as the family was made for.")
]
Batch = Annotated[
    Optional[int], typer.Option(min=1, max=65536, help="Images per run; without it, as the family was made for.")
]
Pause = Annotated[float, typer.Option(min=0, max=10000, help="Milliseconds to sleep before every run.")]
Pin = Annotated[Optional[str], typer.Option(help="Cores to run on: 0 or 0,2.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit 1 unless a variant surely fits, with its whole interval.")]
Device = Annotated[str, typer.Option(help="Where torch computes: cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on standard error.")]
MODEL = "A timm name, a folder of ours or of transformers, its owner/name on the hub, an .onnx file, or 'bundled'."
ModelArg = Annotated[
    Optional[list[str]],
    typer.Option("--model-arg", help="For a timm name: img_size=384, patch_size=8, ... May be repeated."),
]
Pool = Annotated[
    Optional[str],
    typer.Option(help="For a timm name: the output is read from the class 'token' or is the mean ('avg') of patches."),
]
ImageSize = Annotated[Optional[str], typer.Option(help="For a timm name: pixels of its images, 224 or 192x384.")]

# What an ONNX file does not say itself.
Output = Annotated[Optional[str], typer.Option(help="ONNX file: which of several outputs is meant.")]
Preprocessing = Annotated[
    Optional[str],
    typer.Option(help="ONNX file: the model it was made from (vit_base_patch16_224), or a preprocessor_config.json."),
]
Mean = Annotated[Optional[str], typer.Option(help="ONNX file: mean of the pixels, 0 to 1: 0.485,0.456,0.406")]
Std = Annotated[Optional[str], typer.Option(help="ONNX file: their deviation: 0.229,0.224,0.225")]
Resize = Annotated[
    Optional[str], typer.Option(help="ONNX file: shorter side before the crop, or squash: 256, 256:bilinear, squash")
]
ClassNames = Annotated[Optional[Path], typer.Option(help="Names of the model's classes: line i names output i.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that this command did not make.")]

# Images of whatever command takes them: docs/commands.md, Sources of images.
SOURCES = "folder, list, .npz, set like cifar10, hf:owner/name or 'digits'"

# Of answering before a deadline.
Deadline = Annotated[Optional[str], typer.Option(help="From an image to its answer: 10ms, 60% (of dense) or 100fps.")]
Hit = Annotated[float, typer.Option(min=0.5, max=1, help="Share of answers that are to be in time.")]
Late = Annotated[str, typer.Option(help="What nothing can answer in time: 'run' it on the fastest, or 'refuse' it.")]
