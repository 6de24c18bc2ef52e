"""Paths with wildcards, as in Spark: the files that match, and the directories that lead to them. A backslash before a wildcard makes it a
plain character."""

from __future__ import annotations

import fnmatch
import functools
import re
from collections.abc import Sequence

_GLOB = re.compile(r"[*?\[{]")


def is_glob(path: str) -> bool:
    """Whether a path has wildcards (`*`, `?`, `[…]`, `{a,b}`). A web URL's `?` starts its query."""
    return not path.startswith(("http://", "https://")) and _GLOB.search(path) is not None


def glob_root(url: str) -> str:
    """The directory above the first component with a wildcard."""
    return re.split(_GLOB, url, maxsplit=1)[0].rpartition("/")[0]


def glob_matches(url: str, pattern: str) -> bool:
    """Whether a file, or a directory above it, matches the pattern component by component."""
    components = url.split("/")
    return any(
        len(components) >= len(pattern_components) and _components_match(components, pattern_components)
        for pattern_components in _alternatives(pattern)
    )


def glob_reaches(directory: str, pattern: str) -> bool:
    """Whether files below this directory, or directories below it, may match the pattern."""
    return any(
        _components_match(directory.split("/"), pattern_components) for pattern_components in _alternatives(pattern)
    )


def _components_match(components: Sequence[str], pattern_components: Sequence[str]) -> bool:
    """Whether the components match, up to the length of the shorter list."""
    return all(fnmatch.fnmatchcase(name, part) for name, part in zip(components, pattern_components, strict=False))


@functools.lru_cache(maxsize=128)
def _alternatives(pattern: str) -> tuple[tuple[str, ...], ...]:
    """The components of each pattern for which a pattern with braces stands."""
    braces = re.search(r"(?<!\\)\{([^{}]*)\}", pattern)
    if braces is None:
        # To fnmatch a backslash is an ordinary character.
        plain = re.sub(r"\\(.)", lambda escaped: f"[{escaped[1]}]" if escaped[1] in "*?[" else escaped[1], pattern)
        return (tuple(plain.replace("[^", "[!").split("/")),)
    choices = (pattern[: braces.start()] + choice + pattern[braces.end() :] for choice in braces[1].split(","))
    return tuple(parts for choice in choices for parts in _alternatives(choice))
