"""Pictures of merged patches: the groups that the module makes, in their mean colours, with lines between them."""

import base64
import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from helpers.images import noise
from helpers.models import model_of
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from helpers.report_factory import make_manifest
from snapvit_export.evaluate.merged_patches import LEAST_CELL, SIDE, draw_groups, draw_merges, shown_variants
from snapvit_export.family.manifest import Input, Manifest, Variant
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.prune.blocks.merging import holder_of
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint


def merging_manifest(merged: dict[int, tuple[int, ...]], chosen: int | None) -> Manifest:
    """A family in which some variants merge tokens, by their numbers."""
    manifest = make_manifest(4, choice=chosen is not None)
    variants = list(manifest.variants)
    for i, counts in merged.items():
        left = 197 - np.cumsum(counts)
        variants[i] = msgspec.structs.replace(variants[i], tokens=tuple(int(count) for count in left))
    choice = manifest.choice and msgspec.structs.replace(manifest.choice, variant=variants[chosen].name)
    return msgspec.structs.replace(manifest, variants=tuple(variants), choice=choice)


def names(variants: list[Variant], manifest: Manifest) -> list[int]:
    return [manifest.variants.index(variant) for variant in variants]


def test_the_chosen_variant_is_shown_if_it_merges_and_the_one_that_merges_most():
    few, many = (2,) * 12, (8,) * 12
    for merged, chosen, wanted in [
        ({}, 2, []),
        ({1: few}, None, [1]),
        ({1: few, 3: few}, 3, [3, 1]),
        ({1: few, 2: few, 3: many}, 2, [2, 3]),
        ({1: many, 2: few, 3: few}, 0, [1]),
    ]:
        manifest = merging_manifest(merged, chosen)
        assert names(shown_variants(manifest), manifest) == wanted


def test_groups_have_the_mean_colour_of_their_pixels_and_lines_part_them():
    pixels = np.random.default_rng(0).integers(0, 256, (9, 13, 3), np.uint8)  # a pixel more than whole patches
    groups = np.array([[5, 5, 2], [5, 7, 2]])
    cell = SIDE // 3
    found = draw_groups(pixels, groups, (4, 4))
    assert found.shape == (2 * cell, 3 * cell, 3)
    patches = {(i, j): pixels[4 * i : 4 * i + 4, 4 * j : 4 * j + 4].reshape(-1, 3) for i in (0, 1) for j in (0, 1, 2)}
    for group in (2, 5, 7):
        members = [place for place in patches if groups[place] == group]
        mean = np.concatenate([patches[place] for place in members]).mean(0)
        for i, j in members:
            inner = found[i * cell + 1 : (i + 1) * cell, j * cell + 1 : (j + 1) * cell].reshape(-1, 3)
            assert np.abs(inner - mean).max() <= 0.5  # rounded
    across = lambda i, j: bool((found[i * cell + 5, j * cell] != found[i * cell + 5, j * cell + 5]).any())  # noqa: E731
    down = lambda j: bool((found[cell, j * cell + 5] != found[cell + 5, j * cell + 5]).any())  # noqa: E731
    assert [across(i, j) for i in (0, 1) for j in (1, 2)] == [False, True, True, True]
    assert [down(j) for j in (0, 1, 2)] == [False, True, False]


def test_small_patches_are_still_large_enough_for_lines():
    found = draw_groups(np.zeros((200, 100, 3), np.uint8), np.arange(5000).reshape(100, 50), (2, 2))
    assert found.shape == (100 * LEAST_CELL, 50 * LEAST_CELL, 3)


@pytest.mark.parametrize("takes_bytes", [False, True])
def test_pictures_show_the_groups_of_the_module(takes_bytes, tmp_path):
    model = model_of("deit3_small_patch16_224")
    plan = uneven_plan(model.anatomy).with_tokens((3, 4, 0))
    ranking, images = random_ranking(model.anatomy, seed=1), noise(model, 3)
    path = GraphWriter(blueprint(model, ranking), tmp_path, takes_bytes=takes_bytes).write(
        "x", plan, format=GraphFormat("ort", takes_bytes=takes_bytes)
    )
    base = make_manifest(1, choice=False)
    variant = msgspec.structs.replace(
        base.variants[0],
        file=path.graph.name,
        heads=plan.heads,
        neurons=plan.neurons,
        tokens=model.anatomy.tokens_after(plan),
    )
    manifest = msgspec.structs.replace(
        base,
        anatomy=model.anatomy,
        variants=(variant,),
        input=Input.of(GraphFormat("ort", takes_bytes=takes_bytes)),
    )
    found = draw_merges(tmp_path, manifest, variant, images, ["a", "b", "c"])
    assert found.missing is None
    assert [image.title for image in found.images] == ["a", "b", "c"]
    assert {tuple((step.block, step.tokens) for step in image.steps) for image in found.images} == {((0, 14), (1, 10))}
    module = shrink(model.module, ranking, plan)
    with torch.no_grad():
        module(torch.from_numpy(next(images.batches(3))))
    went = holder_of(module).groups.places.numpy()  # after the last merge
    for image, pixels, groups in zip(found.images, images.pixels, went):
        wanted = draw_groups(pixels, groups.reshape(model.anatomy.grid), model.anatomy.patch)
        shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(image.steps[-1].picture))))
        np.testing.assert_array_equal(shown, wanted)


def test_files_that_do_not_tell_are_left_out_with_the_reason(monkeypatch):
    manifest = merging_manifest({1: (2,) * 12}, None)
    own = msgspec.structs.replace(manifest.variants[1], file="v1.xml")
    found = draw_merges(Path("absent"), manifest, own, None, [])
    assert (found.images, found.missing) == (
        (),
        "v1.xml is in OpenVINO's own format, which does not tell what it merges",
    )
    monkeypatch.setattr("snapvit_export.evaluate.merged_patches.find_spec", lambda name: None)
    found = draw_merges(Path("absent"), manifest, manifest.variants[1], None, [])
    assert found.missing == "what a file merges is read in ONNX Runtime, which is not installed"
