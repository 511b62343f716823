"""Tables for the terminal: families, validations, rankings, profiles and files, some of them with bars. Light.

Bars are drawn in eighths of a character where the stream can write them, with `#` where it cannot.
"""

from __future__ import annotations

import io
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TextIO

from ..checks.inspect import Inspection
from ..checks.inspect_engine import EngineInspection
from ..family.evaluation import TITLES, Evaluation, Measure
from ..family.manifest import Manifest
from ..model.ranking import Ranking
from ..model.rounds import RecoveredRounds
from ..profiling.conditions import worst_warnings
from ..runtimes.tensorrt.kernel_plan import KernelPlan
from ..visible import say, visible, writing_to
from . import text as words

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from rich.table import Table
    from rich.text import Text

    from ..profiling.profile import Profile
    from ..selection.known_profiles import FamilyProfile

PLAIN_WIDTH = 120  # columns when the output is not a terminal
EIGHTHS = " ▏▎▍▌▋▊▉█"
BAR_WIDTH = 12  # characters
COLUMN_GAP = 3  # characters between the columns of a table, and at its side
LONGEST_NAME = 24  # characters of a name on one line, where there is little room


def print_family(
    manifest: Manifest, file: TextIO | None = None, folder: Path | None = None, width: int | None = None
) -> None:
    """Print a row per candidate that was timed, best first, the chosen one marked; then the decision in a sentence.

    `folder` is where the family lies, for the commands that go on from here; `width` is the stream's own by default.
    """
    from rich.text import Text

    from .data import LoadedFamily, collect
    from .summary import GAP, lines_below, table

    stream = file or sys.stdout
    report = collect(LoadedFamily(folder or Path(), manifest))
    columns_wide = width or width_of(stream)
    rows, columns = table(report, columns_wide)
    shown = _table([], left=set(), gap=GAP)
    top = max(column.title.count("\n") for column in columns)
    for column in columns:
        title = "\n" * (top - column.title.count("\n")) + _writable(column.title, stream)
        justify: Literal["left", "right"] = "left" if column.is_words else "right"
        shown.add_column(title, justify=justify, no_wrap=not column.is_words, overflow="fold")
    for i, row in enumerate(rows):
        cells = [_writable(column.cells[i], stream) for column in columns]
        lines = ["\n".join(map(visible, cell.split("\n"))) for cell in cells]  # the breaks are ours: `summary.table`
        shown.add_row(*map(Text, lines), style="bold" if row.is_chosen else None)
    print_table(shown, file, columns_wide)
    sentences, commands = lines_below(report, len(rows), _warnings(manifest), folder)
    wrapped = width is not None or stream.isatty()
    say(file=stream)
    for sentence in sentences:
        text = _writable(visible(sentence), stream)
        for line in _wrapped(text, columns_wide).split("\n") if wrapped else [text]:
            say(line, stream)
    for command in commands:
        say(command, stream)


def _warnings(manifest: Manifest) -> list[str]:
    """Return warnings about the machine from the two measurements that the choice is between."""
    choice = manifest.choice
    if choice is None:
        return []
    compared = [row for row in choice.measurements if row.variant in (choice.variant, choice.next_denser)]
    return worst_warnings(row.profile.conditions for row in compared)


def _wrapped(sentence: str, width: int) -> str:
    """Break a sentence into lines, but never within a number and its unit, error or interval."""
    whole = re.sub(
        r"(?<=[0-9±–(]) (?=[0-9±–(%]|ms\b|px\b|of\b|s\b)|(?<=of) (?=[0-9])|(?<=%) (?=width)", "\u00a0", sentence
    )
    return textwrap.fill(whole, width, break_long_words=False, break_on_hyphens=False).replace("\u00a0", " ")


def _writable(text: str, stream: TextIO) -> str:
    """Replace what the stream cannot write."""
    if can_write(stream, "±–"):
        return text
    return text.replace("±", "+-").replace("–", "-").replace("…", "...")


def _shown_tokens(counts: Mapping[str, tuple[Sequence[int], tuple[int, int]]]) -> dict[str, dict[str, str]]:
    """Return the columns of tokens and of image sizes, by variant; each only if some of the variants differ in it."""
    columns = {
        "tokens": {name: words.tokens(tokens) for name, (tokens, _) in counts.items()},
        "pixels": {name: words.pixels(image) for name, (_, image) in counts.items()},
    }
    return {title: cells for title, cells in columns.items() if len(set(cells.values())) > 1}


def print_validation(manifest: Manifest, file: TextIO | None = None, width: int | None = None) -> None:
    """Print latency and quality of every variant, with bars; the budget and the chosen one are marked."""
    from .data import LoadedFamily, collect

    report = collect(LoadedFamily(Path(), manifest))
    ascii_only = not can_write(file or sys.stdout, "█▏┊±–")
    points = report.own
    latencies = bars([p.latency_ms for p in points], report.budget_ms, 10, ascii_only)
    qualities = spread_bars([p.quality for p in points], 10, ascii_only)
    title = words.measure_title(report) if report.measure else "quality"
    tokens = _shown_tokens({p.name: (p.tokens, p.image_size) for p in points})
    columns: list[tuple[str, list[str], int]] = [  # the number: which is left out first where there is no room
        ("variant", [p.name for p in points], 0),
        *((title, [by_name[p.name] for p in points], 5) for title, by_name in tokens.items()),
        (f"{report.at} ms", [_number(p.latency_ms, 2) for p in points], 0),
        ("", latencies, 4),
        (title, [words.quality(report.measure, p.quality, p.error) for p in points], 0),
        (" ", qualities, 4),
        ("agrees", [words.share(p.agreement) for p in points], 6),
        ("cosine", [words.cosine(p.cosine) for p in points], 2),
        ("MB", [_number(p.size_bytes / 1e6, 1) for p in points], 7),
        ("parity", [words.small(p.parity) for p in points], 1),
        ("dominated by", [p.dominated_by or words.UNKNOWN for p in points], 3),
        ("  ", ["chosen" if p.is_chosen else "" for p in points], 0),
    ]
    known = [column for column in columns if any(cell.strip(words.UNKNOWN) for cell in column[1])]
    wide = width or width_of(file or sys.stdout)
    kept = columns_that_fit(known, wide)
    table = _table([name for name, _ in kept], left={"variant", "", " ", "dominated by", "  "})
    for point, row in zip(points, zip(*(cells for _, cells in kept))):
        cells = [cell.replace("±", "+-").replace(words.UNKNOWN, "-") if ascii_only else cell for cell in row]
        table.add_row(*map(_literal, cells), style="bold" if point.is_chosen else None)
    if ascii_only:
        from rich import box

        table.box = box.ASCII_DOUBLE_HEAD
    print_table(table, file, wide)


def columns_that_fit(columns: Sequence[tuple[str, list[str], int]], width: int) -> list[tuple[str, list[str]]]:
    """Leave columns out, the smallest number first and those of 0 never, until the others fit into the width.

    >>> columns_that_fit([("a", ["1.25"], 0), ("b", ["0.5"], 2), ("c", ["long"], 1)], 14)
    [('a', ['1.25']), ('b', ['0.5'])]
    """
    for leaving in sorted({0, *(number for _, _, number in columns)}):
        shown = [(title, cells) for title, cells, number in columns if not 0 < number <= leaving]
        widths = [max(map(len, (title, *cells))) for title, cells in shown]
        if sum(min(each, LONGEST_NAME) + COLUMN_GAP for each in widths) <= width:  # longer names are folded
            break
    return shown


def _number(value: float | None, digits: int) -> str:
    return words.UNKNOWN if value is None else f"{value:.{digits}f}"


def print_ranking(ranking: Ranking, path: Path) -> None:
    """Print the range of scores of each block, and the result of the search."""
    rows = [
        (str(i), *_range(heads), *_range(neurons))
        for i, (heads, neurons) in enumerate(zip(ranking.head_scores, ranking.neuron_scores))
    ]
    print_rows(("block", "heads from", "to", "neurons from", "to "), rows, left=set())
    found = ranking.provenance.get("search")
    if found:
        evaluations = found["history"][-1]["evaluations"] if found["history"] else 0
        say(f"Fitness {found['start_fitness']:.5f} at the start, {found['best_fitness']:.5f} after {evaluations}.")
    for timing in ranking.timings:
        say(f"{words.took(timing)}.")
    say(f"Written to {path}: {ranking.model}, {sum(ranking.heads)} heads, {sum(ranking.neurons)} neurons")


def print_rounds(ranking: Ranking) -> None:
    """Print a table of the rounds of a ranking that recover."""
    from .charts.rounds import COLUMNS, table

    found = RecoveredRounds.of(ranking.provenance, ranking.anatomy)
    if found is not None:
        print_rows(COLUMNS, table(found), left={"", "round"})


def _range(scores: npt.NDArray[np.float32]) -> tuple[str, str]:
    """Format the least and the largest score; "none" for a sub-layer that the model lacks."""
    return (f"{min(scores):.3g}", f"{max(scores):.3g}") if len(scores) else ("none", "none")


def print_profiles(found: FamilyProfile) -> None:
    """Print the latency of each variant, and warnings about the machine."""
    device = found.target.device
    by = f"{found.target.threads} thread(s)" if device.accelerator is None else device.accelerator.name
    say(f"{found.model} on {device.cpu}, {by}, batch {found.target.batch}")
    elsewhere = found.target.runtime != "onnxruntime"  # which gave the answers that others are compared with
    hot = any(p.steady_ms is not None for p in found.profiles.values())
    columns = ["variant", "p50 ms", "between", "p90 ms", "p99 ms", "CPU ms", "mJ"]
    columns += ["hot, p50 ms"] * hot + ["compared"] * elsewhere
    rows = [
        (
            name,
            f"{p.p50_ms:.2f}",
            "{:.2f} - {:.2f}".format(*p.intervals_ms["p50"]),
            f"{p.p90_ms:.2f}",
            f"{p.p99_ms:.2f}",
            "-" if p.cpu_ms is None else f"{p.cpu_ms:.2f}",
            "-" if p.energy_mj is None else f"{p.energy_mj:.1f}" if p.energy_mj < 100 else f"{p.energy_mj:.0f}",
            *["-" if p.steady_ms is None else f"{p.steady_ms:.2f}"] * hot,
            *[_compared(p)] * elsewhere,
        )
        for name, p in found.profiles.items()
    ]
    print_rows(columns, rows, left={"variant", "between", "compared"})
    for name, failed in found.failed.items():
        say(f"{name} was not timed: it does not answer as its graph does: {failed.compared.told}.")
    for name, left in found.left_out.items():
        say(f"{name} was not timed: {left.reason}.")
    for source in dict.fromkeys(p.energy_source for p in found.profiles.values() if p.energy_source is not None):
        say(f"Energy of a run, in a row of many: {source}.")
    for warning in worst_warnings(p.conditions for p in found.profiles.values()):
        say(f"Beware: {warning}.")


def _compared(profile: Profile) -> str:
    """Write the least cosine of a variant's answers to its graph's."""
    if profile.compared is None or profile.compared.least_cosine is None:
        return "not compared"
    return f"{profile.compared.least_cosine:.6f}"


def print_inspection(found: Inspection) -> None:
    """Print the properties of an ONNX file, and the heads, neurons and tokens that each block keeps."""
    if found.plan is not None:
        counts: dict[str, Sequence[object]] = {"heads": found.plan.heads, "neurons": found.plan.neurons}
        if found.tokens is not None:
            before = (found.tokens[0] + found.plan.merged[0], *found.tokens[:-1])
            counts["tokens"] = tuple(f"{a} -> {b}" if a != b else f"{a}" for a, b in zip(before, found.tokens))
        rows = [(str(i), *map(str, row)) for i, row in enumerate(zip(*counts.values()))]
        print_rows(("block", *counts), rows, set())
    exact_in = f"sums of int8 products within {found.int8_sum_bits} bits" if found.int8_sum_bits else None
    observed = " by statistics of all tokens" if found.correction_tokens == "all" else ""
    correction = f"correction {found.correction or 'unknown'}{observed}"
    ours = (found.model, found.variant, found.precision, exact_in, correction)
    whose = ", ".join(filter(None, ours)) if found.model else "not made by snapvit"
    say(f"{found.file}: {whose}")
    kinds = ", ".join(f"{kind} {size / 1e6:.1f} MB" for kind, size in found.weights.items())
    say(f"opset {found.opset}, {found.nodes} nodes, {found.size_bytes / 1e6:.1f} MB, weights in {kinds or 'no file'}")
    say(f"reads {', '.join(found.reads)}" if found.reads else "holds all of its weights")
    for kind, ports in (("takes", found.inputs), ("gives", found.outputs)):
        say(f"{kind} " + ", ".join(f"{p.name} {p.type} [{', '.join(map(str, p.shape))}]" for p in ports))


def print_engine(found: EngineInspection) -> None:
    """Print what an engine was built from and for, and the kernels of each block, if they are known."""
    record = found.record
    if found.blocks:
        columns = ("block", "kernels", "attention fused", "fc1 + activation", "proj, fc2 + residual", "products")
        rows = [
            (
                str(b.block),
                str(b.kernels),
                *map(_yes_or_no, (b.attention_fused, b.activation_fused, b.residuals_fused)),
                _by_type(b.products),
            )
            for b in found.blocks
        ]
        print_rows(columns, rows, {"attention fused", "fc1 + activation", "proj, fc2 + residual", "products"})
    where = "any GPU" if record.device == "any" else f"{record.device} ({record.capability})"
    size = f"{found.size_bytes / 1e6:.1f} MB"
    batch = f"{record.batch}" if record.most_batch == record.batch else f"{record.batch}, at most {record.most_batch}"
    by = f"{record.package} {record.version}"
    say(f"{found.file}: {record.precision}, batch {batch}, built by {by} for {where}, {size}")
    say(f"of the graph with SHA-256 {record.onnx_sha256}")
    say(f"matrix products in the network: {_by_type(record.products)}")
    agreed = "agreed with" if record.agreed else "were not compared with"
    say(f"its outputs on a GPU {agreed} ONNX Runtime's")
    for line in _of_kernels(record.kernels):
        say(line)


def _of_kernels(plan: KernelPlan | None) -> list[str]:
    if plan is None:
        return ["its kernels are not known: its compiler did not tell them, or an older snapvit built it"]
    fused = [plan.attention_fused(i) for i in plan.blocks]
    has = sum(whole is not None for whole in fused)
    lines = [
        f"{len(plan.kernels)} kernels, with a fused attention in {fused.count(True)} of {has} blocks that have one"
    ]
    if plan.compiler.startswith("tensorrt_rtx"):
        lines.append(
            f"This is the plan of {plan.compiler}, as it compiles for RTX cards. TensorRT 10.3 on a Jetson has another "
            "compiler, which may fuse more or less."
        )
    else:
        lines.append(f"This is the plan of {plan.compiler} on this kind of GPU.")
    return lines


def _yes_or_no(found: bool | None) -> str:
    return "-" if found is None else "yes" if found else "no"


def _by_type(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} in {kind}" for kind, count in counts.items()) or "none"


def print_evaluation(found: Evaluation) -> None:
    """Print one row per measure, with its standard error."""
    rows = [(TITLES[measure], f"{_percent(found, measure)} %", str(found.images)) for measure in found.measures]
    print_rows(("measure", "value", "images"), rows, left={"measure"})
    say(f"On {found.source}.")


def print_rows(columns: Sequence[str], rows: Iterable[Sequence[str]], left: set[str], width: int | None = None) -> None:
    """Print a plain table to standard output."""
    table = _table(columns, left)
    for row in rows:
        table.add_row(*map(_literal, row))
    print_table(table, width=width)


def print_table(table: Table, file: TextIO | None = None, width: int | None = None) -> None:
    from rich.console import Console

    stream = file or sys.stdout
    console = Console(file=stream, width=width or width_of(stream), highlight=False, markup=False)
    with writing_to(stream):
        console.print(table)


def width_of(stream: TextIO) -> int:
    """Return the columns of a terminal, or a fixed number elsewhere."""
    from rich.console import Console

    return Console(file=stream).width if stream.isatty() else PLAIN_WIDTH


def _table(columns: Sequence[str], left: set[str], gap: int | None = None) -> Table:
    """Make a table; with a gap its columns stand that many letters apart, and nothing stands at its sides."""
    from rich import box
    from rich.table import Table

    if gap is not None:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))
    else:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    return table


def _literal(cell: str) -> Text:
    """Return the text as it is, on one line: neither brackets nor control characters in names mean anything."""
    from rich.text import Text

    return Text(visible(cell))


def _percent(evaluation: Evaluation | None, measure: Measure) -> str:
    value = None if evaluation is None else evaluation.value(measure)
    if evaluation is None or value is None:
        return "-"
    return f"{100 * value:.1f} ± {100 * evaluation.error(measure):.1f}"


def can_write(file: TextIO, text: str = EIGHTHS) -> bool:
    """Return True if the stream's encoding has these characters."""
    if isinstance(file, io.StringIO):
        return True
    try:
        text.encode(getattr(file, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def bar(share: float, width: int = BAR_WIDTH, ascii_only: bool = False) -> str:
    """Draw a bar of that share of the width, from 0 to 1, padded with spaces.

    >>> bar(0.5, 4)
    '██  '
    """
    inside = min(max(share, 0.0), 1.0)
    if ascii_only:
        return ("#" * round(inside * width)).ljust(width)
    eighths = round(inside * width * 8)
    last = EIGHTHS[eighths % 8] if eighths % 8 else ""
    return ("█" * (eighths // 8) + last).ljust(width)


def bars(
    values: list[float | None], limit: float | None = None, width: int = BAR_WIDTH, ascii_only: bool = False
) -> list[str]:
    """Draw a bar for each value, in one scale, the longest full; `limit`, such as a budget, is marked in each."""
    known = [value for value in values if value is not None]
    most = max([*known, limit or 0.0], default=0.0) or 1.0
    found = ["" if value is None else bar(value / most, width, ascii_only) for value in values]
    if limit is None:
        return found
    at = min(width - 1, int(limit / most * width))
    mark = "|" if ascii_only else "┊"
    return [text and f"{text[:at]}{mark}{text[at + 1 :]}" if _is_short(text, at) else text for text in found]


def spread_bars(values: list[float | None], width: int = BAR_WIDTH, ascii_only: bool = False) -> list[str]:
    """Draw bars that begin below the least value, so that small differences show; for shares that are all near one."""
    known = [value for value in values if value is not None]
    if not known:
        return ["" for _ in values]
    room = max(max(known) - min(known), 0.02)
    scaled = [None if value is None else 1 - (max(known) - value) / (1.25 * room) for value in values]
    return ["" if share is None else bar(share, width, ascii_only) for share in scaled]


def _is_short(text: str, at: int) -> bool:
    """Return True if the bar ends before the mark, which then stands in free space."""
    return bool(text) and text[at] == " "


def print_recovered(manifest: Manifest) -> None:
    """Print what training has brought to each variant that was recovered, on images that it was not trained on."""
    found = [(variant, variant.recovered) for variant in manifest.variants if variant.recovered is not None]
    if not found:
        say("No variant got better by training: the family is as it was.")
        return
    columns = ("variant", "trained", "steps", "same answer before, %", "after, %", "divergence before", "after")
    rows = [
        (
            variant.name,
            how.train + (" together" if how.together else ""),
            f"{how.best_step} of {how.steps}",
            words.same(how.before),
            words.same(how.after),
            words.divergence(how.before),
            words.divergence(how.after),
        )
        for variant, how in found
    ]
    stream = sys.stdout
    print_rows(columns, [[_writable(cell, stream) for cell in row] for row in rows], left={"variant", "trained"})
    if all(how.same_graph for _, how in found):
        say("Latencies are as before: the graphs differ from those that were timed in their weights alone.", stream)
