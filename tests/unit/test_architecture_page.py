"""docs/architecture.md lists every package with what it really imports; docs/dashboard.md lists every button."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "windlass"
CODE = re.compile(r"`([^`]+)`")


def module_of(name: str) -> str:
    return name.strip("/").removesuffix(".py")


def stated_imports() -> dict[str, set[str]]:
    """Package to the packages that its row names. Packages that may import any are left out."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    rows = page.split("| imports from `windlass` |\n")[1].split("\n\n")[0].splitlines()[1:]
    found: dict[str, set[str]] = {}
    for row in rows:
        packages, _, imports = [cell.strip() for cell in row.strip("|").split(" | ")]
        for package in CODE.findall(packages):
            found[module_of(package)] = {"any"} if imports == "any" else set(CODE.findall(imports))
    return found


# lint-imports checks that the emulators share nothing with the product.
CHECKED = [each for each in stated_imports().items() if each[1] != {"any"} and each[0] != "windlass_emulators"]


def real_imports(package: str) -> set[str]:
    folder = SOURCE / package
    found = set()
    for path in folder.rglob("*.py") if folder.is_dir() else [SOURCE / f"{package}.py"]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            found |= {name.split(".")[1] for name in names if name.startswith("windlass.")}
    return found - {package}


def test_page_lists_every_package() -> None:
    packages = {path.stem for path in SOURCE.iterdir() if path.is_dir() or path.suffix == ".py"}
    assert {name for name in packages if not name.startswith("__")} == set(stated_imports()) - {"windlass_emulators"}


@pytest.mark.parametrize(("package", "stated"), CHECKED)
def test_page_states_the_imports_of_a_package(package: str, stated: set[str]) -> None:
    assert real_imports(package) == stated


def test_dashboard_page_lists_every_button() -> None:
    templates = "".join(path.read_text() for path in (SOURCE / "dashboard" / "templates").glob("*.html"))
    calls = re.findall(r"action_button\((?:[^,]+), \"([^\"]+)\"", templates)
    page = (ROOT / "docs" / "dashboard.md").read_text().split("## Buttons")[1].split("## ")[0]
    cells = re.findall(r"^\|[^|]*\|([^|]*)\|", page, re.MULTILINE)
    listed = {label.strip() for cell in cells for label in cell.split(",")}
    assert len(calls) > 10
    assert set(calls) - listed == set()
