"""The names of all files in a family folder: one list for those who write, read and replace them. Light."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

from ..errors import UsageError

MANIFEST, RANKING, VALIDATION = "manifest.json", "ranking.safetensors", "validation.json"
TRACE = "deadlines.json"  # of `snapvit run --record`
MODEL = ("model.onnx", "model.xml", "model.bin")  # the chosen variant as it is shipped: one of the first two
LABELS, RUN, README = "labels.txt", "run.py", "README.txt"  # beside it
RUN_ENGINE = "run_engine.py"  # and where it runs in TensorRT
SHIPPED = (*MODEL, LABELS, RUN, README)
ANSWERS, DENSE_ANSWERS = ".answers", "reference.fp32"  # reference answers: of a variant, of the dense model in fp32
Application = Literal["run_engine.py", "tensorrt-cpp", "triton", "deepstream"]  # a program or a folder for its engine
APPLICATIONS: tuple[Application, ...] = get_args(Application)
TORCH = "torch"  # folder of variants for torch, if they were asked for
TORCH_MODEL, TRANSFORMERS = "model.json", "transformers"  # of each: its description, and a folder
TORCH_FILES = (
    *(TORCH_MODEL, "model.safetensors", "load.py", README, TRANSFORMERS),
    *(f"{TRANSFORMERS}/{name}" for name in ("model.safetensors", "config.json", "preprocessor_config.json")),
)
TORCH_KEYS = frozenset({"format_version", "name", "architecture", "kwargs", "preprocessing"})  # of a description
KEPT_FEATURES = ".validation-"  # prefix of the features that a stopped validation keeps
# What a run that was killed leaves behind beside temporaries: a validation its features, older versions their copies.
UNFINISHED = (f"{KEPT_FEATURES}*", ".tap-*", ".cut-*", ".*.onnx.probe")

Format = Literal["html", "png", "svg", "md", "json"]
FORMATS: tuple[Format, ...] = get_args(Format)
STEM = "report"
PLOTS = (
    "pareto",
    "proof",
    "heads",
    "neurons",
    "latencies",
    "deadlines",
    "search",
    "rounds-gflops",
    "rounds-params",
    "sublayers",
)  # in the order of the page


def reference_images(image: tuple[int, int]) -> str:
    """Return the file name of the reference images in a height and width."""
    return f"reference-{image[0]}x{image[1]}.rgb"


def plot_file(stem: str, plot: str, kind: str) -> str:
    """Return the file name of a plot beside its report."""
    return f"{stem}_{plot}.{kind}"


def report_files() -> list[str]:
    """Return all file names that a report in a family folder may have."""
    pages = [f"{STEM}.{kind}" for kind in ("html", "md", "json")]
    return pages + [plot_file(STEM, plot, kind) for plot in PLOTS for kind in ("svg", "png")]


def parse_formats(text: str) -> tuple[Format, ...]:
    """Parse `html,png` into formats, each once."""
    words = [word.strip().lower() for word in text.split(",")]
    if unknown := [word for word in words if word not in FORMATS]:
        raise UsageError(f"no format is called '{unknown[0]}'. Known: {', '.join(FORMATS)}")
    return tuple(kind for kind in FORMATS if kind in words)


def place(
    family: Path, out: Path | None, formats: tuple[Format, ...] | None, stem: str = STEM
) -> tuple[Path, str, tuple[Format, ...]]:
    """Return folder, stem and formats of a report; `out` is a folder, or a file whose suffix names the format."""
    if out is None:
        return family, stem, formats or ("html",)
    kind = out.suffix[1:].lower()
    if kind not in FORMATS or out.is_dir():
        if out.suffix and not out.is_dir():
            raise UsageError(f"--out {out} is neither a folder nor one of {', '.join('.' + kind for kind in FORMATS)}")
        return out, stem, formats or ("html",)
    named: Format = kind
    if formats is not None and named not in formats:
        raise UsageError(f"--out {out} is not what --format {','.join(formats)} gives. Leave one of them out")
    return out.parent, out.stem, formats or (named,)
