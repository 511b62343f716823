"""A manifest checks itself: its choice is among its measurements, its counts are those of its model."""

import json

import pytest

from helpers.report_factory import make_evaluation, make_fidelity, make_manifest, make_mixed
from snapvit_export.errors import FileFormatError
from snapvit_export.evaluate.comparison import Comparison, MethodResult
from snapvit_export.family.evaluation import Evaluation
from snapvit_export.family.fidelity import Fidelity
from snapvit_export.family.manifest import Manifest
from snapvit_export.model.anatomy import Anatomy
from snapvit_export.storage.json import from_json, to_json


def test_the_manifests_of_the_other_tests_are_valid():
    for manifest in (make_manifest(4), make_manifest(1), make_mixed(), make_mixed(labelled=True)):
        assert from_json(to_json(manifest), Manifest, "manifest.json") == manifest


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda m: m["choice"]["measurements"].pop(3), "int8-r112-w85 is chosen or compared, and not among"),
        (lambda m: m["choice"].update(measurements=[]), "not among the measurements"),
        (lambda m: m["choice"].update(next_denser="nobody"), "nobody is chosen or compared"),
        (lambda m: m["choice"]["alternatives"][0].update(variant="nobody"), "nobody is chosen or compared"),
        (lambda m: m["choice"]["measurements"].append(m["choice"]["measurements"][0]), "two measurements of one"),
        (lambda m: m["choice"].update(budget_ms=0), "Expected `float` > 0"),
        (lambda m: m["choice"].update(budget_ms=-1.0), "Expected `float` > 0"),
        (lambda m: m["choice"].update(budget_ms=1e200), "Expected `float` <="),
        (lambda m: m["choice"]["measurements"][0].update(between_ms=[30, 20]), "ends before it begins"),
        (lambda m: m["variants"][1].update(heads=[6] * 11), "same number of blocks"),
        (lambda m: m["variants"][1].update(heads=[7] * 12), "keeps 7 heads of 6"),
        (lambda m: [v.update(neurons=[9999] * 12) for v in m["variants"]], "keeps 9999 neurons of 1536"),
        (lambda m: m["variants"][1].update(heads=[0] * 12, neurons=[0] * 12), "keeps no attention"),
        (lambda m: m["anatomy"].update(blocks=[]), "at least one block"),
        (lambda m: [b.update(heads=0, hidden=0) for b in m["anatomy"]["blocks"]], "at least one head or neuron"),
        (lambda m: m["anatomy"].update(blocks=m["anatomy"]["blocks"] * 1000), "more than the 1000 of any model"),
        (lambda m: m["anatomy"].update(patch=[1, 1], image=[2**15, 2**15]), "patches are more than"),
        (lambda m: m["anatomy"].update(image=[10**7, 10**7]), "Expected `int` <="),
        (lambda m: m["anatomy"].update(channels=5), "other channels"),
        (lambda m: m.update(recipe={"x": json.loads("[" * 300 + "]" * 300)}), "nested more than"),
        (lambda m: m["seconds"].update(ranking=-1.0), "Expected `float` >= 0"),
        (lambda m: m["target"]["device"].update(core_numbers=[0] * 10**6), "length <= 16384"),
    ],
)
def test_what_a_manifest_cannot_mean_is_refused(change, says):
    written = json.loads(to_json(make_mixed()))
    change(written)
    with pytest.raises(FileFormatError) as refused:
        from_json(json.dumps(written), Manifest, "manifest.json")
    assert says in str(refused.value)


def test_counts_of_a_variant_are_checked_also_in_a_file_from_before_there_were_tokens():
    written = json.loads(to_json(make_manifest(3)))
    assert "tokens" not in written["variants"][1]
    written["variants"][1]["heads"] = [99] * 12
    with pytest.raises(FileFormatError, match="keeps 99 heads of 6"):
        from_json(json.dumps(written), Manifest, "manifest.json")


def test_a_latency_model_of_another_depth_is_refused():
    written = json.loads(to_json(make_mixed()))
    model = dict(fixed_ms=1.0, head_ms=[1.0] * 3, neuron_ms=[1.0] * 3, nets=4, mean_error=0.1, most_error=0.1)
    written["choice"]["model"] = model
    with pytest.raises(FileFormatError, match="latency model is of another number of blocks"):
        from_json(json.dumps(written), Manifest, "manifest.json")


def test_evaluations_and_fidelities_out_of_bounds_are_refused():
    for found, kind, changes in (
        (make_evaluation(0.5), Evaluation, dict(images=0)),
        (make_evaluation(0.5), Evaluation, dict(top1=1.5)),
        (make_evaluation(0.5), Evaluation, dict(standard_errors={"top1": 1e300})),
        (make_fidelity(0.1, 0.9), Fidelity, dict(divergence=1e300)),
        (make_fidelity(0.1, 0.9), Fidelity, dict(images=0)),
    ):
        assert from_json(to_json(found), kind, "x") == found
        with pytest.raises(FileFormatError):
            from_json(json.dumps({**json.loads(to_json(found)), **changes}), kind, "x")


def test_an_anatomy_with_an_epsilon_that_erases_everything_is_refused():
    written = json.loads(to_json(make_manifest(1).anatomy))
    with pytest.raises(FileFormatError):
        from_json(json.dumps({**written, "norm_eps": 1e30}), Anatomy, "x")


def test_a_comparison_without_a_measure_of_all_or_of_an_unknown_method_is_refused():
    by_head, by_knn = make_evaluation(0.5), Evaluation(source="pictures", images=5, knn=0.5)
    shares = dict(asked=0.5, sparsity=0.5, flops_ratio=0.5, params=1, correction=None)
    described = dict(model="m", weights_sha256="ab", calibration={}, judged_on={}, axis="sparsity", dense=by_head)
    result = MethodResult(recipe="default", evaluation=by_head, **shares)
    assert Comparison(**described, settings={"default": {}}, contestants=(result,)).measure == "top1"
    with pytest.raises(ValueError, match="default has results and no settings"):
        Comparison(**described, settings={}, contestants=(result,))
    other = MethodResult(recipe="default", evaluation=by_knn, **shares)
    with pytest.raises(ValueError, match="no measure that all of them took"):
        Comparison(**described, settings={"default": {}}, contestants=(other,))
