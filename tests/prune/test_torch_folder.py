"""Variants written for torch: loaded by timm alone, and by `transformers` where its config can say what they are."""

import json
import py_compile
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

from helpers.graphs import close, run
from helpers.images import make_image_folder
from helpers.models import EVERY_KIND, FAMILIES, as_model, randomise, small
from helpers.plans import plan_without, uneven_plan
from helpers.rankings import random_ranking
from snapvit_export.model.plan import Plan
from snapvit_export.prune.models import plain_timm
from snapvit_export.prune.models.load import load_model
from snapvit_export.prune.models.slicing import shrink
from snapvit_export.prune.models.timm_modules import SHAPE_ARGUMENTS
from snapvit_export.prune.models.torch_folder import against_timm, save_for_torch
from snapvit_export.prune.models.transformers_out import reason_against

# Loads with timm and safetensors in a process that cannot import us.
ALONE = """
import runpy, sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("snapvit_export", "msgspec", "transformers", "typer"):
            raise ImportError(f"{name} is not installed")
sys.meta_path.insert(0, Blocked())
import torch
torch.set_num_threads(1)
made = runpy.run_path(sys.argv[1] + "/load.py")
with torch.no_grad():
    torch.save(made["load"]()(torch.load(sys.argv[2], weights_only=True)), sys.argv[3])
"""


KINDS = [(name, changes) for name, changes in EVERY_KIND if set(changes) <= SHAPE_ARGUMENTS]  # that we save


def outputs(module, images):
    with torch.no_grad():
        return module(images)


def saved(name, folder, plan_of, **changes):
    """A cut model of a family, written for torch; the module that it was, and its images."""
    module, kwargs = small(name, **changes)
    model = as_model(module, name, kwargs)
    plan = plan_of(model.anatomy)
    cut = shrink(module, random_ranking(model.anatomy), plan)
    save_for_torch(cut, model.description, folder)
    anatomy = model.anatomy.with_counts(plan)
    return cut, torch.randn(2, 3, *anatomy.image, generator=torch.Generator().manual_seed(0)), anatomy


def neurons_only(anatomy):
    return Plan(heads=anatomy.heads, neurons=(anatomy.neurons[0] // 2, 7, anatomy.neurons[2]))


@pytest.mark.parametrize(("name", "changes"), KINDS, ids=str)
@pytest.mark.parametrize("plan_of", [uneven_plan, neurons_only, lambda a: plan_without(a, {1}, {0, 1})])
def test_timm_alone_computes_the_same_or_says_why_not(name, changes, plan_of, tmp_path):
    cut, images, anatomy = saved(name, tmp_path / "torch", plan_of, **changes)
    if against_timm(anatomy) is not None:
        with pytest.raises(ValueError, match="all heads or none"):
            plain_timm.load(tmp_path / "torch")
        assert "not alone" in (tmp_path / "torch" / "README.txt").read_text()
        return
    loaded = plain_timm.load(tmp_path / "torch")
    assert not loaded.training
    torch.testing.assert_close(outputs(loaded, images), outputs(cut, images), rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in cut.parameters())
    assert torch.equal(outputs(load_model(str(tmp_path / "torch")).module, images), outputs(cut, images))


def test_it_loads_in_a_process_that_cannot_import_us(tmp_path):
    cut, images, _ = saved(FAMILIES["DeiT"], tmp_path / "torch", lambda a: plan_without(a, {1}, {0}))
    torch.save(images, tmp_path / "images.pt")
    call = [sys.executable, "-c", ALONE, tmp_path / "torch", tmp_path / "images.pt", tmp_path / "found.pt"]
    done = subprocess.run([*map(str, call)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    torch.testing.assert_close(found, outputs(cut, images), rtol=1e-5, atol=1e-5)


def test_smaller_images_and_merged_tokens(tmp_path):
    smaller = lambda a: Plan.dense(a).with_tokens((), (2, 3))  # noqa: E731
    cut, images, _ = saved(FAMILIES["DeiT"], tmp_path / "smaller", smaller)
    torch.testing.assert_close(outputs(plain_timm.load(tmp_path / "smaller"), images), outputs(cut, images))
    merged = lambda a: Plan.dense(a).with_tokens((3, 0, 2))  # noqa: E731
    saved(FAMILIES["DeiT"], tmp_path / "merged", merged)
    with pytest.raises(ValueError, match="merges tokens"):
        plain_timm.load(tmp_path / "merged")
    text = (tmp_path / "merged" / "README.txt").read_text()
    assert text.count("its tokens are merged") == 2  # neither timm nor transformers


def test_pixels_go_in_as_the_model_wants_them(tmp_path):
    from PIL import Image

    _, _, anatomy = saved(FAMILIES["DeiT"], tmp_path / "torch", Plan.dense)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), np.uint8))
    ours = load_model(str(tmp_path / "torch")).preprocessing
    found = plain_timm.transform(tmp_path / "torch")(image).numpy()
    assert found.shape == (3, *anatomy.image)
    np.testing.assert_allclose(found, ours.normalise(ours.pixels(image)[None])[0], atol=0.02)


def from_pretrained(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        return transformers.AutoModelForImageClassification.from_pretrained(folder).eval()


@pytest.mark.parametrize("heads", [4, 2])
def test_transformers_loads_what_its_config_can_say(heads, tmp_path):
    uniform = lambda a: Plan(heads=(heads,) * 3, neurons=(31,) * 3)  # noqa: E731
    cut, images, anatomy = saved(FAMILIES["AugReg"], tmp_path / "torch", uniform)
    folder = tmp_path / "torch" / "transformers"
    theirs = from_pretrained(folder)
    with torch.no_grad():
        torch.testing.assert_close(theirs(images).logits, outputs(cut, images), rtol=1e-5, atol=1e-5)
    if heads == 4:  # and it comes back; with fewer heads it is what we refuse, since others' blocks must be whole
        again = load_model(str(folder))
        assert again.anatomy == anatomy
        assert torch.equal(outputs(again.module, images), outputs(cut, images))


def test_what_a_config_cannot_say_is_said_in_words():
    def reason(name, plan_of, **changes):
        module, kwargs = small(name, **changes)
        anatomy = as_model(module, name, kwargs).anatomy
        return reason_against(anatomy.with_counts(plan_of(anatomy)))

    deit = FAMILIES["DeiT"]
    assert reason(deit, Plan.dense) is None
    assert "different numbers of heads, 1 to 4" in reason(deit, uneven_plan)
    assert "different numbers of neurons" in reason(deit, neurons_only)
    assert "block 1 has no attention" in reason(deit, lambda a: plan_without(a, {1}, set()))
    assert "tokens are merged" in reason(deit, lambda a: Plan.dense(a).with_tokens((3, 0, 2)))
    for name in ("DINOv2", "SigLIP", "CLIP", "DINOv3", "DeiT distilled"):
        assert "only plain ViTs" in reason(FAMILIES[name], Plan.dense)


def test_an_export_writes_what_was_asked_for_and_replaces_only_its_own(tmp_path, snapvit, short_timings, tiny_folder):
    make_image_folder(tmp_path / "images", 24)
    family = tmp_path / "family"
    given = ["--model", tiny_folder, "--data", tmp_path / "images", "--images", "12", "--out", family, "--save-torch"]
    outcome = snapvit("export", *given, "--sparsity", "0.3", "--pair", "0.5:0", "--quiet")
    assert outcome.code == 0, outcome.err
    assert f"For torch: {family / 'torch'}" in outcome.out
    assert sorted(path.name for path in (family / "torch").iterdir()) == ["dense", "pair50-0", "s30"]
    assert (family / "torch" / "dense" / "transformers" / "config.json").is_file()
    assert "not possible: its blocks keep different" in (family / "torch" / "s30" / "README.txt").read_text()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    for name in ("dense", "pair50-0", "s30"):
        loaded = plain_timm.load(family / "torch" / name)
        assert close(run(family / f"{name}.onnx", images.numpy()), outputs(loaded, images).numpy())
    py_compile.compile(family / "torch" / "s30" / "load.py")  # as an import of it leaves behind
    outcome = snapvit("export", *given, "--budget", "95%", "--levers", "width", "--quiet", "--json")
    assert outcome.code == 0, outcome.err
    chosen = json.loads(outcome.out)["choice"]["variant"]
    assert [path.name for path in (family / "torch").iterdir()] == [chosen]
    (family / "torch" / "thesis.txt").write_text("mine")
    outcome = snapvit("export", *given, "--sparsity", "0.3", "--quiet")
    assert (outcome.code, "not ours (torch)" in outcome.err) == (1, True)


def test_an_onnx_file_has_no_module(tmp_path, snapvit):
    (tmp_path / "a.onnx").write_bytes(b"")
    outcome = snapvit("export", "--model", tmp_path / "a.onnx", "--data", tmp_path, "--budget", "10ms", "--save-torch")
    assert (outcome.code, "--save-torch writes modules of torch" in outcome.err) == (2, True)


def test_norms_keep_their_eps(tmp_path):
    import timm

    from snapvit_export.prune.models.load import as_model as described

    module = randomise(timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2)).eval()
    model = described(module)
    kwargs = {**model.description.kwargs, "norm_eps": 0.01}
    from msgspec.structs import replace

    save_for_torch(module, replace(model.description, kwargs=kwargs), tmp_path / "torch")
    assert {part.eps for part in plain_timm.load(tmp_path / "torch").modules() if hasattr(part, "eps")} == {0.01}
