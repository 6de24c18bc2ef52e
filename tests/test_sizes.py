"""Hostile and odd sizes cost an error, or time by their length: never the process."""

from __future__ import annotations

import time

import pytest

from pyspark_lookup.base.errors import without_credentials


@pytest.mark.parametrize(
    "text", ["1", "?", "key", "?key", "&key", "://@", "a://", "password=", "x?", "=@", "pwd=x;", "@", "'key': ", "key="]
)
def test_messages_of_any_length(text: str) -> None:
    """What is looked for in a message takes time by its length, whatever is in it."""
    start = time.process_time()
    without_credentials(f"a://{text * 100_000}")
    without_credentials(f"?{text * 100_000}")
    assert time.process_time() - start < 5
