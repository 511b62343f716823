"""What is somebody's own, or read by the command itself, is never written over without --force."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapvit_export.errors import SnapvitError
from snapvit_export.storage.json import Value, is_name, write_json
from snapvit_export.storage.places import check_output, is_json_of


class Number(Value, frozen=True):
    number: int


is_number = is_json_of(Number)


def refused(path, says, **more) -> None:
    with pytest.raises(SnapvitError, match=says):
        check_output(path, "a number", is_number, **more)


def test_new_files_and_files_of_the_same_kind_may_be_written(tmp_path):
    check_output(tmp_path / "new" / "x.json", "a number", is_number)
    write_json(tmp_path / "x.json", Number(3))
    check_output(tmp_path / "x.json", "a number", is_number)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "x.json"]


@pytest.mark.parametrize("content", [b"", b"{}", b'{"number": "x"}', b"diary", bytes(100)])
def test_files_of_something_else_need_force(tmp_path, content):
    (tmp_path / "x.json").write_bytes(content)
    refused(tmp_path / "x.json", "is there already, and not a number that snapvit made. Choose another --out, or give")
    check_output(tmp_path / "x.json", "a number", is_number, force=True)
    assert (tmp_path / "x.json").read_bytes() == content


def test_a_part_of_the_input_needs_force_under_any_name(tmp_path):
    write_json(tmp_path / "x.json", Number(3))
    os.link(tmp_path / "x.json", tmp_path / "hard.json")
    (tmp_path / "soft.json").symlink_to(tmp_path / "x.json")
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    for name in ("x.json", "hard.json", "soft.json", "elsewhere/x.json", "elsewhere/elsewhere/x.json"):
        refused(tmp_path / name, "is read by this command", inputs=[None, tmp_path / "x.json"])
    check_output(tmp_path / "x.json", "a number", is_number, [tmp_path / "x.json"], force=True)
    refused(tmp_path / "later.json", "is read by this command", inputs=[tmp_path / "later.json"])


@pytest.mark.parametrize("force", [False, True])
def test_folders_devices_and_pipes_are_never_replaced(tmp_path, force):
    os.mkfifo(tmp_path / "pipe")
    refused(tmp_path, "is a folder", force=force)
    refused(tmp_path / "pipe", "not an ordinary file", force=force)
    refused(tmp_path.__class__("/dev/null"), "not an ordinary file", force=force)


def test_links_to_nothing_are_somebodys_own(tmp_path):
    (tmp_path / "x.json").symlink_to(tmp_path / "nowhere")
    refused(tmp_path / "x.json", "is there already")


@given(st.one_of(st.text(), st.text("ab./\\\0\n~-+_:* "), st.text("aZ0_.+-")))
def test_a_path_that_is_made_from_a_name_stays_in_its_folder(text):
    plain = set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_.+-")
    assert is_name(text) == (0 < len(text) <= 180 and set(text) <= plain and not text.startswith("."))
    if is_name(text):
        for made in (text, f"{text}.onnx", f".validation-{text}.safetensors"):
            assert os.path.normpath(os.path.join("/folder", made)) == f"/folder/{made}"
