"""What no ranking reaches is refused before any work, and what some ranking reaches never is."""

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.models import small
from helpers.rankings import random_ranking
from snapvit_export.allocation.planner import Planner, check_reach
from snapvit_export.errors import SnapvitError
from snapvit_export.model.plan import Protection
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.models.read_anatomy import read_anatomy

ANATOMIES = {
    name: read_anatomy(small(name)[0], name) for name in ("deit_tiny_patch16_224", "vit_base_patch16_siglip_224")
}


def refuses(anatomy, protection, **asked) -> str | None:
    try:
        check_reach(anatomy, protection, **asked)
    except SnapvitError as error:
        return str(error)
    return None


def with_curves(anatomy, seed: int) -> Ranking:
    rng = np.random.default_rng(seed)
    made = random_ranking(anatomy, seed)
    losses = [(rng.random(h), rng.random(n)) for h, n in zip(anatomy.heads, anatomy.neurons)]
    damage = tuple(tuple(np.append(np.cumsum(np.sort(kind))[::-1], 0) for kind in block) for block in losses)
    orders = ([made.head_order(i) for i in range(3)], [made.neuron_order(i) for i in range(3)])
    return Ranking.from_orders(*orders, damage, anatomy=anatomy)


@pytest.mark.parametrize("name", ANATOMIES)
@pytest.mark.parametrize("corrected", [False, True])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 99), sublayers=st.booleans(), blocks=st.integers(0, 2))
def test_what_a_planner_gives_is_never_refused(name, corrected, seed, sublayers, blocks):
    anatomy = ANATOMIES[name]
    uneven = list(anatomy.blocks)
    uneven[blocks] = msgspec.structs.replace(uneven[blocks], hidden=20, heads=2)
    anatomy = msgspec.structs.replace(anatomy, blocks=tuple(uneven))
    protection = Protection(sublayers=sublayers)
    planner = Planner(with_curves(anatomy, seed), anatomy, protection, corrected=corrected)
    sparsest = planner.sparsest
    after = anatomy.with_output_biases() if corrected else anatomy
    share = np.nextafter(after.params(sparsest) / anatomy.params(), 1)
    asked = dict(sparsity=[sparsest.sparsity(anatomy)], flops=[sparsest.flops_ratio(anatomy)], params=[share, 1])
    assert refuses(anatomy, protection, corrected=corrected, **asked) is None


@pytest.mark.parametrize("sublayers", [False, True])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_bound_is_the_floor_where_all_blocks_are_alike_and_the_class_token_is_read(sublayers, corrected):
    anatomy, protection = ANATOMIES["deit_tiny_patch16_224"], Protection(sublayers=sublayers)
    planner = Planner(with_curves(anatomy, 0), anatomy, protection, corrected=corrected)
    for kind, fraction in (("sparsity", 0.9999), ("flops", 0.0001), ("params", 0.0001)):
        with pytest.raises(SnapvitError) as late:
            getattr(planner, kind)(fraction)
        assert refuses(anatomy, protection, corrected=corrected, **{kind: [fraction]}) == str(late.value)


def test_without_a_class_token_a_single_mlp_may_be_all_that_stays():
    anatomy = ANATOMIES["vit_base_patch16_siglip_224"]
    said = refuses(anatomy, Protection(sublayers=False), flops=[1e-6])
    mlp = anatomy.structure_flops()[0][1] * Protection().kept_neurons(anatomy.neurons[0])
    assert f"at least {mlp / anatomy.block_flops():.4f}" in said


@pytest.fixture
def watched(monkeypatch) -> list[str]:
    """What of the long work was begun."""
    begun: list[str] = []
    for name in ("observe", "measure_sublayers", "damage_ranking"):
        monkeypatch.setattr(f"snapvit_export.prune.rank.rank.{name}", lambda *_, name=name, **__: begun.append(name))
    return begun


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (("--flops", "0.02"), "FLOPs fraction 0.02 is out of reach: protection leaves at least 0.0311"),
        (("--sparsity", "0.98"), "sparsity 0.98 is out of reach: protection leaves at most 0.97"),
        (("--params", "0.01"), "parameter fraction 0.01 is out of reach: the smallest plan has 0."),
        (("--pair", "0.99:0.2"), "cutting 0.99 of the neurons leaves less than the protected part"),
        (("--flops", "0.1", "--no-depth"), "FLOPs fraction 0.1 is out of reach: protection leaves at least 0.1226"),
        (("--flops", "0.02", "--recipe", "idap"), "FLOPs fraction 0.02 is out of reach"),
    ],
)
def test_an_impossible_export_is_refused_before_anything_is_observed(
    snapvit, tiny_folder, image_folder, tmp_path, watched, asked, said
):
    given = ("export", "--model", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "out")
    outcome = snapvit(*given, *asked)
    assert (outcome.code, watched) == (1, [])
    assert said in outcome.error_line


def test_a_search_is_refused_by_the_floor_that_its_plans_have(snapvit, tiny_folder, image_folder, tmp_path, watched):
    given = ("rank", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "r", "--evaluations", 4)
    assert "protection leaves at least 0.0311" in snapvit(*given, "--flops", 0.02).error_line
    assert "protection leaves at least 0.1226" in snapvit(*given, "--flops", 0.08, "--no-depth").error_line
    assert watched == []


def test_a_search_goes_on_where_only_depth_reaches(snapvit, tiny_folder, image_folder, tmp_path):
    given = ("rank", tiny_folder, "--data", image_folder, "--images", 16, "--out", tmp_path / "r", "--evaluations", 4)
    outcome = snapvit(*given, "--flops", 0.08)
    assert outcome.code == 0, outcome.err
    assert Ranking.load(tmp_path / "r").provenance["search_settings"]["flops"] == [0.08]
