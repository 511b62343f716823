"""ONNX files as others export them: torch's two exporters, ONNX Runtime's optimiser, onnxsim, conversions to fp16.

Every exporter is a function of a module and a path, or of a file and a path. `Exported` keeps what was made once.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import timm
import torch

from helpers.models import as_model, randomise
from snapvit_export.graph.format import Flavour, GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.pack import blueprint

SIZE = dict(img_size=32, patch_size=8, embed_dim=48, depth=3, num_heads=3, num_classes=7)
FAMILIES: dict[str, tuple[str, dict]] = {
    "DeiT": ("deit_tiny_patch16_224", {}),
    "DeiT distilled": ("deit_tiny_distilled_patch16_224", {}),
    "DINOv2": ("vit_small_patch14_reg4_dinov2", {}),  # LayerScale and registers
    "SigLIP": ("vit_base_patch16_siglip_224", {}),  # attention pooling, gelu_tanh, no class token
    "CLIP": ("vit_base_patch32_clip_224", {}),  # a norm before the blocks, quick_gelu
    "EVA-02": ("eva02_base_patch14_224", {}),  # rotary pairs side by side, SwiGLU with a norm inside
    "DINOv3": ("vit_small_plus_patch16_dinov3", {}),  # rotary pairs half a head apart, SwiGLU, LayerScale, registers
}
PARTS: dict[str, tuple[str, dict]] = {  # in other combinations
    "mean": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "mean of all tokens": ("vit_tiny_patch16_224", {"global_pool": "avg", "pool_include_prefix": True}),
    "mean and maximum": ("vit_tiny_patch16_224", {"global_pool": "avgmax", "class_token": False}),
    "norms of heads": ("vit_tiny_patch16_224", {"qk_norm": True, "no_embed_class": True, "reg_tokens": 3}),
    "norm of attention": ("vit_tiny_patch16_224", {"pos_embed": "none", "scale_attn_norm": True}),
    "no biases": ("vit_tiny_patch16_224", {"qkv_bias": False, "init_values": 0.5}),
    "no classifier": ("vit_tiny_patch16_224", {"num_classes": 0}),
    "no classifier, mean": ("vit_tiny_patch16_224", {"num_classes": 0, "global_pool": "avg"}),
    "no classifier, distilled": ("deit_tiny_distilled_patch16_224", {"num_classes": 0}),
    "no classifier, attention pooling": ("vit_base_patch16_siglip_224", {"num_classes": 0}),
    "rotary, mean": ("vit_medium_patch16_rope_reg1_gap_256", {"num_reg_tokens": 0, "class_token": True}),
    "not square": ("vit_tiny_patch16_224", {"img_size": (32, 48), "patch_size": (8, 16)}),
}
# timm's EVA hands torch a tensor where the tracer wants a bool, so its SDPA is not exported by tracing.
TRACED_EAGER_ONLY = ("EVA-02", "DINOv3", "rotary, mean")


@functools.cache
def module_of(name: str) -> torch.nn.Module:
    """A small model with weights that matter everywhere."""
    architecture, extra = {**FAMILIES, **PARTS}[name]
    return randomise(timm.create_model(architecture, **{**SIZE, **extra}))


def images_for(anatomy: Anatomy, count: int = 4) -> np.ndarray:
    """Inputs of a model."""
    return np.random.default_rng(0).standard_normal((count, 3, *anatomy.image)).astype(np.float32)


def in_file_order(anatomy: Anatomy) -> Ranking:
    """A ranking that leaves heads and neurons where they are."""

    def falling(counts: tuple[int, ...]) -> tuple[np.ndarray, ...]:
        return tuple(np.arange(n, 0, -1, dtype=np.float32) for n in counts)

    return Ranking(falling(anatomy.heads), falling(anatomy.neurons), anatomy=anatomy)


def _images(module: torch.nn.Module, batch: int) -> torch.Tensor:
    size = module.patch_embed.img_size if hasattr(module, "patch_embed") else (32, 32)
    return torch.zeros(batch, 3, *size)


def traced(
    module: torch.nn.Module,
    path: Path,
    *,
    fused: bool = False,
    opset: int = 17,
    batch: int | None = None,
    axes: dict[str, dict[int, str]] | None = None,
) -> None:
    """torch's exporter by tracing; `fused`: attention by torch's own function; `batch`: a fixed one."""
    open_axes = axes or {"pixels": {0: "batch"}, "scores": {0: "batch"}}
    for part in module.modules():
        if hasattr(part, "fused_attn"):
            part.fused_attn = fused
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module,
            (_images(module, batch or 1),),
            str(path),
            opset_version=opset,
            input_names=["pixels"],
            output_names=["scores"],
            dynamo=False,
            dynamic_axes={} if batch else open_axes,
        )


def captured(module: torch.nn.Module, path: Path, *, opset: int, batch: int | None = None) -> None:
    """torch's exporter by capture ("dynamo"); it takes about ten seconds."""
    shapes = {} if batch else {"dynamic_shapes": ({0: torch.export.Dim("batch", min=1, max=64)},)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            module, (_images(module, batch or 2),), str(path), opset_version=opset, dynamo=True, verbose=False, **shapes
        )


def ours(module: torch.nn.Module, path: Path, *, flavour: Flavour) -> None:
    """Our own export of the dense model: scale, LayerScale and biases are folded into other tensors."""
    model = as_model(module, "ours", {})
    drawn = blueprint(model, in_file_order(model.anatomy))
    format = GraphFormat(flavour, single_file=True)
    GraphWriter(drawn, path.parent).write(path.stem, Plan.dense(model.anatomy), format=format)


def optimised(source: Path, path: Path, *, extended: bool) -> None:
    """A file as ONNX Runtime saves it after its own optimisations."""
    import onnxruntime as ort

    levels = ort.GraphOptimizationLevel
    options = ort.SessionOptions()
    options.graph_optimization_level = levels.ORT_ENABLE_EXTENDED if extended else levels.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(path)
    options.log_severity_level = 3
    ort.InferenceSession(str(source), options, providers=["CPUExecutionProvider"])


def simplified(source: Path, path: Path) -> None:
    """A file as onnxsim leaves it."""
    import onnxsim

    model, is_equal = onnxsim.simplify(onnx.load(source))
    assert is_equal
    onnx.save(model, path)


def halved(source: Path, path: Path, *, keep_input: bool) -> None:
    """A file with weights and computation in fp16; its nodes are not in order then."""
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        onnx.save(convert_float_to_float16(onnx.load(source), keep_io_types=keep_input), path)


def weights_outside(source: Path, path: Path) -> None:
    """A file whose tensors lie in another one."""
    onnx.save(onnx.load(source), path, save_as_external_data=True, location=f"{path.stem}.bin", size_threshold=0)


FROM_MODULE: dict[str, Callable[[torch.nn.Module, Path], None]] = {
    "traced, eager": traced,
    "traced, SDPA": functools.partial(traced, fused=True),
    "traced, opset 11, batch of 3": functools.partial(traced, opset=11, batch=3),
    "captured, opset 18": functools.partial(captured, opset=18),
    "captured, opset 23": functools.partial(captured, opset=23, batch=1),
    "ours, portable": functools.partial(ours, flavour="portable"),
    "ours, ort": functools.partial(ours, flavour="ort"),
}
FROM_FILE: dict[str, Callable[[Path, Path], None]] = {  # from that which was traced, eager
    "ORT basic": functools.partial(optimised, extended=False),
    "ORT extended": functools.partial(optimised, extended=True),
    "onnxsim": simplified,
    "fp16": functools.partial(halved, keep_input=False),
    "fp16 inside": functools.partial(halved, keep_input=True),
    "weights outside": weights_outside,
}


class Exported:
    """Exported files in a folder, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, name: str, exporter: str) -> Path:
        """The file of a model of `FAMILIES` or `PARTS` by an exporter."""
        path = self.folder / f"{name}-{exporter}".replace(" ", "_").replace(",", "") / "model.onnx"
        if not path.exists():
            path.parent.mkdir(parents=True)
            if exporter in FROM_MODULE:
                FROM_MODULE[exporter](module_of(name), path)
            else:
                FROM_FILE[exporter](self(name, "traced, eager"), path)
        return path
