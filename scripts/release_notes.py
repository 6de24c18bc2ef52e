"""Prints what CHANGELOG.md says of a release: `release_notes.py v0.1.0`. Fails if the tag is not that of the package's version, or the section is missing, empty or has no date."""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, version: str, changelog: str) -> str:
    """The changelog's section of the version, without its heading. Raises ValueError if there is none, or the tag is another version's."""
    if tag != f"v{version}":
        raise ValueError(f"tag {tag}: pyspark_lookup.__version__ is {version}, so the tag must be v{version}")
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)
    for section in sections[1:]:
        heading, _, text = section.partition("\n")
        if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}", heading) and text.strip():
            return text.strip() + "\n"
    raise ValueError(f"CHANGELOG.md: no section '## [{version}] - YYYY-MM-DD' with a text")


def package_version() -> str:
    source = (ROOT / "pyspark_lookup" / "__init__.py").read_text(encoding="utf-8")
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    return str(version)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("give the tag, as 'release_notes.py v0.1.0'")
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        print(release_notes(sys.argv[1], package_version(), changelog), end="")
    except ValueError as problem:
        raise SystemExit(f"error: {problem}") from None
