"""Prints the table of licences in docs/dependencies.md: the packages that pip installs with this one and its extras for users.

Run it with a Python that has the package `packaging` and a pip of 2025 or later, which knows SPDX expressions. pip is asked what it would
install, and installs nothing. The licences are those that the packages state themselves.
"""

from __future__ import annotations

import configparser
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
FOR_DEVELOPERS = {"test", "examples", "docs", "bench"}
CLASSIFIED = {
    "Apache Software License": "Apache-2.0", "BSD License": "BSD", "MIT License": "MIT",
    "Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0", "Python Software Foundation License": "PSF-2.0",
}  # fmt: skip
OTHERWISE_SPELLED = {"3-Clause BSD License": "BSD-3-Clause"}


def canonical(name: str) -> str:
    """The name of a package as PyPI compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def direct_requirements() -> dict[str, list[str]]:
    """The names of the packages that setup.cfg requires, by extra for users. Those under '' are always installed."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    extras = {"": setup["options"]["install_requires"], **setup["options.extras_require"]}
    names = {extra: re.findall(r"^[\w-]+", text, re.MULTILINE) for extra, text in extras.items()}
    return {extra: [canonical(name) for name in listed] for extra, listed in names.items() if extra not in FOR_DEVELOPERS}  # fmt: skip


def find_licence(metadata: Mapping[str, Any]) -> str:
    """The licence in a package's metadata (as JSON): its SPDX expression, or else its classifiers or its field License."""
    if metadata.get("license_expression"):
        return str(metadata["license_expression"])
    classifiers = [
        text.rpartition(" :: ")[2] for text in metadata.get("classifier", ()) if text.startswith("License ::")
    ]
    if classifiers:
        return ", ".join(CLASSIFIED.get(name, name) for name in classifiers)
    first_line, *_ = str(metadata.get("license") or "not stated").strip().splitlines()
    return OTHERWISE_SPELLED.get(first_line, first_line)


def would_be_installed(extras: Iterable[str]) -> dict[str, dict[str, Any]]:
    """The metadata of each package that pip would install with these extras into a new environment, by name."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        subprocess.run([*command, "--report", report.name, f"{ROOT}[{','.join(extras)}]"], check=True)
        installs = json.load(report)["install"]
    return {canonical(install["metadata"]["name"]): install["metadata"] for install in installs}


def list_dependencies(packages: Mapping[str, Mapping[str, Any]], name: str, extra: str) -> set[str]:
    """The names of the packages that `name[extra]` requires, and that these require."""
    names: set[str] = set()
    pending, visited = [(name, extra)], {(name, extra)}
    while pending:
        requiring, with_extra = pending.pop()
        for text in packages[requiring].get("requires_dist", ()):
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": with_extra}):
                names.add(canonical(required.name))
                more = {(canonical(required.name), of_it) for of_it in ("", *required.extras)} - visited
                pending += more
                visited |= more
    return names


def table() -> str:
    """One row for each package: its name, its licence, and the extras that bring it."""
    direct = direct_requirements()
    packages = would_be_installed(extra for extra in direct if extra)
    packages_by_extra = {extra: list_dependencies(packages, "pyspark-lookup", extra) for extra in direct}
    lines = ["| package | licence | installed |", "|---|---|---|"]
    for name in sorted({*packages} - {"pyspark-lookup"}):
        extras = [f"`{extra}`" for extra, names in packages_by_extra.items() if name in names]
        installed = "always" if name in packages_by_extra[""] else f"with {', '.join(extras)}"
        lines.append(f"| {name} | {find_licence(packages[name])} | {installed} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
