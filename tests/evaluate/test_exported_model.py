"""What an exported file says of images: the embedding that torch gives, and the scores that the file gives anyway."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from helpers.graphs import close, exact_and
from helpers.models import FAMILIES, as_model, small
from helpers.plans import uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.calibration.dataset import open_dataset
from snapvit_export.calibration.images import Images
from snapvit_export.checks.embedding_output import with_embedding
from snapvit_export.errors import FileFormatError, UsageError
from snapvit_export.evaluate.evaluator import EvalOptions, Evaluator
from snapvit_export.evaluate.exported_model import ExportedInfo, open_exported, read_info
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.progress import Silent
from snapvit_export.prune.models.extractor import TorchExtractor
from snapvit_export.prune.models.load import Model
from snapvit_export.prune.models.read_anatomy import read_anatomy
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


READING_ALL = [  # models whose output is read from all tokens, so that the graph has those of the patches
    ("vit_base_patch16_siglip_224", {}),
    ("vit_tiny_patch16_224", {"global_pool": "avg", "reg_tokens": 2}),  # fc_norm is its only norm
    ("eva02_tiny_patch14_224", {}),
    ("vit_small_patch16_dinov3", {"global_pool": "avg"}),
]


def merged(name: str, folder: Path, writing: GraphFormat, **extra):
    """A model that merges tokens of smaller images, its graph, and images of that size."""
    model, ranking, _ = made(name, **extra)
    plan = uneven_plan(model.anatomy).with_tokens((2, 3, 1), (4, 3))
    written = GraphWriter(blueprint(model, ranking), folder, takes_bytes=writing.takes_bytes).write(
        "x", plan, format=writing
    )
    module = shrink(model.module, ranking, plan)
    preprocessing = model.preprocessing.at((64, 48))
    description = msgspec.structs.replace(model.description, preprocessing=preprocessing)
    pixels = np.random.default_rng(0).integers(0, 256, (5, 64, 48, 3), np.uint8)
    cut = Model(module, read_anatomy(module, name), description)
    return TorchExtractor(cut), written.graph, Images(pixels, None, preprocessing, "noise")


@pytest.mark.parametrize("flavour", ["ort", "portable"])
@pytest.mark.parametrize(("name", "extra"), READING_ALL)
def test_a_merged_file_gives_the_features_and_patch_tokens_of_torch(name, extra, flavour, tmp_path):
    extractor, path, images = merged(name, tmp_path, GraphFormat(flavour), **extra)
    before = sorted(each.name for each in tmp_path.iterdir())
    with open_exported(path, target(), info_of(images)) as exported:
        features, scores = exported.features(images)
        tokens = exported.tokens(images)
    wanted, logits = extractor.features(images)
    assert close(features, wanted)
    assert close(scores, logits)
    assert tokens.shape == (5, 4, 3, 48)
    assert close(tokens, extractor.tokens(images))
    assert {len(np.unique(image.reshape(12, 48), axis=0)) for image in tokens} == {12 - 6}  # six were merged away
    assert sorted(each.name for each in tmp_path.iterdir()) == before


def test_patch_tokens_of_bytes_in_a_fixed_batch(tmp_path):
    writing = GraphFormat("ort", batch=2, takes_bytes=True)
    extractor, path, images = merged("vit_base_patch16_siglip_224", tmp_path, writing)
    with open_exported(path, target(batch=2), info_of(images, takes_bytes=True)) as exported:
        assert close(exported.tokens(images), extractor.tokens(images))


def test_patch_tokens_in_half_precision(tmp_path):
    model, ranking, images = made("vit_tiny_patch16_224", global_pool="avg")  # fc_norm is its only norm
    plan = uneven_plan(model.anatomy)
    _, written, _ = exact_and("fp16", blueprint(model, ranking), plan, tmp_path, next(images.batches(5)), "ort")
    with open_exported(written.graph, target(precision="fp16"), info_of(images)) as exported:
        tokens = exported.tokens(images)
    module = shrink(model.module, ranking, plan)
    wanted = TorchExtractor(Model(module, read_anatomy(module, "x"), model.description)).tokens(images)
    cosine = (tokens * wanted).sum(-1) / np.linalg.norm(tokens, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert cosine.min() > 0.9999


def test_a_merged_file_that_is_read_from_one_token_has_no_patch_tokens(tmp_path):
    extractor, path, images = merged("deit_tiny_patch16_224", tmp_path, GraphFormat("ort"))
    assert extractor.tokens(images).shape == (5, 4, 3, 48)  # torch computes them all the same
    with (
        open_exported(path, target(), info_of(images)) as exported,
        pytest.raises(UsageError, match="gives no patch tokens, since its output is read from one token alone"),
    ):
        exported.tokens(images)


@pytest.mark.parametrize("torch_side", [True, False], ids=["torch", "file"])
@pytest.mark.parametrize("segmenter", ["quick", "paper"])
def test_merged_models_are_segmented(torch_side, segmenter, tmp_path):
    extractor, path, _ = merged("vit_base_patch16_siglip_224", tmp_path, GraphFormat("ort"))
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 6)):
        for i in range(count):
            mask = np.zeros((64, 64), np.uint8)
            mask[:, : int(rng.integers(16, 48))] = 1
            place = tmp_path / "data" / split / "a" / f"{i}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(np.where(mask[..., None], [220, 30, 30], [30, 30, 220]).astype(np.uint8)).save(place)
            Image.fromarray(mask).save(place.with_suffix(".png"))
    data, options = open_dataset(str(tmp_path / "data")), EvalOptions(by=("segment", "in-context"), segmenter=segmenter)
    with open_exported(path, target(), read_info(path)[0]) as exported:
        model = extractor if torch_side else exported
        found = Evaluator.prepare(model, data, options, Silent()).evaluate(model)
    assert found.measures == ("miou", "in_context")
    assert found.miou > 0.6  # a constant guess has less than a half
    assert found.in_context > 0.6
