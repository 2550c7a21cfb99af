"""Write tests/stand_ins: the classes of the engines that the plug-ins build on, so that they are tested without them.

Signatures, dataclass fields and enum members are taken from the sources of the installed engine; texts and bodies are
not. Run it where an engine is installed; --check says whether the stand-ins still equal it.

    python tools/make_stand_ins.py [--check] vllm sglang lmcache
"""

from __future__ import annotations

import argparse
import ast
import importlib.machinery
import sys
import textwrap
from importlib import metadata
from pathlib import Path

from stand_in_spec import ENGINES, Engine, Module

ROOT = Path(__file__).parent.parent / "tests" / "stand_ins"
HEAD = '''"""Signatures of {module}, {engine} {version}; written by tools/make_stand_ins.py."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, ClassVar, NewType
'''
KEPT_BASES = {"ABC", "Enum", "str", "int"}
KEPT_DECORATORS = {"abstractmethod", "property", "classmethod", "staticmethod"}
KEPT_ROOTS = {"field", "auto", "time", "dict", "list"}


def main() -> int:
    """Write the stand-ins of the engines asked for, or compare them."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("engines", nargs="+", choices=sorted(ENGINES))
    made.add_argument("--check", action="store_true", help="write nothing, say whether they are as they should be")
    args = made.parse_args()
    differing = []
    for name in args.engines:
        for path, text in files_of(name, ENGINES[name]).items():
            if args.check:
                differing += [path] if not path.exists() or path.read_text() != text else []
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
    for path in differing:
        print(f"{path}: the installed engine has other signatures; read what changed, then write the stand-ins anew")
    if args.check and not differing:
        print(f"stand-ins of {', '.join(args.engines)} equal what is installed")
    return 1 if differing else 0


def files_of(name: str, engine: Engine) -> dict[Path, str]:
    """Return the text of every file of one engine's stand-in."""
    top, home = package_of(name), {}
    for module, told in engine.modules.items():
        home |= dict.fromkeys(told.classes, module)
    files = {}
    for module, told in engine.modules.items():
        path = ROOT / name / Path(*module.split("."))
        is_package = any(other.startswith(module + ".") for other in engine.modules)
        target = path / "__init__.py" if is_package else path.with_suffix(".py")
        files[target] = module_text(module, told, engine, home, top)
        for parent in list(target.parents)[: len(target.relative_to(ROOT / name).parts) - 1]:
            files.setdefault(parent / "__init__.py", "")
    dist = ROOT / name / f"{engine.distribution}-{engine.version}.dist-info" / "METADATA"
    files[dist] = f"Metadata-Version: 2.1\nName: {engine.distribution}\nVersion: {engine.version}\n"
    return files


def package_of(name: str) -> Path:
    """Return the folder of the installed package `name`, without importing it."""
    path = [entry for entry in sys.path if not Path(entry or ".").resolve().is_relative_to(ROOT.resolve())]
    spec = importlib.machinery.PathFinder.find_spec(name, path)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"{name} is not installed here; see `make test-engines`")
    for distribution in (name, f"{name}-cpu"):
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        if found != ENGINES[name].version:
            print(f"note: {distribution} {found} is installed, the stand-ins are of {ENGINES[name].version}")
    return Path(next(iter(spec.submodule_search_locations)))


def module_text(module: str, told: Module, engine: Engine, home: dict[str, str], top: Path) -> str:
    """Return one module of a stand-in."""
    relative = Path(*(told.source or module).split(".")[1:])
    options = [top / relative.with_suffix(suffix) for suffix in (".pyi", ".py")] + [top / relative / "__init__.py"]
    tree = ast.parse(next(path for path in options if path.exists()).read_text())
    defined = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}
    parts, imports = [], set()
    for name, methods in told.classes.items():
        text, bases = class_text(defined[name], methods, engine, set(home))
        imports |= {base for base in bases if home.get(base, module) != module}
        parts.append(text)
    parts += [function_text(defined[name], engine, name) for name in told.functions]
    lines = [HEAD.format(module=module, engine=engine.distribution, version=engine.version)]
    lines += [f"from {home[name]} import {name}" for name in sorted(imports)]
    return "\n".join([*lines, told.lines, "\n\n\n".join(parts)]).replace("\n\n\n\n", "\n\n\n") + "\n"


def class_text(
    node: ast.ClassDef, methods: tuple[str, ...] | None, engine: Engine, ours: set[str]
) -> tuple[str, set[str]]:
    """Return a class with the fields, members and methods that are wanted, and the names of its bases."""
    bases = [ast.unparse(base) for base in node.bases if ast.unparse(base) in KEPT_BASES | ours]
    decorators = [ast.unparse(one) for one in node.decorator_list if ast.unparse(one).startswith("dataclass")]
    body: list[str] = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign):
            value = "" if item.value is None else f" = {default_of(item.value, ours)}"
            body.append(f"{ast.unparse(item.target)}: {ast.unparse(item.annotation)}{value}")
        elif isinstance(item, ast.Assign) and "Enum" in bases:
            body.append(ast.unparse(item))
        elif isinstance(item, ast.FunctionDef) and (methods is None or item.name in methods):
            is_further = any(ast.unparse(one) == "overload" for one in item.decorator_list) and item.name in str(body)
            if not is_further:
                body.append(function_text(item, engine, f"{node.name}.{item.name}", ours))
    if own := engine.bodies.get(node.name):
        body.append(own)
    head = (
        "".join(f"@{one}\n" for one in decorators) + f"class {node.name}" + (f"({', '.join(bases)})" if bases else "")
    )
    return f"{head}:\n{textwrap.indent(chr(10).join(body) or 'pass', '    ')}", set(bases)


def function_text(node: ast.FunctionDef, engine: Engine, name: str, ours: set[str] | None = None) -> str:
    """Return a function with its signature, and our body or none."""
    args = node.args
    args.defaults = [ast.parse(default_of(one, ours or set()), mode="eval").body for one in args.defaults]
    args.kw_defaults = [
        None if one is None else ast.parse(default_of(one, ours or set()), mode="eval").body for one in args.kw_defaults
    ]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    names = [ast.unparse(one) for one in node.decorator_list]
    body = engine.bodies.get(name, "raise NotImplementedError")
    if name in engine.bodies:
        names = [one for one in names if one != "abstractmethod"] if name.startswith("EventNotifier") else names
    decorators = "".join(f"@{one}\n" for one in names if one in KEPT_DECORATORS)
    return f"{decorators}def {node.name}({ast.unparse(args)}){returns}:\n{textwrap.indent(body, '    ')}"


def default_of(value: ast.expr, ours: set[str]) -> str:
    """Return a default as source: literals and what a stand-in knows as they are, anything else as `...`."""
    known = KEPT_ROOTS | ours
    names = {node.id for node in ast.walk(value) if isinstance(node, ast.Name)}
    if any(isinstance(node, ast.Lambda) for node in ast.walk(value)):
        return "field(default_factory=dict)"
    return ast.unparse(value) if names <= known else "..."


if __name__ == "__main__":
    sys.exit(main())
