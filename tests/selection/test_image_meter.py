"""The meter: files compared with the dense model on images, each run as its target runs it."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest

from helpers.graphs import exact_and, run
from helpers.images import pictures
from helpers.models import TINY, make_model
from helpers.plans import half_plan
from snapvit_export.calibration.images import Images
from snapvit_export.family.fidelity import Comparison
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.model.plan import Plan
from snapvit_export.model.ranking import Ranking
from snapvit_export.prune.pack import blueprint
from snapvit_export.selection import image_meter
from snapvit_export.selection.candidates import BuiltVariant, Probe
from snapvit_export.selection.image_meter import FEW, ImageMeter
from snapvit_export.selection.point import Point
from snapvit_export.target import Target

TARGET = Target(runtime="onnxruntime", precision="fp32", batch=3, threads=1)
RACE, REPORTED = 40, 20


class Setting:
    """A tiny model whose dense, halved and int8 graphs are files, and a meter of them."""

    def __init__(self, folder, classes: int = 5, **options) -> None:
        model = make_model({**TINY, "num_classes": classes})
        self.anatomy, drawn = model.anatomy, blueprint(model, Ranking.flat(model.anatomy))
        self.race, self.reported = pictures(RACE, seed=1), pictures(REPORTED, seed=2)
        if "columns" in options:
            rng = np.random.default_rng(0)
            self.race, self.reported = (
                replace(images, labels=rng.integers(0, 5, len(images))) for images in (self.race, self.reported)
            )
        folder.mkdir()
        (folder / "graphs").mkdir()
        writer = GraphWriter(drawn, folder / "graphs")
        self.dense = writer.write("dense", Plan.dense(self.anatomy)).graph
        self.half = writer.write("half", half_plan(self.anatomy)).graph
        images = next(self.race.batches(8))
        self.int8 = exact_and("int8-dynamic", drawn, Plan.dense(self.anatomy), folder, images, "ort")[1].graph
        self.asked: list[int] = []
        target = options.pop("target", TARGET)
        self.meter = ImageMeter(self.anatomy, target, self.race, self.reported, self._dense, **options)

    def _dense(self, images: Images) -> np.ndarray:
        self.asked.append(len(images))
        return self.outputs(self.dense, images)

    def outputs(self, path, images: Images, batch: int = 8) -> np.ndarray:
        return np.concatenate([run(path, inputs) for inputs in images.batches(batch)])

    def built(self, path, plan: Plan, precision="fp32") -> BuiltVariant:
        return BuiltVariant(path.stem, path, (), plan, precision, "ab", 1, None, None, kept=True)

    @property
    def plan(self) -> Plan:
        return Plan.dense(self.anatomy)


@pytest.fixture
def setting(tmp_path):
    return Setting(tmp_path / "tiny")


def test_the_dense_file_has_no_divergence_and_agrees_with_itself(setting):
    found = setting.meter.measured(setting.built(setting.dense, setting.plan)).fidelity
    assert (found.divergence, found.agreement, found.images, found.by) == (0.0, 1.0, REPORTED, "predictions")
    losses = setting.meter.losses(Probe(setting.dense, (), "fp32"), Point(setting.plan, "fp32"), few=False)
    assert losses == pytest.approx(np.zeros(RACE), abs=1e-6)


def test_a_smaller_file_is_compared_on_the_very_outputs_of_both(setting):
    plan = half_plan(setting.anatomy)
    found = setting.meter.measured(setting.built(setting.half, plan))
    outputs = [setting.outputs(path, setting.reported) for path in (setting.half, setting.dense)]
    wanted = Comparison.of(*outputs, classifies=True)
    assert found.losses.divergence == pytest.approx(wanted.divergence, rel=1e-3, abs=1e-6)
    assert found.fidelity.divergence == pytest.approx(wanted.fidelity().divergence, rel=1e-3)
    assert found.fidelity.divergence > 0
    assert found.losses.wrong is None
    assert found.evaluation is None


def test_the_race_and_the_report_are_told_on_different_images_and_the_dense_outputs_are_made_once(setting):
    plan, probe = half_plan(setting.anatomy), Probe(setting.half, (), "fp32")
    few, on_all = (setting.meter.losses(probe, Point(plan, "fp32"), few=few) for few in (True, False))
    assert (len(few), len(on_all)) == (FEW, RACE)
    spread = [i * RACE // FEW for i in range(FEW)]
    assert on_all[spread] == pytest.approx(few, rel=1e-4, abs=1e-6)
    for _ in range(2):
        reported = setting.meter.measured(setting.built(setting.half, plan)).losses.divergence
    assert len(reported) == REPORTED
    assert not np.isin(np.round(reported, 6), np.round(on_all, 6)).any()
    assert setting.asked == [RACE, REPORTED]


def test_dynamic_int8_runs_with_the_batch_of_the_target(setting, monkeypatch):
    sizes, plain = [], image_meter.run_in_threads

    def seen(path, batches):
        batches = list(batches)
        sizes.append(len(batches[0]))
        return plain(path, batches)

    monkeypatch.setattr(image_meter, "run_in_threads", seen)
    found = setting.meter.measured(setting.built(setting.int8, setting.plan, "int8-dynamic"))
    assert sizes == [TARGET.batch]
    outputs = setting.outputs(setting.int8, setting.reported, TARGET.batch)
    wanted = Comparison.of(outputs, setting.outputs(setting.dense, setting.reported), classifies=True)
    assert found.losses.divergence == pytest.approx(wanted.divergence, rel=1e-3, abs=1e-6)
    other = setting.outputs(setting.int8, setting.reported, 7)
    assert np.abs(other - outputs).max() > 1e-5  # the scale is of the whole batch, so it matters
    setting.meter.measured(setting.built(setting.half, half_plan(setting.anatomy)))
    assert sizes == [TARGET.batch, image_meter.BATCH]


def test_a_probe_in_another_precision_is_charged_with_what_that_one_loses(setting):
    probe, point = Probe(setting.half, (), "fp32"), Point(half_plan(setting.anatomy), "int8-static")
    without = setting.meter.losses(probe, point, few=True)
    dense = setting.meter.measured(setting.built(setting.int8, setting.plan, "int8-static"))
    assert dense.fidelity.divergence > 0
    added = without + dense.fidelity.divergence
    assert setting.meter.losses(probe, point, few=True) == pytest.approx(added)
    own = Point(point.plan, "fp32")
    assert setting.meter.losses(probe, own, few=True) == pytest.approx(without)


def test_labels_give_accuracy_and_may_decide_the_race(tmp_path):
    setting = Setting(tmp_path / "labelled", columns=np.arange(5), by_accuracy=True)
    plan = half_plan(setting.anatomy)
    found = setting.meter.measured(setting.built(setting.half, plan))
    right = setting.outputs(setting.half, setting.reported).argmax(1) == setting.reported.labels
    assert found.evaluation.top1 == pytest.approx(right.mean())
    assert found.evaluation.images == REPORTED
    assert found.losses.wrong.tolist() == (~right).tolist()
    losses = setting.meter.losses(Probe(setting.half, (), "fp32"), Point(plan, "fp32"), few=False)
    wrong = setting.outputs(setting.half, setting.race).argmax(1) != setting.race.labels
    assert np.round(losses).astype(bool).tolist() == wrong.tolist()  # divergence only tells equals apart


def test_labels_of_some_classes_read_their_own_columns(tmp_path):
    setting = Setting(tmp_path / "labelled", columns=np.array([4, 3, 2, 1, 0]))
    found = setting.meter.measured(setting.built(setting.half, half_plan(setting.anatomy)))
    answers = 4 - setting.outputs(setting.half, setting.reported).argmax(1)
    assert found.evaluation.top1 == pytest.approx((answers == setting.reported.labels).mean())


def test_a_model_without_a_classifier_is_compared_by_neighbours(tmp_path):
    setting = Setting(tmp_path / "headless", classes=0)
    assert setting.anatomy.classes == 0
    found = setting.meter.measured(setting.built(setting.half, half_plan(setting.anatomy)))
    outputs = [setting.outputs(path, setting.reported) for path in (setting.half, setting.dense)]
    wanted = Comparison.of(*outputs, classifies=False).fidelity()
    assert found.fidelity.by == "neighbours"
    assert found.fidelity.divergence == pytest.approx(wanted.divergence, rel=1e-3)
    assert found.fidelity.agreement == wanted.agreement
    dense = setting.meter.measured(setting.built(setting.dense, setting.plan)).fidelity
    assert (dense.divergence, dense.agreement) == (pytest.approx(0, abs=1e-9), 1.0)


def test_openvino_compares_what_openvino_computes(tmp_path):
    pytest.importorskip("openvino")
    setting = Setting(tmp_path / "openvino", target=msgspec.structs.replace(TARGET, runtime="openvino"))
    found = setting.meter.measured(setting.built(setting.half, half_plan(setting.anatomy)))
    outputs = [setting.outputs(path, setting.reported) for path in (setting.half, setting.dense)]
    wanted = Comparison.of(*outputs, classifies=True).fidelity()
    assert found.fidelity.divergence == pytest.approx(wanted.divergence, rel=0.01)
