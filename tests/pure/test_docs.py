"""The pages of docs/ against the source: every error has its place, and every link leads there.

The messages are read out of the source, never listed here: what `raise` can say is what the
constructor of an error class is called with, values shown as an ellipsis.
"""

from __future__ import annotations

import ast
import inspect
import pathlib
import re

import pytest

from tfckpt import errors

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "errors").glob("*.md"))
PACKAGES = ("tfckpt", "grappler_ext")
CLASSES = {name: kind for name, kind in vars(errors).items() if inspect.isclass(kind)}
WARNINGS = "warnings"
BLOCK = re.compile(r"^```text\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
ANY = "…"


def said(node: ast.expr, names: dict[str, ast.expr]) -> str:
    """Return an expression that makes text, values replaced by an ellipsis."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(said(part, names) for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return said(node.left, names) + said(node.right, names)
    if isinstance(node, ast.FormattedValue):
        return said(node.value, names) if ".format(" in ast.unparse(node.value) else ANY
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and (
            node.func.attr == "format"):
        return re.sub(r"{\w*}", ANY, said(node.func.value, names))
    if isinstance(node, ast.Name) and node.id in names:
        return said(names[node.id], {})
    return ANY


def messages() -> list[tuple[str, str, str]]:
    """(class or "warnings", what it says, where in the source) of every message."""
    found = []
    for path in [p for name in PACKAGES for p in sorted((ROOT / name).rglob("*.py"))]:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names = {target.id: node.value for node in ast.walk(tree) if isinstance(node, ast.Assign)
                 for target in node.targets if isinstance(target, ast.Name)}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or not node.args:
                continue
            called = ast.unparse(node.func).rpartition(".")[2]
            kind = {"warn": WARNINGS, "warning": WARNINGS}.get(called, called)
            # what the native pass logs is on its own page
            if kind in CLASSES or kind == WARNINGS and path.is_relative_to(ROOT / "tfckpt"):
                text = said(node.args[0], names).replace("%s", ANY)
                found.append((kind, " ".join(text.split()),
                              f"{path.relative_to(ROOT)}:{node.lineno}"))
    return found


def documented() -> dict[str, list[str]]:
    """Return the messages that each page explains, by the page's title."""
    found: dict[str, list[str]] = {}
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        title = text.partition("\n")[0].lstrip("# ")
        found[title] = [line for block in BLOCK.findall(text) for line in block.splitlines()]
    return found


TEXTS = [*(ROOT / f"{name}.md" for name in (
    "README", "BUILD_NOTES", "CONTRIBUTING", "CHANGELOG")), *sorted((ROOT / "docs").rglob("*.md"))]


FOLDERS = ("tfckpt", "grappler_ext", "tests", "benchmarks", "examples", "docs")
MODULES = {name[at:] for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")
           for name in [f"/{path.relative_to(ROOT)}"]
           for at, letter in enumerate(name) if letter == "/"}
"""What modules may be called, in full or by the end of their path, with a slash before it."""


@pytest.mark.parametrize("kind, text, where", messages(), ids=lambda value: value[:60])
def test_every_message_is_explained(kind, text, where):
    assert re.match(r"[a-z]+: ", text), f"{where} names no stage"
    lines = documented().get(kind, [])
    assert any(text.startswith(line) for line in lines), (
        f"{where} says\n  {text}\nwhich no page explains: give it a ```text line in the page of "
        f"docs/errors/ whose title is {kind!r}, with its cause and its remedy")


@pytest.mark.parametrize("kind", CLASSES)
def test_every_class_is_explained(kind):
    index = (ROOT / "docs" / "errors" / "README.md").read_text(encoding="utf-8")
    assert f"`{kind}`" in index
    assert any(found == kind for found, _, _ in messages()), f"nothing raises {kind}"


def test_no_page_explains_what_is_never_said():
    every = messages()
    stale = [line for title, lines in documented().items() for line in lines
             if not any(kind == title and text.startswith(line) for kind, text, _ in every)]
    assert not stale


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page):
    named = re.findall(r"`((?:tfckpt|grappler_ext|tests|benchmarks|examples|docs)/[\w/.-]*)`",
                       page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()
            and not name.startswith(("benchmarks/results", "docs/api"))] == []


@pytest.mark.parametrize("page", [page for page in TEXTS if page.name != "CHANGELOG.md"],
                         ids=lambda page: page.name)
def test_modules_that_are_named_are_there(page):
    named = re.findall(r"`([\w/]+\.py)`", page.read_text(encoding="utf-8"))
    assert [name for name in named if f"/{name}" not in MODULES] == []


@pytest.mark.parametrize("page", TEXTS, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for link in LINK.findall(text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: pathlib.Path) -> set[str]:
    """Return the anchors that renderers of Markdown give to a page's headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
