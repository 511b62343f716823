"""Writes the report of a family in the requested formats, each file whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..budget import Budget
from ..family.folder import parts_beside, read_family
from ..family.layout import Format, place, plot_file, report_files
from ..family.trace import Trace
from ..family.validation import Validation
from ..progress import Progress, Silent
from ..storage.atomic import write_atomically
from ..storage.json import to_json
from ..storage.places import check_output, is_json_of
from .charts import all_charts
from .charts.style import Chart
from .data import LoadedFamily, ReportData, collect
from .draw import MADE_BY, check_there, png, svg
from .markdown import markdown
from .page import page


def report(
    family: Path,
    out: Path | None = None,
    formats: tuple[Format, ...] | None = None,
    budget: str | None = None,
    beside: Sequence[Path] = (),
    progress: Progress | None = None,
    force: bool = False,
) -> tuple[ReportData, list[Path]]:
    """Write the report of a family and return its data and the files; `force`: over files of something else, too."""
    progress = progress or Silent()
    folder, stem, kinds = place(family, out, formats)
    wanted = Budget.parse(budget) if budget is not None else None
    check_there()
    progress.phase(f"reading {family}")
    own = LoadedFamily(family, read_family(family), Validation.load(family), Trace.load(family))
    data = collect(own, [LoadedFamily(path, read_family(path)) for path in beside], wanted)
    charts = all_charts(data)
    _check_places(family, [folder / name for name in _names(stem, kinds, charts)], force)
    files: dict[str, bytes] = {}
    for kind in kinds:
        progress.phase(f"drawing {kind}")
        files |= render(own, data, charts, stem, kind, with_plots="svg" in kinds)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return data, [folder / name for name in files]


def render(
    family: LoadedFamily, report: ReportData, charts: Sequence[Chart], stem: str, kind: Format, with_plots: bool = False
) -> dict[str, bytes]:
    """Return the files of one format by name."""
    if kind == "html":
        return {f"{stem}.html": page(family, report).encode()}
    if kind == "json":
        return {f"{stem}.json": to_json(report)}
    if kind == "md":
        pareto = next((chart for chart in charts if chart.name == "pareto"), None)
        plot = plot_file(stem, "pareto", "svg")
        files = {} if with_plots or pareto is None else {plot: svg(pareto)}
        return {f"{stem}.md": markdown(report, plot if pareto else None).encode(), **files}
    draw = svg if kind == "svg" else png
    return {plot_file(stem, chart.name, kind): draw(chart) for chart in charts}


def _names(stem: str, kinds: Sequence[Format], charts: Sequence[Chart]) -> list[str]:
    """Return the names of all files that `render` gives."""
    plots = [chart.name for chart in charts]
    names = [f"{stem}.{kind}" for kind in kinds if kind in ("html", "md", "json")]
    names += [plot_file(stem, plot, kind) for kind in kinds if kind in ("svg", "png") for plot in plots]
    return names + ([plot_file(stem, "pareto", "svg")] if "md" in kinds and "pareto" in plots else [])


def _check_places(family: Path, paths: Sequence[Path], force: bool) -> None:
    """Refuse, before anything is drawn, to write over files of others; in the family its names are taken as its own."""
    for path in paths:
        is_own = path.name in report_files() and path.parent.resolve() == family.resolve()
        parts = [part for part in parts_beside(path) if not is_own or part.name not in report_files()]
        check_output(path, "a report", (lambda _: True) if is_own else is_report, parts, force)


def is_report(path: Path) -> bool:
    """Return True if a file is a page, a plot, a table or the numbers of a report."""
    if path.suffix == ".json":
        return is_json_of(ReportData)(path)
    content = path.read_bytes()
    return MADE_BY.encode() in content or b": report of a family</title>" in content  # older pages
