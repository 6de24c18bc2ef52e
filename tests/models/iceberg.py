"""An Iceberg table: written by hand, and read by the specification, slowly and plainly, after each step."""

import contextlib
import datetime
import decimal
import functools
import random
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import StaticTable

from tests.models.adapter import Ground, Past, Table
from tests.models.answers import Condition, Content
from tests.models.histories import ICEBERG, Step
from tests.models.values import plain
from tests.support.iceberg_definition import Publish, in_catalog, sql_catalog
from tests.support.iceberg_manifests import Entry, File, find_spec
from tests.support.iceberg_oracle import DATA, Oracle, is_vector
from tests.support.iceberg_values import Field, Kind, arrow_field, from_raw
from tests.support.iceberg_writing import IcebergTable
from tests.support.rest_catalog import RestCatalog

_PLACE = {"type": "struct", "fields": [
    {"id": 101, "name": "x", "required": False, "type": "int"}, {"id": 102, "name": "y", "required": False, "type": "string"},
]}  # fmt: skip
_TAGS = {"type": "list", "element-id": 103, "element-required": False, "element": "string"}
COLUMNS: dict[str, Kind] = {
    "id": "int", "v": "int", "s": "long", "c": "string", "part": "string", "value": "float", "number": "int", "amount": "decimal(9, 2)", "day": "date",
    "at": "timestamptz", "local": "timestamp", "code": "uuid", "mark": "fixed[4]", "flag": "boolean", "place": _PLACE, "tags": _TAGS,
}  # fmt: skip
SPECS: list[list[tuple[str, str]]] = [
    [], [("part", "identity")], [("id", "bucket[3]")], [("part", "truncate[1]"), ("c", "identity")], [("at", "month")],
    [("day", "year"), ("flag", "identity")], [("local", "hour")], [("at", "day"), ("part", "void")], [("amount", "truncate[50]")],
    [("code", "bucket[2]")], [("day", "identity")], [("id", "truncate[10]")], [("number", "identity")],
]  # fmt: skip
WIDER = {"int": "long", "float": "double", "decimal(9, 2)": "decimal(18, 2)"}
DEFAULTS = {
    "long": 7, "string": "given", "date": "2020-02-29", "decimal(9, 2)": "1.50", "boolean": True, "double": -0.5,
}  # fmt: skip
_UTC = datetime.timezone.utc
VALUES: dict[str, list[Any]] = {
    "int": [0, 1, -5, 2**31 - 1, None],
    "long": [0, 1, -5, 2**40, None],
    "float": [1.5, -2.0, -0.0, 0.0, float("nan"), None],
    "double": [1.5, 0.1, -0.0, 0.0, float("nan"), None],
    "decimal(9, 2)": [decimal.Decimal("0.00"), decimal.Decimal("-1.50"), decimal.Decimal("120.25"), None],
    "decimal(18, 2)": [decimal.Decimal("-1.50"), decimal.Decimal("123456789012.25"), None],
    "date": [datetime.date(1969, 12, 31), datetime.date(1970, 1, 1), datetime.date(2024, 2, 29), None],
    "timestamptz": [datetime.datetime(1969, 12, 31, 23, 59, tzinfo=_UTC), datetime.datetime(2024, 2, 29, 1, tzinfo=_UTC), None],
    "timestamp": [datetime.datetime(1969, 12, 31, 23, 59, 59, 999999), datetime.datetime(2024, 2, 29, 1), None],
    "uuid": [uuid.UUID(int=1), uuid.UUID(int=2**128 - 1), None],
    "fixed[4]": [b"\0\1\2\3", b"\xff" * 4, None],
    "boolean": [True, False, None],
    "string": ["x", "y", "", "z" * 40, None],
}  # fmt: skip
_IN_TEXT = ("boolean", "int", "long", "decimal", "date", "timestamp", "string", "uuid")
"""Types whose values are selected by text in `lookup.partition`."""
CONDITIONS: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "int": ("< 1", lambda value: value < 1),
    "long": (">= 1", lambda value: value >= 1),
    "string": ("= 'x'", lambda value: value == "x"),
    "date": ("> DATE '1970-01-01'", lambda value: value > datetime.date(1970, 1, 1)),
    "timestamp": ("< TIMESTAMP '1970-01-01 00:00:00'", lambda value: value < datetime.datetime(1970, 1, 1)),
    "boolean": ("= true", lambda value: value is True),
    "decimal(9, 2)": ("> 1.25", lambda value: value > 1),
    "decimal(18, 2)": ("< 1.25", lambda value: value < 1),
    "double": ("< 1.25", lambda value: value < 1.25),
}
"""A condition on a column of each type, and what it means for a value."""


class Iceberg(Table):
    """A table that changes in all ways that the specification allows. A peer changes only as PyIceberg can read it, which has to agree."""

    def __init__(self, ground: Ground, rng: random.Random) -> None:
        super().__init__(ground)
        self.rng, self.keys = rng, ground.setup.keys
        version = rng.choice([1, 2, 2, 3, 3])
        self.forms = rng.choice([["parquet"], ["parquet"], ["orc"], ["parquet", "orc"]])
        self._is_peer = rng.random() < 0.25
        hidden = {"code", "mark"} if self._is_peer and "orc" in self.forms else set()
        self._deleted: list[dict[str, Any]] = []
        self._texts = [name for name, _ in ground.setup.partitions]
        self._fixed = {"id", "v", "s", "c", *self._texts}
        columns = {name: kind for name, kind in COLUMNS.items() if name not in hidden} | dict.fromkeys(
            self._texts, "string"
        )
        self._closing = contextlib.ExitStack()
        publish = self._publisher(rng.choice(["directory", "directory", "sql", "sql", "rest"]))
        spec = [(name, "identity") for name in self._texts] or rng.choice(self._specs(columns))
        self.table = IcebergTable.create(ground.path, columns, version, spec, publish)
        self.append()

    def _publisher(self, kind: str) -> Publish | None:
        """How a version is published: to a catalog, or, if None, by a hint in the directory."""
        if kind == "directory":
            return None
        self.name = "ns.table"
        if kind == "rest":
            server = self._closing.enter_context(RestCatalog())
            properties, publish = {"type": "rest", "uri": server.uri}, server.publisher(self.name)
        else:
            home = self.ground.root / f"catalog{self.ground.new_serial()}"
            home.mkdir()
            catalog, properties = sql_catalog(home)
            self._closing.callback(catalog.close)
            publish = in_catalog(catalog, self.name)
        self.options = {
            "lookup.catalog": "tests",
            **{f"lookup.catalog.{name}": text for name, text in properties.items()},
        }
        return publish

    def close(self) -> None:
        self._closing.close()

    def content(self) -> Content:
        content = self._content()
        if self._is_peer:
            self._check_peer(content)
        return content

    def _content(self, **of: Any) -> Content:
        """The content of a version by the specification. Its partition columns are those by whose own values all files are partitioned."""
        oracle = Oracle(self.table.metadata, **of)
        schema = pa.schema([arrow_field(field) for field in oracle.fields])
        fields = {field["id"]: field for field in oracle.fields if str(field["type"]).startswith(_IN_TEXT)}
        files = []
        for entry in oracle.entries:
            if entry.file["content"] == DATA:
                spec = zip(find_spec(oracle.meta, entry.file["spec_id"]), entry.file["partition"].values(), strict=True)
                identities = [
                    (fields.get(part["source-id"]), value) for part, value in spec if part["transform"] == "identity"
                ]
                values = {
                    field["name"]: from_raw(field["type"], value) for field, value in identities if field is not None
                }
                files.append((values, tuple(oracle.rows([row for _, row in oracle.live_rows(entry)]).to_pylist())))
        common = set.intersection(*(set(values) for values, _ in files)) if files else set[str]()
        partitions = pa.schema([field for field in schema if field.name in common])
        return Content(schema, partitions, tuple(files))

    def _check_peer(self, content: Content) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYICEBERG_DOWNCAST_NS_TIMESTAMP_TO_US_ON_WRITE", "true")  # ORC has nanoseconds
            rows = StaticTable.from_metadata(str(self.table.metadata)).scan().to_arrow().to_pylist()
        peer_rows = [{name: str(v) if isinstance(v, uuid.UUID) else v for name, v in row.items()} for row in rows]
        peer_rows = pa.Table.from_pylist(peer_rows, content.data).to_pylist()
        assert sorted(map(plain, peer_rows)) == sorted(map(plain, content.rows))

    def past(self) -> list[Past]:
        """Snapshots, branches, tags and times."""
        meta = self.table.meta
        named: list[tuple[str, Any, dict[str, Any]]] = []
        named += [
            ("version", snapshot["snapshot-id"], {"snapshot": snapshot["snapshot-id"]})
            for snapshot in meta["snapshots"]
        ]
        named += [(ref["type"], name, {ref["type"]: name}) for name, ref in meta["refs"].items()]
        for entry in meta["snapshot-log"]:
            at = datetime.datetime.fromtimestamp(entry["timestamp-ms"] / 1000, _UTC)
            named.append(("timestamp", at.isoformat(timespec="milliseconds"), {"at_ms": entry["timestamp-ms"]}))
        return [Past({f"lookup.{how}": str(value)}, functools.partial(self._content, **of)) for how, value, of in named]

    def condition(self, rng: random.Random) -> Condition:
        field = rng.choice([column for column in self.table.fields if str(column["type"]) in CONDITIONS])
        text, means = CONDITIONS[field["type"]]
        name = field["name"]
        if rng.random() < 0.3:
            return Condition(f"`{name}` IS NULL", frozenset([name]), lambda row: row[name] is None)
        return Condition(f"`{name}` {text}", frozenset([name]), lambda row: row[name] is not None and means(row[name]))

    def take(self, step: Step, rng: random.Random) -> None:
        self.rng = rng
        version = self.table.meta["format-version"]
        match step.op:
            case "delete_equal" | "upsert_often" if version == 1 or self._is_peer:
                self.rewrite_rows()
            case "delete_places":
                (self.rewrite_rows, self.delete_positions, self.delete_by_vectors)[version - 1]()
            case "upgrade" if version > 2:
                self.map_names()
            case "upsert" | "overwrite" | "transaction":
                self.rewrite_rows()
            case "delete":
                self.remove_file()
            case op if op in ICEBERG:
                getattr(self, op)()

    def drawn(self, count: int) -> list[dict[str, Any]]:
        rows = [{field["name"]: self.value(field) for field in self.table.fields} for _ in range(count)]
        if self._deleted:  # some that were deleted come back
            old = self.rng.choice(self._deleted)
            rows[0] |= {name: old[name] for name in self._fixed - {"s"}}
        return rows

    def value(self, field: Field) -> Any:
        kind, rng = field["type"], self.rng
        match field["name"]:
            case "id":
                return rng.randrange(12)
            case "v":
                return rng.choice([None, None, 0, 0, *range(1, 8)])
            case "s":
                return self.ground.new_serial()
            case name if name in self._texts:
                return rng.choice(["01", "1", "eu", None])
        if not isinstance(kind, dict):
            return rng.choice(VALUES[kind])
        if rng.random() < 0.3:
            return None
        if kind["type"] == "struct":
            return {inner["name"]: self.value(inner) for inner in kind["fields"]}
        return [rng.choice(VALUES[kind["element"]]) for _ in range(rng.randrange(3))]

    def write(self, rows: Sequence[dict[str, Any]]) -> list[File]:
        """Write new data files. Some lack field ids, bounds, or columns whose value is in their partition."""
        rng, table = self.rng, self.table
        mapped = self.is_mapped and rng.random() < 0.4
        specs = table.meta["partition-specs"]
        spec = rng.choice(specs)["spec-id"] if rng.random() < 0.2 else table.meta["default-spec-id"]
        identity_ids = {part["source-id"] for part in find_spec(table.meta, spec) if part["transform"] == "identity"}
        without = (
            {field["name"] for field in table.fields if field["id"] in identity_ids} if rng.random() < 0.3 else set()
        )
        form, bounds = rng.choice(self.forms), rng.random() < 0.8
        return table.data(rows, form, ids=not mapped, bounds=bounds, spec=spec, without=without)

    @property
    def is_mapped(self) -> bool:
        return "schema.name-mapping.default" in self.table.meta["properties"]

    def data_files(self) -> list[Entry]:
        return [entry for entry in self.table.live() if entry.file["content"] == DATA]

    def some_files(self) -> list[Entry]:
        files = self.data_files()
        return self.rng.sample(files, min(len(files), self.rng.randint(1, 4)))

    def append(self) -> None:
        self.table.commit(self.write(self.drawn(self.rng.randrange(1, 15))))

    def rewrite_rows(self) -> None:
        """Delete and update rows as engines do that copy on write."""
        files = self.some_files()[:2]
        rows = [row for entry in files for _, row in self.table.live_rows(entry) if self.rng.random() < 0.7]
        changed = [{**row, "c": "changed"} if self.rng.random() < 0.3 else row for row in rows]
        self.table.commit(self.write(changed), files)

    def remove_file(self) -> None:
        self.table.commit([], self.some_files()[:1])

    def compact(self) -> None:
        """Rewrite files without their deleted rows, sometimes with the last sequence number. Deletes may stay that apply to nothing."""
        table, rng = self.table, self.rng
        files = replaced = self.some_files()
        if rng.random() < 0.2:
            files, replaced = self.data_files(), table.live()
        sequence = table.meta.get("last-sequence-number", 0) if rng.random() < 0.5 else None
        new_files = self.write([row for entry in files for _, row in table.live_rows(entry)])
        table.commit(new_files, replaced, "replace", sequence=sequence)

    def rewrite_manifests(self) -> None:
        self.table.commit(rewrite=True)

    def delete_equal(self) -> None:
        """Delete by value rows that exist, rows that do not, and nulls: in one partition, or, with a spec without fields, in all."""
        table, rng = self.table, self.rng
        specs = table.meta["partition-specs"]
        free = [spec["spec-id"] for spec in specs if all(part["transform"] == "void" for part in spec["fields"])]
        files = self.some_files()
        if not files:
            return
        entry, add = rng.choice(files), []
        for _ in range(rng.choice([1, 1, 2])):
            columns = sorted({*rng.sample(self.equality_columns(), rng.choice([1, 1, 1, 2]))})
            candidates = [row for _, row in table.live_rows(entry)] + self.drawn(2)
            rows = [_project(row, columns) for row in rng.sample(candidates, min(len(candidates), rng.randint(1, 4)))]
            if rng.random() < 0.5:
                rows.append(dict.fromkeys({column.partition(".")[0] for column in columns}))
            of: dict[str, Any] = {"spec": entry.file["spec_id"], "partition": entry.file["partition"]}
            if free and rng.random() < 0.6:
                spec = rng.choice(free)
                of = {"spec": spec, "partition": {part["name"]: None for part in find_spec(table.meta, spec)}}
            add.append(table.equality(rows, columns, rng.choice(self.forms), bounds=rng.random() < 0.7, **of))
        new_rows = [{**row, "s": self.ground.new_serial()} for row in rng.sample(candidates, min(len(candidates), 2))]
        self._deleted += candidates
        table.commit(add + (self.write(new_rows) if rng.random() < 0.5 else []))

    def upsert_often(self) -> None:
        """Many commits without a compaction, as Flink makes them: each deletes by value what it writes anew, in a partition or in all."""
        table, rng = self.table, self.rng
        columns = sorted({*rng.sample(self.equality_columns(), rng.choice([1, 1, 2]))})
        for _ in range(rng.randint(4, 8)):
            rows, deletes = self.drawn(rng.randint(1, 3)), []
            for row in rows:
                how = {"form": rng.choice(self.forms), "partition": table.make_partition(row)}
                deletes.append(table.equality([_project(row, columns)], columns, **how))
            table.commit([*deletes, *self.write(rows)])

    def equality_columns(self) -> list[str]:
        """Columns by which rows may be deleted: one field of each struct, and the keys more often."""
        columns = [*["id"] * 3, *["c", "v"] * 4]
        for field in self.table.fields:
            if not isinstance(field["type"], dict):
                columns.append(field["name"])
            elif field["type"]["type"] == "struct":
                columns.append(f"{field['name']}.{self.rng.choice(field['type']['fields'])['name']}")
        return columns

    def places_in(self, entry: Entry) -> list[int]:
        count = entry.file["record_count"]
        return sorted(self.rng.sample(range(count), self.rng.randint(1, count)))

    def delete_positions(self) -> None:
        """Delete positions in one data file, or in several of a partition, by one delete file."""
        table, rng, files = self.table, self.rng, self.some_files()
        if not files:
            return
        same_partition = [entry for entry in files if entry.partition == files[0].partition][: rng.choice([1, 1, 3])]
        places = [(entry.file, place) for entry in same_partition for place in self.places_in(entry)]
        referenced = len(same_partition) == 1 and rng.random() < 0.5
        how: dict[str, Any] = {"form": rng.choice(self.forms), "bounds": rng.choice([None, 16, 1000])}
        delete_file = table.positions(places, referenced=referenced, **how)
        table.commit([delete_file] + (self.write(self.drawn(2)) if rng.random() < 0.3 else []))

    def delete_by_vectors(self) -> None:
        """Delete rows by deletion vectors. A data file has only one, which includes the rows that were deleted before."""
        table = self.table
        files = self.some_files()
        if not files:
            return
        deleted_places = {entry.file["file_path"]: table.deleted_places(entry) for entry in files}
        old = [
            entry
            for entry in table.live()
            if is_vector(entry.file) and entry.file["referenced_data_file"] in deleted_places
        ]
        vectors = [(entry.file, [*self.places_in(entry), *deleted_places[entry.file["file_path"]]]) for entry in files]
        table.commit(table.vectors(vectors), old)

    def evolve(self) -> None:
        table, rng = self.table, self.rng
        default = find_spec(table.meta, table.meta["default-spec-id"])
        partitioned = {part["source-id"] for part in default if part["transform"] != "void"}
        free = [field for field in table.fields if field["name"] not in self.keys and field["id"] not in partitioned]
        changeable = [field for field in free if field["name"] not in self._fixed]
        way = rng.choice(["add", "add", "rename", "drop", "again", "widen", "widen", "reorder", "inside"])
        if way == "add" or not changeable:
            kind = rng.choice([*DEFAULTS])
            default_value = DEFAULTS[kind] if table.meta["format-version"] > 2 and rng.random() < 0.7 else None
            table.add_column(f"new{table.next_id}", kind, default_value)
        elif way == "rename":
            field = rng.choice(changeable)
            names = {field["name"] for field in table.fields}
            freed = sorted({field["name"] for schema in table.meta["schemas"] for field in schema["fields"]} - names)
            name = rng.choice(
                [f"{field['name']}_", *(free_name for free_name in freed if self.may_be(free_name, field["type"]))]
            )
            table.change_column(field["name"], name=name)
        elif way == "drop":
            table.drop_column(rng.choice(changeable)["name"])
        elif way == "again":
            field = rng.choice(free)
            kind = field["type"] if not isinstance(field["type"], dict) else "string"
            if self.may_be(field["name"], kind):
                table.drop_column(field["name"])
                table.add_column(field["name"], kind)
        elif way == "widen":
            narrow = [field for field in table.fields if not isinstance(field["type"], dict) and field["type"] in WIDER]
            if narrow:
                field = rng.choice(narrow)
                table.change_column(field["name"], type=WIDER[field["type"]])
        elif way == "reorder":
            table.evolve(rng.sample(table.fields, len(table.fields)))
        elif way == "inside":
            structs = [field for field in free if isinstance(field["type"], dict) and field["type"]["type"] == "struct"]
            if structs:
                self.evolve_inside(structs[0])

    def may_be(self, name: str, kind: Kind) -> bool:
        """Whether a column may take a name. If a name mapping finds the columns of files, all columns of that name must have one type."""
        schemas = self.table.meta["schemas"]
        kinds = [field["type"] for schema in schemas for field in schema["fields"] if field["name"] == name]
        return not self.is_mapped or all(other_kind == kind for other_kind in kinds)

    def evolve_inside(self, field: Field) -> None:
        """Add a field to a struct, or widen or rename one."""
        inner = [dict(inner_field) for inner_field in field["type"]["fields"]]
        inner_field = self.rng.choice(inner)
        if inner_field["type"] == "int" and self.rng.random() < 0.5:
            inner_field["type"] = "long"
        elif self.rng.random() < 0.3:
            inner_field["name"] += "_"
        else:
            number = self.table.next_id
            new = {"id": number, "name": f"in{number}", "required": False, "type": "string"}
            if self.table.meta["format-version"] > 2:
                new |= {"initial-default": "inner", "write-default": "inner"}
            inner.append(new)
        self.table.change_column(field["name"], type={"type": "struct", "fields": inner})

    def evolve_spec(self) -> None:
        spec = self.rng.choice(self._specs({field["name"]: field["type"] for field in self.table.fields}))
        self.table.set_spec(spec)

    def refer(self) -> None:
        if self.rng.random() < 0.5:
            self.table.add_branch(self.rng.choice(["audit", "b/2"]))
        else:
            self.table.add_tag(f"tag{self.ground.new_serial()}")

    def write_branch(self) -> None:
        """Append to a branch; then it may become the main one."""
        branches = [name for name, ref in self.table.meta["refs"].items() if ref["type"] == "branch" and name != "main"]
        if branches:
            snapshot_id = self.table.commit(self.write(self.drawn(3)), branch=self.rng.choice(branches))
            if self.rng.random() < 0.3:
                self.table.set_current(snapshot_id)

    def roll_back(self) -> None:
        self.table.set_current(self.rng.choice(self.table.meta["snapshots"])["snapshot-id"])

    def expire(self) -> None:
        self.table.expire(self.rng.randint(1, 4))

    def upgrade(self) -> None:
        self.table.upgrade(self.table.meta["format-version"] + 1)

    def map_names(self) -> None:
        self.table.map_names()

    def _specs(self, columns: Mapping[str, Kind]) -> list[list[tuple[str, str]]]:
        """The specs of `SPECS` that fit these columns, and, three times, the one of the columns of text."""

        def fits(name: str) -> bool:
            kinds = (COLUMNS.get(name), WIDER.get(str(COLUMNS.get(name))))
            return name in columns and columns[name] in kinds

        text_specs = [[(name, "identity") for name in self._texts]] * 3 if self._texts else []
        return text_specs + [spec for spec in SPECS if all(fits(name) for name, _ in spec)]


def _project(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """Some columns of a row. `struct.field` names the field of a struct."""
    projected = {}
    for column in columns:
        name, _, inner = column.partition(".")
        value = row[name]
        projected[name] = value if not inner or value is None else {inner: value[inner]}
    return projected
