"""Imports run one way (design: protocol <- memory <- transfer <- engine <- actors <- cluster <- serve)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "kvferry"

#: What each package may import of the others, beside itself. `kernels` stand alone.
BELOW_ACTORS = {"protocol", "memory", "transfer", "engine"}
MAY_IMPORT = {
    "protocol": set[str](),
    "memory": {"protocol"},
    "transfer": {"protocol", "memory", "kernels"},
    "kernels": set[str](),
    "engine": {"protocol", "memory", "transfer", "kernels"},
    "actors": BELOW_ACTORS | {"obs"},
    "obs": BELOW_ACTORS,
    # The front is part of what is simulated, and fronts live in serve. Of serve the simulation takes no more than that.
    "sim": BELOW_ACTORS | {"actors", "obs", "serve"},
    "cluster": BELOW_ACTORS | {"actors", "obs"},
    "serve": BELOW_ACTORS | {"actors", "obs", "cluster"},
    "cli": BELOW_ACTORS | {"actors", "obs", "cluster", "serve", "sim", "kernels"},
    "__init__": set[str](),
}
NO_RAY = set(MAY_IMPORT) - {"cluster", "serve"}
#: Sans-IO: no event loop, no socket, no thread, no clock, no data plane.
PURE = (
    "protocol", "memory", *(f"transfer/{name}" for name in (
        "blocks", "chunk", "cost", "layout", "page_plan", "pairing", "plan", "ranks", "row_plan", "runs", "spans",
    )),
)  # fmt: skip
NOT_PURE = {
    "ray", "zmq", "socket", "asyncio", "nixl", "nixl_cu12", "selectors", "select", "threading", "multiprocessing",
    "concurrent", "subprocess", "time", "random", "secrets", "pickle", "torch",
}  # fmt: skip
#: Clock, network and randomness are passed in; these are where they are made.
MAKES_CLOCKS = {"cluster", "sim", "obs", "cli"}


def modules() -> list[Path]:
    """Every module, once, by its path below the package; `actors` and `kernels` are links to the root."""
    found = [path for name in ("actors", "kernels") for path in (ROOT / name).rglob("*.py")]
    named = [Path(path.relative_to(ROOT)) for path in found]
    named += [
        path.relative_to(SOURCE)
        for path in SOURCE.rglob("*.py")
        if path.relative_to(SOURCE).parts[0] not in ("actors", "kernels")
    ]
    return sorted(set(named))


MODULES = modules()


def package_of(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def file_of(module: Path) -> Path:
    return (ROOT if module.parts[0] in ("actors", "kernels") else SOURCE) / module


def imports(module: Path) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import anywhere in the file, inside functions and TYPE_CHECKING too."""
    for node in ast.walk(ast.parse(file_of(module).read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_every_package_is_known() -> None:
    assert {package_of(module) for module in MODULES} == set(MAY_IMPORT)
    assert len(MODULES) > 60


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_run_one_way(module: Path) -> None:
    package = package_of(module)
    for line, name in imports(module):
        parts = name.split(".")
        assert parts[0] not in ("actors", "kernels"), f"{module}:{line}: import it as kvferry.{name}"
        if parts[0] == "kvferry" and parts[1] in MAY_IMPORT and parts[1] != package:
            allowed = sorted(MAY_IMPORT[package])
            assert parts[1] in MAY_IMPORT[package], f"{module}:{line}: {name}; {package} may import {allowed}"


def test_of_serve_the_simulation_takes_the_front_alone() -> None:
    front = {"attempts", "choices", "front", "gateway", "prepare"}
    for module in MODULES:
        if package_of(module) == "sim":
            names = {name.split(".")[2] for _, name in imports(module) if name.startswith("kvferry.serve.")}
            assert names <= front, f"{module}: {sorted(names - front)}"


@pytest.mark.parametrize("package", sorted(NO_RAY))
def test_only_cluster_and_serve_import_ray(package: str) -> None:
    for module in MODULES:
        if package_of(module) == package:
            bad = [(line, name) for line, name in imports(module) if name.split(".")[0] == "ray"]
            assert not bad, f"{module}: {bad}"


@pytest.mark.parametrize("prefix", PURE)
def test_the_pure_parts_import_nothing_that_does_io(prefix: str) -> None:
    pure = [module for module in MODULES if module.as_posix().startswith(prefix)]
    assert pure
    for module in pure:
        bad = [(line, name) for line, name in imports(module) if name.split(".")[0] in NOT_PURE]
        assert not bad, f"{module}: {bad}"


def test_protocol_imports_the_standard_library_and_msgspec_only() -> None:
    import sys

    for module in MODULES:
        if package_of(module) == "protocol":
            tops = {name.split(".")[0] for _, name in imports(module)}
            assert tops <= set(sys.stdlib_module_names) | {"msgspec", "kvferry"}, f"{module}: {tops}"


@pytest.mark.parametrize("module", [m for m in MODULES if package_of(m) not in MAKES_CLOCKS], ids=str)
def test_clocks_and_randomness_are_passed_in(module: Path) -> None:
    bad = [(line, name) for line, name in imports(module) if name.split(".")[0] in ("time", "random", "secrets")]
    assert not bad, f"{module}: {bad}"


@pytest.mark.parametrize("package", sorted({package_of(m) for m in MODULES} - {"kernels", "cli", "__init__"}))
def test_every_package_says_what_lives_there(package: str) -> None:
    opening = (ROOT if package == "actors" else SOURCE) / package / "__init__.py"
    assert len(ast.get_docstring(ast.parse(opening.read_text())) or "") > 80
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a package of that name would shadow the hub's kernels"
