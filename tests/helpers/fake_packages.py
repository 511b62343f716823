"""Fake packages in a folder that Python finds first: a module, and the metadata that pip would leave."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest


class FakePackages:
    """Adds packages that are not what they are called, for this process and those that it starts."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        folder.mkdir()
        monkeypatch.syspath_prepend(str(folder))
        known = os.environ.get("PYTHONPATH")
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(folder), *([known] if known else [])]))
        monkeypatch.setattr(sys, "path", list(sys.path))

    def add(self, package: str, version: str, code: str | None = None) -> Path:
        """Add a package with its metadata; `code` of its module, None: metadata alone. Returns the module's folder."""
        name = package.replace("-", "_")
        metadata = self.folder / f"{name}-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
        if code is not None:
            (self.folder / name).mkdir()
            (self.folder / name / "__init__.py").write_text(code)
        return self.folder / name
