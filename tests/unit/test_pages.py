"""What the pages name exists: other pages and their headings, commands, files, modules."""

import importlib.util
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from paramserver_cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
PRESENT = [p for p in PAGES if p.name != "CHANGELOG.md" and p.parent.name != "decisions"]
"""Pages of what there is now; the others also tell what there was."""
SOURCES = [f for d in ("deploy", "k8s", "services", "shared", "tests") for f in sorted((ROOT / d).rglob("*.*"))]
TEXTS = [*PAGES, *(f for f in SOURCES if f.suffix in (".py", ".js", ".css", ".html", ".yaml", ".yml"))]
BRITISH = re.compile(
    r"(?:behav|col|fav|flav|harb|hon|neighb)our|(?:anal|paral)yse|misspelt"
    r"|(?:initial|normal|optim|organ|random|recogn|serial|synchron|summar|util)is(?:e|ing|ation)"
    r"|^(?:grey|centred?|metres?|licence|defence|artefact|catalogue)$|(?:label|level|model|travel)l(?:ed|ing)$"
)
WORD = re.compile("[a-z]+")
CODE = re.compile(r"^```.*?^```|^    .*?$", re.M | re.S)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


def links(page: Path) -> Iterator[tuple[str, Path, str]]:
    """Each link to a file of this repository: as it is written, the file, and the anchor if it has one."""
    for link in re.findall(r"\]\(([^)\s]+)\)", CODE.sub("", page.read_text())):
        if not link.startswith("http"):
            path, _, anchor = link.partition("#")
            yield link, (page.parent / path).resolve() if path else page, anchor


@cache
def psctl() -> Any:
    """All commands of psctl."""
    return typer.main.get_command(app)


def commands(text: str) -> Iterator[list[str]]:
    """The words after `psctl` in code, as far as the command goes."""
    code = "\n".join([*CODE.findall(text), *re.findall(r"`([^`\n]+)`", text)])
    for words in re.findall(r"(?<![\w/.-])psctl( [^\n|;&)>'\"]*)", re.sub(r"\s#.*", "", code)):
        yield words.split()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link to a file of the repository names one that exists and, after a `#`, one of its headings."""
    for link, target, anchor in links(page):
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_page_can_be_found() -> None:
    """Every page is linked from another one, apart from decisions, which their folder lists."""
    linked = {target for page in PAGES for _, target, _ in links(page) if target != page}
    assert [named(p) for p in PAGES if p not in linked and p.parent.name != "decisions"] == []


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_commands_and_their_options_exist(page: Path) -> None:
    """Every `psctl` command of the page exists, and has the options that the page gives it."""
    for words in commands(page.read_text()):
        command, rest = psctl(), list(words)
        while rest and hasattr(command, "commands"):
            assert rest[0] in command.commands or rest[0].startswith("-"), words
            command = command.commands.get(rest.pop(0), command)
        options = {o for p in command.params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
        assert {w.partition("=")[0] for w in rest if w.startswith("-") and w != "-"} <= options, words


def leaves(command: Any, *path: str) -> Iterator[tuple[str, ...]]:
    """The words of each command that has no commands below it."""
    inner = getattr(command, "commands", {})
    if not inner:
        yield path
    for name, one in inner.items():
        yield from leaves(one, *path, name)


def test_every_command_is_on_its_page() -> None:
    """docs/psctl.md lists each command of psctl."""
    listed = list(commands((ROOT / "docs" / "psctl.md").read_text()))
    assert [path for path in leaves(psctl()) if not any(tuple(words[: len(path)]) == path for words in listed)] == []


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_files_modules_and_targets_exist(page: Path) -> None:
    """Files of the source tree, modules run with `python -m`, and targets of make that the page names exist."""
    text = page.read_text()
    folders = {p.name for p in ROOT.iterdir() if p.is_dir()}
    for path in re.findall(r"`([\w.-]+/[\w./-]+)`", text):
        if path.split("/")[0] in folders:
            assert (ROOT / path).exists(), path
    sources = [f"/{named(f)}" for f in SOURCES if f.suffix == ".py"]
    for source in re.findall(r"`([\w/]+\.py)`", text):
        assert any(s.endswith(f"/{source}") for s in sources), source
    for module in re.findall(r"python -m ([a-z_.]+)", text):
        assert (ROOT / module.replace(".", "/")).with_suffix(".py").exists() or importlib.util.find_spec(module), module
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M)
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.M):
        assert target in targets, target


def test_what_sources_name_of_the_library_exists() -> None:
    """Modules of the core and its neighbors, and what is in them, exist under the names that docstrings give them."""
    for source in sorted((ROOT / "shared").rglob("*.py")) + sorted((ROOT / "services").rglob("*.py")):
        for name in re.findall(r"`(?:paramserver\.)?((?:codecs|core|kernels|net|wire)\.[\w.]+)", source.read_text()):
            assert pkgutil.resolve_name(f"paramserver.{name}"), (named(source), name)


@pytest.mark.parametrize("page", PRESENT, ids=named)
def test_files_are_changed_by_what_linux_and_macos_understand(page: Path) -> None:
    """No `sed -i` stands alone: that of macOS takes the next word for the ending of a copy."""
    assert re.findall(r"sed -i .*", page.read_text()) == []


def test_spelling_is_american() -> None:
    """Pages, sources and comments have American spelling, apart from the wrong keys that a test sends on purpose."""
    words = {named(f): set(WORD.findall(f.read_text().lower())) for f in TEXTS if f != Path(__file__)}
    british = set(filter(BRITISH.search, set().union(*words.values())))
    wrong = {(f, w) for f, found in words.items() for w in found & british}
    assert wrong <= {(f"tests/{f}", "optimiser") for f in ("contract/test_scheduler_routes.py", "unit/test_spec.py")}
