"""Load: whatever is done again and again in one process leaves nothing behind. Full numbers: `benchmarks/load.py`.

What is bounded is what would grow with every round: a result that is kept, a session that is not closed, a file that
stays open or mapped, a temporary file. Every bound is half of what is left if each round keeps the smallest of its
results, and each test is done again with such a leak, to see that it notices.
"""

import json
import sys

import msgspec
import pytest

from helpers.families import make_family
from helpers.load import Left
from helpers.programs import python
from helpers.shared import ROOT
from snapvit_export.profiling.sampling import AT_ONCE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
PROGRAM = ROOT / "tests" / "helpers" / "load.py"
leaks = pytest.mark.parametrize("leak", [False, True], ids=["as it is", "with a leak"])


def left_by(load: str, made: object, count: int, leak: bool, *settings: str) -> Left:
    done = python(PROGRAM, load, made, "--count", count, *(["--leak"] if leak else []), *settings)
    assert done.returncode == 0, done.stderr
    return msgspec.convert(json.loads(done.stdout.splitlines()[-1]), Left)


def nothing_but_memory_is_left(left: Left) -> bool:
    return (left.files, left.mapped, left.threads, left.temporary) == (0, 0, 0, 0)


@leaks
def test_exports_of_many_variants_leave_no_memory_and_no_files(family_and_elastic, leak):
    left = left_by("exports", family_and_elastic, 30, leak)
    assert nothing_but_memory_is_left(left)
    assert (left.grown_bytes > left.rounds * left.unit_bytes / 2) == leak


@leaks
def test_folders_that_are_forgotten_are_closed_though_no_garbage_is_collected(family_and_elastic, leak):
    left = left_by("folders", family_and_elastic, 20, leak)
    assert nothing_but_memory_is_left(left) != leak


@leaks
def test_families_validated_in_a_row_leave_no_images_and_no_files(family_and_elastic, leak):
    left = left_by("families", family_and_elastic, 6, leak)
    assert nothing_but_memory_is_left(left)
    assert (left.grown_bytes > left.rounds * left.unit_bytes / 2) == leak


@pytest.fixture(scope="module")
def small_family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("requests")
    make_family(folder, "local", correct=False, sparsity=[0.3])
    return folder


@leaks
def test_ten_thousand_requests_of_eight_threads_are_all_answered_and_leave_nothing(small_family, leak):
    left = left_by("requests", small_family, 50, leak)  # rounds of 200
    assert nothing_but_memory_is_left(left)
    assert (left.grown_bytes > left.rounds * left.unit_bytes / 2) == leak


def test_hours_of_profiling_take_as_much_memory_as_the_samples_that_are_kept(family_and_elastic):
    """If all were kept it would be 55 MB (`--leak`); `tests/profiling/test_sampling.py` counts them."""
    left = left_by("days", family_and_elastic, 1, False, "variants=2", "hours=1")
    assert nothing_but_memory_is_left(left)
    resampling = 4 * 8 * AT_ONCE  # the bursts, their draws, and what percentiles need beside them
    assert left.most_bytes <= 2 * left.unit_bytes + resampling  # the samples, and Profiles of them
