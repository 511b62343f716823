"""`snapvit validate`: evaluates every variant of a family on real images, in its runtime, next to its latency.

Each image is decoded once and each file runs once over all of them; accuracy with the head, k-NN, linear probe and the
fidelity to the dense model all come from the outputs of that run. Latencies are those of the manifest if a choice rests
on them, or if they were taken on this machine with the same settings; otherwise all variants are timed now, side by
side. Where torch and the weights are available, files whose weights were not corrected are compared with the module
that they were built from. The results go into the manifest, and some images to look at, with predictions and with the
patches that were merged, into `validation.json`. Until then the features of every file are kept, so that a run that
was stopped resumes with the next file. Light, but for the comparison with torch.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ..calibration.dataset import Dataset, are_other_splits, open_dataset, split_by_seed
from ..calibration.digits import BUNDLED as BUNDLED_IMAGES
from ..calibration.images import calibration_and_held_out
from ..calibration.open_source import open_source
from ..calibration.preprocessing import Preprocessing
from ..calibration.sampling import places_of, without_images
from ..errors import FileFormatError, SnapvitError, UsageError, needs
from ..evaluate.evaluator import EvalOptions, Evaluator, check_options, fidelity_to, splits_for
from ..evaluate.exported_model import ExportedInfo, open_exported
from ..evaluate.features import Features
from ..evaluate.merged_patches import MOST_IMAGES, draw_merges, shown_variants
from ..evaluate.options import refuse_token_metrics
from ..evaluate.pareto import Tradeoff, dominated
from ..evaluate.samples import pick_samples, spread
from ..family.evaluation import TITLES, Evaluation, Measure
from ..family.folder import read_family, unchanged, write_manifest
from ..family.layout import KEPT_FEATURES, RANKING
from ..family.manifest import Manifest, MeasuredOn
from ..family.validation import MergedPatches, Sample, Validation
from ..profiling.profile import Percentile, Profile
from ..progress import Progress
from ..runtimes.device import DeviceCard
from ..runtimes.session import device_for
from ..selection.known_profiles import FamilyProfile
from ..selection.on_device import TimingOptions, profile_family
from ..storage.json import is_name
from ..storage.temporary import alone_in, remove_leftovers
from ..target import Target, in_precision
from .inputs import BUNDLED_MODEL, BUNDLED_NAME

SECONDS = 1.0  # of each variant, if they are timed


@dataclass(frozen=True)
class ValidateRequest:
    """A family, images to evaluate it on, and the options.

    >>> manifest = validate(ValidateRequest(Path("snapvit-family"), data="path/to/images"), progress)
    """

    family: Path
    data: str | None = None  # None: the bundled digits, for the bundled model
    options: EvalOptions = field(default_factory=EvalOptions)
    timing: TimingOptions = field(default_factory=TimingOptions)
    known: FamilyProfile | None = None  # latencies that were taken before
    measure: bool = False  # time again, whatever is known
    seconds: float | None = None  # of each variant, which must then be timed; None: SECONDS, if they are
    model: str | None = None  # that the family was made from, if the manifest's name is not enough
    checkpoint: Path | None = None  # its weights, to compare with torch
    model_arguments: Mapping[str, Any] | None = None  # for timm, beside a timm name
    needs_labels: bool = False  # True: an accuracy must be measured


def validate(request: ValidateRequest, progress: Progress) -> Manifest:
    """Evaluate every variant and write the results into the family."""
    began, folder = time.monotonic(), Path(request.family)
    manifest = read_family(folder)
    target = request.timing.target(manifest)
    with alone_in(folder):
        remove_leftovers(folder)
    device = device_for(target.runtime)
    _check(request, manifest)
    known = _known_latencies(request, manifest, target, device)
    if known is not None and request.seconds is not None:
        raise UsageError(f"--seconds is how long variants are timed, and they are not: {known.why}. Leave it out")
    progress.phase("finding images")
    data = open_dataset(_data(request, manifest), request.options.seed, splits_for(request.options.by))
    data = _without_calibration(data, request, manifest, progress)
    evaluator = Evaluator.prepare(
        _FamilyUnderTest(manifest), data, request.options, progress, not request.needs_labels, streamed=False
    )
    outputs, found = _evaluate_all(folder, manifest, target, evaluator, progress)
    parities = _parities(request, folder, manifest, evaluator, outputs, progress)
    profiles = _latencies(request, known, progress)
    on = manifest.target if manifest.choice else MeasuredOn.of(target, device)
    on = on if request.known is None else request.known.target
    validated = _described(manifest, profiles, found, parities, on)
    _note_kept(validated, found, progress)
    samples = _samples(manifest, evaluator, outputs)
    validation = Validation(
        source=evaluator.test.source,
        images=len(evaluator.test),
        sha256=str(evaluator.test.fingerprint["sha256"]),
        runtime=target.runtime,
        seconds=round(time.monotonic() - began, 3),
        samples=samples,
        merged=_merged(folder, manifest, evaluator, progress),
    )
    with unchanged(folder, manifest):
        validation.save(folder)
        write_manifest(folder, validated)
        for path in folder.glob(f"{KEPT_FEATURES}*"):
            path.unlink()
    return validated


def _note_kept(manifest: Manifest, found: Mapping[str, Evaluation], progress: Progress) -> None:
    """Say where an earlier evaluation on more images stays the one that is shown."""
    dense = manifest.variant(manifest.dense)
    now, shown = found[dense.name], dense.evaluation
    if shown is not None and shown.images > now.images:
        progress.note(
            f"tables show the evaluation on {shown.images} images of {shown.source} that was there before; that on "
            f"{now.images} is beside it in the manifest"
        )


def require_accuracy(folder: Path, manifest: Manifest, least: float) -> None:
    """Refuse a family of which some variant falls below the accuracy that was asked for, by the last validation."""
    last = Validation.load(folder)
    assert last is not None, "it was written just now"
    scores = {
        variant.name: _headline(found)
        for variant in manifest.variants
        for found in (variant.evaluation, *variant.evaluations)
        if found is not None and (found.source, found.images) == (last.source, last.images)
    }
    low = [name for name, (_, value) in scores.items() if value < least]
    if not low:
        return
    worst = min(low, key=lambda name: scores[name][1])
    measure, value = scores[worst]
    shown = ", ".join(low[:5]) + (f" and {len(low) - 5} more" if len(low) > 5 else "")
    raise SnapvitError(
        f"below {100 * least:g} %: {shown}; {worst} has {TITLES[measure]} {100 * value:.1f} %. "
        "Cut less, or lower --min-accuracy"
    )


@dataclass(frozen=True)
class _FamilyUnderTest:
    """The properties of a family's dense model, which all variants but the image size share: a `ModelUnderTest`."""

    manifest: Manifest

    @property
    def preprocessing(self) -> Preprocessing:
        return self.manifest.preprocessing

    @property
    def labels(self) -> tuple[str, ...]:
        return self.manifest.labels

    @property
    def outputs(self) -> int:
        return self.manifest.anatomy.classes


def _check(request: ValidateRequest, manifest: Manifest) -> None:
    """Refuse what can be refused before any file is run."""
    check_options(request.options)
    refuse_token_metrics(
        request.options, "validate reads no patch tokens. Segment one model or file: snapvit evaluate {}"
    )
    if request.known is not None and request.measure:
        raise UsageError("--profile and --measure contradict each other. Give one")
    if manifest.choice is not None and (request.known is not None or request.measure):
        raise UsageError(
            f"{request.family} was chosen by its latencies, and others would contradict the proof. Choose again with "
            f"them (snapvit choose {request.family} --budget {manifest.choice.budget}), or leave them out"
        )
    if request.known is not None:
        _require_all(request.known, manifest)
    if request.checkpoint is not None and not request.checkpoint.is_file():
        raise SnapvitError(f"{request.checkpoint}: no such checkpoint file")
    if request.checkpoint is not None or request.model is not None:
        with needs("comparing with torch", extra="prune"):
            import torch  # noqa: F401


def _data(request: ValidateRequest, manifest: Manifest) -> str:
    if request.data is not None:
        return request.data
    if dict(manifest.recipe.get("data", {})).get("source") == BUNDLED_IMAGES:
        return BUNDLED_IMAGES
    raise UsageError(f"{manifest.model} needs images to be evaluated on. Give --data FOLDER")


def _without_calibration(data: Dataset, request: ValidateRequest, manifest: Manifest, progress: Progress) -> Dataset:
    """Return the dataset without images that calibrated the family: accuracy on those would be too high."""
    used, seed = dict(manifest.recipe.get("data", {})), manifest.recipe.get("seed")
    name = str(used.get("source", ""))
    if not name or name == BUNDLED_IMAGES or not isinstance(seed, int):  # the bundled images have a held-out part
        return data
    if are_other_splits(name.split(" + "), data):
        return data
    count = int(used.get("images", 0)) + int(used.get("unreadable", 0))
    try:
        # Draws the same images again; names are recorded of the very folders, so they are no datasets to be split.
        calibrated, _ = calibration_and_held_out(name.split(" + "), count, seed, 0, opens=open_source)
    except SnapvitError:
        progress.note(
            f"the family was calibrated on {name}, which is not here: whether it has these images is not known"
        )
        return data
    known = places_of(calibrated)
    test = without_images(data.test, known)
    unsplit = None if data.unsplit is None else without_images(data.unsplit, known)
    before = data.unsplit or data.test
    left_out = before.count - (unsplit or test).count
    if not left_out:
        return data
    if not (unsplit or test).count:
        raise SnapvitError(
            f"{data.name}: all of its images calibrated the family. Give --data others to evaluate it on"
        )
    progress.note(f"{data.name}: left out {left_out} images that calibrated the family")
    if unsplit is not None:
        return split_by_seed(data.name, unsplit, request.options.seed)
    return replace(data, test=test)


def _evaluate_all(
    folder: Path, manifest: Manifest, target: Target, evaluator: Evaluator, progress: Progress
) -> tuple[dict[str, Features], dict[str, Evaluation]]:
    """Run and evaluate every file, the dense one first; return features and evaluations by variant."""
    outputs: dict[str, Features] = {}
    found: dict[str, Evaluation] = {}
    for variant in sorted(manifest.variants, key=lambda v: v.name != manifest.dense):
        info = ExportedInfo(
            variant.name,
            variant.sha256,
            manifest.preprocessing_of(variant),
            manifest.labels,
            manifest.input.type == "uint8",
        )
        sized = evaluator.at(variant.image_of(manifest.anatomy))
        kept = folder / f"{KEPT_FEATURES}{variant.name}.safetensors"
        resumable = replace(sized, options=replace(sized.options, features=kept))
        with open_exported(folder / variant.file, in_precision(target, variant.precision), info) as exported:
            features = resumable.features(exported, progress)
        outputs[variant.name] = replace(features, train=None, valid=None)  # those are not needed any more
        measured = sized.measures(features, progress) | fidelity_to(features, outputs[manifest.dense])
        found[variant.name] = sized.evaluation(measured)
        measure, value = _headline(found[variant.name])
        progress.note(f"{variant.name}: {TITLES[measure]} {100 * value:.1f} %")
    return outputs, found


def _headline(evaluation: Evaluation) -> tuple[Measure, float]:
    measure = evaluation.headline
    assert measure is not None, "nothing was measured"
    return measure, evaluation.value(measure) or 0.0


def _parities(
    request: ValidateRequest,
    folder: Path,
    manifest: Manifest,
    evaluator: Evaluator,
    outputs: Mapping[str, Features],
    progress: Progress,
) -> dict[str, float]:
    """Return the largest difference of each uncorrected file to its torch module, where torch is available."""
    name = request.model or (BUNDLED_MODEL if manifest.model == BUNDLED_NAME else manifest.model)
    asked = request.checkpoint is not None or request.model is not None
    if not asked and (name != BUNDLED_MODEL or find_spec("torch") is None):
        return {}
    if request.model is None and not is_name(name):  # it is a stranger's, and would be opened as a path
        raise UsageError(f"'{name}' is not the name of a model. Give --model the one that the family was made from")
    exact = [v for v in manifest.variants if v.precision == "fp32"]  # `precision_cosine` tells of the others
    if not exact:
        progress.note(f"torch is compared with files in fp32, not in {manifest.target.precision}")
        return {}
    if not (folder / RANKING).is_file():
        progress.note(f"{folder / RANKING} is missing, so files cannot be compared with torch")
        return {}
    from ..prune.torch_parity import parities

    progress.phase("comparing with torch")
    plans = {v.name: manifest.plan(v) for v in exact if not v.corrected}
    plans = {name: plan for name, plan in plans.items() if not any(plan.merged)}  # the others keep that of the export
    found = {name: outputs[name].test for name in plans}
    return parities(name, request.checkpoint, request.model_arguments, folder / RANKING, plans, evaluator.test, found)


@dataclass(frozen=True)
class _KnownLatencies:
    """Latencies that are valid without timing anything, and why."""

    profiles: Mapping[str, Profile]
    why: str


def _known_latencies(
    request: ValidateRequest, manifest: Manifest, target: Target, device: DeviceCard
) -> _KnownLatencies | None:
    """Return latencies that are given, or the manifest's if a choice rests on them or they are still valid."""
    if request.known is not None:
        return _KnownLatencies(request.known.profiles, "latencies are those of --profile")
    known = {v.name: v.profile for v in manifest.variants if v.profile is not None}
    if manifest.choice is not None:
        return _KnownLatencies(known, f"latencies are those by which {manifest.choice.variant} was chosen")
    same_target = target == manifest.target.target
    if request.measure or not same_target or len(known) != len(manifest.variants):
        return None
    shas = {v.name: v.sha256 for v in manifest.variants}
    targets = {v.name: in_precision(target, v.precision) for v in manifest.variants}
    pause = request.timing.pause_ms
    if all(profile.belongs_to(shas[name], targets[name], device, pause) for name, profile in known.items()):
        return _KnownLatencies(known, "latencies are those of the manifest, taken on this machine")
    return None


def _latencies(request: ValidateRequest, known: _KnownLatencies | None, progress: Progress) -> dict[str, Profile]:
    """Return the latencies that are known, or new ones."""
    if known is None:
        seconds = SECONDS if request.seconds is None else request.seconds
        return profile_family(request.family, request.timing, progress, seconds).profiles
    if request.known is None:
        progress.note(known.why)
    return dict(known.profiles)


def _require_all(given: FamilyProfile, manifest: Manifest) -> None:
    """Refuse latencies that are not of these files."""
    for variant in manifest.variants:
        profile = given.profiles.get(variant.name)
        if profile is None or profile.sha256 != variant.sha256:
            raise FileFormatError(
                f"the given latencies of {variant.name} are missing or of another file. Time this family again"
            )


def _samples(manifest: Manifest, evaluator: Evaluator, outputs: Mapping[str, Features]) -> tuple[Sample, ...]:
    """Pick sample images with predictions: among the data's classes if the head has them, else among all."""
    logits = {name: found.test.logits for name, found in outputs.items() if found.test.logits is not None}
    if not logits:
        return ()
    names: Sequence[str] = manifest.labels or [str(i) for i in range(manifest.anatomy.classes)]
    if evaluator.columns is not None:
        logits = {name: scores[:, evaluator.columns] for name, scores in logits.items()}
        names = evaluator.test.classes
    chosen = manifest.choice.variant if manifest.choice is not None else None
    pruned = chosen if chosen in logits and chosen != manifest.dense else None
    has_labels = evaluator.columns is not None
    return pick_samples(evaluator.test, evaluator.titles, logits, names, manifest.dense, has_labels, pruned)


def _merged(folder: Path, manifest: Manifest, evaluator: Evaluator, progress: Progress) -> tuple[MergedPatches, ...]:
    """Draw on some images which patches the variants merge."""
    variants = shown_variants(manifest)
    if not variants:
        return ()
    progress.phase("drawing merged patches", len(variants))
    rows = spread(np.arange(len(evaluator.test)), MOST_IMAGES)
    titles = [evaluator.titles[row] for row in rows]
    found = []
    for variant in variants:
        images = evaluator.at(variant.image_of(manifest.anatomy)).test.only(rows)
        found.append(draw_merges(folder, manifest, variant, images, titles))
        progress.advance(1)
    return tuple(found)


def _described(
    manifest: Manifest,
    profiles: Mapping[str, Profile],
    found: Mapping[str, Evaluation],
    parities: Mapping[str, float],
    on: MeasuredOn,
) -> Manifest:
    """Return the manifest with latencies, evaluations and parities filled in."""
    # One answer for all variants, or they would be compared on different images.
    shown = not all(variant.knows_better(found[variant.name]) for variant in manifest.variants)
    known = [
        msgspec.structs.replace(
            variant.evaluated(found[variant.name], shown),
            profile=profiles.get(variant.name, variant.profile),
            parity=parities.get(variant.name, variant.parity),
        )
        for variant in manifest.variants
    ]
    evaluated = msgspec.structs.replace(manifest, variants=tuple(known), target=on)
    at: Percentile = "p50" if manifest.choice is None else manifest.choice.limits.at
    latencies = {variant.name: evaluated.latency(variant.name, at) for variant in known}
    best = {variant.name: variant.evaluation for variant in known}
    points = {
        name: Tradeoff(ms[0], _headline(evaluation)[1])
        for name, ms in latencies.items()
        if ms is not None and (evaluation := best[name]) is not None
    }
    beaten = dominated(points)
    flagged = [msgspec.structs.replace(v, dominated_by=beaten.get(v.name)) for v in known]
    return msgspec.structs.replace(evaluated, variants=tuple(flagged))
