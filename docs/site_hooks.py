"""Answers to mkdocs while it builds the site (mkdocs.yml): which files there are, and the order of the pages.

Files have the same places in the site as in the repository, so that a link that works in one works in the other. The
navigation is the table of docs/README.md; a page of docs/ that is not in it ends the build.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
HOME, INDEX = "README.md", "docs/README.md"
BESIDE = {  # section of the navigation -> pages outside docs/
    "Extensions": "extensions/*/README.md",
    "Measured": "benchmarks/results/**/*.md",
    "Contribute": "CONTRIBUTING.md",
}
PART = re.compile(r"\[[^\]]*\]\([^)]*#[^)]*\)")  # a link to a part of a page
LINK = re.compile(r"\[([^\]]*)\]\(([^)#:\s]+)[^)]*\)")


def on_config(config: MkDocsConfig) -> None:
    (table, *_) = re.findall(r"(?:^\|.*\n)+", (ROOT / INDEX).read_text(), re.MULTILINE)
    links = [link for link in find_links(PART.sub("", table), INDEX) if link[1].startswith("docs/")]
    pages = [{text[0].upper() + text[1:]: place} for text, place in links]
    beside = [{section: list_files(pattern)} for section, pattern in BESIDE.items()]
    config.nav = [{"Home": HOME}, {"Start here": INDEX}, {"Pages": pages}, *beside]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replaces the files of docs/ by those of the repository: the pages, and the files that they link to."""
    pages = [place for pattern in (HOME, "docs/*.md", *BESIDE.values()) for place in list_files(pattern)]
    linked = {place for page in pages for _, place in find_links((ROOT / page).read_text(), page)}
    places = [*pages, *sorted(place for place in linked - {*pages} if (ROOT / place).is_file())]
    theme = [file for file in files if not Path(file.abs_src_path or "").is_relative_to(config.docs_dir)]
    return Files([*theme, *(File.generated(config, place, abs_src_path=str(ROOT / place)) for place in places)])


def on_page_content(html: str, **_: object) -> str:
    """Shows `|` in the code of a table's cell, where Markdown needs a backslash before it, as GitHub does."""
    return html.replace("\\|", "|")


def list_files(pattern: str) -> list[str]:
    return [file.relative_to(ROOT).as_posix() for file in sorted(ROOT.glob(pattern))]


def find_links(text: str, page: str) -> list[tuple[str, str]]:
    """Returns (words, place in the repository) of the links to other files in a text of `page`."""
    folder = (ROOT / page).parent
    return [(words, (folder / to).resolve().relative_to(ROOT).as_posix()) for words, to in LINK.findall(text)]
