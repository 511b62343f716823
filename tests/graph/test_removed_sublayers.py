"""Sub-layers of which a Plan keeps nothing: no node of them is left, and the graph still equals the masked model."""

import numpy as np
import onnx
import pytest
import torch

from helpers.graphs import FLAVOURS, close, exact_and, run, writer_of
from helpers.models import SOME_MODELS, deep
from helpers.plans import plan_without
from helpers.rankings import random_ranking
from snapvit_export.checks.gates import agreement
from snapvit_export.errors import SnapvitError
from snapvit_export.graph.format import GraphFormat
from snapvit_export.graph.weights import ADDED
from snapvit_export.graph.writer import GraphWriter
from snapvit_export.prune.blocks.timm_blocks import blocks_of
from snapvit_export.prune.models.masking import masked
from snapvit_export.prune.pack import blueprint

WITHOUT = {  # blocks without attention, blocks without MLP
    "the first attention": ({0}, set()),
    "the first block": ({0}, {0}),
    "two MLPs": (set(), {0, 1}),
    "the last attention": ({2}, set()),
    "the last block": ({2}, {2}),
    "all attention": ({0, 1, 2}, set()),
    "a block in the middle, and an MLP after it": ({1}, {1, 2}),
}


@pytest.mark.parametrize("name", SOME_MODELS)
@pytest.mark.parametrize("case", sorted(WITHOUT))
def test_a_removed_sub_layer_leaves_no_node_and_changes_nothing_else(name, case, tmp_path):
    model = deep(name)
    ranking = random_ranking(model.anatomy, seed=1)
    attention, mlps = WITHOUT[case]
    plan = plan_without(model.anatomy, attention, mlps)
    if model.anatomy.pooling == "token" and not any(plan.heads):
        with pytest.raises(SnapvitError, match="the class token would never see the image"):
            GraphWriter(blueprint(model, ranking), tmp_path).write("x", plan)
        return
    images = torch.randn(2, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), masked(model.module, ranking, plan) as silenced:
        wanted = silenced(images).numpy()
    drawn = blueprint(model, ranking)
    for flavour in FLAVOURS:
        path = writer_of(drawn, tmp_path, flavour).write(flavour, plan, format=GraphFormat(flavour)).graph
        onnx.checker.check_model(str(path), full_check=True)
        assert close(run(path, images.numpy()), wanted), flavour
        for precision in ("fp16", "int8-dynamic", "int8-static"):
            exact, fewer, _ = exact_and(precision, drawn, plan, tmp_path, images.numpy(), flavour)
            assert agreement(run(exact.graph, images.numpy()), run(fewer.graph, images.numpy())).cosine > 0.98
        graph = onnx.load(path, load_external_data=False).graph
        gone = {f"blocks.{i}.attn" for i in attention} | {f"blocks.{i}.mlp" for i in mlps}
        left = {node.op_type for node in graph.node if ".".join(node.output[0].split(".")[:3]) in gone}
        assert not left
        assert ADDED not in {tensor.name for tensor in graph.initializer} or model.anatomy.pre_norm
        read = {tensor.name.rpartition(".")[0] for tensor in graph.initializer if tensor.name.startswith("blocks.")}
        parts = {"attn": ("q", "k", "v", "qkv", "proj", "norm1"), "mlp": ("fc1", "fc2", "gate", "up", "norm2")}
        assert not read & {f"{sub.rpartition('.')[0]}.{part}" for sub in gone for part in parts[sub.rpartition(".")[2]]}


@pytest.mark.parametrize("last", [0, 1, 2])
@pytest.mark.parametrize("flavour", FLAVOURS)
def test_from_the_last_attention_on_only_the_token_that_is_read_is_worked_on(last, flavour, tmp_path):
    model = deep("deit_tiny_patch16_224")
    plan = plan_without(model.anatomy, set(range(last + 1, 3)), set())
    writer = writer_of(blueprint(model, random_ranking(model.anatomy)), tmp_path, flavour)
    written = writer.write("x", plan, format=GraphFormat(flavour, batch=2))
    graph = onnx.shape_inference.infer_shapes(onnx.load(written.graph, load_external_data=False)).graph
    shapes = {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in graph.value_info}
    rows = [shapes[written.layer_inputs[f"blocks.{i}.fc2"]][0] for i in range(3)]
    assert rows == [2 * model.anatomy.tokens if i < last else 2 for i in range(3)]


def test_what_a_correction_puts_in_the_place_of_a_sub_layer_is_added_by_the_one_before(tmp_path):
    model = deep("deit_tiny_patch16_224")
    ranking = random_ranking(model.anatomy, seed=1)
    plan = plan_without(model.anatomy, {2}, set())
    means = np.random.default_rng(0).standard_normal(model.anatomy.embed_dim).astype(np.float32)
    corrected = {"blocks.2.proj.weight": np.zeros((0, len(means)), np.float32), "blocks.2.proj.bias": means}
    blocks_of(model.module)[2].attn.proj.bias.data = torch.from_numpy(means)
    images = torch.randn(2, 3, *model.anatomy.image, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), masked(model.module, ranking, plan) as silenced:
        wanted = silenced(images).numpy()
    written = GraphWriter(blueprint(deep("deit_tiny_patch16_224"), ranking), tmp_path).write("x", plan, corrected)
    assert close(run(written.graph, images.numpy()), wanted)
    assert {path.name for path in tmp_path.iterdir()} == {"x.onnx", "weights.bin"}
