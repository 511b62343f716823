"""The gate between two forms of one model."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from helpers.graphs import FLAVOURS
from snapvit_export import profiles
from snapvit_export.allocation.recipe import make_settings
from snapvit_export.checks.gates import first_difference, require_close, require_equal
from snapvit_export.errors import GateFailed
from snapvit_export.graph import writer as emitter
from snapvit_export.graph.precision import stored
from snapvit_export.graph.weights import prepare
from snapvit_export.workflows.export import Request, export

A = np.random.default_rng(0).standard_normal((4, 10)).astype(np.float32)


def test_equal_outputs_pass_and_say_how_close_they_are():
    found = require_equal("a and b", A, A + np.float32(1e-6))
    assert found.max_abs < 1e-5
    assert found.cosine > 0.999999


@pytest.mark.parametrize(
    ("reference", "other", "says"),
    [
        (A, A + np.float32(1e-2), "differ by"),
        (A, A[:, :5], "shapes"),
        (A, np.where(A > 1, np.nan, A), "not finite"),
        (np.where(A > 1, np.nan, A), A, "not finite"),
        (np.full_like(A, np.nan), np.full_like(A, np.nan), "not finite"),
    ],
)
def test_different_or_broken_outputs_do_not_pass(reference, other, says):
    with pytest.raises(GateFailed, match=f"dense and sliced: .*{says}"):
        require_equal("dense and sliced", reference, other)


def test_fewer_bits_are_judged_by_their_cosine():
    assert require_close("a and b", A, A * np.float32(1.001), "fp16").cosine > 0.9999
    turned = A + 0.05 * A[:, ::-1]
    assert require_close("a and b", A, turned, "int8-dynamic").cosine < 0.9999
    with pytest.raises(GateFailed, match=r"a and b: the cosine is 0\.99\d+ \(at least 0.9999 is asked\); block 7"):
        require_close("a and b", A, turned, "fp16", where=lambda: "; block 7")
    with pytest.raises(GateFailed, match="not finite"):
        require_close("a and b", A, np.where(A > 1, np.inf, A), "int8-static")


def test_the_first_block_that_differs_is_named_with_its_figure():
    streams = {i: np.ones((2, 5, 3), np.float32) * (i + 1) for i in range(4)}
    other = {i: x.copy() for i, x in streams.items()}
    assert "block 0 differs most, by 0.00e+00" in first_difference(streams, other)
    other[2][1, 0, 0] += 0.3
    other[3] += 1
    assert first_difference(streams, other) == "; the first block that differs is 2, by 1.00e-01 of its largest value"
    other[2][1, 0, 0] = np.nan
    assert "the first block that differs is 2, by nan" in first_difference(streams, other)
    short = {3: streams[3][:, :1]}  # the last block may give only the tokens that are read
    assert "block 3 differs most, by 0.00e+00" in first_difference(streams, short)


def test_outputs_that_are_all_zero_are_equal():
    zeros = np.zeros((2, 4), np.float32)
    assert require_close("a and b", zeros, zeros, "int8-static").cosine == 1
    with pytest.raises(GateFailed):
        require_close("a and b", zeros, zeros + 1, "int8-static")


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_an_export_whose_graph_is_wrong_names_the_block_and_leaves_nothing(flavour, tiny_folder, tmp_path, monkeypatch):
    def wrong(dense, anatomy, wiring):
        made = prepare(dense, anatomy, wiring)
        return made | {"blocks.1.fc1.weight": made["blocks.1.fc1.weight"] * np.float32(1.01)}

    monkeypatch.setattr(emitter, "prepare", wrong)
    request = Request(
        model=str(tiny_folder),
        data="digits",
        settings=make_settings("default", images=8),
        sparsity=[0.3],
        flavour=flavour,
    )
    with pytest.raises(GateFailed, match=r"dense: module and \w+ graph: .*; the first block that differs is 1, by"):
        export(replace(request, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert not [path.name for path in tmp_path.iterdir() if "out" in path.name and "checkpoint" not in path.name]


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-static"])
def test_a_graph_in_fewer_bits_that_is_wrong_is_refused_as_well(precision, tiny_folder, tmp_path, monkeypatch):
    def wrong(tensors, kind, *rest):
        made = stored(tensors, kind, *rest)
        name = "blocks.1.norm2.weight"
        return made if kind == "fp32" or name not in made else made | {name: -99 * made[name]}

    monkeypatch.setattr(emitter, "stored", wrong)
    target = msgspec.structs.replace(profiles.load("cpu").target, precision=precision)
    request = Request(
        model=str(tiny_folder),
        data="digits",
        settings=make_settings("default", images=8),
        sparsity=[0.3],
        target=target,
    )
    with pytest.raises(
        GateFailed, match=rf"dense: {precision} and fp32 graph: .*block that differs is 1, .*Use another"
    ):
        export(replace(request, out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()
