"""Reads the options with which a catalog table was created from the metadata of its columns, and detects what ALTER TABLE has changed.

This module does not need Spark to be installed: its functions get a session and Spark's types as arguments.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pyspark_lookup.core.decoding import UNREADABLE, as_text
from pyspark_lookup.errors import OptionError, SchemaError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.options.lookup_options import is_local
from pyspark_lookup.options.parsing import parse_path
from pyspark_lookup.sources.registry import CATALOG_KEYS, names_catalog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructField, StructType

OPTIONS_METADATA = "lookupcache.options"
MARK_METADATA = "lookupcache.mark"


def added_columns(schema: StructType) -> list[str]:
    """The columns that ALTER TABLE … ADD COLUMN has added to a catalog table. The table's files get them with the next INSERT."""
    return [field.name for field in schema if not read_mark(field)[0]] if table_options(schema) else []


def table_options(schema: StructType) -> dict[str, str]:
    """The options with which a catalog table was created, from its schema; {} if the schema has none.

    Raises OptionError for options that cannot be read, SchemaError for a table whose columns were renamed.
    """
    text = next(
        (
            metadata_text
            for field in schema
            if (metadata_text := (field.metadata or {}).get(OPTIONS_METADATA)) is not None
        ),
        None,
    )
    if text is None:
        return {}
    for field in schema:
        mark, name = read_mark(field)
        if mark and name != field.name:
            raise SchemaError(
                f"column {field.name!r} is {name!r} in the table: ALTER TABLE … RENAME COLUMN changes the catalog only. Rename it "
                f"back, and read it under its new name from a view: CREATE VIEW … AS SELECT {name} AS {field.name}, …"
            )
    try:
        return {as_text(key): as_text(value) for key, value in json.loads(text).items()}
    except UNREADABLE as problem:
        raise OptionError(
            f"this table's options, which are in its schema in the catalog, cannot be read ({type(problem).__name__}): DROP TABLE, which leaves its "
            "files, and CREATE TABLE … USING lookupcache OPTIONS (path '…' and its other options)"
        ) from None


def read_mark(field: StructField) -> tuple[str, str]:
    """(the mark of the table for which the column was created, the name that the column had then); two empty texts for a column without a mark.

    A mark is a random text, different for each CREATE TABLE.
    """
    mark, _, name = str((field.metadata or {}).get(MARK_METADATA, "")).partition(":")
    return mark, name


def named_options(spark: SparkSession, name: str) -> tuple[dict[str, str], StructType | None]:
    """(the options of the catalog table `name`, its columns; None instead of columns if ALTER TABLE has added some).

    Raises OptionError for a view that does not show all of a table, for a table of another format, for a table whose options are lost, and for
    a table whose location ALTER TABLE has changed.
    """
    kind = spark.catalog.getTable(name).tableType
    if (kind == "TEMPORARY" or kind.endswith("VIEW")) and not _is_whole_table(spark.table(name)):
        raise OptionError(
            f"{name} is a view, in which rows cannot be looked up by key: look up its table, with lookup.where and columns=[…] in place of the "
            "view's query, or write the view's rows to a managed table, df.write.format('lookupcache').save(path), and look up that table"
        )
    schema = spark.table(name).schema
    stored = table_options(schema)
    if not stored:
        raise OptionError(
            f"table {name} is not of the format lookupcache, or has lost its options (Spark does not keep them for a table created with a column list "
            "or AS SELECT): give the path of its files and its options, or, under another name, CREATE TABLE … USING lookupcache OPTIONS (path '…' and its other options); "
            f"for a table in another catalog give its name, with {', '.join(sorted(CATALOG_KEYS))}"
        )
    # A table of an Iceberg catalog has no files at the location that Spark's catalog gives it.
    place = _location(spark, name) if "path" in stored and not names_catalog(stored) else None
    warehouse = spark.conf.get("spark.sql.warehouse.dir", "") or "/"
    if place is not None and not _is_same_place(
        comparable_path(place), comparable_path(stored["path"]), comparable_path(warehouse)
    ):
        others = "".join(f", '{key}' {redact(key, text)!r}" for key, text in stored.items() if key != "path")
        raise OptionError(
            f"table {name} was created for {redact('path', stored['path'])}, and ALTER TABLE … SET LOCATION says "
            f"{redact('path', place)}: Spark does not pass that on, so reads and writes stay at the old path. DROP TABLE {name}, "
            f"which leaves its files but loses its options, then CREATE TABLE {name} USING lookupcache OPTIONS (path '…'{others})"
        )
    return stored, None if added_columns(schema) else schema


def _is_whole_table(view: Any) -> bool:
    """Whether a view shows all of a table, without options of its own. False over Spark Connect, which does not show a view's options."""
    planned = getattr(view, "_jdf", None)
    if planned is None:
        return False
    plan = planned.queryExecution().optimizedPlan()
    return str(plan.toString()).startswith("RelationV2") and bool(plan.relation().options().isEmpty())


def _location(spark: SparkSession, name: str) -> str | None:
    """The location of a table in the catalog; None if it has none."""
    database, _, table = name.rpartition(".")
    within = f" IN {database}" if database else ""
    pattern = table.strip("`").replace("'", "\\'")
    try:
        tables = spark.sql(f"SHOW TABLE EXTENDED{within} LIKE '{pattern}'").collect()
    except Exception as problem:
        if getattr(problem, "getCondition", str)() == "UNSUPPORTED_PIPELINE_SPARK_SQL_COMMAND":
            return None  # in a file of Declarative Pipelines Spark forbids this statement
        raise
    if not database and any(row["isTemporary"] for row in tables):
        return None  # the name is that of a temporary view
    lines = [line for row in tables for line in str(row["information"]).splitlines()]
    return next((line.removeprefix("Location: ") for line in lines if line.startswith("Location: ")), None)


def _is_same_place(place: str, path: str, warehouse: str) -> bool:
    """Whether Spark shows `place` as the location of a table that was created with `path`.

    Spark takes a relative path as relative to its warehouse, and not to the working directory.
    """
    if place == path or place.startswith(f"{warehouse}/"):
        return True
    return is_local(path) and place == os.path.normpath(os.path.join(warehouse, os.path.relpath(path)))


def absolute_path(path: str) -> str:
    """A path that means the same in any working directory, for instance a worker's."""
    try:
        path = parse_path(path)
    except ValueError as problem:
        raise OptionError(f"option path = {redact('path', path)!r}: expected {problem}") from None
    return path if "://" in path or path.startswith("file:") else os.path.abspath(path)


def resolve_path(options: Mapping[str, str]) -> dict[str, str]:
    """The options with a path that means the same in any working directory. The name of a table in a catalog stays as it is."""
    if "path" not in options or names_catalog(options):
        return dict(options)
    return {**options, "path": absolute_path(options["path"])}


def created_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options of CREATE TABLE as `resolve_path` returns them. Spark has turned the name of a table in a catalog into a path, from which
    the name is taken."""
    if "path" in options and names_catalog(options):
        return {**options, "path": options["path"].rpartition("/")[2]}
    return resolve_path(options)


def comparable_path(path: str) -> str:
    """A path in a spelling that can be compared: `file:/x`, `file:///x` and `/x` all become `/x`."""
    return "/" + path.removeprefix("file:").strip("/") if is_local(path) else path.rstrip("/")
