"""Hive-style partition directories, `k=v`."""

from __future__ import annotations

from urllib.parse import unquote

from pyspark_lookup.storage.stores import PartitionValues

NULL_PARTITION = "__HIVE_DEFAULT_PARTITION__"
"""The value, in a directory's name, that stands for null."""


def partition_values(root: str, url: str) -> PartitionValues:
    """(column, value as text; None: null) of the `k=v` directories between the root and a file."""
    parts = url[len(root) :].strip("/").split("/")[:-1]
    pairs = (part.partition("=") for part in parts if "=" in part)
    return tuple((unescape(k), None if v == NULL_PARTITION else unescape(v)) for k, _, v in pairs if k)


def unescape(text: str) -> str:
    """The decoded text of a directory's name. If it is not UTF-8, each byte becomes one character, as in Spark, so that names stay distinct."""
    try:
        return unquote(text, errors="strict")
    except UnicodeDecodeError:
        return unquote(text, encoding="latin-1")
