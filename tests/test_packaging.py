"""The wheel holds what the tree holds, and the README tells the truth about commands."""

import re
import sys
from pathlib import Path

import pytest

import snapvit_export
from helpers.shared import ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli", reason="reading pyproject.toml needs Python 3.11 or tomli")

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
README = (ROOT / "README.md").read_text()


def test_the_list_of_packages_is_the_tree():
    mapped = PYPROJECT["tool"]["setuptools"]["package-dir"]
    tree = {"snapvit_export": ROOT / "snapvit_export"} | {name: ROOT / folder for name, folder in mapped.items()}
    found = set()
    for package, folder in tree.items():
        for init in folder.rglob("__init__.py"):
            found.add(".".join((package, *init.parent.relative_to(folder).parts)))
    assert found == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_folder_of_code_is_a_package():
    for folder in ("snapvit_export", "cli", "profiles", "calibration"):
        for path in (ROOT / folder).rglob("*.py"):
            assert (path.parent / "__init__.py").is_file(), path


def test_every_file_beside_the_code_is_in_the_wheel():
    data = PYPROJECT["tool"]["setuptools"]["package-data"]
    for path in (ROOT / "snapvit_export").rglob("*"):
        if path.is_file() and path.suffix not in (".py", ".pyc"):
            package = ".".join(path.parent.relative_to(ROOT).parts)
            assert any(path.match(pattern) for pattern in data.get(package, ())), path


def test_one_version_everywhere():
    assert PYPROJECT["project"]["version"] == snapvit_export.__version__
    assert f"## {snapvit_export.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_gpu_and_cpu_runtimes_are_never_installed_together():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert "ort-gpu" not in extras["all"][0]
    assert all("torch" not in need for need in PYPROJECT["project"]["dependencies"])


def test_the_readme_shows_the_two_commands_and_ci_runs_the_second_verbatim():
    commands = re.findall(r"^    (python.*&&.*)$", README, re.MULTILINE)
    assert len(commands) == 2, commands
    run, tests = commands
    assert "snapvit export --budget 10ms" in run
    assert "pytest" in tests
    assert tests in (ROOT / ".ci" / "run").read_text()


def test_the_readme_is_short_enough_to_be_read_and_whole():
    assert len(README.splitlines()) <= 110
    assert not re.search(r"^@\w+@$", README, re.MULTILINE)


def test_commands_of_the_docs_exist_with_their_options():
    from typer.main import get_command

    from snapvit_export.cli.app import app

    known = {name: {o for p in command.params for o in p.opts} for name, command in get_command(app).commands.items()}
    pages = ["README.md", *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
    seen = 0
    for page in pages:
        text = (ROOT / page).read_text().replace("\\\n", " ")
        for command, rest in re.findall(r"snapvit ([a-z-]+)((?: [^`\n#]*)?)", text):
            if command not in known:
                assert not re.search(rf"`snapvit {command}", text), f"{page}: snapvit {command}"
                continue
            for option in re.findall(r"(?<![\w-])--[a-z0-9-]+", re.split(r" && | \| |;", rest)[0]):
                assert option in known[command] | {"--help"}, f"{page}: snapvit {command} {option}"
                seen += 1
    assert seen > 40


def test_every_page_of_the_docs_is_in_the_menu():
    listed = re.findall(r": (\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in (ROOT / "docs").glob("*.md"))


def test_every_option_is_documented():
    from typer.main import get_command

    from snapvit_export.cli.app import app

    documented = (ROOT / "docs" / "commands.md").read_text()
    for name, command in get_command(app).commands.items():  # type: ignore[attr-defined]
        assert f"## snapvit {name}" in documented
        section = documented.split(f"## snapvit {name}\n")[1].split("\n## ")[0]
        for parameter in command.params:
            for option in parameter.opts:
                if option.startswith("--") and option != "--help":
                    assert f"`{option}" in section, f"{name} {option}"


@pytest.mark.parametrize(
    "path",
    [
        *("README.md", "CONTRIBUTING.md", "profiles/README.md"),
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))),
    ],
)
def test_links_between_documents_lead_somewhere(path):
    text = (ROOT / path).read_text()
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", text):
        assert ((ROOT / path).parent / target).exists(), target


def test_the_picture_of_the_house_names_every_room():
    text = (ROOT / "docs" / "architecture.md").read_text()
    rooms = [
        path.name for path in (ROOT / "snapvit_export").iterdir() if path.is_dir() and (path / "__init__.py").exists()
    ]
    for room in [*rooms, "cli", "profiles", "calibration", "tests", "tools"]:
        assert f"{room}/" in text, room


def test_licence_is_apache():
    assert "Apache License" in Path(ROOT / "LICENSE").read_text()
