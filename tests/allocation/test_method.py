"""Methods of `snapvit compare`: a strict grammar, and one name for equal methods."""

import pytest

from snapvit_export.allocation.method import READERS, Method
from snapvit_export.allocation.recipe import Settings
from snapvit_export.errors import UsageError


@pytest.mark.parametrize(
    ("text", "base", "correction", "changes"),
    [
        ("default", "default", None, {}),
        ("snip+elastic", "snip", "elastic", {"correction": "elastic"}),
        ("paper:search-over=none", "paper", None, {"search_over": "none"}),
        ("paper:pairs=0.35:0.2", "paper", None, {"pairs": ((0.35, 0.2),)}),
        ("paper:pairs=0.15:0/0.35:0.2:pca=64", "paper", None, {"pairs": ((0.15, 0.0), (0.35, 0.2)), "pca": 64}),
        ("paper:cka=on:cka-images=2500", "paper", None, {"cka": True, "cka_images": 2500}),
        ("default:no=1", None, None, None),
        ("snip+elastic:damping=max:0.1", "snip", "elastic", {"damping": "max:0.1", "correction": "elastic"}),
        ("default:flops=0.7/.5:depth=off", "default", None, {"flops": (0.7, 0.5), "depth": False}),
    ],
)
def test_a_method_is_a_name_a_correction_and_options(text, base, correction, changes):
    if base is None:
        with pytest.raises(UsageError, match="has no option 'no'. Known: allocation, criterion"):
            Method.parse(text)
        return
    method = Method.parse(text)
    assert (method.base, method.correction, method.changes) == (base, correction, changes)


def test_every_option_is_a_setting():
    assert {name.replace("-", "_") for name in READERS} <= set(Settings.__dataclass_fields__)


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ("paper:pca=64:search-over=mlp", "paper:search-over=mlp:pca=064", "paper:search-over=mlp:pca=64"),
        ("paper:pairs=0.350:0.2/.1:0", " paper:pairs=0.35:0.20/0.10:0", "paper:pairs=0.35:0.2/0.1:0"),
        ("snip+refit:cka=off", "snip+refit:cka=off", "snip+refit:cka=off"),
    ],
)
def test_equal_methods_have_one_name_which_is_read_as_the_same(one, other, name):
    assert str(Method.parse(one)) == str(Method.parse(other)) == name
    assert Method.parse(name) == Method.parse(one)


def test_images_of_its_own_are_sources_and_may_have_colons():
    method = Method.parse("paper:data=hf:owner/name:data=/some/folder:seed=3")
    assert method.data == ("hf:owner/name", "/some/folder")
    assert method.changes == {"seed": 3}
    assert str(method) == "paper:seed=3:data=hf:owner/name:data=/some/folder"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is no method"),
        ("+elastic", "is no method"),
        ("paper+", "is no method"),
        ("paper:mlp", "is no method. Write it as NAME"),
        ("paper:", "is no method"),
        ("paper:pca=64:pca=32", "pca is given twice"),
        ("paper:data=a:data=a", "data is given twice"),
        ("paper:data=", "data is given twice, or without a value"),
        ("paper:pca=", "pca= is not understood. Give a value"),
        ("paper:pca=-1", "pca=-1 is not understood. Give a whole number"),
        ("paper:pca=1e3", "Give a whole number"),
        ("paper:cka=yes", "cka=yes is not understood. Give on or off"),
        ("paper:pairs=0.3", "Give ratios of neurons and heads"),
        ("paper:pairs=0.3:0.2/0.3:0.2", "are one variant"),
        ("paper:flops=nan", "Give numbers with / between them"),
        ("paper:images=10", "--images are the same for all"),
    ],
)
def test_anything_else_is_refused_in_a_line(text, says):
    with pytest.raises(UsageError) as error:
        Method.parse(text)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
