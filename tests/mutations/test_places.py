"""Faults are put into the package by its text: one whose text has changed tests nothing."""

from __future__ import annotations

from tests.mutations.faults import FAULTS
from tests.mutations.run import ROOT, place_of


def test_each_fault_has_its_place() -> None:
    """The text that a fault replaces is in its module once."""
    assert [problem for fault in FAULTS if (problem := place_of(fault, ROOT)) is not None] == []
