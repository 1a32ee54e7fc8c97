"""What is imported is declared: another package that brings it along today may not do so tomorrow."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def imported() -> set[str]:
    """Packages, by the first part of what the modules of extractor/ import."""
    found: set[str] = set()
    for path in ROOT.glob("extractor/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                found.add((node.module or "").partition(".")[0])
    return found - sys.stdlib_module_names - {"extractor"}


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["report"]]
    declared = {plain(re.split(r"[^\w.-]", text)[0]) for text in wanted}
    owners = packages_distributions()
    lacking = {
        name
        for name in imported()
        if not {plain(owner) for owner in owners.get(name, [name])} & declared
    }
    assert not lacking
