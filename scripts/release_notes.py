"""Prints what CHANGELOG.md says of a release: `release_notes.py v0.1.0`. Fails if the tag is not that of the package's version, or the section is missing, empty or has no date.

setup.py uses its functions, too: the files that a text links to are not beside it where a release is shown.
"""

from __future__ import annotations

import configparser
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, version: str, changelog: str) -> str:
    """The changelog's section of the version, without its heading. Raises ValueError if there is none, or if the tag is that of another version."""
    if tag != f"v{version}":
        raise ValueError(f"tag {tag}: pyspark_lookup.__version__ is {version}, so the tag must be v{version}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    for section in sections[1:]:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}", heading) and text.strip():
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md: no section '## [{version}] - YYYY-MM-DD' with a text")


def with_absolute_links(markdown: str, version: str) -> str:
    """The text, with links to files of the project that lead to the repository at the version's tag."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    (home,) = re.findall(r"^Source = (.+)$", setup["metadata"]["project_urls"], re.MULTILINE)
    return re.sub(r"\]\((?![a-z]+:|#)([^)\s]+)\)", rf"]({home}/blob/v{version}/\1)", markdown)


def package_version() -> str:
    source = (ROOT / "pyspark_lookup" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(version)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give the tag, as 'release_notes.py v0.1.0'")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = package_version()
    try:
        print(with_absolute_links(release_notes(sys.argv[1], version, changelog), version), end="")
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from None
