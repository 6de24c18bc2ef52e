"""Reads the values of partition columns from the names of Hive-style directories, `k=v`, and from the host's JSON records."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from pyspark_lookup.core.decoding import as_text
from pyspark_lookup.storage.stores import PartitionValues

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The value in a directory's name that stands for null."""


def partition_values(root: str, url: str) -> PartitionValues:
    """For each `k=v` directory between the root and a file, a pair (column, value as text; None: null)."""
    parts = url[len(root) :].strip("/").split("/")[:-1]
    pairs = (part.partition("=") for part in parts if "=" in part)
    return tuple((unescape(k), None if v == NULL_PARTITION else unescape(v)) for k, _, v in pairs if k)


def parse_partition(pairs: Any) -> PartitionValues | None:
    """The partition values in a record: a list of pairs (column, text or null); None for null. Raises one of `decoding.UNREADABLE` otherwise."""
    if pairs is None:
        return None
    return tuple((as_text(name), None if value is None else as_text(value)) for name, value in pairs)


def unescape(text: str) -> str:
    """The text of a directory's name without its `%` escapes.

    If the bytes are not UTF-8, each byte becomes one character, as in Spark, so that different names have different texts.
    """
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return unquote(text, encoding="latin-1")
