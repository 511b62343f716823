"""Accuracy at equal cost, without retraining: every way of pruning that we have, and what others do, on a real model.

    python benchmarks/quality.py --checkpoint deit_tiny.safetensors --images imagenet-sample/ --classes classes.txt \
        [--knn pets/ --knn tiny-imagenet/] [--seeds 0,1] [--rows default,snapvit] [--peers rows.jsonl] --results DIR

Half of the images calibrate, the other half report; seeds 2i and 2i+1 are the two halves of the same split, each
reporting once; k-NN goes with seed 0. File names are wnid_label.jpg; a class is the line of its wnid in `classes.txt`.
Every row is judged at the same fractions of the dense blocks' FLOPs. Rows are kept in DIR as they are found, and those
already there are not computed again; `--write` makes docs/quality.md and docs/quality.svg from them. Rows that DIR does
not have stay in quality.md as they are.

`benchmarks/peers/torch_pruning.py` adds the rows of Torch-Pruning from an environment of its own; DIR/split_SEED.npz is
what it needs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from quality_report import FRACTIONS, TOKEN_FRACTIONS, write_report

import snapvit_export
from snapvit_export.allocation.planner import Planner
from snapvit_export.allocation.recipe import Rounds, Settings, make_settings
from snapvit_export.allocation.tokens import Schedule
from snapvit_export.calibration.images import Images
from snapvit_export.calibration.preprocessing import Preprocessing
from snapvit_export.correction.cholesky import Factors
from snapvit_export.correction.moments import Statistics
from snapvit_export.evaluate.knn import nearest_neighbours
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan, Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.model.scores import Scores
from snapvit_export.prune.blocks.merging import holder_of
from snapvit_export.prune.correct.elastic import make_factors
from snapvit_export.prune.correct.refit import refit
from snapvit_export.prune.correct.sequential import correct_in_sequence
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.rank.iterative import rank_in_rounds
from snapvit_export.prune.rank.rank import rank
from snapvit_export.prune.rank.search.candidate_runner import CandidateRunner
from snapvit_export.prune.rank.search.damage_fitness import DamageFitness
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.output_divergence import OutputDivergence
from snapvit_export.prune.stats.schedules import choose_schedule
from snapvit_export.storage.json import from_json, to_json

ROWS_FILE, NEIGHBOURS_FILE = "rows.jsonl", "neighbours.jsonl"
USE_SCORES = ("criterion", "product")  # orders
SEARCH = 104  # evaluations of the search over the damage curves: eight generations
BATCH = 25  # images that a module embeds at once
SIZES, WIDTHS = (224, 192), (1.0, 0.85, 0.7)  # that are mixed with merging
RELEASED_IMAGES = 128  # that score and judge in the released recipe here; it has 1000, which takes hours on a CPU


@dataclass(frozen=True)
class Cut:
    """One pruned model: a Plan of a ranking, corrected by factors, or with the weights of a module."""

    ranking: Ranking
    plan: Plan
    factors: Factors | None = None
    module: torch.nn.Module | None = None


@dataclass
class Half:
    """One seed: the images that calibrate, the ones that report, and what several rows share."""

    model: Model
    seed: int
    calibration: Images
    held_out: Images
    chosen: dict[tuple[str, float], Plan] = field(default_factory=dict)  # mixes, by row and cost

    @cached_property
    def statistics(self) -> Statistics:
        return observe(self.model, self.calibration)

    @cached_property
    def alike(self) -> Statistics:
        """All tokens count the same, whatever the model reads."""
        return observe(self.model, self.calibration, token_weights=[None] * len(self.model.anatomy.blocks))

    @cached_property
    def gradient(self) -> Ranking:
        return self.ranked(criterion="self-supervised")

    @cached_property
    def released(self) -> Ranking:
        return rank(self.model, self.calibration.first(RELEASED_IMAGES), make_settings("snapvit"))

    @cached_property
    def default(self) -> Ranking:
        return rank(self.model, self.calibration, make_settings("default", seed=self.seed))

    @cached_property
    def idap(self) -> Ranking:
        return rank(self.model, self.calibration, make_settings("idap", seed=self.seed))

    @cached_property
    def rounds(self) -> Ranking:
        rounds = Rounds(most_moved=float("inf"))  # all of them, however far the answers move
        return rank_in_rounds(
            self.model, self.calibration, rounds, make_settings("default", depth=False, seed=self.seed)
        )

    @cached_property
    def searched(self) -> Ranking:
        return rank(self.model, self.calibration, make_settings("default", evaluations=SEARCH))

    def ranked(self, **changes: object) -> Ranking:
        return rank(self.model, self.calibration, Settings(seed=self.seed, **changes))  # type: ignore[arg-type]

    @cached_property
    def merging(self) -> Schedule:
        """The schedule that suits the model by the calibration images."""
        return choose_schedule(self.model, self.calibration)[0]

    @property
    def of_dense(self) -> tuple[Anatomy, Plan]:
        return self.model.anatomy, Plan.dense(self.model.anatomy)

    def cut(self, size: int = 0, merged: Sequence[int] | None = (), proportional: bool = True) -> Cut:
        """The model at its full width with other tokens."""
        grid = (size // self.model.anatomy.patch[0],) * 2 if size else None
        plan = Plan.dense(self.model.anatomy).with_tokens(merged or (), grid)
        module = shrink(self.model.module, Ranking.flat(self.model.anatomy), plan)
        if (holder := holder_of(module)) is not None:
            holder.proportional = proportional
        return Cut(Ranking.flat(self.model.anatomy), plan, module=module)

    def mix(self, size: int, width: float, fraction: float) -> Plan | None:
        """The Plan of an input size, a width (as its FLOPs at all tokens) and as much merging as the cost needs."""
        side = size // self.model.anatomy.patch[0]
        planner = Planner(self.default, self.model.anatomy, self.default.protection)
        grid = None if side == self.model.anatomy.grid[0] else (side, side)
        plan = planner.flops(width).with_tokens(grid=grid)
        merged = self.merging.within(self.model.anatomy, plan, fraction)
        return None if merged is None else plan.with_tokens(merged, grid)

    def fitted(self, plan: Plan, images: Images) -> Cut:
        """A Plan refitted on images of its own size."""
        of_size = images.at(self.model.anatomy.image_of(plan))
        return Cut(self.default, plan, module=refit(self.model, self.default, plan, of_size))

    @cached_property
    def parts(self) -> tuple[Images, Images]:
        """The calibration images that mixes are fitted on, and those that compare them."""
        count = len(self.calibration) * 3 // 4
        return self.calibration.only(slice(0, count)), self.calibration.only(slice(count, len(self.calibration)))

    def divergence(self, plan: Plan) -> float:
        """The divergence of a Plan's predictions from dense on calibration images that it was not fitted on."""
        if plan not in self._divergences:
            judge = self._judge
            z = judge.embedding(self.fitted(plan, self.parts[0]))
            self._divergences[plan] = float(judge.predictions(z, slice(0, len(z))).mean())
            print(f"  {plan.flops_ratio(self.model.anatomy):.3f} {self._divergences[plan]:.4f} {plan}", flush=True)
        return self._divergences[plan]

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.model, self.parts[1])

    @cached_property
    def _divergences(self) -> dict[Plan, float]:
        return {}

    def factors(self, ranking: Ranking) -> Factors:
        return make_factors(self.model, ranking, self.statistics)

    def joint(self, order: str, alike: bool = False) -> tuple[Ranking, Factors]:
        scores = Scores(self.gradient.head_scores, self.gradient.neuron_scores) if order in USE_SCORES else None
        return damage_ranking(self.model, self.alike if alike else self.statistics, order, scores)


Row = Callable[[Half], Iterator[Cut]]


def plain(ranking: Callable[[Half], Ranking], corrected: bool = False) -> Row:
    """A ranking as it is, along the published line or by its damage curves; elastic correction if asked for."""

    def cuts(half: Half) -> Iterator[Cut]:
        made = ranking(half)
        factors = half.factors(made) if corrected else None
        planner = Planner(made, half.model.anatomy, made.protection)
        for fraction in FRACTIONS:
            yield Cut(made, planner.flops(fraction), factors)

    return cuts


def joint(order: str, alike: bool = False) -> Row:
    """Orders and curves from the statistics, allocated jointly, elastic correction, no search."""

    def cuts(half: Half) -> Iterator[Cut]:
        made, factors = half.joint(order, alike)
        planner = Planner(made, half.model.anatomy)
        for fraction in FRACTIONS:
            yield Cut(made, planner.flops(fraction), factors)

    return cuts


def on_images(
    ranking: Callable[[Half], Ranking],
    fit: Callable[..., torch.nn.Module],
    protection: Protection | None = None,  # None: as the ranking says
    fractions: Sequence[float] = FRACTIONS,
    **options: object,
) -> Row:
    """Every Plan fitted on the calibration images by itself."""

    def cuts(half: Half) -> Iterator[Cut]:
        made = ranking(half)
        planner = Planner(made, half.model.anatomy, protection or made.protection)
        for fraction in fractions:
            plan = planner.flops(fraction)
            yield Cut(made, plan, module=fit(half.model, made, plan, half.calibration, **options))

    return cuts


def largest_size(half: Half, fraction: float) -> int:
    """The largest input in pixels whose blocks need at most this fraction of the dense FLOPs."""
    dense = Plan.dense(half.model.anatomy)
    step = half.model.anatomy.patch[0]
    grids = [(side, side) for side in range(1, half.model.anatomy.grid[0] + 1)]
    fit = [grid for grid in grids if dense.with_tokens(grid=grid).flops_ratio(half.model.anatomy) <= fraction]
    return step * max(fit)[0]


def mixed(name: str, sizes: Sequence[int] = SIZES, widths: Sequence[float] = WIDTHS) -> Row:
    """Resolution, width and merging together: the mix with the least divergence from dense, measured without labels.

    Every mix needs the same FLOPs: given the size and the width, tokens are merged until it does. The calibration
    images are divided once more: mixes are refitted on most of them and compared on the others. The best is refitted
    on all.
    """

    def cuts(half: Half) -> Iterator[Cut]:
        for fraction in TOKEN_FRACTIONS:
            best = half.chosen.get((name, fraction))  # before: k-NN is of the same mixes
            if best is None:
                mixes = [half.mix(size, width, fraction) for size in sizes for width in widths]
                best = min((plan for plan in mixes if plan is not None), key=half.divergence)
            yield half.fitted(best, half.calibration)

    return cuts


ROWS: dict[str, Row] = {
    "random": plain(lambda half: half.ranked(criterion="random")),
    "magnitude": plain(lambda half: half.ranked(criterion="magnitude")),
    "lamp": plain(lambda half: half.ranked(criterion="lamp")),
    "snip": plain(lambda half: half.ranked(criterion="snip")),
    "taylor": plain(lambda half: half.ranked(criterion="taylor")),
    "snapvit local": plain(lambda half: half.gradient),
    "snapvit": plain(lambda half: half.released),
    "snapvit + elastic": plain(lambda half: half.released, corrected=True),
    "snapvit + sparsegpt": on_images(lambda half: half.released, correct_in_sequence, correction="sparsegpt"),
    "joint, gradient order": joint("criterion"),
    "joint, variance order": joint("variance"),
    "joint, product order": joint("product"),
    "joint, pivoted order": joint("pivoted"),
    "joint, backward order": joint("backward"),
    "joint, backward, tokens alike": joint("backward", alike=True),
    "joint, backward, sequential": on_images(lambda half: half.joint("backward")[0], correct_in_sequence),
    "searched": plain(lambda half: half.searched, corrected=True),
    "searched, refit": on_images(lambda half: half.searched, refit),
    "idap": plain(lambda half: half.idap),
    "idap, refit": on_images(lambda half: half.idap, refit),
    "joint, in rounds, refit": on_images(lambda half: half.rounds, refit),
    "default, width alone": on_images(lambda half: half.default, refit, Protection()),
    "default": on_images(lambda half: half.default, refit),
}
TOKEN_ROWS: dict[str, Row] = {
    "width and depth": on_images(lambda half: half.default, refit, fractions=TOKEN_FRACTIONS),
    "resolution": lambda half: (half.cut(size=largest_size(half, f)) for f in TOKEN_FRACTIONS),
    "merging": lambda half: (half.cut(merged=half.merging.within(*half.of_dense, f)) for f in TOKEN_FRACTIONS),
    "merging, sizes ignored": lambda half: (
        half.cut(merged=half.merging.within(*half.of_dense, f), proportional=False) for f in TOKEN_FRACTIONS
    ),
    "resolution x merging": mixed("resolution x merging", widths=(1.0,)),
    "merging x width": mixed("merging x width", sizes=(224,)),
    "all of them": mixed("all of them"),
}
ROWS |= TOKEN_ROWS
NEIGHBOUR_ROWS = ("default", "joint, backward order", "snapvit local")
TOKEN_NEIGHBOUR_ROWS = ("resolution", "merging", "all of them")


def fractions_of(row: str) -> tuple[float, ...]:
    """The costs at which a row is judged."""
    return TOKEN_FRACTIONS if row in TOKEN_ROWS else FRACTIONS


def code_state() -> str:
    """A hash of the library's sources: rows of different states must not pass for one another."""
    sources = sorted(Path(snapvit_export.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:12]


CODE = code_state()


class Judge:
    """Runs cuts over one set of images and compares them with the dense model."""

    def __init__(self, model: Model, images: Images) -> None:
        self.runner, self.images, self.labels = CandidateRunner(model, images), images, images.labels
        self.cosine = OutputDivergence("cosine", model, self.runner.dense)
        self.predictions = OutputDivergence("predictions", model, self.runner.dense)
        self.classify = model.module.head

    def embedding(self, cut: Cut) -> torch.Tensor:
        if cut.module is None:
            return DamageFitness(self.runner, cut.ranking, cut.factors, self.cosine).embedding(cut.plan)
        module: Any = cut.module
        images = self.images.at(tuple(module.patch_embed.img_size))
        with torch.no_grad():
            made = [self._embedded(module, torch.from_numpy(batch)) for batch in images.batches(BATCH)]
        return torch.cat(made)

    @staticmethod
    def _embedded(module: Any, images: torch.Tensor) -> torch.Tensor:
        return module.forward_head(module.forward_features(images), pre_logits=True)

    def top1(self, z: torch.Tensor) -> float:
        assert self.labels is not None
        return float((self.classify(z).argmax(1).numpy() == self.labels).mean())

    def turned(self, z: torch.Tensor) -> float:
        """Mean cosine to the dense model's embedding."""
        return 1 - float(self.cosine(z, slice(0, len(z))).mean())


class Neighbours:
    """k-NN on another data set: features of its train part vote on its test part."""

    def __init__(self, model: Model, folder: Path, most_classes: int) -> None:
        parts = [read_classes(model, folder / name, most_classes) for name in ("train", "test")]
        self.train, self.test = (Judge(model, part) for part in parts)
        self.images = len(parts[1])  # that are judged

    def accuracy(self, cut: Cut | None) -> float:
        train, test = (j.runner.dense if cut is None else j.embedding(cut) for j in (self.train, self.test))
        return nearest_neighbours(train.numpy(), self.train.labels, test.numpy(), self.test.labels)


def read_named(model: Model, folder: Path, classes: Path) -> Images:
    """Pictures called wnid_label.jpg."""

    wnids = [line.split()[0] for line in classes.read_text().splitlines()]
    paths = sorted(folder.glob("*.jpg"))
    labels = np.array([wnids.index(path.name.split("_")[0]) for path in paths])
    return from_files(paths, labels, folder.name, model.preprocessing)


def from_files(paths: Sequence[Path], labels: np.ndarray, name: str, preprocessing: Preprocessing) -> Images:
    """Pictures that can be read again in another size."""
    from PIL import Image

    pixels = np.stack([preprocessing.pixels(Image.open(path).convert("RGB")) for path in paths])
    again = lru_cache(maxsize=2)(partial(from_files, paths, labels, name))
    return Images(pixels, labels, preprocessing, name, again=again)


def read_classes(model: Model, folder: Path, most: int) -> Images:
    """One sub-folder per class; the first `most` classes. `train` may be called trainval, `test` val."""

    other = {"train": "trainval", "test": "val"}[folder.name]
    folder = folder if folder.is_dir() else folder.with_name(other)
    classes = sorted(path for path in folder.iterdir() if path.is_dir())[:most]
    found = [
        (p, i) for i, c in enumerate(classes) for p in sorted(c.rglob("*")) if p.suffix.lower() in (".jpg", ".jpeg")
    ]
    return from_files([p for p, _ in found], np.array([label for _, label in found]), folder.name, model.preprocessing)


def halves(model: Model, images: Images, seed: int) -> Half:
    order = np.random.default_rng(seed // 2).permutation(len(images))
    parts = np.array_split(order, 2)
    first, second = parts if seed % 2 == 0 else parts[::-1]
    return Half(model, seed, *(images.only(part) for part in (first, second)))


def save_split(half: Half, path: Path) -> None:
    """What a peer needs that does not have our image code."""
    normalise = half.model.preprocessing.normalise
    np.savez(
        path,
        calibration=normalise(half.calibration.pixels),
        calibration_labels=half.calibration.labels,
        held_out=normalise(half.held_out.pixels),
        held_out_labels=half.held_out.labels,
    )


def measure(half: Half, judge: Judge, wanted: list[str], results: Path) -> None:
    done = {(r["row"], r["seed"]) for r in read_rows(results, ROWS_FILE)}
    dense = judge.top1(judge.runner.dense)
    for name in wanted:
        if (name, half.seed) in done:
            continue
        found = []
        for fraction, cut in zip(fractions_of(name), ROWS[name](half)):
            z = judge.embedding(cut)
            record = {"row": name, "seed": half.seed, "flops": fraction, "dense_top1": dense}
            record |= {"flops_ratio": cut.plan.flops_ratio(half.model.anatomy), "top1": judge.top1(z)}
            record |= {"cosine": judge.turned(z), "images": len(z), "code": CODE}
            record |= {"plan": to_json(cut.plan).decode()} if cut.plan.changes_tokens else {}
            found.append(record)
            print(f"{name:28s} seed {half.seed} flops {fraction:.2f} top-1 {record['top1']:.3f}", flush=True)
        append(results, ROWS_FILE, found)


def measure_neighbours(half: Half, others: dict[str, Neighbours], wanted: list[str], results: Path) -> None:
    done = {(row["row"], row["flops"]) for row in read_rows(results, NEIGHBOURS_FILE)}
    for name in ("dense", *(row for row in (*NEIGHBOUR_ROWS, *TOKEN_NEIGHBOUR_ROWS) if row in wanted)):
        fractions = [1.0] if name == "dense" else fractions_of(name)
        if (name, fractions[-1]) in done:
            continue
        cuts: Iterable[Cut | None] = [None] if name == "dense" else ROWS[name](half)
        for fraction, cut in zip(fractions, cuts):
            accuracy = {title: other.accuracy(cut) for title, other in others.items()}
            record = {"row": name, "seed": half.seed, "flops": fraction, "knn": accuracy}
            record |= {"images": {title: other.images for title, other in others.items()}, "code": CODE}
            append(results, NEIGHBOURS_FILE, [record])
            print(f"{name:28s} flops {fraction:.2f} k-NN {accuracy}", flush=True)


def read_rows(results: Path, name: str) -> list[dict]:
    path = results / name
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def append(results: Path, name: str, rows: list[dict]) -> None:
    with open(results / name, "a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path)
    parser.add_argument("--images", type=Path)
    parser.add_argument("--classes", type=Path)
    parser.add_argument("--knn", type=Path, action="append", default=[])
    parser.add_argument("--knn-classes", type=int, default=37)
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--rows", default=",".join(ROWS).replace(", ", "; "))
    parser.add_argument("--peers", type=Path, help="Rows of a peer, to go into the report.")
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--write", type=Path, help="Folder for quality.md and quality.svg, such as docs.")
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    if given.checkpoint:
        torch.set_grad_enabled(True)
        model = load_model("deit_tiny_patch16_224", given.checkpoint)
        images = read_named(model, given.images, given.classes)
        wanted = [name.strip().replace("; ", ", ") for name in given.rows.split(",") if name]
        for seed in map(int, given.seeds.split(",")):
            half = halves(model, images, seed)
            for row in read_rows(given.results, ROWS_FILE):
                if row["seed"] == seed and "plan" in row:
                    half.chosen[row["row"], row["flops"]] = from_json(row["plan"], Plan, ROWS_FILE)
            save_split(half, given.results / f"split_{seed}.npz")
            measure(half, Judge(model, half.held_out), wanted, given.results)
            if seed == 0 and given.knn:
                others = {folder.name: Neighbours(model, folder, given.knn_classes) for folder in given.knn}
                measure_neighbours(half, others, wanted, given.results)
    if given.write:
        peers = [json.loads(line) for line in given.peers.read_text().splitlines()] if given.peers else []
        rows = read_rows(given.results, ROWS_FILE) + peers
        neighbours = read_rows(given.results, NEIGHBOURS_FILE)
        table = given.results / "fitness.md"
        fitness = table.read_text() if table.exists() else ""
        write_report(rows, neighbours, fitness, list(ROWS), given.write)


if __name__ == "__main__":
    main()
