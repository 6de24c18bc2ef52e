"""Errors about malformed documents say what is wrong in our words, not in Python's."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from pyspark_lookup.core.decoding import UNREADABLE, as_text, describe_fault

FAULTS: list[tuple[Callable[[Any], Any], object, str]] = [
    (lambda value: value["schema"], {}, "it has no 'schema'"),
    (lambda value: value["schema"], [], "a value in it has the wrong type"),
    (lambda value: value["schema"], None, "a value in it has the wrong type"),
    (lambda value: value["a"].get("b"), {"a": 1}, "a value in it has the wrong type"),
    (int, [], "a value in it has the wrong type"),
    (list, 5, "a value in it has the wrong type"),
    (lambda value: value[0], [], "it is incomplete"),
    (as_text, 5, "5 is not text"),
    (json.loads, "x", "Expecting value: line 1 column 1 (char 0)"),
]


@pytest.mark.parametrize(("decode", "document", "expected"), FAULTS)
def test_faults_in_words(decode: Callable[[Any], Any], document: object, expected: str) -> None:
    with pytest.raises(UNREADABLE) as raised:
        decode(document)
    assert describe_fault(raised.value) == expected


def test_errors_without_a_text() -> None:
    assert describe_fault(EOFError()) == "it is incomplete"
    assert describe_fault(ValueError()) == "ValueError"
