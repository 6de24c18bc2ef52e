"""What mkdocs.yml needs beyond configuration: pages from files outside docs/, and links to files that are no pages."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "reporting.md",
    "CODE_OF_CONDUCT.md": "conduct.md",
}


def on_files(files: Files, config: Any) -> Files:
    """Adds a page for each file of PAGES, so that no text exists twice."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=relinked(text, page, inside=Path())))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Relinks the pages in docs/ (those of PAGES are relinked already), and gives the table of options the whole width."""
    if page.file.src_uri == "options.md":
        page.meta["hide"] = ["toc"]
        markdown = markdown.replace("<!-- options -->", '<div class="options" markdown>\n')
        markdown = markdown.replace("<!-- /options -->", "\n</div>")
    at = page.file.src_uri
    return markdown if page.file.generated_by else relinked(markdown, at, inside=Path("docs", at).parent)


def relinked(markdown: str, page: str, inside: Path) -> str:
    """The text of `page` with links that work on the site: to a page, or else the path in the repository as text. `inside`: the directory of its file."""

    def replace(match: re.Match[str]) -> str:
        label, target, anchor = match[1], match[2], match[3] or ""
        path = (ROOT / inside / target).resolve().relative_to(ROOT).as_posix()
        if path in PAGES or path.startswith("docs/"):
            target = PAGES.get(path, path.removeprefix("docs/"))
            return f"[{label}]({posixpath.relpath(target, posixpath.dirname(page) or '.')}{anchor})"
        return f"`{path}`" if label.strip("`/") in path else f"{label} (`{path}`)"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((?![a-z]+:|#)([^)\s#]+)(#[^)\s]*)?\)", replace, markdown)
