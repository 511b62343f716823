"""Writes the report of a family, or of a ranking alone, in the requested formats, each file whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..budget import Budget
from ..errors import SnapvitError
from ..family.folder import parts_beside, read_family
from ..family.layout import Format, place, plot_file, report_files
from ..family.trace import Trace
from ..family.validation import Validation
from ..model.ranking import KIND, Ranking
from ..progress import Progress, Silent
from ..storage.atomic import write_atomically
from ..storage.checksummed import is_checksummed
from ..storage.json import to_json
from ..storage.places import check_output, is_json_of
from .charts import all_charts
from .charts.ranking import ranking_charts
from .charts.style import Chart
from .data import LoadedFamily, ReportData, collect
from .draw import MADE_BY, check_there, png, svg
from .markdown import markdown, ranking_markdown
from .page import page
from .ranking_data import RankingReport, collect_ranking
from .ranking_page import ranking_page


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


def report_ranking(
    file: Path,
    out: Path | None = None,
    formats: tuple[Format, ...] | None = None,
    sparsity: Sequence[float] = (),
    flops: Sequence[float] = (),
    pairs: Sequence[tuple[float, float]] = (),
    progress: Progress | None = None,
    force: bool = False,
) -> tuple[RankingReport, list[Path]]:
    """Write the report of a ranking file, by default beside it, and return its data and the files."""
    progress = progress or Silent()
    folder, stem, kinds = place(file.parent, out, formats, stem=file.stem)
    check_there()
    progress.phase(f"reading {file}")
    ranking = Ranking.load(file)
    try:
        data = collect_ranking(ranking, sparsity, flops, pairs)
    except SnapvitError as error:
        raise type(error)(f"{file}: {error}") from error
    charts = ranking_charts(data)
    for path in (folder / name for name in _names(stem, kinds, charts, in_table=("heads", "neurons"))):
        check_output(path, "a report", is_report, [file, *parts_beside(path)], force)
    files: dict[str, bytes] = {}
    for kind in kinds:
        progress.phase(f"drawing {kind}")
        files |= _render_ranking(data, charts, stem, kind)
    for name, content in files.items():
        write_atomically(folder / name, content)
    return data, [folder / name for name in files]


def _render_ranking(report: RankingReport, charts: Sequence[Chart], stem: str, kind: Format) -> dict[str, bytes]:
    """Return the files of one format by name."""
    if kind == "html":
        return {f"{stem}.html": ranking_page(report).encode()}
    if kind == "json":
        return {f"{stem}.json": to_json(report)}
    if kind == "md":
        beside = {plot_file(stem, c.name, "svg"): c for c in charts if c.name in ("heads", "neurons")}
        text = ranking_markdown(report, {chart.title: name for name, chart in beside.items()})
        return {f"{stem}.md": text.encode(), **{name: svg(chart) for name, chart in beside.items()}}
    draw = svg if kind == "svg" else png
    return {plot_file(stem, chart.name, kind): draw(chart) for chart in charts}


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


def _names(
    stem: str, kinds: Sequence[Format], charts: Sequence[Chart], in_table: Sequence[str] = ("pareto",)
) -> list[str]:
    """Return the names of all files that are rendered; `in_table`: the plots that Markdown shows."""
    plots = [chart.name for chart in charts]
    names = [f"{stem}.{kind}" for kind in kinds if kind in ("html", "md", "json")]
    names += [plot_file(stem, plot, kind) for kind in kinds if kind in ("svg", "png") for plot in plots]
    return names + [plot_file(stem, plot, "svg") for plot in in_table if "md" in kinds and plot in plots]


def _check_places(family: Path, paths: Sequence[Path], force: bool) -> None:
    """Refuse, before anything is drawn, to write over files of others; in the family its names are taken as its own."""
    for path in paths:
        is_own = path.name in report_files() and path.parent.resolve() == family.resolve()
        parts = [part for part in parts_beside(path) if not is_own or part.name not in report_files()]
        check_output(path, "a report", (lambda _: True) if is_own else is_report, parts, force)


def is_ranking(path: Path) -> bool:
    """Return True if a path is a ranking file, by its header, and no family folder."""
    return path.is_file() and is_checksummed(path, KIND)


def is_report(path: Path) -> bool:
    """Return True if a file is a page, a plot, a table or the numbers of a report."""
    if path.suffix == ".json":
        return is_json_of(ReportData)(path) or is_json_of(RankingReport)(path)
    content = path.read_bytes()
    return MADE_BY.encode() in content or b": report of a family</title>" in content  # older pages
