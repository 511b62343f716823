"""`snapvit export-scores`: from a ranking to a score file that the released SnapViT code reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import SnapvitError, needs
from ..family.folder import parts_beside
from ..storage.places import check_output


def export_scores(ranking: Path, out: Path, model_type: str | None = None, force: bool = False) -> dict[str, Any]:
    """Write the file, and return what it says of the model and what of the ranking it cannot hold (`left_out`)."""
    if not ranking.is_file():
        raise SnapvitError(f"{ranking}: no such ranking. Make one: snapvit rank")
    with needs("writing scores", extra="prune"):
        from ..prune.importance_scores import ElasticImportanceScores, is_score_file

    check_output(out, "a score file", is_score_file, [ranking, *parts_beside(out)], force)
    scores = ElasticImportanceScores.load(ranking)
    try:
        content = scores.released(model_type)
    except SnapvitError as error:
        raise type(error)(f"{ranking}: {error}") from error
    scores.save(out, model_type)
    left_out = {
        "damage curves": scores.ranking.damage is not None,
        "one order of heads and neurons": scores.ranking.is_mixed,
        "removable sub-layers": not scores.ranking.protection.sublayers,
    }
    told = {name: value for name, value in content.items() if name not in ("mlp_scores", "head_scores", "metadata")}
    return {**told, "left_out": [name for name, is_there in left_out.items() if is_there]}
