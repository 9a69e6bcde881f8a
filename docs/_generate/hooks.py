"""Hooks of `mkdocs build`: generated pages, and copies of files outside docs/.

The pages for the command line and the Python API are generated from the code at every build. The
tables of docs/configuration.md become a reference with the types and limits from the code. Links
that leave docs/ lead to copies of those files, so that the site is complete without the repository.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

import command_line
import python_api
import settings
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
COPIES = "repository"  # where the site keeps copies of files outside docs/
LISTING = "folder.md"  # a link to a folder leads to a page that lists its files
FROM_THE_START = ("CHANGELOG.md", "CONTRIBUTING.md")  # in the navigation
_MADE = {"reference/command-line.md": command_line.page, "reference/python.md": python_api.page}
_LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")


def on_files(files: Any, config: Any) -> Any:
    for uri, make in _MADE.items():
        files.append(File.generated(config, uri, content=make()))
    waiting = [*FROM_THE_START]
    for file in files.documentation_pages():
        if not file.generated_by:
            waiting += _outside(Path(file.abs_src_path).read_text(), f"docs/{file.src_uri}")
    while waiting:
        path = waiting.pop()
        uri = f"{COPIES}/{path}"
        if files.get_file_from_path(uri) is not None:
            continue
        is_listing = path.endswith(f"/{LISTING}")
        content = _listing(path) if is_listing else (ROOT / path).read_bytes()
        if path.endswith(".md"):
            waiting += _outside(content.decode(), path)
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    uri = page.file.src_uri
    if uri in _MADE:
        return markdown
    markdown = _relinked(markdown, uri)
    return settings.expanded(markdown) if uri == "configuration.md" else markdown


def on_page_content(html: str, **_: Any) -> str:
    """Unescape bars in table cells: GitHub needs the backslash, Python-Markdown would show it."""
    return re.sub(
        r"<td>.*?</td>",
        lambda cell: re.sub(
            r"<code>[^<]*</code>", lambda code: code[0].replace("\\|", "|"), cell[0]
        ),
        html,
    )


def _outside(markdown: str, path: str) -> list[str]:
    """The files outside docs/ that this page links to; `path` is its place in the repository."""
    return [
        found
        for _, target, _, _ in _LINK.findall(markdown)
        if (found := _target(target, path)) and not found.startswith("docs/")
    ]


def _target(target: str, path: str) -> str | None:
    """The path in the repository that a link leads to. None if it leads elsewhere or nowhere."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if ":" in target or not (ROOT / found).exists():
        return None
    return f"{found}/{LISTING}" if (ROOT / found).is_dir() else found


def _listing(path: str) -> bytes:
    folder = ROOT / posixpath.dirname(path)
    files = sorted(file.relative_to(folder) for file in folder.rglob("*") if file.is_file())
    links = [f"- [{file}]({file})" for file in files if not file.name.startswith(".")]
    return "\n".join([f"# {posixpath.dirname(path)}", "", *links, ""]).encode()


def _relinked(markdown: str, uri: str) -> str:
    path = uri.removeprefix(f"{COPIES}/") if uri.startswith(f"{COPIES}/") else f"docs/{uri}"

    def link(match: re.Match[str]) -> str:
        found = _target(match[2], path)
        if found is None:
            return match[0]
        new = found.removeprefix("docs/") if found.startswith("docs/") else f"{COPIES}/{found}"
        relative = posixpath.relpath(new, posixpath.dirname(uri) or ".")
        return f"{match[1]}{relative}{match[3] or ''}{match[4]}"

    return _LINK.sub(link, markdown)
