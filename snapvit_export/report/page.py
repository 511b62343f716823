"""The report of a family as one HTML file: numbers, plots, sample images, and where everything comes from."""

from __future__ import annotations

import base64
import binascii
import shlex
from typing import Any

from ..family.class_names import class_name
from ..family.manifest import Manifest
from ..family.validation import MergedPatches, Prediction, Sample, Validation
from ..visible import visible
from . import text as words
from .charts import all_charts
from .data import LoadedFamily, ReportData, precisions
from .shell import brief, facts, plain_json, render, tight
from .variants import alternative_rows, measurement_rows, variant_table

MOST_OTHERS = 4  # variants that are named for one image; the others are counted
PNG = b"\x89PNG\r\n\x1a\n"


def page(family: LoadedFamily, report: ReportData) -> str:
    """Write the page of a family."""
    return render(
        "page.html",
        all_charts(report),
        side_by_side=("heads", "neurons"),
        report=report,
        headline=tight(words.headline(report)),
        tiles=_tiles(report),
        notes=_notes(family.manifest, report),
        table=variant_table(report),
        measurements=measurement_rows(report),
        alternatives=alternative_rows(report),
        decision=tight(words.decision(report)) if report.chosen and report.looks else "",
        dropped=[f"{words.dropped(found)}." for found in report.dropped],
        use=_use(family),
        empty=_empty(family, report),
        command=_command(family.manifest),
        samples=_samples(family, report),
        samples_note=_samples_note(family.validation),
        merges=_merges(family.validation),
        tokens=_tokens(report),
        provenance=_provenance(family, report),
        recipe=plain_json(brief(family.manifest.recipe)),
    )


USE = """\
import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession("{file}")
images = np.zeros({shape}, np.{type})  # prepared as in run.py
(outputs,) = session.run(None, {{"images": images}})  # {outputs}"""


def _use(family: LoadedFamily) -> dict[str, str] | None:
    """Return how the chosen variant is used outside of snapvit; None where none was written so."""
    manifest, shipped = family.manifest, family.manifest.shipped
    if shipped is None or manifest.choice is None:
        return None
    variant, given = manifest.variant(manifest.choice.variant), manifest.input
    height, width = variant.image_of(manifest.anatomy)
    batch = given.batch or 1
    shape = (batch, height, width, 3) if given.layout == "NHWC" else (batch, 3, height, width)
    outputs = f"(N, {manifest.anatomy.classes}) class scores" if manifest.anatomy.classes else "an embedding"
    code = USE.format(file=shipped.file, shape=shape, type=given.type, outputs=outputs)
    if manifest.target.runtime == "openvino":
        code = f'import openvino\n\ncompiled = openvino.Core().compile_model("{shipped.file}", "CPU")'
    return {
        "file": ", ".join(shipped.files),
        "size": words.megabytes(shipped.size_bytes),
        "beside": "run.py beside it classifies images, README.txt says what goes in and comes out.",
        "command": "python run.py image.jpg",
        "code": code,
    }


def _command(manifest: Manifest) -> str:
    """Return the command that made a family, as its manifest has it: one of ours, or none."""
    command = visible(manifest.command or "")
    return command if command.startswith("snapvit ") else ""


def _empty(family: LoadedFamily, report: ReportData) -> dict[str, str]:
    """Return why there is no chart of quality against latency, and the command that changes it."""
    where = shlex.quote(visible(str(family.folder)))
    if all(point.latency_ms is None for point in report.own):
        return {"reason": "no latency was measured", "command": f"snapvit choose {where} --budget 10ms"}
    return {"reason": "neither accuracy nor fidelity is known", "command": f"snapvit validate {where} --data DIR"}


def _tiles(report: ReportData) -> list[dict[str, str]]:
    """Return the main figures of the result."""
    dense = next(p for p in report.own if p.is_dense)
    point = words.best_variant(report)
    shown = point or dense
    tiles = [("variant" if point else "dense model", shown.name, "" if shown.is_dense else shown.levers)]
    if shown.latency_ms is not None:
        detail = f"{words.interval(shown.between_ms)} ms" if shown.between_ms else ""
        tiles.append((f"latency {report.at}", words.ms(shown.latency_ms), detail))
    if report.budget_ms is not None:
        part = "" if not dense.latency_ms else f"{100 * report.budget_ms / dense.latency_ms:.0f} % of the dense latency"
        tiles.append(("budget", words.budget(report.budget_ms), part))
    if report.budget_mj is not None:
        spent = next((words.energy(row.energy_mj, None) for row in report.looks if row.is_chosen), words.UNKNOWN)
        tiles.append(("energy of a run", spent, f"budget {report.budget_mj:.4g} mJ"))
    if report.measure is not None:
        value, _, error = words.quality(report.measure, shown.quality, shown.error).partition(" ± ")
        unit = " %" if error.endswith(" %") else ""
        known = (
            ""
            if shown.is_dense or report.by_fidelity
            else f"dense {words.quality(report.measure, dense.quality, dense.error)}"
        )
        detail = "; ".join(filter(None, [error and f"± {error}", known]))
        tiles.append((words.measure_title(report), value + unit, detail))
    tiles.append(("parameters", words.millions(shown.params), _of(shown.params, dense.params)))
    tiles.append(("size", words.megabytes(shown.size_bytes), _of(shown.size_bytes, dense.size_bytes)))
    return [dict(title=title, value=tight(value), detail=tight(detail)) for title, value, detail in tiles]


def _of(value: int, whole: int) -> str:
    return "" if value == whole else f"{100 * value / max(whole, 1):.0f} % of dense"


def _notes(manifest: Manifest, report: ReportData) -> list[tuple[str, str]]:
    """Return what a reader must know before trusting the charts."""
    notes = [("Missing", text) for text in words.missing(report)]
    if report.doubt:
        notes.append(("Not decided", f"{report.doubt}."))
    if report.compared is False:
        notes.append(("Not compared", (words.comparison(report) or "").partition(": ")[2]))
    chosen = report.point(report.chosen) if report.chosen else None
    if chosen is not None and chosen.dominated_by and report.measure:
        text = f"on these images {chosen.dominated_by} is as fast and as good or better than {chosen.name}. The "
        text += f"{report.best} variant that fits was chosen; differences within the standard error prove nothing."
        notes.append(("Note", text))
    if report.warnings:
        notes.append(("Beware", "; ".join(report.warnings) + "."))
    return [(kind, tight(text)) for kind, text in notes]


def _samples_note(validation: Validation | None) -> str:
    if validation is None:
        return ""
    return (
        f"{len(validation.samples)} of the {validation.images} images of {visible(validation.source)} on which the "
        f"variants were evaluated, in {validation.runtime}. ✓ right, ✗ wrong, ≠ not the dense model's prediction."
    )


def _samples(family: LoadedFamily, report: ReportData) -> list[dict[str, Any]]:
    if family.validation is None:
        return []
    dense = family.manifest.dense
    choice = family.manifest.choice
    cheapest = min(family.manifest.variants, key=lambda variant: variant.flops).name
    pruned = choice.variant if choice and choice.variant != dense else cheapest
    return [_sample(sample, dense, pruned) for sample in family.validation.samples]


def _sample(sample: Sample, dense: str, pruned: str) -> dict[str, Any]:
    predictions = sample.predictions
    reference = predictions.get(dense)
    lines = [
        _line(name, predictions[name], sample, reference)
        for name in dict.fromkeys((dense, pruned))
        if name in predictions
    ]
    others = {
        name: found
        for name, found in predictions.items()
        if name not in (dense, pruned) and reference is not None and found.label != reference.label
    }
    label = None if sample.label is None else visible(class_name(sample.label))
    known = "" if label is None else f", true class {label}"
    return {
        "title": visible(sample.title),
        "label": label,
        "picture": _data_url(sample.picture),
        "alt": f"Image {visible(sample.title)}{known}",
        "lines": lines,
        "more": _list(
            [f"{visible(name)} predicts {visible(class_name(found.label))}" for name, found in others.items()]
        ),
    }


def _tokens(report: ReportData) -> list[dict[str, Any]]:
    """Return the tokens before the first block and after each, where variants differ in them."""
    if len({point.tokens for point in report.own}) == 1:
        return []
    return [
        {"name": visible(point.name), "before": point.tokens[0], "counts": list(point.tokens[1:])}
        for point in report.own
    ]


def _merges(validation: Validation | None) -> list[dict[str, Any]]:
    """Return for each variant that merges tokens a table of pictures: an image in each row, a block in each column."""
    return [] if validation is None else [_merge(found, validation) for found in validation.merged]


def _merge(found: MergedPatches, validation: Validation) -> dict[str, Any]:
    columns = [(step.block, step.tokens) for step in found.images[0].steps] if found.images else []
    rows = [
        {
            "title": visible(image.title),
            "picture": _data_url(image.picture),
            "steps": [
                {
                    "picture": _data_url(step.picture),
                    "alt": f"{visible(image.title)} as {step.tokens} tokens, after block {step.block}",
                }
                for step in image.steps
            ],
        }
        for image in found.images
    ]
    size = _size(found.images[0].steps[0].picture) if columns else (0, 0)
    note = ""
    if validation.runtime != "onnxruntime":
        note = f"As ONNX Runtime merges them; {validation.runtime} may differ where two matches are nearly equal."
    return {
        "variant": visible(found.variant),
        "missing": None if found.missing is None else visible(found.missing),
        "columns": [f"block {block}: {tokens} tokens" for block, tokens in columns],
        "rows": rows,
        "width": size[0],
        "height": size[1],
        "note": note,
    }


def _list(texts: list[str]) -> str:
    more = [f"{len(texts) - MOST_OTHERS} more"] if len(texts) > MOST_OTHERS else []
    return ", ".join(texts[:MOST_OTHERS] + more)


def _line(name: str, found: Prediction, sample: Sample, reference: Prediction | None) -> dict[str, Any]:
    marks = []
    if sample.label is not None:
        marks.append(("good", "✓ right") if found.label == sample.label else ("bad", "✗ wrong"))
    if reference is not None and found.label != reference.label:
        marks.append(("bad", "≠ dense"))
    percent = f"{100 * found.probability:.0f} %"
    return {"variant": visible(name), "label": visible(class_name(found.label)), "probability": percent, "marks": marks}


def _data_url(text: str) -> str | None:
    """Return the data URL of a PNG; None for anything else."""
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None
    return f"data:image/png;base64,{base64.b64encode(data).decode()}" if data.startswith(PNG) else None


def _size(text: str) -> tuple[int, int]:
    """Return the width and height of a PNG: lines of one pixel must not be scaled away. 0 for anything else."""
    if _data_url(text) is None:
        return 0, 0
    header = base64.b64decode(text)[16:24]  # after the signature and the beginning of the first chunk
    return int.from_bytes(header[:4], "big"), int.from_bytes(header[4:], "big")


def _provenance(family: LoadedFamily, report: ReportData) -> list[dict[str, Any]]:
    manifest, target = family.manifest, family.manifest.target
    device = target.device
    timed = [variant.profile for variant in manifest.variants if variant.profile is not None]
    runs = f"{min(p.runs for p in timed)} to {max(p.runs for p in timed)} of each variant" if timed else "none"
    measured = [
        ("runtime", f"{target.runtime} {device.runtime_version}"),
        ("precision", precisions(manifest)),
        ("batch, threads", f"{target.batch}, {target.threads}"),
        ("processor", f"{device.cpu}, {device.cores} usable cores, governor {device.governor}"),
        ("memory", f"{device.memory_bytes / 2**30:.1f} GiB"),
        ("system", device.system),
        ("runs", runs),
        ("compared at", f"{report.at} of the wall clock, with {words.interval_title(report)}s"),
    ]
    if report.seconds:
        measured.append(("time", words.seconds(report.seconds)))
    if device.accelerator is not None:
        software = ", ".join(f"{name} {version}" for name, version in device.accelerator.software.items())
        measured.insert(3, ("accelerator", f"{device.accelerator.name}, {software}, {device.accelerator.power_mode}"))
    return [
        facts("How it was measured", measured),
        facts("Model and data", _model(family, report)),
        facts("Files, by SHA-256", _files(manifest)),
    ]


def _model(family: LoadedFamily, report: ReportData) -> list[tuple[str, str]]:
    manifest, validation = family.manifest, family.validation
    anatomy, recipe = manifest.anatomy, manifest.recipe
    size = "x".join(map(str, anatomy.image))
    found = [("model", f"{manifest.model}: {len(anatomy.blocks)} blocks of width {anatomy.embed_dim}, {size} pixels")]
    data = recipe.get("data")
    if isinstance(data, dict):
        found.append(("calibration", ", ".join(f"{name} {value}" for name, value in data.items())))
    if isinstance(recipe.get("weights_sha256"), str):
        found.append(("weights", recipe["weights_sha256"]))
    found.append(("evaluated on", report.judged or "nothing yet"))
    if validation is not None:
        found.append(("validation", f"{validation.images} images of {validation.source}, pixels {validation.sha256}"))
    return found


def _files(manifest: Manifest) -> list[tuple[str, str]]:
    variants = [(variant.file, variant.sha256) for variant in manifest.variants]
    variants += [(manifest.shipped.file, manifest.shipped.sha256)] if manifest.shipped else []
    return variants + [(weights.file, weights.sha256) for weights in manifest.weights]
