"""The number of threads changes nothing of a ranking but its time: what is cut does not depend on the cores."""

import pytest
import torch
from threadpoolctl import threadpool_limits

from helpers.rankings import apart_from_time

RECIPES = {
    "default": ["--recipe", "default", "--evaluations", 12, "--population", 5],
    "local": ["--recipe", "local", "--evaluations", 12, "--population", 5, "--pca", 16],
}


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("recipe", RECIPES)
def test_rankings_of_one_two_and_four_threads_are_equal_but_for_their_time(
    recipe, threads, snapvit, tiny_folder, image_folder, tmp_path
):
    found = []
    for count in (1, 2, 4):
        out = tmp_path / f"{count}.safetensors"
        threads(count)
        with threadpool_limits(count):
            outcome = snapvit(
                "rank", tiny_folder, "--data", image_folder, "--images", 40, *RECIPES[recipe], "--out", out
            )
        assert outcome.code == 0, outcome.err
        found.append(apart_from_time(out))
    assert found[0] == found[1] == found[2]
