"""Writes the chosen variant as what is copied to a product: one file that runs alone, and how to run it. Light.

    model.onnx    graph and weights in one; above 2 GB, which protobuf cannot write, the weights are in model.bin.
                  What OpenVINO quantised stays in its own format: model.xml and model.bin
    labels.txt    the names of the classes, one a line, where they are known
    run.py        classifies images with it: numpy, pillow and the runtime, with the exact preprocessing
    README.txt    input, output, preprocessing, versions

The other variants of a family go on sharing their weights. `run.py` is `run.py.in` with the model's own values. Where
the target is TensorRT, `applications` adds programs and settings for its engine.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..errors import SnapvitError
from ..graph.read import placed_bytes, read_graph, tensors_of
from ..runtimes.ort import KEEPS_FLOAT8
from ..storage.atomic import sha256, write_atomically, writing
from ..target import ON_CPU, Runtime
from .applications.places import remove_applications, strangers
from .applications.write import interface_of, readme_of, write_applications
from .class_names import class_name
from .layout import LABELS, README, RUN, SHIPPED
from .manifest import Choice, Manifest, Measurement, Shipped, Variant, WeightFile
from .templates import filled, line, plain, program, step_values

PROTOBUF_LIMIT = 2_000_000_000  # bytes

ONNX_RUNTIME = '''\
def open_model():
    """Return a function from a batch of prepared images to the outputs of the model."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    session = onnxruntime.InferenceSession(str(HERE / "@model@"), options, providers=["CPUExecutionProvider"])
    (name,) = [given.name for given in session.get_inputs()]
    return lambda images: session.run(None, {name: images})[0]'''
OPENVINO = '''\
def open_model():
    """Return a function from a batch of prepared images to the outputs of the model."""
    settings = {"INFERENCE_NUM_THREADS": THREADS, "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(str(HERE / "@model@"), "CPU", settings)
    return lambda images: compiled(images)[0]'''
NEEDS = {17: "onnxruntime>=1.14", 19: "onnxruntime>=1.16", 23: "onnxruntime>=1.23"}  # by opset


def write_shipped(folder: Path, manifest: Manifest) -> Manifest:
    """Write the chosen variant into its family's folder so that it runs alone; return the manifest that says so.

    What an earlier choice had written, by the manifest that is given, goes.
    """
    check_place(folder, manifest)
    if manifest.shipped is not None:
        for name in SHIPPED:
            (folder / name).unlink(missing_ok=True)
        remove_applications(folder, manifest)
    if manifest.choice is None:
        return _with(manifest, None)
    variant = manifest.variant(manifest.choice.variant)
    files = _write_model(folder, folder / variant.file)
    if manifest.labels:
        write_atomically(folder / LABELS, "".join(f"{line(class_name(name))}\n" for name in manifest.labels).encode())
    values = _values(manifest, variant, files)
    write_atomically(folder / RUN, filled(program("run.py.in"), values).encode())
    engine = interface_of(manifest, variant, files[0])
    shipped = Shipped(
        file="model.xml" if files[0].suffix == ".xml" else "model.onnx",
        sha256=sha256(files[0]),
        size_bytes=sum(path.stat().st_size for path in files),
        also=tuple(WeightFile(file=p.name, size_bytes=p.stat().st_size, sha256=sha256(p)) for p in files[1:]),
        applications=() if engine is None else write_applications(folder, engine, files[0], PROTOBUF_LIMIT),
    )
    text = _readme(manifest, variant, shipped, values) + ("" if engine is None else readme_of(engine))
    write_atomically(folder / README, text.encode())
    return _with(manifest, shipped)


def check_place(folder: Path, manifest: Manifest, runtime: Runtime | None = None) -> None:
    """Refuse, before long work, to write over files that no earlier choice has written.

    `runtime`: of the choice to come, if not that of the family.
    """
    there = [name for name in SHIPPED if manifest.shipped is None and os.path.lexists(folder / name)]
    there += strangers(folder, manifest, runtime or manifest.target.runtime)
    if there:
        raise SnapvitError(f"{folder / there[0]}: is there already and not ours. Move it away")


def _with(manifest: Manifest, shipped: Shipped | None) -> Manifest:
    return msgspec.structs.replace(manifest, shipped=shipped)


def _write_model(folder: Path, graph: Path) -> list[Path]:
    """Write the model without the files that it shares with others; return its files, that to open first."""
    if graph.suffix == ".xml":  # OpenVINO's: two files of their own already
        with writing(folder / "model.xml"):
            for suffix in (".xml", ".bin"):
                shutil.copy(graph.with_suffix(suffix), folder / f"model{suffix}")
        return [folder / "model.xml", folder / "model.bin"]
    model = read_graph(graph)
    whole = model.ByteSize() + placed_bytes(model)
    _place_inside(model, graph.parent)
    if whole <= PROTOBUF_LIMIT:
        write_atomically(folder / "model.onnx", model.SerializeToString())
        return [folder / "model.onnx"]
    import onnx

    with writing(
        folder / "model.onnx"
    ):  # the folder itself is still under a temporary name, or the choice is rewritten
        onnx.save_model(model, str(folder / "model.onnx"), save_as_external_data=True, location="model.bin")
    return [folder / "model.onnx", folder / "model.bin"]


def _place_inside(model: Any, folder: Path) -> None:
    """Read all weights of a graph into it."""
    import onnx
    from onnx.external_data_helper import load_external_data_for_tensor

    for tensor in tensors_of(model):
        if tensor.data_location == onnx.TensorProto.EXTERNAL:
            load_external_data_for_tensor(tensor, str(folder))
            tensor.data_location = onnx.TensorProto.DEFAULT
            del tensor.external_data[:]


def _open_model(in_openvino: bool, variant: Variant) -> str:
    """Return the function that opens the model; ONNX Runtime opens fp8 only with an option."""
    if in_openvino or variant.precision != "fp8":
        return OPENVINO if in_openvino else ONNX_RUNTIME
    threads = "    options.intra_op_num_threads = THREADS\n"
    return ONNX_RUNTIME.replace(threads, f"{threads}    options.add_session_config_entry{KEEPS_FLOAT8}\n")


def _values(manifest: Manifest, variant: Variant, files: list[Path]) -> dict[str, str]:
    """Return what the places of the template are filled with."""
    steps, given = manifest.preprocessing_of(variant), manifest.input
    in_openvino = manifest.target.runtime == "openvino"
    needs = "openvino" if in_openvino else NEEDS.get(_opset(files[0]), "onnxruntime")
    names = [path.name for path in files] + ([LABELS] if manifest.labels else []) + [RUN]
    return {
        "title": f"Run {plain(manifest.model)}, variant {plain(variant.name)}, on images.{_where(manifest)}",
        "needs": f"numpy, pillow and {needs}",
        "files": ", ".join(names[:-1]) + f" and {names[-1]}",
        "imports": "import openvino" if in_openvino else "import onnxruntime",
        "open_model": _open_model(in_openvino, variant).replace("@model@", files[0].name),
        "batch": str(given.batch),
        "threads": str(manifest.target.threads),
        **step_values(steps, given, manifest.anatomy.classes),
    }


def _where(manifest: Manifest) -> str:
    """Return what must be said where the latency is not that of a CPU."""
    if manifest.target.runtime in ON_CPU:
        return ""
    return f"\n\nOn the CPU, to check its answers: the latency in {README} is of {manifest.target.runtime}."


def _opset(path: Path) -> int:
    return int(next((each.version for each in read_graph(path).opset_import if each.domain in ("", "ai.onnx")), 0))


def _readme(manifest: Manifest, variant: Variant, shipped: Shipped, values: dict[str, str]) -> str:
    """Return what a person must know to use the file without snapvit."""
    steps, given, target = manifest.preprocessing_of(variant), manifest.input, manifest.target
    height, width = steps.input_size[1:]
    batch = "N" if given.batch is None else str(given.batch)
    shape = f"({batch}, {height}, {width}, 3)" if given.layout == "NHWC" else f"({batch}, 3, {height}, {width})"
    choice = manifest.choice
    assert choice is not None
    row = next(each for each in choice.measurements if each.variant == variant.name)
    outputs = manifest.anatomy.classes or manifest.anatomy.embed_dim
    kind = "class scores before softmax" if manifest.anatomy.classes else "an embedding"
    kind += f"; their names are in {LABELS}" if manifest.labels and manifest.anatomy.classes else ""
    resized = "both sides" if steps.crop_mode == "squash" else "the smaller side"
    scaled = [int(side / steps.crop_pct) for side in (height, width)]
    goal = str(scaled[0]) if scaled[0] == scaled[1] else f"{scaled[0]} x {scaled[1]}"
    last = (
        "pixels stay bytes, 0 to 255, RGB"
        if given.type == "uint8"
        else f"divide by 255, subtract {steps.mean}, divide by {steps.std}, channels first"
    )
    files = ", ".join(shipped.files)
    packages = " ".join(f"'{name}'" if ">" in name else name for name in re.split(r", | and ", values["needs"]))
    device = target.device.cpu if target.device.accelerator is None else target.device.accelerator.name
    lines = [
        f"{plain(manifest.model)}, variant {plain(variant.name)}",
        "",
        f"Ship      {files}: {shipped.size_bytes / 1e6:.2f} MB. Nothing else is read.",
        f"Try       python {RUN} image.jpg      (pip install {packages})",
        f"Input     {given.type} {shape}",
        f"Output    float32 ({batch}, {outputs}): {kind}",
        "Images    1. turn them as their EXIF says",
        f"          2. resize {resized} to {goal}, {steps.interpolation}",
        f"          3. cut {height} x {width} from the middle",
        f"          4. {last}",
        f"Precision {variant.precision}",
        f"Latency   {row.latency_ms:.2f} ms ({row.between_ms[0]:.2f} to {row.between_ms[1]:.2f}) at {choice.limits.at}",
        f"          batch {target.batch}, threads {target.threads}, {target.runtime} {target.device.runtime_version}",
        f"          on {plain(device)}",
        *([f"Energy    {_energy(row)}"] if row.energy_mj is not None else []),
        f"Verdict   {row.verdict or 'unknown'}: the budget is {_budget(choice)}",
        *([f"Fidelity  {_fidelity(row)}"] if row.fidelity is not None else []),
        f"Made by   snapvit {__version__}; sha256 of {shipped.file}: {shipped.sha256}",
    ]
    return "\n".join(lines) + "\n"


def _budget(choice: Choice) -> str:
    parts = [(choice.budget_ms, "ms"), (choice.budget_mj, "mJ")]
    return " and ".join(f"{value:.4g} {unit}" for value, unit in parts if value is not None)


def _energy(row: Measurement) -> str:
    assert row.energy_mj is not None
    low, high = row.energy_between_mj or (row.energy_mj, row.energy_mj)
    source = plain(row.profile.energy_source or "unknown")
    return f"{row.energy_mj:.2f} mJ ({low:.2f} to {high:.2f}) of one run: {source}"


def _fidelity(row: Measurement) -> str:
    assert row.fidelity is not None
    what = "the same top answer" if row.fidelity.by == "predictions" else "the same nearest image"
    return f"{what} as the dense model in {100 * row.fidelity.agreement:.1f} of 100 held-out images"
