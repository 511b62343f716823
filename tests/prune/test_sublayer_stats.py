"""What sub-layers do and what their loss does: by hand, in every family, and kept with the ranking."""

import math

import numpy as np
import pytest
import torch

from helpers.images import HALF, inputs_of, some_images
from helpers.models import FAMILIES, as_model, make_model, small
from helpers.rankings import random_ranking
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.calibration.images import Images
from snapvit_export.errors import FileFormatError, SnapvitError
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.correct.elastic import correct_module, make_factors
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.rank.rank import rank
from snapvit_export.prune.stats.observe import observe
from snapvit_export.prune.stats.output_divergence import TEMPERATURE, OutputDivergence, default_divergence
from snapvit_export.prune.stats.sublayer_stats import measure_sublayers
from snapvit_export.prune.stats.token_weights import as_read


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_the_damage_is_that_of_the_model_without_the_sub_layer(name):
    model = as_model(small(name)[0], name, {})
    images, ranking = some_images(5), random_ranking(model.anatomy)
    found = measure_sublayers(model, images)
    assert [(s.block, s.part) for s in found] == [(i, part) for i in range(3) for part in ("attention", "mlp")]
    factors = make_factors(model, ranking, observe(model, images, warn=False))
    heads, neurons = list(model.anatomy.heads), list(model.anatomy.neurons)
    with torch.no_grad():
        dense = model.module.forward_head(model.module.forward_features(inputs_of(images)), pre_logits=True)
        judge = OutputDivergence(default_divergence(model), model, dense)
        for s in found[2:4]:
            counts = [heads.copy(), neurons.copy()]
            counts[s.part == "mlp"][s.block] = 0
            plan = Plan(heads=tuple(counts[0]), neurons=tuple(counts[1]))
            short = shrink(model.module, ranking, plan)
            correct_module(short, ranking, plan, factors)
            z = short.forward_head(short.forward_features(inputs_of(images)), pre_logits=True)
            assert s.damage == pytest.approx(float(judge(z, slice(0, 5)).mean()), rel=2e-2, abs=1e-4)


def test_divergence_and_turn_are_what_they_say():
    model = as_model(small("deit_tiny_patch16_224", class_token=False, global_pool="avg")[0], "x", {})
    images = some_images(3)
    block, seen = model.module.blocks[1], []
    hooks = [block.norm1.register_forward_pre_hook(lambda _, x: seen.append(x[0]))]
    hooks.append(block.norm2.register_forward_pre_hook(lambda _, x: seen.append(x[0])))
    with torch.no_grad():
        model.module(inputs_of(images))
    for hook in hooks:
        hook.remove()
    before, after = (x.flatten(0, 1).double() for x in seen)
    found = measure_sublayers(model, images)[2]
    assert found.divergence == pytest.approx(float((after - before).norm(dim=1).mean() / after.norm(dim=1).mean()))
    assert found.turned == pytest.approx(float(1 - torch.cosine_similarity(before, after).mean()), abs=1e-6)


@torch.no_grad()
def rounding(judge: OutputDivergence, z: torch.Tensor, divergence: float, depth: int) -> float:
    """How far two computations in float32 of one mean KL(p || p') may be apart, whatever order a CPU adds in.

    If the logits behind p' are off by d each, KL is off by (p' - p) d at most, and |p' - p| <= sqrt(2 KL) (Pinsker).
    d: each of the 2 * depth sub-layers, the norm and the classifier (or the similarities) after them round to eps of
    their values, so d = (2 * depth + 2) * eps * the largest logit. Then log p' itself is rounded, to eps of its size.
    Both computations do so, hence twice.
    """
    eps, rows = float(torch.finfo(torch.float32).eps), slice(0, len(z))
    logits = 1 / TEMPERATURE if judge.name == "neighbours" else float(judge.classifier(z).abs().max())
    seen = judge._compared(z, rows)
    largest = float(seen[seen > -1e3].abs().max())  # an image is no neighbour of itself
    return 2 * eps * (math.sqrt(2 * divergence) * (2 * depth + 2) * logits + largest)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_onward_is_the_damage_without_this_attention_and_all_later_ones(name):
    model = as_model(small(name)[0], name, {})
    images, blocks = some_images(4), model.module.blocks
    found = measure_sublayers(model, images)
    outputs: list[torch.Tensor] = []
    hooks = [block.attn.register_forward_hook(lambda _, x, y: outputs.append(y)) for block in blocks]
    with torch.no_grad():
        dense = model.module.forward_head(model.module.forward_features(inputs_of(images)), pre_logits=True)
        for hook in hooks:
            hook.remove()
        judge = OutputDivergence(default_divergence(model), model, dense)
        weights = [w / w.sum() for w in as_read(model.anatomy)]
        means = [torch.einsum("t,bte->e", w, y) / len(y) for w, y in zip(weights, outputs)]
        for first in range(len(blocks)):
            hooks = [
                blocks[i].attn.register_forward_hook(lambda _, x, y, i=i: means[i].expand_as(y))
                for i in range(first, len(blocks))
            ]
            z = model.module.forward_head(model.module.forward_features(inputs_of(images)), pre_logits=True)
            for hook in hooks:
                hook.remove()
            wanted = float(judge(z, slice(0, 4)).mean())
            assert found[2 * first].onward == pytest.approx(wanted, abs=rounding(judge, z, wanted, len(blocks)))
    wanted = found[-2].damage
    assert found[-2].onward == pytest.approx(wanted, abs=rounding(judge, z, wanted, len(blocks)))
    assert all(s.onward is None for s in found[1::2])
    pooled = (
        as_model(small(name, class_token=False, global_pool="avg")[0], "x", {}) if "distilled" not in name else None
    )
    assert pooled is None or all(s.onward is None for s in measure_sublayers(pooled, images))


def test_a_sub_layer_that_does_nothing_is_known_by_it_and_others_are_not_touched():
    model = make_model()
    attn = model.module.blocks[1].attn
    attn.proj.weight.data.zero_()
    attn.proj.bias.data.zero_()
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), np.uint8)
    images = Images(pixels, None, model.preprocessing, "noise")
    found = {(s.block, s.part): s for s in measure_sublayers(model, images)}
    idle = found.pop((1, "attention"))
    assert (idle.divergence, idle.damage) == (0.0, pytest.approx(0, abs=1e-9))
    assert idle.turned == pytest.approx(0, abs=1e-6)
    assert all(s.damage > 1e-4 and s.divergence > 1e-2 for s in found.values())


def test_a_ranking_keeps_them_and_older_files_are_read(tmp_path):
    model = make_model()
    pixels = np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), np.uint8)
    images = Images(pixels, None, model.preprocessing, "noise")
    ranking = rank(model, images, make_settings("default", images=8))
    assert len(ranking.sublayers) == 6
    ranking.save(tmp_path / "r")
    assert Ranking.load(tmp_path / "r").sublayers == ranking.sublayers
    assert ranking.weighted(np.ones((3, 2))).sublayers == ranking.sublayers
    assert random_ranking(model.anatomy).sublayers is None
    damaged = Ranking(ranking.head_scores, ranking.neuron_scores, provenance={"sublayers": [{"block": 0}]})
    with pytest.raises(FileFormatError, match="sublayers are damaged"):
        damaged.sublayers  # noqa: B018


def test_no_images_are_refused():
    with pytest.raises(SnapvitError, match="sub-layers are measured on images"):
        measure_sublayers(make_model(), Images(np.zeros((0, 64, 64, 3), np.uint8), None, HALF, "none"))


def test_the_command_shows_them(snapvit, tiny_folder, image_folder, tmp_path):
    outcome = snapvit("rank", tiny_folder, "--data", image_folder, "--images", 12, "--out", tmp_path / "r.safetensors")
    assert outcome.code == 0, outcome.err
    assert all(column in outcome.out for column in ("sub-layer", "divergence", "turned", "damage without"))
    assert outcome.out.count("attention") == 3
