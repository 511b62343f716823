"""What a source file uses of TensorRT, read without running it: the other direction of the contract.

What is reached from the package (`trt.Builder`) must be listed as it stands. Of the objects that it makes the source
does not say the type, so every attribute of anything must be the last part of a listed name, unless it is a name that
the file defines itself or one that Python's own types have; only `self` is known to be ours. The test then makes sure
that no class of TensorRT has a name that was excused in this way: no attribute can be of TensorRT and unlisted.
"""

from __future__ import annotations

import ast
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

ROOTS = {"trt", "_trt"}  # what the adapter calls the package
PACKAGES = {"tensorrt", "tensorrt_rtx", "tensorrt_bindings", "tensorrt_lean", "tensorrt_dispatch"}
PYTHON_TYPES = (str, bytes, int, float, list, dict, tuple, set, memoryview, OSError, Path, np.ndarray)
OF_PYTHON = {name for kind in PYTHON_TYPES for name in dir(kind) if not name.startswith("_")}
DUNDERS = {"__name__", "__class__", "__init__"}  # the others can lead anywhere: __dict__, __members__
LOOK_UPS = {"getattr", "hasattr", "setattr", "delattr"}
ESCAPES = {"vars", "eval", "exec", "__import__", "import_module", "attrgetter", "methodcaller"}


@dataclass
class Uses:
    """What was found, with the lines."""

    names: dict[str, int] = field(default_factory=dict)  # dotted, from the package on
    attributes: dict[str, int] = field(default_factory=dict)  # of anything else
    own: set[str] = field(default_factory=set)  # functions, classes and fields that the file defines
    faults: dict[str, int] = field(default_factory=dict)  # what cannot be followed

    def outside(self, table: Collection[str], removed: Collection[str] = ()) -> list[str]:
        """What a table of dotted names does not cover; a name of `removed` is never excused."""
        begun = {".".join(name.split(".")[:n]) for name in table for n in range(1, name.count(".") + 2)}
        known = last(table) | DUNDERS | ((self.own | OF_PYTHON) - last(removed))
        found = {name: line for name, line in self.names.items() if name not in begun | DUNDERS}
        found |= {f"(...).{name}": line for name, line in self.attributes.items() if name not in known}
        return [f"line {line}: {name}" for name, line in (found | self.faults).items()]

    def excused(self, table: Collection[str]) -> set[str]:
        """Attributes that pass only because they are ours or Python's. No class of TensorRT may have one of them."""
        return set(self.attributes) - last(table) - DUNDERS


def last(table: Collection[str]) -> set[str]:
    """The last parts of dotted names."""
    return {name.rpartition(".")[2] for name in table}


def find_uses(source: str) -> Uses:
    """Read a source file."""
    reader = _Reader(ast.parse(source))
    reader.visit(reader.tree)
    return reader.uses


class _Reader(ast.NodeVisitor):
    def __init__(self, tree: ast.Module) -> None:
        self.tree = tree
        self.uses = Uses()
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        self.imported = {(each.asname or each.name).split(".")[0] for node in imports for each in node.names}
        self.ours: set[ast.expr] = set()  # every `self` of a class that extends nothing of TensorRT

    def visit_Import(self, node: ast.Import) -> None:
        for each in node.names:
            self._refuse_package(each.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if not node.level:  # our own modules may have the same names
            self._refuse_package(node.module or "", node.lineno)

    def _refuse_package(self, module: str, line: int) -> None:
        if module.split(".")[0] in PACKAGES:
            self.uses.faults[f"import of {module}: the package is an argument"] = line

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.uses.own.add(node.name)
        self.generic_visit(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.uses.own.add(node.name)
        bases = [name for name in map(_from_package, node.bases) if name]
        if not bases:
            self.ours |= {each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == "self"}
        else:
            self.ours -= set(ast.walk(node))
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                self.uses.own.add(part.target.id)
            # A class that extends one of TensorRT's is called back, by a name that must exist there.
            if isinstance(part, ast.FunctionDef) and not part.decorator_list and not part.name.startswith("_"):
                for base in bases:
                    self.uses.names[f"{base}.{part.name}"] = part.lineno
        self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        if node.id in ESCAPES:
            self.uses.faults[f"{node.id}: cannot be followed"] = node.lineno

    def visit_Attribute(self, node: ast.Attribute) -> None:
        name = _from_package(node)
        if name is not None:
            head, _, tail = name.rpartition(".")
            self._add_name(head if tail in DUNDERS and head else name, node.lineno)
            return  # its beginnings say nothing more
        if node.attr in ESCAPES:
            self.uses.faults[f"{node.attr}: cannot be followed"] = node.lineno
        if isinstance(node.value, ast.Name) and node.value.id == "self" and isinstance(node.ctx, ast.Store):
            self.uses.own.add(node.attr)
        if node.value not in self.ours and not self._is_imported(node):
            self.uses.attributes.setdefault(node.attr, node.lineno)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in LOOK_UPS and len(node.args) > 1:
            beginning = _from_package(node.args[0])
            for word in self._words(node.args[1]):
                if beginning is None:
                    self.uses.attributes.setdefault(word, node.lineno)
                else:
                    self._add_name(f"{beginning}.{word}".lstrip("."), node.lineno)
        self.generic_visit(node)

    def _add_name(self, name: str, line: int) -> None:
        if name:  # "" is the package itself
            self.uses.names.setdefault(name, line)

    def _is_imported(self, node: ast.expr) -> bool:
        while isinstance(node, ast.Attribute):
            node = node.value
        return isinstance(node, ast.Name) and node.id in self.imported

    def _words(self, name: ast.expr) -> list[str]:
        """The names that getattr can be asked for: one written there, or the keys of a literal that it loops over."""
        if isinstance(name, ast.Constant):
            return [str(name.value)]
        loops = [node for node in ast.walk(self.tree) if isinstance(node, (ast.comprehension, ast.For))]
        texts = [(ast.unparse(node.target).strip("()").split(",")[0], node.iter) for node in loops]
        found = [self._literal(over) for target, over in texts if target == ast.unparse(name)]
        if not found or not all(found):
            self.uses.faults[f"look-up of {ast.unparse(name)}: cannot be followed"] = name.lineno
        return [word for words in found for word in words]

    def _literal(self, over: ast.expr) -> list[str]:
        """The keys or items of TABLE or TABLE.items(), where the module says TABLE = {...}; nothing if it does not."""
        table = ast.unparse(over).removesuffix(".items()")
        for node in self.tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == table:
                try:
                    return [str(word) for word in ast.literal_eval(node.value)]
                except ValueError:
                    return []
        return []


def _from_package(node: ast.expr) -> str | None:
    """`Builder.create_network` for self.trt.Builder.create_network, "" for the package itself, None for all else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute) and node.attr not in ROOTS:
        parts.insert(0, node.attr)
        node = node.value
    is_package = isinstance(node, ast.Attribute) or (isinstance(node, ast.Name) and node.id in ROOTS)
    return ".".join(parts) if is_package else None
