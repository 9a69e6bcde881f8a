"""The site is built as `make docs` builds it: strict, whole, and without a request to elsewhere."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from penstock.cli import app
from penstock.config import Config, describe

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """MkDocs has tags of its own, which name what Python is to do; the navigation has none."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def nav_pages() -> list[str]:
    def pages(entries: Any) -> Iterator[str]:
        for entry in entries:
            for target in entry.values() if isinstance(entry, dict) else [entry]:
                yield from [target] if isinstance(target, str) else pages(target)

    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), _Loader)
    return list(pages(settings["nav"]))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


class _Page(HTMLParser):
    """What a browser fetches by itself, and the text that people read."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.images: list[dict[str, str | None]] = []
        self.ids: set[str] = set()
        self.text = ""
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "img":
            self.images.append(given)
        if tag == "link":  # which other pages follow is a link, not a request
            fetches = given.get("rel") not in ("canonical", "prev", "next")
            self.fetched += [given.get("href") or ""] if fetches else []
        for name in ("src", "srcset", "poster", "data"):
            self.fetched += [given[name] or ""] if name in given else []
        if given.get("id"):
            self.ids.add(str(given["id"]))
        self.fetched += _urls(given.get("style") or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def _urls(css: str) -> list[str]:
    """What a style sheet has fetched."""
    loaded = re.findall(r"url\(\s*[\"']?([^)\"']+)", css)
    return loaded + re.findall(r"@import\s+[\"']([^\"']+)", css)


def test_every_page_of_the_navigation_is_there(site: Path) -> None:
    pages = nav_pages()
    assert len(pages) == len(set(pages)) >= 20
    for page in pages:
        assert (site / page).with_suffix(".html").stat().st_size > 1000, page
    # MkDocs itself, being strict, fails where a page of docs/ is missing in the navigation.
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} <= set(pages)
    assert not (site / "_generate").exists()


def test_nothing_is_fetched_from_another_host(site: Path) -> None:
    fetched = {
        str(page.relative_to(site)): _Page(page).fetched for page in sorted(site.rglob("*.html"))
    }
    for sheet in [*site.rglob("*.css"), *site.rglob("*.svg")]:
        fetched[str(sheet.relative_to(site))] = _urls(sheet.read_text())
    assert len(fetched) > 25
    for where, targets in fetched.items():
        for target in targets:
            assert not re.match(r"(\w+:)?//", target), f"{where} fetches {target}"
    # The theme's script would have these drawn by one from elsewhere.
    assert not [page for page in site.rglob("*.html") if 'class="mermaid"' in page.read_text()]


def test_pictures_exist_and_are_described(site: Path) -> None:
    num_drawn = 0
    for file in sorted(site.rglob("*.html")):
        for image in _Page(file).images:
            source, alt = str(image.get("src")), image.get("alt")
            assert (file.parent / source).is_file(), f"{file.name} shows {source}"
            assert len(alt or "") > 20, f"{file.name}: {source} needs a description"
            num_drawn += source.endswith(".svg")
    assert num_drawn >= 6


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda p: p.name)
def test_a_picture_is_drawn_for_light_and_dark(picture: Path) -> None:
    root = ElementTree.fromstring(picture.read_text())
    assert root.find("{*}title") is not None
    assert "prefers-color-scheme: dark" in picture.read_text()


def test_the_command_line_is_all_there(site: Path) -> None:
    page = _Page(site / "reference" / "command-line.html")

    def visit(command: Any, name: str) -> int:
        if hasattr(command, "commands"):
            words = command.commands.items()
            return sum(visit(each, f"{name} {word}".strip()) for word, each in words)
        assert name.replace(" ", "-") in page.ids, name
        assert f"penstock {name}" in page.text
        for option in command.params:
            assert all(word in page.text for word in option.opts if word.startswith("-")), name
        return 1

    assert visit(typer.main.get_command(app), "") >= 14


def test_every_setting_has_its_entry(site: Path) -> None:
    page = _Page(site / "configuration.html")
    for section, keys in describe(Config()).items():
        for key in keys:
            assert f"{section}-{key}".replace("_", "-") in page.ids
            assert f"{section}.{key}" in page.text
            assert f"PENSTOCK_{section}_{key}".upper() in page.text


def test_the_defaults_of_the_settings_are_those_of_the_code() -> None:
    spec = importlib.util.spec_from_file_location("settings", DOCS / "_generate" / "settings.py")
    assert spec is not None
    assert spec.loader is not None
    settings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(settings)
    told = {
        name: default
        for name, default, _ in settings.documented((DOCS / "configuration.md").read_text())
    }
    told["remote.threads"] = told["remote.threads"].replace("up to 4", "none")  # as many as cores
    assert told == {name: each.default for name, each in settings.all_settings().items()}


def test_what_the_docs_import_is_in_the_python_reference(site: Path) -> None:
    page = _Page(site / "reference" / "python.html")
    known = set(re.findall(r"from (penstock\S*) import (\w+)", page.text))
    constants = {"MODELS", "WORKLOADS", "GiB", "Slot", "BlockKey"}
    imported = {
        (module, name)
        for file in DOCS.rglob("*.md")
        for module, names in re.findall(r"^from (penstock\S*) import (.*)$", file.read_text(), re.M)
        for name in names.split(", ")
        if name not in constants
    }
    assert len(imported) > 20
    assert imported <= known
    assert "Complete prompts: texts, token ids" in page.text  # a docstring
    assert "None or -1: not reproducible" in page.text  # a comment behind a field
