"""The reference of a family in use: written by an export, and what every runtime elsewhere is compared with. Light.

ONNX Runtime on the workstation gives the reference answers of every graph. Wherever else a variant is to run, its
answers to the same images are compared with them before it is timed (`checks.comparison` has the definition). Random
pixels tell nothing here: activations on them are not those of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ..calibration.images import Images
from ..checks.comparison import Compared, compare, to_dense
from ..checks.gates import undecided
from ..errors import GateFailed
from ..family.layout import ANSWERS, DENSE_ANSWERS
from ..family.manifest import Manifest, Variant
from ..family.reference import Answers, Pixels, Reference, as_inputs, write_answers, write_images
from ..model.anatomy import Anatomy
from ..progress import Progress
from ..runtimes.device import usable_cores
from ..runtimes.fixed_batch import in_batches
from ..runtimes.ort import OrtSession
from ..runtimes.session import open_session, with_cores_here
from ..runtimes.tensorrt.engine_file import mark_agreed
from ..target import Target, in_precision
from .candidates import DENSE, BuiltVariant

IMAGES = 8


def write_reference(
    folder: Path,
    anatomy: Anatomy,
    target: Target,
    images: Images,
    takes_bytes: bool,
    variants: Mapping[str, BuiltVariant],
    dense: Callable[[], Path],
) -> Reference:
    """Write the first images in every size that the variants take, and the answers of each.

    `dense` writes the dense model in fp32, if no variant is just that; its graph is removed again.
    """
    some = images.first(IMAGES)
    sizes = dict.fromkeys([anatomy.image, *(anatomy.image_of(each.plan) for each in variants.values())])
    at = {size: some.at(size) for size in sizes}
    inputs = {size: as_inputs(found.pixels, found.preprocessing, takes_bytes) for size, found in at.items()}
    answers, outputs = {}, 0
    for name, built in variants.items():
        of = inputs[anatomy.image_of(built.plan)]
        found, numbers = answer(built.path, in_precision(target, built.precision), of)
        answers[name], outputs = write_answers(folder, f"{name}{ANSWERS}", found, numbers), found.shape[1]
    if variants[DENSE].precision == "fp32":
        of_dense = answers[DENSE]
    else:
        path = dense()
        found, _ = answer(path, in_precision(target, "fp32"), inputs[anatomy.image])
        path.unlink()
        of_dense = write_answers(folder, DENSE_ANSWERS, found)
    return Reference(
        images=len(some),
        source=images.source,
        kind="scores" if anatomy.classes > 1 else "embedding",
        outputs=outputs,
        pixels=tuple(write_images(folder, found.pixels) for found in at.values()),
        dense=msgspec.structs.replace(of_dense, undecided=()),
        answers=answers,
    )


def answer(path: Path, target: Target, inputs: npt.NDArray[Any]) -> tuple[Answers, list[int]]:
    """Return the answers of a file in ONNX Runtime, and the images by number whose merges rounding decides.

    OpenVINO's own files, which nothing else reads, are run in OpenVINO.
    """
    if path.suffix != ".onnx":
        with open_session(path, with_cores_here(target)) as opened:
            return opened.run(inputs), []
    batch = target.batch if target.precision == "int8-dynamic" else None  # which has one scale for a batch
    with OrtSession(path, usable_cores()) as session:
        found = in_batches(session.run, inputs, batch)
    return found, np.flatnonzero(undecided(path, inputs, target.precision)).tolist()


def compare_here(
    folder: Path, manifest: Manifest, variants: Sequence[Variant], target: Target, progress: Progress
) -> dict[str, Compared]:
    """Compare the answers of variants in the target's runtime on this machine with the family's reference.

    What was not compared is named in a note, and is not among those that are returned; ONNX Runtime on the CPU, which
    gave the reference, is never compared with itself.
    """
    reference = manifest.reference
    known = {} if reference is None else reference.answers
    if target.runtime == "onnxruntime":
        return {}
    if without := [variant.name for variant in variants if variant.name not in known]:
        why = "the family has no reference images" if reference is None else "there are no reference answers of them"
        progress.note(f"not compared: {', '.join(without)}, since {why}. Export the family again with --reference")
    found = {}
    for variant in variants:
        if reference is not None and variant.name in known:
            progress.phase(f"comparing {variant.name} with its reference")
            found[variant.name] = _compared(folder, manifest, reference, variant, target)
            if found[variant.name].passed:
                mark_agreed(folder / variant.file)
    return found


def _compared(folder: Path, manifest: Manifest, reference: Reference, variant: Variant, target: Target) -> Compared:
    size, precision = variant.image_of(manifest.anatomy), variant.precision
    pixels = reference.pixels_at(folder, size)
    inputs = as_inputs(pixels, manifest.preprocessing_of(variant), manifest.input.type == "uint8")
    runs = -(-len(inputs) // target.batch) * target.batch  # the last one is filled up, and compared too
    numbers = np.arange(runs) % len(inputs)
    with open_session(folder / variant.file, with_cores_here(in_precision(target, precision))) as session:
        found = session.run(inputs[numbers])
    wanted, may_differ = reference.answers_of(folder, variant.name), reference.undecided(variant.name)
    compared = compare(wanted[numbers], found, precision, reference.scores, may_differ[numbers])
    cosine = to_dense(reference.dense_answers(folder)[numbers], found, reference.scores)
    beside = "graph" if variant.file.endswith(".onnx") else "export"  # where OpenVINO gave the answers itself
    return msgspec.structs.replace(compared, dense_cosine=cosine, beside=beside)


def left_out(compared: Mapping[str, Compared], dense: str, progress: Progress) -> list[str]:
    """Return the variants whose answers differ, each named in a note; the dense one must not be among them."""
    wrong = {name: found for name, found in compared.items() if not found.passed}
    if dense in wrong:
        raise GateFailed(f"{differs(dense, wrong[dense])}. Nothing is timed without it: use another --precision")
    for name, found in wrong.items():
        progress.note(f"{differs(name, found)}. It is neither timed nor chosen")
    return list(wrong)


def differs(name: str, compared: Compared) -> str:
    """Say in one line that a variant does not answer as its graph does."""
    return f"{name}: does not answer as its graph does: {compared.told}; at least {compared.asked:g} is asked"


def with_variants(folder: Path, manifest: Manifest, target: Target, new: Sequence[BuiltVariant]) -> Reference | None:
    """Return the reference of a family with the answers of more variants, which are written into its folder."""
    found = manifest.reference
    for built in new if found is not None else ():
        assert found is not None
        size, steps = manifest.anatomy.image_of(built.plan), manifest.preprocessing
        own = partial(_answer, built, in_precision(target, built.precision), steps, manifest.input.type == "uint8")
        found = found.with_variant(folder, built.name, size, own)
    return found


def _answer(
    built: BuiltVariant, target: Target, steps: Any, takes_bytes: bool, pixels: Pixels
) -> tuple[Answers, list[int]]:
    return answer(built.path, target, as_inputs(pixels, steps, takes_bytes))
