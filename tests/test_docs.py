"""The documents say what is so: the protocol page is the tables', and what they name is there."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest

import kvferry

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", DOCS / "architecture.md"]
#: What ends a name that is meant as a file of the repository.
ENDINGS = (".py", ".md", ".yaml", ".toml", ".txt", ".svg", ".json")
ADR_NAME = re.compile(r"(\d{4})-[a-z0-9]+(-[a-z0-9]+)*\.md")
ADR_PARTS = ("**Decision.**", "**Why.**", "**Given up.**")
#: A page, about.
ADR_LINES = 60


def in_backticks(page: Path) -> list[str]:
    """Inline code of a page, without its code blocks."""
    return re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL))


def paths_in(page: Path) -> list[str]:
    """The inline code that names a file or folder: `a/b.py`, `memory/`, `cli.py`; not routes, commands or globs."""
    found = []
    for text in in_backticks(page):
        path = text.split("::")[0]
        is_file = path.endswith(ENDINGS) and "my." not in path
        is_folder = path.endswith("/") or path.startswith(("src/", "tests/", "docs/", "actors/", "kernels/"))
        if re.fullmatch(r"[\w./-]+", path) and not path.startswith("/") and (is_file or is_folder):
            found.append(path)
    return found


def exists(path: str) -> bool:
    """Architecture names packages by their place below the package; everything else is named from the root."""
    return (ROOT / path).exists() or (ROOT / "src" / "kvferry" / path).exists()


def make_protocol() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_protocol", DOCS / "make_protocol.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_protocol_page_is_that_of_the_tables() -> None:
    assert make_protocol().main(["--check"]) == 0, "run: python docs/make_protocol.py"


def test_the_check_notices_a_page_that_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module, page = make_protocol(), tmp_path / "protocol.md"
    assert module.main(["--check"], page) == 1
    assert module.main([], page) == 0 and module.main(["--check"], page) == 0
    page.write_text(
        page.read_text().replace("| SETTLING | COMMITTED | COMMITTED |", "| SETTLING | COMMITTED | FAILED |")
    )
    assert module.main(["--check"], page) == 1
    assert "make_protocol.py" in capsys.readouterr().err


def test_the_diagrams_have_each_pair_of_states_that_an_event_leads_over() -> None:
    module = make_protocol()
    for states, table in (
        (module.RoomState, module.room.TABLE),
        (module.link_table.LinkState, module.link_table.TABLE),
    ):
        pairs = {(s.name, c.to.name) for s, row in table.items() for c in row.values() if isinstance(c, module.Go)}
        drawn = re.findall(r"^    (\w+) --> (\w+): [A-Z]", module.diagram(states, table), re.MULTILINE)
        assert len(drawn) == len(pairs) and set(drawn) == pairs
    assert (DOCS / "protocol.md").read_text().count("stateDiagram-v2") == 4


def test_the_protocol_page_has_every_state_and_event() -> None:
    """A hand-made sample of cells, each against the words of the page."""
    text = (DOCS / "protocol.md").read_text()
    assert "| RECEIVING | ALL_RECEIVED | CHECKING | check |" in text
    assert "| CHECKING | CHECKED | RUNNING | commit |" in text
    assert "| TRANSFERRING | PREFILL_LOST | SETTLING | settle |" in text
    assert "| FLUSHING | FLUSHED | DONE | deliver |" in text
    assert "| **SUCCESS** | FAILED | TRANSFERRING | TRANSFERRING | TRANSFERRING | SUCCESS |" in text
    assert "| COMPUTING | WAITING_FOR_INPUT; TRANSFERRING once a write is posted |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_backticks_exist(page: Path) -> None:
    missing = [path for path in paths_in(page) if not exists(path)]
    assert not missing, f"{page.name} names {missing}"


def test_the_search_for_paths_finds_them() -> None:
    found = paths_in(DOCS / "architecture.md")
    assert len(found) > 50
    assert {"protocol/room.py", "actors/room/room.py", "tests/test_imports.py", "memory/", "cli.py"} <= set(found)
    assert exists("protocol/room.py") and not exists("protocol/rooms.py")


@pytest.mark.parametrize("page", [*PAGES, *sorted(DOCS.rglob("*.md"))], ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert not broken, f"{page.name} links to {broken}"


def test_routes_and_targets_of_the_readme_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    app = (ROOT / "src" / "kvferry" / "serve" / "app.py").read_text()
    routes = [text for text in in_backticks(ROOT / "README.md") if re.fullmatch(r"/[\w/]+(/\{\w+\})?", text)]
    assert {"/health", "/ready", "/metrics", "/status"} <= set(routes)
    for route in routes:
        assert f'Route("{route.split("{")[0]}' in app, route
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z-]+)", readme, re.MULTILINE))
    assert {"serve", "ask", "test"} <= named <= targets


def test_the_readme_shows_both_pictures() -> None:
    readme = (ROOT / "README.md").read_text()
    for name in ("actors", "request"):
        picture = DOCS / f"{name}.svg"
        assert f"(docs/{name}.svg)" in readme
        root = ElementTree.parse(picture).getroot()
        titles = root.findall("{http://www.w3.org/2000/svg}title")
        assert len(titles) == 1 and titles[0].text
        assert "prefers-color-scheme: dark" in picture.read_text()


def test_decisions_are_numbered_and_have_their_parts() -> None:
    pages = sorted((DOCS / "adr").iterdir())
    numbers = []
    for page in pages:
        name = ADR_NAME.fullmatch(page.name)
        assert name is not None, f"{page.name}: a name is four digits and words in small letters"
        text = page.read_text()
        assert re.match(rf"# {int(name[1])}\. \S.*\n", text), f"{page.name}: its title begins with its number"
        places = [text.find(part) for part in ADR_PARTS]
        assert -1 not in places and places == sorted(places), f"{page.name}: wants {ADR_PARTS} in this order"
        assert len(text.splitlines()) <= ADR_LINES, f"{page.name}: at most {ADR_LINES} lines"
        numbers.append(int(name[1]))
    assert numbers == list(range(1, len(pages) + 1))


def test_the_changelog_begins_with_this_version() -> None:
    versions = re.findall(r"^## \[([^\]]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions and versions[0] == kvferry.__version__


def test_make_runs_every_test_that_starts_a_cluster() -> None:
    """It names their folders, so that the thousands of others need not be collected once more."""
    (named,) = re.findall(r"^REAL +:= (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.real" in path.read_text()}
    marked.discard(Path(__file__))
    assert len(marked) > 10
    assert {f"tests/{path.relative_to(ROOT / 'tests').parts[0]}" for path in marked} == set(named.split())
