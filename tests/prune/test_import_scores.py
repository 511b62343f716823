"""Score files of the released code: their kept sets, and that nothing in them runs."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.hostile import Bomb
from snapvit_export.allocation.planner import Planner
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.model.anatomy import Anatomy, Block
from snapvit_export.model.plan import Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.import_scores import import_scores

FILES = [
    "augreg-vit-b-16-in21k-ft-in1k",
    "deit-3-vit-l-16",
    "deit-3-vit-s-16",
    "deit-vit-b-16",
    "dino_vitb16",
    "siglip2-vit-b16",
]


def planner_of(ranking: Ranking, protection: Protection = Protection()) -> Planner:
    blocks = tuple(Block(heads=h, head_dim=64, hidden=n) for h, n in zip(ranking.heads, ranking.neurons))
    anatomy = Anatomy(family="vit", embed_dim=64, blocks=blocks, image=(32, 32), patch=(8, 8), positions=17)
    return Planner(ranking, anatomy, protection)


def kept_mask(orders: list, counts: tuple[int, ...]) -> np.ndarray:
    mask = np.zeros((len(orders), len(orders[0])), bool)
    for row, order, count in zip(mask, orders, counts):
        row[order[:count]] = True
    return mask


def masks(ranking: Ranking, plan) -> tuple[np.ndarray, np.ndarray]:
    blocks = range(len(ranking.heads))
    return (
        kept_mask([ranking.head_order(i) for i in blocks], plan.heads),
        kept_mask([ranking.neuron_order(i) for i in blocks], plan.neurons),
    )


@pytest.mark.parametrize("name", FILES)
def test_released_scores_keep_the_released_sets(shared: Path, name: str):
    ranking = import_scores(shared / "data" / "reference_scores" / f"{name}.pt")
    golden = np.load(shared / "golden" / "shipped_keep" / f"{name}.npz")
    planner = planner_of(ranking)
    hidden = int(golden["hidden_dim"])
    assert len(golden["pairs"]) == 6
    for j, (mlp, head) in enumerate(golden["pairs"]):
        heads, neurons = masks(ranking, planner.pair(mlp, head))
        assert np.array_equal(heads, golden[f"keep_head_{j}"])
        packed = golden[f"keep_mlp_packed_{j}"]
        assert np.array_equal(neurons, np.unpackbits(packed, axis=1)[:, :hidden].astype(bool))


def test_tiny_scores_keep_the_golden_sets(shared: Path):
    ranking = import_scores(shared / "golden" / "tiny_scores_reference_format.pt")
    golden = np.load(shared / "golden" / "tiny_keep.npz")
    planner = planner_of(ranking, Protection(neurons=0.05, heads=0.25))
    for j, (mlp, head) in enumerate(golden["pairs"]):
        heads, neurons = masks(ranking, planner.pair(mlp, head))
        assert np.array_equal(heads, golden[f"keep_head_{j}"])
        assert np.array_equal(neurons, golden[f"keep_mlp_{j}"])
    for i in range(4):
        assert np.array_equal(ranking.neuron_order(i), golden[f"perm_mlp_{i}"])
        assert np.array_equal(ranking.head_order(i), golden[f"perm_head_{i}"])


def test_the_command_writes_a_ranking(shared: Path, tmp_path: Path, snapvit):
    source = shared / "data" / "reference_scores" / "dino_vitb16.pt"
    outcome = snapvit(
        "import-scores", source, "--out", tmp_path / "r.safetensors", "--model", "vit_base_patch16_224.dino"
    )
    assert outcome.code == 0
    assert "dino_vitb16, 12 blocks, 144 heads, 36864 neurons" in outcome.out
    read = Ranking.load(tmp_path / "r.safetensors")
    assert np.array_equal(read.neuron_scores[3], import_scores(source).neuron_scores[3])
    assert read.anatomy is not None


def test_scores_of_another_model_are_refused(shared: Path, snapvit, tmp_path):
    source = shared / "data" / "reference_scores" / "dino_vitb16.pt"
    outcome = snapvit("import-scores", source, "--model", "vit_tiny_patch16_224", "--out", tmp_path / "r.safetensors")
    assert outcome.code == 1
    assert "the model has 12 blocks with 36 heads" in outcome.error_line
    assert not list(tmp_path.iterdir())


def test_pickled_code_is_refused_and_not_run(tmp_path: Path, snapvit):
    torch.save({"mlp_scores": Bomb(tmp_path / "proof")}, tmp_path / "bomb.pt")
    outcome = snapvit("import-scores", tmp_path / "bomb.pt", "--out", tmp_path / "r.safetensors")
    assert outcome.code == 1
    assert "not a readable score file" in outcome.error_line
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bomb.pt"]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"num_blocks": 2}, "hidden_dim is missing"),
        ([1, 2], "not a score file"),
        (
            dict(num_blocks=2, hidden_dim=8, num_heads=2, mlp_scores=torch.ones(2, 7), head_scores=torch.ones(2, 2)),
            "(2, 7)",
        ),
        (dict(num_blocks=1, hidden_dim=2, num_heads=1, mlp_scores=torch.ones(1, 2).int(), head_scores=1), "float32"),
        (
            dict(
                num_blocks=1,
                hidden_dim=2,
                num_heads=1,
                mlp_scores=torch.full((1, 2), torch.nan),
                head_scores=torch.ones(1, 1),
            ),
            "not finite",
        ),
    ],
)
def test_other_contents_are_refused(tmp_path: Path, content, says):
    torch.save(content, tmp_path / "x.pt")
    with pytest.raises(FileFormatError) as refused:
        import_scores(tmp_path / "x.pt")
    assert says in str(refused.value)


@pytest.mark.parametrize("ratio", ["abc", None, 1.5])
def test_a_protection_that_is_no_ratio_is_refused(tmp_path: Path, ratio):
    content = dict(num_blocks=1, hidden_dim=2, num_heads=1, mlp_scores=torch.ones(1, 2), head_scores=torch.ones(1, 1))
    torch.save({**content, "min_head_keep_ratio": ratio}, tmp_path / "x.pt")
    with pytest.raises(FileFormatError, match="min_head_keep_ratio is not a number"):
        import_scores(tmp_path / "x.pt")


def test_absent_and_cut_files_are_refused(tmp_path: Path):
    with pytest.raises(SnapvitError, match="no such score file"):
        import_scores(tmp_path / "x.pt")
    torch.save({"a": torch.ones(100)}, tmp_path / "x.pt")
    (tmp_path / "x.pt").write_bytes((tmp_path / "x.pt").read_bytes()[:300])
    with pytest.raises(FileFormatError, match="not a readable score file"):
        import_scores(tmp_path / "x.pt")
