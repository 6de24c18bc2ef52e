"""Gives the package the README as its description. Everything else is in setup.cfg."""

import runpy
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELEASE = runpy.run_path(str(ROOT / "scripts" / "release_notes.py"))
README = (ROOT / "README.md").read_text(encoding="utf-8")

setup(long_description=RELEASE["with_absolute_links"](README, RELEASE["package_version"]()))
