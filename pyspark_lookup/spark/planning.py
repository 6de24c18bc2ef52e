"""Plans reads and writes on the driver: turns the options and the schema that Spark passes into the engine's options, columns and tasks.

CREATE TABLE passes its options to `schema()` only, and the catalog keeps nothing but the schema, with the metadata of its columns. So this
module writes the options of a catalog table into the metadata of one column. A read takes them from there, and adds its own options.
The metadata of each column also holds a mark, random for each table, and the column's name. By the mark, a write recognises its table.
By the mark and the name, a read notices ALTER TABLE.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.types import CharType, StringType, StructType, VarcharType

from pyspark_lookup.columnar.ddl import columns_ddl
from pyspark_lookup.columnar.types import spark_type
from pyspark_lookup.core.decoding import UNREADABLE, as_texts
from pyspark_lookup.errors import NotSupportedError, OptionError
from pyspark_lookup.lookup import planner
from pyspark_lookup.lookup.catalog_tables import (
    MARK_METADATA,
    OPTIONS_METADATA,
    absolute_path,
    added_columns,
    comparable_path,
    created_options,
    read_mark,
    table_options,
)
from pyspark_lookup.lookup.metadata_tables import ViewTask, managed_state, plan_changes, view_schema, view_tasks
from pyspark_lookup.lookup.read import ReadPlan, ReadTask, ResolvedTable, with_table_keys
from pyspark_lookup.lookup.runtime import runtime
from pyspark_lookup.options.conf_file import redact, tells_secret
from pyspark_lookup.options.enums import View
from pyspark_lookup.options.groups import ANY_TYPE, BUILT, EXPLICIT, refuse_in_reads
from pyspark_lookup.options.lookup_options import LookupOptions
from pyspark_lookup.options.parsing import parse_boolean
from pyspark_lookup.sources.managed.change_feed import change_columns
from pyspark_lookup.sources.managed.options import ChangeOptions
from pyspark_lookup.sources.registry import names_system, parse_options
from pyspark_lookup.spark.types import arrow_schema, struct_type
from pyspark_lookup.versions.executions import Build

_VARCHAR = "__CHAR_VARCHAR_TYPE_STRING"
_LONGEST = 2**30  # the most characters that a text can have in Java
_CREATE = "lookup.create-if-not-exists"
_OF_WRITES = ("lookup.write.", "lookup.storage.")


def plan_schema(options: Mapping[str, str]) -> tuple[StructType, ResolvedTable | None]:
    """(the schema of a table or of a view of the table, the resolved table; None for a view).

    With the option `ANY_TYPE`, columns that Spark cannot read are VOID. For CREATE TABLE, the schema's metadata also holds the options. If the options ask for a new managed table, it is created at their path.
    """
    creating, readable = "provider" in options, ANY_TYPE not in options
    # Options that are stored with a table apply to all uses of it.
    source_options, explicit = (_table_to_create(options), ()) if creating else _split_explicit(options)
    parsed = runtime().effective(parse_options(source_options))
    is_stream = parsed.read.view in (View.DATA, View.CHANGES)
    refuse_in_reads(explicit, parsed.read.view, stream=is_stream, on_error=parsed.read.on_error)
    if parsed.read.view not in (View.DATA, View.CHANGES):
        return _with_options(view_schema(parsed.read.view), source_options if creating else None), None
    engine = runtime().engine(parsed)
    with engine.publish():
        resolved_table = engine.reader.find(parsed)
        columns = planner.table_columns(resolved_table, parsed, readable)
        columns = change_columns(columns) if parsed.read.view is View.CHANGES else columns
    return _with_options(columns, source_options if creating else None, readable), resolved_table


def _table_to_create(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a CREATE TABLE that the catalog is to keep. Creates a managed table first if `lookup.create-if-not-exists` is true.
    Raises the errors of `TableWriter.create`."""
    catalog_options = _catalog_options(options)
    create = catalog_options.pop(_CREATE, "false")
    try:
        if not parse_boolean(create):
            return catalog_options
    except ValueError as problem:
        raise OptionError(f"option {_CREATE} = {create!r}: expected {problem}") from None
    columns = parse_options(catalog_options).files.schema
    if columns is None:
        raise OptionError(
            f"option {_CREATE} = 'true' needs lookup.schema: set it to the columns of the new table, e.g. 'id INT, name STRING'"
        )
    del catalog_options["lookup.schema"]  # from now on the table's log has the columns
    parsed = parse_options(catalog_options)
    engine = runtime().engine(parsed)
    with engine.publish():
        engine.managed.writer(parsed).create(columns)
    return {key: text for key, text in catalog_options.items() if key != "lookup.keys"}


def _catalog_options(options: Mapping[str, str]) -> dict[str, str]:
    """The options given in OPTIONS (…), without the table's properties in the catalog. Spark passes each option twice, the second time as
    `option.<key>`, and each property once."""
    catalog_options = {key: text for key, text in options.items() if f"option.{key}" in options or key == "path"}
    for key in sorted(options.keys() - catalog_options.keys()):
        if key.startswith("lookup."):
            raise OptionError(
                f"option {key} is among the table's properties, which Spark does not pass to reads: put it into OPTIONS (…)"
            )
    if names_system(catalog_options):
        return catalog_options
    if tells_secret("path", catalog_options.get("path", "")):
        raise OptionError(
            f"option path = {redact('path', catalog_options['path'])!r} holds a credential, which the catalog would keep: "
            "leave it out, and set it in the environment or in the conf file ($LOOKUPCACHE_CONF), or use the store's own credential chain (e.g. an instance role)"
        )
    if "path" not in catalog_options:
        raise OptionError(
            "option path is missing: write CREATE TABLE dim USING lookupcache OPTIONS (path 's3://bucket/dim') or LOCATION '…'"
        )
    return created_options(catalog_options)


def _single_path(options: Mapping[str, str]) -> dict[str, str]:
    """The options of a load(), with its path as the option `path`. Raises OptionError for several paths, which Spark passes as a JSON list."""
    load_options = dict(options)
    paths = load_options.pop("paths", None)
    if paths is not None:
        try:
            path_list = as_texts(json.loads(paths))
        except UNREADABLE:
            raise OptionError(
                "option paths is not a list of paths, as Spark writes it for load(): give the option path instead"
            ) from None
        if len(path_list) != 1:
            raise OptionError(
                f"option path: {len(path_list)} paths are given: give one file, directory or glob, e.g. '{{a,b}}/*.parquet'"
            )
        load_options.setdefault("path", path_list[0])
    return load_options


def _split_explicit(options: Mapping[str, str]) -> tuple[dict[str, str], Collection[str]]:
    """(the options of a load(), the keys of the options that the user gave for this read). These are all options, unless a lookup makes the
    read: then some options are the table's, and the option EXPLICIT lists the keys of the others."""
    load_options = _single_path(options)
    load_options.pop(BUILT, None)
    load_options.pop(ANY_TYPE, None)
    explicit = load_options.pop(EXPLICIT, None)
    return load_options, load_options.keys() if explicit is None else explicit.split(",")


def read_options(read: Mapping[str, str]) -> LookupOptions:
    """The options of a read whose options name a path or a provider."""
    return runtime().effective(parse_options(_split_explicit(read)[0]))


def _with_options(columns: pa.Schema, options: Mapping[str, str] | None, readable: bool = True) -> StructType:
    schema = struct_type(columns, readable)
    if options is None:
        return schema
    mark = os.urandom(8).hex()
    for field in schema:
        field.metadata = {MARK_METADATA: f"{mark}:{field.name}"}
    # If a table has a VARCHAR column, Spark gives every column of an INSERT an alias. Then the writer gets the metadata of this table's columns,
    # and not that of the columns from which the rows come. There is no alias if those have a VARCHAR of the same length, so each table has
    # a length of its own.
    text = next((field for field in schema if field.dataType == StringType()), None)
    if text is not None:
        text.dataType = VarcharType(_LONGEST - 1 - int(mark[:7], 16))
    carrier = text or schema[0]
    carrier.metadata = {**carrier.metadata, OPTIONS_METADATA: json.dumps(dict(options), sort_keys=True)}
    return schema


def resolve_write_options(write: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options of a write, with its path. Raises OptionError if it is not certain which table is to be written."""
    write_options = _single_path(write)
    carrier = next((field for field in schema if OPTIONS_METADATA in (field.metadata or {})), None)
    marks = {read_mark(field)[0] for field in schema} - {""}  # a column without a mark was added by ALTER TABLE
    # A VARCHAR column that Spark gives no alias arrives here with the type VARCHAR, or as a STRING with the metadata _VARCHAR.
    carries_options = carrier is not None and type(carrier.dataType) is StringType and len(marks) == 1
    is_catalog_table = carries_options and not any(_VARCHAR in (field.metadata or {}) for field in schema)
    catalog_options = {} if carrier is None else table_options(schema)
    if "path" in write_options:
        if catalog_options and not is_catalog_table and _differ(catalog_options.get("path", ""), write_options["path"]):
            raise OptionError(
                f"option path = {redact('path', write_options['path'])!r}: the rows come from the catalog table at "
                f"{redact('path', catalog_options.get('path', ''))}. The metadata of their columns holds that table's options, "
                "and a table created from these rows would take them over. Read the rows with "
                "spark.read.format('lookupcache').load(path), or select expressions, which have no metadata, in place of the columns"
            )
        same_path = bool(catalog_options) and not _differ(catalog_options.get("path", ""), write_options["path"])
        # A catalog table's options for writes apply if the write names the path of that table.
        of_table = {key: text for key, text in catalog_options.items() if same_path and key.startswith(_OF_WRITES)}
        options = {
            **of_table,
            **(_added_column_options(schema) if same_path and is_catalog_table else {}),
            **write_options,
        }
    elif is_catalog_table:
        options = {**catalog_options, **_added_column_options(schema), **write_options}
    else:
        raise OptionError(
            "it is not clear which table is written: Spark does not pass a catalog table's options to its writer, and "
            + (
                "the options that came with the rows may be another table's. "
                if carrier
                else "no options came with the rows. "
            )
            + "Use INSERT INTO dim WITH (path 's3://bucket/dim') SELECT …, or df.write.format('lookupcache').mode('append')"
            ".save('s3://bucket/dim'). In place of CREATE TABLE dim … AS SELECT: CREATE TABLE dim USING lookupcache OPTIONS "
            f"(path '…', 'lookup.schema' 'id INT, …', '{_CREATE}' 'true'), then INSERT INTO dim SELECT …"
        )
    if is_catalog_table and any(key.lower() == "lookup.write.missing-columns" for key in options):
        raise OptionError(
            "option lookup.write.missing-columns has no effect on an INSERT into a catalog table: Spark fills the "
            "columns that the INSERT does not name with null. To keep their values, select them from the table, or write the rows "
            "with df.write.format('lookupcache').save('s3://bucket/dim')"
        )
    return options


def _added_column_options(schema: StructType) -> dict[str, str]:
    return {"lookup.write.merge-schema": "true"} if added_columns(schema) else {}


def _differ(stored_path: str, path: str) -> bool:
    return comparable_path(stored_path) != comparable_path(absolute_path(path))


def stream_options(read: Mapping[str, str], schema: StructType) -> LookupOptions:
    """The options of a streaming read. Raises OptionError for a catalog table whose columns have lost the metadata with its options."""
    load_options, explicit = _split_explicit(read)
    options = runtime().effective(parse_options(load_options, _stored_options(load_options, schema)))
    refuse_in_reads(explicit, options.read.view, stream=True)
    return options


def _stored_options(load_options: Mapping[str, str], schema: StructType) -> dict[str, str]:
    """The options with which a catalog table was created; {} for a read whose options name a path or a provider.

    The metadata of a column holds them. Raises OptionError if it has been lost.
    """
    # A read that names a path is not a read of a catalog table, even if its schema was taken from one.
    if "path" in load_options or names_system(load_options):
        return {}
    stored = table_options(schema)
    if not stored:
        raise OptionError(
            "this table's options are lost. Spark does not keep them if the table is created with a column list or by CREATE TABLE AS "
            "SELECT, and drops them on ALTER TABLE … REPLACE COLUMNS or DROP COLUMN of the column whose metadata holds them. DROP "
            "TABLE dim (its files stay), then CREATE TABLE dim USING lookupcache OPTIONS (path 's3://bucket/dim' and its other options). To declare the "
            "columns, use the option 'lookup.schema' 'id INT, …'"
        )
    return stored


class Planning:
    """The plan of a batch read: its options and columns, and the tasks into which it is divided."""

    def __init__(
        self,
        options: LookupOptions,
        columns: pa.Schema,
        resolved_table: ResolvedTable | None,
        declared: bool,
        added: Sequence[str],
        build: Build | None,
    ) -> None:
        self.options = options
        self.build = build
        self.columns = columns
        self._declared = declared
        self._added = added
        self._resolved_table = resolved_table

    @classmethod
    def from_options(
        cls, read: Mapping[str, str], schema: StructType, resolved_table: ResolvedTable | None
    ) -> Planning:
        """The plan of a read with the options and the schema that Spark passes. `resolved_table`: the table, if `plan_schema` has already resolved
        it. Raises OptionError for options that contradict the schema or are not for reads, NotSupportedError for changes without a first
        version."""
        load_options, explicit = _split_explicit(read)
        stored = _stored_options(load_options, schema)
        options = runtime().effective(parse_options(load_options, stored))
        refuse_in_reads(explicit, options.read.view, on_error=options.read.on_error)
        if options.read.view is View.CHANGES and options.kind(ChangeOptions).first is None:
            raise NotSupportedError(
                "option lookup.view = 'changes' needs lookup.changes-from in a batch: set it to the version of the first changes, or read a "
                "stream with spark.readStream"
            )
        for fixed in ("lookup.columns", "lookup.view", "lookup.changes-from"):
            if stored and fixed in load_options:
                raise OptionError(
                    f"option {fixed} would change the columns of a catalog table for one read: select the columns with SELECT, or read the path with load(path) and the option"
                )
        for field in schema:
            if isinstance(field.dataType, (VarcharType, CharType)):
                raise OptionError(
                    f"spark.sql.preserveCharVarcharTypeInfo = 'true': column {field.name!r} is {field.dataType.simpleString()}, which Spark "
                    "does not pass to sources in Python: set this conf to 'false', which makes the column a STRING"
                )
        columns = arrow_schema(schema)
        if (
            options.read.columns is not None
            and options.read.view not in (View.SUMMARY, View.TOKEN)  # there, they are the columns of the table's cache
            and list(options.read.columns) != columns.names
            and resolved_table is None
            and not stored
        ):
            raise OptionError("option lookup.columns contradicts the given schema: give one of them")
        declared = resolved_table is None and not stored and options.read.view is View.DATA
        if declared and options.system is None:
            options = _with_declared_columns(options, columns)
        built = read.get(BUILT)
        build = None if built is None else Build(*json.loads(built))
        added = added_columns(schema) if stored else ()
        return cls(options, columns, resolved_table, declared, added, build)

    def newest_change(self) -> int:
        """The position in the managed table's log at which its current version ends."""
        engine = runtime().engine(self.options)
        with engine.publish():
            return managed_state(engine, self.options).newest

    def tasks(self, nonce: str = "") -> list[tuple[ReadPlan | LookupOptions, ReadTask | ViewTask]]:
        """The tasks of the read, each with the plan or the options by which it is read. `nonce`: a text that is the same in all processes that plan
        this read."""
        if self.options.read.view is View.CHANGES:
            engine = runtime().engine(self.options)
            with engine.publish():
                planned = plan_changes(engine, self.options)
            return [(self.options, ViewTask(View.CHANGES, changes=part, columns=self.columns)) for part in planned]
        if self.options.read.view is not View.DATA:
            return [(self.options, task) for task in view_tasks(self.options, nonce or runtime().nonce())]
        engine = runtime().engine(self.options)
        with engine.publish():
            resolved_table = self._resolved_table or engine.reader.find(self.options)
            options = engine.reader.host.with_floor(
                resolved_table.table, with_table_keys(self.options, resolved_table.version)
            )
            planner.table_columns(resolved_table, options)
            current_names = {name.lower() for name in resolved_table.columns.names}
            columns = pa.schema(
                [c for c in self.columns if c.name not in self._added or c.name.lower() in current_names]
            )
            plan = planner.plan_read(resolved_table, options, columns, runtime().clock, declared=self._declared)
            return [(plan, task) for task in planner.plan_tasks(engine.reader, resolved_table, plan)]


def _with_declared_columns(options: LookupOptions, columns: pa.Schema) -> LookupOptions:
    """The options with `lookup.schema` set to the columns of `.schema(…)`. Raises OptionError if it is set to other columns."""
    columns = pa.schema([(field.name, spark_type(field.type)) for field in columns])
    if options.files.schema is not None and options.files.schema != columns:
        raise OptionError(
            f"option lookup.schema = {columns_ddl(options.files.schema)!r} contradicts .schema({columns_ddl(columns)!r}): give one of them"
        )
    return options.with_values({"lookup.schema": columns})
