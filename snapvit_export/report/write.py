"""Writes the report of a family in the requested formats, each file whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..budget import Budget
from ..errors import UsageError
from ..family.folder import own_files, read_family
from ..family.layout import Format, place, plot_file, report_files
from ..family.validation import Validation
from ..progress import Progress, Silent
from ..storage.atomic import write_atomically
from ..storage.json import to_json
from .charts import all_charts
from .data import LoadedFamily, ReportData, collect
from .draw import check_there, png, svg
from .markdown import markdown
from .page import page


def report(
    family: Path,
    out: Path | None = None,
    formats: tuple[Format, ...] | None = None,
    budget: str | None = None,
    beside: Sequence[Path] = (),
    progress: Progress | None = None,
) -> tuple[ReportData, list[Path]]:
    """Write the report of a family and return its data and the files."""
    progress = progress or Silent()
    folder, stem, kinds = place(family, out, formats)
    wanted = Budget.parse(budget) if budget is not None else None
    check_there()
    progress.phase(f"reading {family}")
    own = LoadedFamily(family, read_family(family), Validation.load(family))
    data = collect(own, [LoadedFamily(path, read_family(path)) for path in beside], wanted)
    files: dict[str, bytes] = {}
    for kind in kinds:
        progress.phase(f"drawing {kind}")
        files |= render(own, data, stem, kind, with_plots="svg" in kinds)
    _refuse_models(family, [folder / name for name in files])
    for name, content in files.items():
        write_atomically(folder / name, content)
    return data, [folder / name for name in files]


def render(
    family: LoadedFamily, report: ReportData, stem: str, kind: Format, with_plots: bool = False
) -> dict[str, bytes]:
    """Return the files of one format by name."""
    if kind == "html":
        return {f"{stem}.html": page(family, report).encode()}
    if kind == "json":
        return {f"{stem}.json": to_json(report)}
    charts = all_charts(report)
    if kind == "md":
        pareto = next((chart for chart in charts if chart.name == "pareto"), None)
        plot = plot_file(stem, "pareto", "svg")
        files = {} if with_plots or pareto is None else {plot: svg(pareto)}
        return {f"{stem}.md": markdown(report, plot if pareto else None).encode(), **files}
    draw = svg if kind == "svg" else png
    return {plot_file(stem, chart.name, kind): draw(chart) for chart in charts}


def _refuse_models(family: Path, paths: Sequence[Path]) -> None:
    """Refuse to overwrite a file that the family is made of."""
    names = set(own_files(family) or ()) - set(report_files())
    models = {(family / name).resolve() for name in names}
    if taken := [path for path in paths if path.resolve() in models]:
        raise UsageError(f"{taken[0]}: a file of the family itself. Choose another --out")
