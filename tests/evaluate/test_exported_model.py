"""What an exported file says of images: the embedding that torch gives, and the scores that the file gives anyway."""

import numpy as np
import onnx
import pytest
import torch

from helpers.graphs import close, exact_and
from helpers.models import FAMILIES, as_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.images import Images
from snapvit_export.checks.embedding_output import with_embedding
from snapvit_export.errors import FileFormatError, UsageError
from snapvit_export.evaluate.exported_model import ExportedInfo, open_exported
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.pack import blueprint
from snapvit_export.target import Target


def target(runtime="onnxruntime", precision="fp32", batch=1) -> Target:
    return Target(runtime=runtime, precision=precision, batch=batch, threads=1)


def made(name: str, **extra):
    module, _ = small(name, **extra)
    model = as_model(module, name, {})
    ranking = random_ranking(model.anatomy, seed=1)
    height, width = model.anatomy.image
    pixels = np.random.default_rng(0).integers(0, 256, (5, height, width, 3), np.uint8)
    return model, ranking, Images(pixels, None, model.preprocessing, "noise")


def info_of(images: Images, takes_bytes=False) -> ExportedInfo:
    return ExportedInfo("x", "0" * 64, images.preprocessing, takes_bytes=takes_bytes)


def torch_features(module, images: Images) -> np.ndarray:
    """The embedding that the classifier reads; of two tokens with two classifiers the mean."""
    x = torch.from_numpy(next(images.batches(len(images))))
    with torch.no_grad():
        tokens = module.forward_features(x)
        if hasattr(module, "head_dist"):
            return tokens[:, :2].mean(1).numpy()
        return module.forward_head(tokens, pre_logits=True).numpy()


@pytest.mark.parametrize("name", FAMILIES.values(), ids=FAMILIES.keys())
def test_every_family_gives_its_embedding_beside_its_scores(name, tmp_path):
    model, ranking, images = made(name)
    plan = uneven_plan(model.anatomy)
    written = GraphWriter(blueprint(model, ranking), tmp_path).write("x", plan, format=GraphFormat("ort"))
    before = sorted(path.name for path in tmp_path.iterdir())
    with open_exported(written.graph, target(), info_of(images)) as exported:
        features, scores = exported.features(images)
    sliced = shrink(model.module, ranking, plan)
    with torch.no_grad():
        logits = sliced(torch.from_numpy(next(images.batches(5)))).numpy()
    assert close(features, torch_features(sliced, images))
    assert scores is not None
    assert close(scores, logits)
    assert sorted(path.name for path in tmp_path.iterdir()) == before  # the copy is gone


def test_a_model_without_a_head_gives_its_embedding_alone(tmp_path):
    module, _ = small("vit_small_patch16_224.dino")
    module.reset_classifier(0)
    model = as_model(module, "dino", {})
    height, width = model.anatomy.image
    images = Images(np.zeros((3, height, width, 3), np.uint8), None, model.preprocessing, "black")
    written = GraphWriter(blueprint(model, random_ranking(model.anatomy)), tmp_path).write(
        "x", uneven_plan(model.anatomy)
    )
    with open_exported(written.graph, target(), info_of(images)) as exported:
        features, scores = exported.features(images)
        with pytest.raises(UsageError, match="gives no patch tokens"):
            exported.tokens(images)
    assert scores is None
    assert features.shape == (3, 48)


@pytest.mark.parametrize("precision", ["fp16", "int8-dynamic", "int8-static"])
@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_fewer_bits(name, precision, tmp_path):
    model, ranking, images = made(name)
    drawn, plan = blueprint(model, ranking), uneven_plan(model.anatomy)
    inputs = next(images.batches(5))
    _, written, _ = exact_and(precision, drawn, plan, tmp_path, inputs, "ort")
    with open_exported(written.graph, target(precision=precision), info_of(images)) as exported:
        features, _ = exported.features(images)
    wanted = torch_features(shrink(model.module, ranking, plan), images)
    cosine = (features * wanted).sum(1) / np.linalg.norm(features, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosine.min() > (0.9999 if precision == "fp16" else 0.9)


def test_bytes_and_a_fixed_batch(tmp_path):
    model, ranking, images = made("deit_tiny_patch16_224")
    plan = uneven_plan(model.anatomy)
    emitter = GraphWriter(blueprint(model, ranking), tmp_path, takes_bytes=True)
    written = emitter.write("x", plan, format=GraphFormat("ort", batch=2, single_file=True))
    with open_exported(written.graph, target(batch=2), info_of(images, takes_bytes=True)) as exported:
        features, _ = exported.features(images)  # five: the last run is filled up
    assert close(features, torch_features(shrink(model.module, ranking, plan), images))


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_openvino_and_its_own_int8_files(name, tmp_path):
    pytest.importorskip("openvino", reason="needs openvino: pip install 'snapvit-export[openvino]'")
    pytest.importorskip("nncf", reason="needs nncf: pip install 'snapvit-export[openvino]'")
    from snapvit_export.runtimes.openvino_nncf import quantise

    model, ranking, images = made(name)
    plan = uneven_plan(model.anatomy)
    written = GraphWriter(blueprint(model, ranking), tmp_path).write("x", plan, format=GraphFormat("portable"))
    wanted = torch_features(shrink(model.module, ranking, plan), images)
    with open_exported(written.graph, target("openvino"), info_of(images)) as exported:
        assert close(exported.features(images)[0], wanted)
    inputs = next(images.batches(5))
    path, _ = quantise(written.graph, tmp_path / "int8", [image[None] for image in inputs])
    before = sorted(each.name for each in tmp_path.iterdir())
    with open_exported(path, target("openvino", "int8-static"), info_of(images)) as exported:
        features, scores = exported.features(images)
    cosine = (features * wanted).sum(1) / np.linalg.norm(features, axis=1) / np.linalg.norm(wanted, axis=1)
    assert cosine.min() > 0.9
    assert scores is not None
    assert scores.shape == (5, 7)
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_a_file_of_others_is_refused_and_nothing_is_left(tmp_path):
    node = onnx.helper.make_node("Relu", ["a"], ["b"])
    ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 3]) for name in "ab"]
    graph = onnx.helper.make_graph([node], "g", ports[:1], ports[1:])
    path = tmp_path / "foreign.onnx"
    path.write_bytes(onnx.helper.make_model(graph).SerializeToString())
    with pytest.raises(FileFormatError, match=r"foreign.onnx: not made by snapvit"), with_embedding(path):
        pass
    assert [each.name for each in tmp_path.iterdir()] == ["foreign.onnx"]
