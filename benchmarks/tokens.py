"""Token merging in ONNX Runtime: what a merge costs, in every form that was tried, and a model against its FLOPs.

    python benchmarks/tokens.py [--models vit_tiny_patch16_224 vit_base_patch16_224] [--rounds 60]

1. One merge: eleven of them after each other, with the bias that the next attention needs of each, without the model
   around them. Microseconds for one merge of a batch, above merely dropping as many tokens. Weights do not matter.
2. The model: r = 13 in all blocks but the last, or a third of that number of blocks with more each, as a ratio to the
   dense graph. Beside it what FLOPs say (of what is computed: of the last block only the class token is), and the same
   graph that drops tokens instead of merging, which no form of merging can beat.

CPU time of one thread, the graphs in turns, the median of the ratios of each turn. Prints Markdown.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from graph import make_model
from onnx import TensorProto, helper

from snapvit_export.allocation.tokens import DEFAULT, SCHEDULES
from snapvit_export.graph import forward
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.merging import Merging
from snapvit_export.graph.nodes import Nodes
from snapvit_export.graph.precision import FLOAT
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.pack import blueprint
from snapvit_export.runtimes.ort import OrtSession

MERGED, BLOCKS, PATCHES = 13, 11, 196
Runs = dict[str, Callable[[], object]]


class Dropping(Merging):
    """Drops as many tokens as it should merge: what fewer tokens cost by themselves."""

    def merge(self, x: str, keys: str, width: int, count: int, *_: Any, **__: Any) -> str:
        whole = self.n.reshape(x, [-1, self.tokens, self.embed_dim])
        self.patches -= count
        return self.n.reshape(self.columns(whole, 0, self.tokens), [-1, self.embed_dim])


class LpNormalised(Merging):
    """Keys by LpNormalization, as in the portable flavour."""

    def normed(self, keys: str, width: int) -> str:
        return self.n.add("LpNormalization", keys, axis=-1, p=2)


class DividedByL2(Merging):
    """Keys by ReduceL2 and Div."""

    def normed(self, keys: str, width: int) -> str:
        return self.n.add("Div", keys, self.n.mean(keys, axis=2, keep=True, op="ReduceL2"))


class NormalisedAfter(Merging):
    """Products of raw keys, divided by the lengths of B, and their largest by those of A."""

    def match(self, keys: str, width: int, block: int, kind: int) -> tuple[str, str]:
        n, (size, others) = self.n, self.halves
        lengths = n.mean(keys, axis=2, op="ReduceL2")
        even, odd = (self.every_second(keys, self.prefix + start) for start in (0, 1))
        products = n.add("MatMul", even, n.add("Transpose", odd, perm=[0, 2, 1]))
        divisor = n.reshape(self.every_second(lengths, self.prefix + 1), [-1, 1, others])
        largest, best = self.largest(n.add("Div", products, divisor), f"best.{block}")
        largest = n.add("Div", largest, self.every_second(lengths, self.prefix))
        return best, n.add_many("TopK", largest, n.ints([size]), count=2, axis=1)[1]


class NotNormalised(Merging):
    """Products of raw keys: another decision, only to see what the norm costs."""

    def normed(self, keys: str, width: int) -> str:
        return keys


class OneTopK(Merging):
    """Best partner by one TopK, as in the portable flavour, instead of ReduceMax and ArgMax."""

    def largest(self, cosines: str, name: str) -> list[str]:
        n, size = self.n, self.halves[0]
        value, place = n.add_many("TopK", cosines, n.ints([1]), count=2, axis=2)
        return [n.reshape(value, [-1, size]), n.add("Reshape", place, n.ints([-1, size]), name=name)]


class OneHead(Merging):
    """Another metric: the keys of one head."""

    def match(self, keys: str, width: int, block: int, kind: int) -> tuple[str, str]:
        n = self.n
        head = n.add("Slice", keys, n.ints([0]), n.ints([64]), n.ints([2]))
        return super().match(head, 64, block, kind)


class FlatRows(Merging):
    """Rows by Gather on the flat stream instead of GatherND: only right for one image."""

    def gathered(self, x: str, places: str) -> str:
        n = self.n
        rows = n.reshape(places, [-1])
        flat = n.add("Squeeze", x, n.ints([0]))
        return n.add("Unsqueeze", n.add("Gather", flat, rows, axis=0), n.ints([0]))


class OneHotRows(Merging):
    """Rows by a product with a one-hot matrix instead of GatherND."""

    def joined(self, x: str, leaves: str, stays: str | None, into: str, shares: str, count: int) -> str:
        n, others = self.n, self.every_second(x, self.prefix + 1)
        partners = self.picked(others, n.reshape(into, [-1, count, 1]), count, self.halves[1])
        change = n.add("Sub", self.picked(x, leaves, count, self.tokens), partners)
        grown = n.add("Add", others, n.add("MatMul", shares, change))
        kept = [self.picked(x, stays, self.halves[0] - count, self.tokens)] if stays else []
        return self.beside([*self.front(x), *kept, grown])

    def picked(self, x: str, places: str, count: int, tokens: int) -> str:
        n, values = self.n, self.n.array("zero_one", np.array([0, 1], np.float32))
        return n.add("MatMul", n.add("OneHot", n.reshape(places, [-1, count]), n.ints([tokens]), values, axis=2), x)


class Scattered(Merging):
    """The change of B by ScatterElements with a sum instead of the one-hot MatMul; only a comparison."""

    def joined(self, x: str, leaves: str, stays: str | None, into: str, shares: str, count: int) -> str:
        n, others = self.n, self.every_second(x, self.prefix + 1)
        partners = self.gathered(others, n.reshape(into, [-1, count, 1]))
        share = n.reshape(n.mean(shares, axis=1, keep=True, op="ReduceSum"), [-1, count, 1])
        change = n.add("Mul", n.add("Sub", self.gathered(x, leaves), partners), share)
        rows = n.add("Expand", n.reshape(into, [-1, count, 1]), n.ints([1, 1, self.embed_dim]))
        grown = n.add("ScatterElements", others, rows, change, axis=1, reduction="add")
        return self.beside([*self.front(x), *([self.gathered(x, stays)] if stays else []), grown])


class Scaled(Merging):
    """B scaled by s_b / s_b' as a whole, instead of adding a change of only the rows that go."""

    def joined(self, x: str, leaves: str, stays: str | None, into: str, shares: str, count: int) -> str:
        n, others = self.n, self.every_second(x, self.prefix + 1)
        rest = n.add("Sub", n.number(1.0), n.mean(shares, axis=2, keep=True, op="ReduceSum"))
        grown = n.add("Add", n.add("Mul", others, rest), n.add("MatMul", shares, self.gathered(x, leaves)))
        return self.beside([*self.front(x), *([self.gathered(x, stays)] if stays else []), grown])


class NoBias(Merging):
    """Without the logarithm of sizes that the next attention adds."""

    def log_sizes(self) -> str | None:
        return None


FORMS: tuple[type[Merging], ...] = (
    Dropping,
    Merging,
    LpNormalised,
    DividedByL2,
    NormalisedAfter,
    NotNormalised,
    OneTopK,
    FlatRows,
    OneHotRows,
    Scattered,
    Scaled,
    OneHead,
    NoBias,
)


def chain(form: type[Merging], width: int, opset: int = 23) -> bytes:
    """A graph of merges alone, each by the tokens themselves as keys."""
    n = Nodes(opset)
    state, x, outputs = form(n, 1, PATCHES, width, False), "x", []
    for i in range(BLOCKS):
        keys = n.reshape(x, [-1, state.tokens, width])
        x = state.merge(x, keys, width, MERGED, i, FLOAT, FLOAT, None)
        if (logs := state.log_sizes()) is not None:
            row = n.reshape(logs, [-1, 1, 1, state.tokens])
            outputs.append(n.add("Expand", row, n.ints([1, 1, state.tokens, 1])))
    given = helper.make_tensor_value_info("x", TensorProto.FLOAT, [None, width])
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in (x, *outputs)]
    graph = helper.make_graph(n.nodes, "merges", [given], results, initializer=list(n.constants.values()))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=11)
    data: bytes = model.SerializeToString()
    return data


def in_turns(runs: Runs, rounds: int) -> dict[str, np.ndarray]:
    """CPU seconds of each, in turns; the first three turns warm up."""
    samples: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds + 3):
        for name, run in runs.items():
            start = time.process_time()
            run()
            if number >= 3:
                samples[name].append(time.process_time() - start)
    return {name: np.array(taken) for name, taken in samples.items()}


def merges_alone(width: int, batch: int, rounds: int) -> dict[str, float]:
    """Microseconds of one merge in each form."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    x = np.random.default_rng(0).standard_normal((batch * (1 + PATCHES), width)).astype(np.float32)
    runs: Runs = {}
    for form in FORMS:
        if form is not FlatRows or batch == 1:
            session = ort.InferenceSession(chain(form, width), options, providers=["CPUExecutionProvider"])
            runs[form.__name__] = lambda session=session: session.run(None, {"x": x})
    found = in_turns(runs, rounds)
    least = np.median(found[Dropping.__name__])
    return {name: 1e6 * float(np.median(taken) - least) / BLOCKS for name, taken in found.items()}


def executed_flops(anatomy: Anatomy, plan: Plan) -> float:
    """FLOPs of what a graph computes that reads only the class token: nearly nothing of the last block."""
    heads = zip(anatomy.structure_flops(plan), plan.heads, plan.neurons)
    each = [k * head + n * neuron for (head, neuron), k, n in heads]
    return anatomy.flops(plan) - each[-1]


def models(name: str, batches: list[int], rounds: int) -> list[str]:
    model = make_model(name)
    anatomy, dense = model.anatomy, Plan.dense(model.anatomy)
    few = [0] * len(anatomy.blocks)
    for i in (3, 6, 9):
        few[i] = 47
    plans = {"all blocks": dense.with_tokens([MERGED] * BLOCKS + [0]), "blocks 3, 6, 9": dense.with_tokens(few)}
    merged = SCHEDULES[DEFAULT].within(anatomy, dense, plans["all blocks"].flops_ratio(anatomy))
    plans[DEFAULT] = dense.with_tokens(merged or ())
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        writer = GraphWriter(blueprint(model, Ranking.flat(anatomy)), Path(folder))
        for flavour in ("ort", "portable"):
            format = GraphFormat(flavour)
            paths = {"dense": writer.write(f"{flavour}-dense", dense, format=format).graph}
            for title, plan in plans.items():
                for form in (Merging, Dropping):
                    forward.Merging = form  # type: ignore[misc]
                    stem = f"{flavour}-{form.__name__}-{title}".replace(" ", "")
                    paths[f"{title} {form.__name__}"] = writer.write(stem, plan, format=format).graph
                    forward.Merging = Merging  # type: ignore[misc]
            opened = {name: OrtSession(path, 1) for name, path in paths.items()}
            for batch in batches:
                images = np.random.default_rng(0).standard_normal((batch, 3, *anatomy.image)).astype(np.float32)
                runs: Runs = {name: lambda s=session, x=images: s.run(x) for name, session in opened.items()}
                found = in_turns(runs, max(5, rounds // batch))
                ratio = {name: float(np.median(taken / found["dense"])) for name, taken in found.items()}
                for title, plan in plans.items():
                    flops = executed_flops(anatomy, plan) / executed_flops(anatomy, dense)
                    merged, dropped = ratio[f"{title} Merging"], ratio[f"{title} Dropping"]
                    lines.append(
                        f"| {name} | {flavour} | {batch} | {title} | {flops:.3f} | {dropped:.3f} | **{merged:.3f}** | "
                        f"{100 * (merged / flops - 1):+.1f} % | {100 * (merged / dropped - 1):+.1f} % |"
                    )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["vit_tiny_patch16_224", "vit_base_patch16_224"])
    parser.add_argument("--batches", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    widths = {name: make_model(name).anatomy.embed_dim for name in args.models}
    columns = {
        f"{name}, batch {batch}": merges_alone(width, batch, max(10, 3 * args.rounds // batch))
        for name, width in widths.items()
        for batch in args.batches
    }
    print(f"| one merge of {MERGED}, µs | {' | '.join(columns)} |\n|---{'|---' * len(columns)}|")
    for form in FORMS[1:]:
        row = [f"{column[form.__name__]:.0f}" if form.__name__ in column else "" for column in columns.values()]
        told = "as it is written" if form is Merging else (form.__doc__ or "").rstrip(".")
        print(f"| {told} | {' | '.join(row)} |", flush=True)
    print("\n| model | flavour | batch | merging | FLOPs | dropped | merged | above FLOPs | above dropped |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name in args.models:
        print("\n".join(models(name, args.batches, args.rounds)), flush=True)


if __name__ == "__main__":
    main()
