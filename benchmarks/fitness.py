"""Which label-free fitness foretells accuracy on other images? A correlation over random Plans of equal cost.

    python benchmarks/fitness.py --checkpoint deit_tiny.safetensors --images imagenet-sample/ --classes classes.txt \
        [--knn pets/] [--plans 30] [--flops 0.6] --results DIR

Random factors (log-normal, sigma 0.7) on the damage curves give Plans of the same FLOPs; all are corrected elastically.
Each fitness is taken on the calibration half, accuracy on the other half and on another data set by k-NN. A good
fitness has a correlation near -1: the smaller the loss, the better the accuracy. Prints Markdown; rows are kept in
DIR/fitness.jsonl, and Plans that are there already are not run again. `quality.py --write` takes the table into docs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from quality import Cut, Judge, Neighbours, halves, read_named

from snapvit_export.allocation.planner import Planner
from snapvit_export.calibration.images import Images
from snapvit_export.correction.cholesky import Factors
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.correct.elastic import correct_module
from snapvit_export.prune.models.load import Model, load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.damage import damage_ranking
from snapvit_export.prune.stats.output_divergence import OutputDivergence

SIGMA = 0.7
FEW, SOME = 64, 192  # images


class Candidates:
    """Every fitness of a Plan, on the calibration half."""

    def __init__(self, model: Model, images: Images) -> None:
        self.model, self.judge, self.images = model, Judge(model, images), images
        dense = self.judge.runner.dense
        self.divergences = {
            name: OutputDivergence(name, model, dense) for name in ("predictions", "neighbours", "cosine")
        }
        self.chosen = model.module.head(dense).argmax(1)
        self.tokens = self._tokens(model.module)

    def of(self, ranking: Ranking, factors: Factors, plan: Plan) -> dict[str, float]:
        z = self.judge.embedding(Cut(ranking, plan, factors))
        found: dict[str, float] = {}
        for name, divergence in self.divergences.items():
            losses = divergence(z, slice(0, len(z)))
            found |= {f"{name}, {n} images": float(losses[:n].mean()) for n in (FEW, SOME)}
        other = (self.model.module.head(z).argmax(1) != self.chosen).float()
        found |= {f"other top class, {SOME} images": float(other[:SOME].mean())}
        module = shrink(self.model.module, ranking, plan)
        correct_module(module, ranking, plan, factors)
        turned = 1 - F.cosine_similarity(self._tokens(module), self.tokens, dim=2)  # (FEW, T)
        return {**found, f"cosine of all tokens, {FEW} images": float(turned.mean())}

    def _tokens(self, module: torch.nn.Module) -> torch.Tensor:
        parts = [module.forward_features(torch.from_numpy(b)) for b in self.images.first(FEW).batches(8)]  # type: ignore[operator]
        return torch.cat(parts)


def ranks(values: list[float]) -> np.ndarray:
    return np.argsort(np.argsort(values)).astype(float)


def table(rows: list[dict]) -> str:
    targets = list(rows[0]["targets"])
    text = ["| fitness | " + " | ".join(f"{t}: rank | linear" for t in targets) + " |"]
    text.append("|---|" + "---|---|" * len(targets))
    for name in rows[0]["fitness"]:
        losses = [row["fitness"][name] for row in rows]
        cells = []
        for target in targets:
            wanted = [row["targets"][target] for row in rows]
            cells.append(f"{np.corrcoef(ranks(losses), ranks(wanted))[0, 1]:.2f}")
            cells.append(f"{np.corrcoef(losses, wanted)[0, 1]:.2f}")
        text.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(text)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--classes", type=Path, required=True)
    parser.add_argument("--knn", type=Path)
    parser.add_argument("--plans", type=int, default=30)
    parser.add_argument("--flops", type=float, default=0.6)
    parser.add_argument("--results", type=Path, required=True)
    given = parser.parse_args()
    given.results.mkdir(parents=True, exist_ok=True)
    path = given.results / "fitness.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    model = load_model("deit_tiny_patch16_224", given.checkpoint)
    half = halves(model, read_named(model, given.images, given.classes), 0)
    if len(rows) < given.plans:
        ranking, factors = damage_ranking(model, half.statistics)
        candidates, held_out = Candidates(model, half.calibration), Judge(model, half.held_out)
        other = Neighbours(model, given.knn, 15) if given.knn else None
        drawn = np.random.default_rng(0).normal(0, SIGMA, (given.plans, len(model.anatomy.blocks), 2))
        for number in range(len(rows), given.plans):
            weighted = ranking.weighted(np.exp(drawn[number]))
            plan = Planner(weighted, model.anatomy).flops(given.flops)
            cut = Cut(ranking, plan, factors)
            targets = {"held-out top-1": held_out.top1(held_out.embedding(cut))}
            if other is not None:
                targets[f"{given.knn.name} k-NN"] = other.accuracy(cut)
            rows.append({"fitness": candidates.of(ranking, factors, plan), "targets": targets})
            with open(path, "a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            print(number, targets, flush=True)
    spread = [row["targets"]["held-out top-1"] for row in rows]
    reach = f"held-out top-1 {min(spread):.3f} to {max(spread):.3f}"
    text = f"{len(rows)} Plans at {given.flops:.2f} of the FLOPs, {reach}.\n\n{table(rows)}\n"
    (given.results / "fitness.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
