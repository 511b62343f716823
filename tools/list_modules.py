"""Write the list of modules in docs/architecture.md from the first lines of their docstrings.

python tools/list_modules.py            # rewrite it
python tools/list_modules.py --check    # fail if it is not up to date: CI does
"""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- modules: written by tools/list_modules.py -->\n", "<!-- end of modules -->"
TOP = ("calibration", "profiles", "cli")  # beside the library in the tree, inside it when installed


def first_line(path: Path) -> str:
    """The first line of a module's docstring, without its full stop."""
    doc = ast.get_docstring(ast.parse(path.read_text()))
    if not doc:
        raise SystemExit(f"{path.relative_to(ROOT)}: has no docstring. Say in one line what it is")
    return doc.splitlines()[0].rstrip(".")


def packages() -> list[Path]:
    """All folders with modules: the library itself, then its layers in the order of the page."""
    layers = PAGE.read_text().split("<!-- layers -->")[1].split("```")[1]
    names = [word.rstrip("/") for line in layers.splitlines() for word in line.split("  ")[0].split() if "/" in word]
    tops = [ROOT / name if name in TOP else ROOT / "snapvit_export" / name for name in names]
    return [
        ROOT / "snapvit_export",
        *(folder for top in tops for folder in sorted({p.parent for p in top.rglob("*.py")})),
    ]


def listed() -> str:
    """The list as Markdown: a heading for each package, a row for each module."""
    parts = []
    for folder in packages():
        modules = sorted(path for path in folder.glob("*.py") if not path.name.startswith("__"))
        parts.append(f"### `{folder.relative_to(ROOT)}/`\n\n{first_line(folder / '__init__.py')}.\n")
        if modules:
            rows = [f"| `{path.stem}` | {first_line(path)} |" for path in modules]
            parts.append("\n".join(["| module | |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def main() -> None:
    """Rewrite the list, or check it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = PAGE.read_text()
    before, rest = text.split(BEGIN)
    wanted = f"{before}{BEGIN}\n{listed()}\n{END}{rest.split(END)[1]}"
    if check and wanted != text:
        sys.exit(f"{PAGE.relative_to(ROOT)}: the list of modules is not up to date. Run: python tools/list_modules.py")
    if not check:
        PAGE.write_text(wanted)


if __name__ == "__main__":
    main()
