"""What mkdocs.yml needs beyond configuration: pages from files outside docs/, and links to files that are no pages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file of PAGES, so that no text exists twice."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, inside=Path())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Relinks the pages in docs/; those of PAGES are relinked already. The table of options gets the whole width."""
    if page.file.src_uri == "options.md":
        page.meta["hide"] = ["toc"]
        markdown = markdown.replace("<!-- options -->", '<div class="options" markdown>\n')
        markdown = markdown.replace("<!-- /options -->", "\n</div>")
    return markdown if page.file.generated_by else relinked(markdown, inside=Path("docs"))


def relinked(markdown: str, inside: Path) -> str:
    """A file's text with links that work on the site: to a page, or else the path in the repository as text."""

    def replace(found: re.Match[str]) -> str:
        label, target, anchor = found[1], found[2], found[3] or ""
        path = (ROOT / inside / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES:
            return f"[{label}]({PAGES[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{label}]({path.removeprefix('docs/')}{anchor})"
        return f"`{path}`" if label.strip("`/") in path else f"{label} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)", replace, markdown)
