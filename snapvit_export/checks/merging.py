"""Which tokens a graph merges: its decisions read, how clear they are, and the graph run with those of another form.

Matching compares cosines, and two correct forms of one model round them differently. Where two matches are equal but
for that rounding, each form may merge other tokens, and from there on their outputs differ by far more than rounding:
no tolerance of outputs can tell this from a mistake. With some hundred cosines in order in every block such ties happen
in a share of all images, in deep models in most. So gates (`gates`) do not leave such images out but compare both forms
with the same merges:

    1. Images whose outputs agree are done: they were merged alike.
    2. For the others the graph runs once more with the reference's decisions in the place of its own (`follow`). Then
       the outputs must agree to the same tolerance as everywhere.
    3. In that run the reference's decisions must be as good as any, by the graph's own cosines, to `ALLOWED` times the
       tolerance. Keys that differ by a share t of their length have cosines that differ by 2t; of two cosines that are
       compared, both do.
    4. What the graph would have decided must be the best by its own cosines, to the rounding of their type: this checks
       the TopK and ArgMax that step 2 goes around.

A file in another runtime cannot be asked that way; there an image that differs is left out if it is undecided, that is
if its smallest margin is below the same bound, and at least half of the images must agree.

In reduced precision such flips are part of what the precision costs, and evaluations of the file include them. Its gate
asks something else, if it is the same computation, so there too the float32 graph follows the decisions of the other.

Light: numpy, and ONNX Runtime to run graphs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import FileFormatError, GateFailed
from ..graph.merging import BEST, COSINES, ORDER
from ..graph.read import read_graph
from ..model.anatomy import Anatomy
from ..model.plan import Plan
from ..storage.json import from_json
from .activations import OWN, with_outputs

Ints = npt.NDArray[np.int64]
ALLOWED = 4  # times a tolerance: how far apart matches may be that two forms decide differently


class Matches(NamedTuple):
    """The decisions of one block for some images; tokens of A and B are numbered from 0."""

    cosines: npt.NDArray[np.float32]  # (images, |A|, |B|)
    order: Ints  # (images, |A|): A from its best to its worst match
    best: Ints  # (images, |A|): the partner in B of each token of A

    def of(self, images: npt.NDArray[Any]) -> Matches:
        """Return those of some images, by number or by a mask."""
        return Matches(*(values[images] for values in self))


ByBlock = Mapping[int, Matches]


def merging_blocks(path: Path) -> tuple[int, ...]:
    """Return the blocks of a graph that merge tokens."""
    names = {name for node in read_graph(path).graph.node for name in node.output}
    found = (re.fullmatch(rf"blocks\.([0-9]{{1,4}})\.{re.escape(ORDER)}", name) for name in names)
    return tuple(sorted(int(match[1]) for match in found if match is not None))


def merged_counts(path: Path) -> dict[int, int]:
    """Return how many tokens each of them merges, by the Plan that the file names."""
    metadata = {entry.key: entry.value for entry in read_graph(path).metadata_props}
    blocks = merging_blocks(path)
    if not blocks:
        return {}
    plan = from_json(metadata.get("snapvit.plan", ""), Plan, str(path))
    if blocks[-1] >= len(plan.merged):
        raise FileFormatError(f"{path}: damaged: it merges tokens in a block that its plan does not have")
    return {block: plan.merged[block] for block in blocks}


def read_matches(path: Path, inputs: npt.NDArray[Any]) -> dict[int, Matches]:
    """Return the decisions of a graph for these inputs, by block.

    >>> {block: match.best for block, match in read_matches(written.graph, batch).items()}
    """
    return run_and_read(path, inputs)[1]


def run_and_read(path: Path, inputs: npt.NDArray[Any]) -> tuple[npt.NDArray[np.float32], dict[int, Matches]]:
    """Return the outputs of a graph and the decisions that led to them, of the very same run."""
    blocks = merging_blocks(path)
    found, output = _run(path, inputs, names_of(blocks), {})
    return found[output].astype(np.float32), {i: matches_in(found, i) for i in blocks}


def follow(
    path: Path, inputs: npt.NDArray[Any], matches: ByBlock
) -> tuple[npt.NDArray[np.float32], dict[int, Matches]]:
    """Return the outputs of a graph that merges as `matches` say, and what it would have decided itself in each block.

    Decisions of blocks that do not merge in the graph are ignored: it leaves out a merge that has no effect.
    """
    blocks = merging_blocks(path)
    given = {f"blocks.{i}.{ORDER}": matches[i].order for i in blocks}
    given |= {f"blocks.{i}.{BEST}": matches[i].best for i in blocks}
    names = [f"blocks.{i}.{COSINES}" for i in blocks] + [f"{name}{OWN}" for name in given]
    found, output = _run(path, inputs, names, given)
    return found[output].astype(np.float32), {i: matches_in(found, i, OWN) for i in blocks}


def names_of(blocks: Sequence[int]) -> list[str]:
    """Return the names of the values that hold the decisions of these blocks."""
    return [f"blocks.{i}.{name}" for i in blocks for name in (COSINES, ORDER, BEST)]


def matches_in(found: Mapping[str, npt.NDArray[Any]], block: int, end: str = "") -> Matches:
    """Return the decisions of a block among the values of a run."""
    name = f"blocks.{block}."
    return Matches(found[f"{name}{COSINES}"], found[f"{name}{ORDER}{end}"], found[f"{name}{BEST}{end}"])


def _run(
    path: Path, inputs: npt.NDArray[Any], names: list[str], given: Mapping[str, Ints]
) -> tuple[dict[str, npt.NDArray[Any]], str]:
    """Run a graph, in batches of the size that it takes, with more outputs and some values given; name its own output.

    The last batch is filled up with the first images, whose values are dropped.
    """
    graph = read_graph(path).graph
    size = graph.input[0].type.tensor_type.shape.dim[0].dim_value or len(inputs)
    chunks = [np.arange(start, start + size) % len(inputs) for start in range(0, len(inputs), size)]
    found: dict[str, list[npt.NDArray[Any]]] = {}
    for chunk in chunks:
        some = {name: np.ascontiguousarray(values[chunk]) for name, values in given.items()}
        with with_outputs(path, names, given=some) as session:
            for name, values in session.run_all(inputs[chunk]).items():
                found.setdefault(name, []).append(values)
    return {name: np.concatenate(parts)[: len(inputs)] for name, parts in found.items()}, graph.output[0].name


def margins(cosines: npt.NDArray[Any], merged: int, ordered: bool = True) -> npt.NDArray[np.float64]:
    """Return for each image the smallest gap that decides something, (images,); infinite where nothing is decided.

    That is: between the last token of A that goes and the first that stays; for each one that goes, between its best
    partner and the next; and, if `ordered`, between neighbours among those that stay, since their order decides who is
    in A and who in B when tokens are merged next.
    """
    if not merged:
        return np.full(len(cosines), np.inf)
    pairs = np.sort(cosines.astype(np.float64), axis=2)[:, :, ::-1]  # (images, |A|, |B|)
    rows = np.argsort(-pairs[:, :, 0], axis=1, kind="stable")
    pairs = np.take_along_axis(pairs, rows[:, :, None], axis=1)
    falls = pairs[:, :-1, 0] - pairs[:, 1:, 0]  # between neighbours in the order
    falls = falls[:, merged - 1 :] if ordered else falls[:, merged - 1 : merged]
    leads = pairs[:, :merged, 0] - pairs[:, :merged, 1] if pairs.shape[2] > 1 else np.empty((len(pairs), 0))
    return np.concatenate([falls, leads], axis=1).min(axis=1, initial=np.inf)


def smallest_margins(path: Path, inputs: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return for each image the smallest margin of all blocks of a graph."""
    counts, matches = merged_counts(path), read_matches(path, inputs)
    found = [margins(matches[i].cosines, count, ordered=i < max(counts)) for i, count in counts.items()]
    return np.min([np.full(len(inputs), np.inf), *found], axis=0)


def places(matches: ByBlock, anatomy: Anatomy) -> dict[int, Ints]:
    """Return the token that each patch belongs to after each block that merges, (images, patches) by block.

    `anatomy` is that of the cut model. Tokens are counted as they lie in the stream, prefix tokens in front.
    """
    return places_of(matches, anatomy.merges, anatomy.prefix)


def places_of(matches: ByBlock, merged: Sequence[int], prefix: int) -> dict[int, Ints]:
    """Return the same from what a file tells: tokens merged in each block, and tokens before the patches."""
    found: dict[int, Ints] = {}
    for i in sorted(matches):
        _, order, best = matches[i]
        last = found[max(found)] if found else None
        stay = order.shape[1] - merged[i]
        now = np.empty((len(order), order.shape[1] + matches[i].cosines.shape[2]), np.int64)  # by place among patches
        now[:, ::2] = stay + best
        np.put_along_axis(now, 2 * order[:, merged[i] :], np.arange(stay)[None], axis=1)
        now[:, 1::2] = stay + np.arange(matches[i].cosines.shape[2])
        here = now if last is None else np.take_along_axis(now, last - prefix, axis=1)
        found[i] = prefix + here
    return found


def followed(
    what: str, path: Path, inputs: npt.NDArray[Any], matches: ByBlock, tolerance: float, where: Callable[[], str]
) -> npt.NDArray[np.float32]:
    """Return the outputs of a graph that merges as a reference does, if it could as well have decided so itself.

    `where` is asked if it could not: which part is to blame, as the end of a sentence.
    """
    outputs, own = follow(path, inputs, matches)
    require_best(what, own)
    for i, found in own.items():
        short = _shortfall(found.cosines, matches[i].order, matches[i].best)
        if not short <= ALLOWED * tolerance:
            raise GateFailed(
                f"{what}: block {i} merges other tokens, and their cosines differ by {short:.2e} "
                f"(allowed {ALLOWED * tolerance:g}){where()}"
            )
    return outputs


def require_best(what: str, matches: ByBlock) -> None:
    """Refuse decisions that are not the best by the cosines of the very run, to the rounding of their type."""
    for i, match in matches.items():
        short = _shortfall(*match)
        if not short <= 2 * np.finfo(match.cosines.dtype).eps:
            raise GateFailed(f"{what}: block {i} does not take the best matches, which are better by {short:.2e}")


def _shortfall(cosines: npt.NDArray[Any], order: Ints, best: Ints) -> float:
    """Return by how much decisions miss the best ones: partners the largest cosine, the order the sorted one."""
    wide = cosines.astype(np.float64)
    largest = wide.max(axis=2)  # (images, |A|)
    taken = np.take_along_axis(wide, best[:, :, None], axis=2)[:, :, 0]
    sorted_so = np.take_along_axis(largest, order, axis=1)
    if (np.sort(order, axis=1) != np.arange(order.shape[1])).any():
        return float("inf")
    later = np.maximum.accumulate(sorted_so[:, ::-1], axis=1)[:, ::-1]  # the largest from here on
    return float(max((largest - taken).max(), (later - sorted_so).max()))
