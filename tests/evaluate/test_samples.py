"""The images that a report shows: first those on which the chosen variant differs from the dense model, worst first."""

import numpy as np

from helpers.images import pictures
from snapvit_export.evaluate.samples import MOST, pick_samples, worst_first

DENSE = np.log(np.array([[0.9, 0.1], [0.6, 0.4], [0.8, 0.2], [0.3, 0.7]], np.float32))
PRUNED = np.log(np.array([[0.4, 0.6], [0.45, 0.55], [0.9, 0.1], [0.9, 0.1]], np.float32))


def test_images_whose_answer_changed_come_by_what_the_old_answer_lost():
    assert worst_first(PRUNED, DENSE) == [3, 0, 1]  # lost 0.6, 0.5 and 0.15; image 2 has the same answer


def test_samples_begin_with_the_worst_of_the_chosen_variant():
    logits = {"dense": DENSE, "s30": PRUNED}
    found = pick_samples(pictures(4), ["a", "b", "c", "d"], logits, ["x", "y"], "dense", False, "s30")
    assert [sample.title for sample in found] == ["d", "a", "b", "c"]
    assert found[0].predictions["s30"].label == "x"


def test_samples_are_never_more_than_a_dozen():
    rng = np.random.default_rng(0)
    images, titles = pictures(60), [str(i) for i in range(60)]
    logits = {name: rng.standard_normal((60, 5)).astype(np.float32) for name in ("dense", "s30")}
    found = pick_samples(images, titles, logits, list("abcde"), "dense", False, "s30")
    assert len(found) == MOST
    assert len({sample.title for sample in found}) == MOST
