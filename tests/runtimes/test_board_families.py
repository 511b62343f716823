"""The families that the tests on a Jetson take: they can be read, and those tests need nothing that a board lacks."""

import ast
import sys

import pytest

from helpers.shared import ROOT
from snapvit_export.family.folder import read_family
from snapvit_export.runtimes import jetson_agent as agent

JETSON = ROOT / "tests" / "runtimes" / "jetson"
PRECISIONS = ("fp16", "fp32", "int8-static")


def test_the_tests_for_a_board_import_the_standard_library_and_pytest_alone():
    for path in JETSON.glob("*.py"):
        tree = ast.parse(path.read_text(), feature_version=(3, 8))
        names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | {"pytest"}


def test_there_is_a_family_for_every_precision():
    assert sorted(path.name for path in (JETSON / "families").iterdir()) == sorted(PRECISIONS)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_family_for_a_board_is_whole_and_the_oldest_tensorrt_takes_it(precision):
    manifest = read_family(JETSON / "families" / precision)
    assert {variant.precision for variant in manifest.variants} == {precision}
    agent.refuse_untaken(agent.read_family(JETSON / "families" / precision), agent.LEAST_VERSION)
