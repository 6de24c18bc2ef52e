"""Iceberg tables that change at random, by everything that the specification lets a writer do."""

from __future__ import annotations

import datetime
import decimal
import random
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyiceberg.table import Table

from tests.support.iceberg_definition import Publish
from tests.support.iceberg_manifests import Entry, File, spec_of
from tests.support.iceberg_oracle import DATA, EQUALITY, is_vector
from tests.support.iceberg_values import Field, Kind, arrow_field
from tests.support.iceberg_writing import IcebergTable

Load = Callable[[], Table]
KEYS = 30
_PLACE = {"type": "struct", "fields": [
    {"id": 101, "name": "x", "required": False, "type": "int"}, {"id": 102, "name": "y", "required": False, "type": "string"},
]}  # fmt: skip
_TAGS = {"type": "list", "element-id": 103, "element-required": False, "element": "string"}
COLUMNS: dict[str, Kind] = {
    "id": "int", "part": "string", "name": "string", "value": "float", "number": "int", "amount": "decimal(9, 2)", "day": "date",
    "at": "timestamptz", "local": "timestamp", "code": "uuid", "mark": "fixed[4]", "flag": "boolean", "place": _PLACE, "tags": _TAGS,
}  # fmt: skip
SPECS: list[list[tuple[str, str]]] = [
    [], [("part", "identity")], [("id", "bucket[3]")], [("part", "truncate[1]"), ("name", "identity")], [("at", "month")],
    [("day", "year"), ("flag", "identity")], [("local", "hour")], [("at", "day"), ("part", "void")], [("amount", "truncate[50]")],
    [("code", "bucket[2]")], [("day", "identity")], [("id", "truncate[10]")], [("number", "identity")],
]  # fmt: skip
WIDER = {"int": "long", "float": "double", "decimal(9, 2)": "decimal(18, 2)"}
DEFAULTS = {
    "long": 7,
    "string": "given",
    "date": "2020-02-29",
    "decimal(9, 2)": "1.50",
    "boolean": True,
    "double": -0.5,
}
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


class History:
    """A table, and `steps`, what was done to it."""

    def __init__(
        self,
        home: Path,
        rng: random.Random,
        publish: Publish | None = None,
        load: Load | None = None,
        peer: bool = False,
    ) -> None:
        """`load`: where the table is in a catalog, how PyIceberg finds it, which then writes, too; `peer`: do only what PyIceberg can read, so
        without equality deletes, and without UUIDs and fixed bytes in ORC."""
        self.rng = rng
        version = rng.choice([1, 2, 2, 3, 3])
        self.forms = rng.choice([["parquet"], ["parquet"], ["orc"], ["parquet", "orc"]])
        hidden = {"code", "mark"} if peer and "orc" in self.forms else set()
        columns = {name: kind for name, kind in COLUMNS.items() if name not in hidden}
        self.table = IcebergTable.create(home, columns, version, rng.choice(_specs_of(columns)), publish)
        self._load, self._peer = load, peer
        self.steps = [f"format {version}, {'/'.join(self.forms)}, {spec_of(self.table.meta, 0)}"]
        self.append()

    def step(self) -> None:
        """One operation of those that the table allows now."""
        version = self.table.meta["format-version"]
        ways: list[Callable[[], None]] = [
            self.append,
            self.append,
            self.rewrite_rows,
            self.remove_file,
            self.compact,
            self.compact,
        ]
        ways += [
            self.rewrite_manifests,
            self.evolve,
            self.evolve,
            self.evolve_spec,
            self.refer,
            self.refer,
            self.roll_back,
        ]
        ways += [self.expire, self.map_names, self.write_branch] + [self.upgrade] * (version < 3)
        ways += [self.delete_equal] * (5 * (version > 1 and not self._peer))
        ways += [self.delete_positions] * (3 * (version == 2)) + [self.delete_by_vectors] * (4 * (version == 3))
        if self._load is not None and version < 3:
            ways += [self.append_by_pyiceberg, self.overwrite_by_pyiceberg, self.delete_by_pyiceberg] * 2
        way = self.rng.choice(ways)
        self.steps.append(way.__name__)
        way()

    # --- rows ---------------------------------------------------------------------------------------

    def drawn(self, count: int) -> list[dict[str, Any]]:
        return [{field["name"]: self.value(field) for field in self.table.fields} for _ in range(count)]

    def value(self, field: Field) -> Any:
        kind, rng = field["type"], self.rng
        if field["name"] == "id":
            return rng.randrange(KEYS)
        if not isinstance(kind, dict):
            return rng.choice(VALUES[kind])
        if rng.random() < 0.3:
            return None
        if kind["type"] == "struct":
            return {inner["name"]: self.value(inner) for inner in kind["fields"]}
        return [rng.choice(VALUES[kind["element"]]) for _ in range(rng.randrange(3))]

    def write(self, rows: Sequence[dict[str, Any]]) -> list[File]:
        """New data files; some of them without field ids, bounds, or columns that their partition tells."""
        rng, table = self.rng, self.table
        mapped = self.is_mapped and rng.random() < 0.4
        spec = (
            rng.choice(table.meta["partition-specs"])["spec-id"]
            if rng.random() < 0.2
            else table.meta["default-spec-id"]
        )
        told = {one["source-id"] for one in spec_of(table.meta, spec) if one["transform"] == "identity"}
        without = {field["name"] for field in table.fields if field["id"] in told} if rng.random() < 0.3 else set()
        form, bounds = rng.choice(self.forms), rng.random() < 0.8
        self.steps[-1] += f" ({form}{', no ids' * mapped}, spec {spec}, without {sorted(without)})"
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
        """As engines that copy on write delete and update."""
        files = self.some_files()[:2]
        rows = [row for entry in files for _, row in self.table.rows_of(entry) if self.rng.random() < 0.7]
        changed = [{**row, "name": "changed"} if "name" in row and self.rng.random() < 0.3 else row for row in rows]
        self.table.commit(self.write(changed), files)

    def remove_file(self) -> None:
        self.table.commit([], self.some_files()[:1])

    def compact(self) -> None:
        """Rewrite files without their deleted rows; also as if they were no newer. Deletes may stay, of nothing."""
        table, rng = self.table, self.rng
        files = gone = self.some_files()
        if rng.random() < 0.2:
            files, gone = self.data_files(), table.live()
        sequence = table.meta.get("last-sequence-number", 0) if rng.random() < 0.5 else None
        made = self.write([row for entry in files for _, row in table.rows_of(entry)])
        table.commit(made, gone, "replace", sequence=sequence)

    def rewrite_manifests(self) -> None:
        self.table.commit(rewrite=True)

    # --- PyIceberg ----------------------------------------------------------------------------------

    def may_use_pyiceberg(self, reads: bool) -> bool:
        """It computes no partitions without another package; of what it rewrites, it reads neither equality deletes nor all of ORC."""
        meta, equality = self.table.meta, any(entry.file["content"] == EQUALITY for entry in self.table.live())
        plain = all(one["transform"] == "identity" for one in spec_of(meta, meta["default-spec-id"]))
        return plain and not (reads and (equality or "orc" in self.forms))

    def by_pyiceberg(self, act: Callable[[Table], None]) -> None:
        assert self._load is not None
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Delete operation did not match any records")
            act(self._load())
        self.table = IcebergTable.open(self._load().metadata_location, self.table.publish)

    def drawn_table(self) -> pa.Table:
        schema = pa.schema([arrow_field(field, "parquet") for field in self.table.fields])
        return pa.Table.from_pylist(self.drawn(8), schema)

    def append_by_pyiceberg(self) -> None:
        if self.may_use_pyiceberg(reads=False):
            self.by_pyiceberg(lambda table: table.append(self.drawn_table()))

    def overwrite_by_pyiceberg(self) -> None:
        if self.may_use_pyiceberg(reads=True):
            below = self.rng.randrange(KEYS)
            self.by_pyiceberg(lambda table: table.overwrite(self.drawn_table(), f"id < {below}"))

    def delete_by_pyiceberg(self) -> None:
        if self.may_use_pyiceberg(reads=True):
            self.by_pyiceberg(lambda table: table.delete(f"id > {self.rng.randrange(KEYS)}"))

    # --- deletes ------------------------------------------------------------------------------------

    def delete_equal(self) -> None:
        """Rows that are there, rows that are not, and nulls; for a partition or, of a spec without fields, for all."""
        table, rng = self.table, self.rng
        free = [
            spec["spec-id"]
            for spec in table.meta["partition-specs"]
            if all(one["transform"] == "void" for one in spec["fields"])
        ]
        files = self.some_files()
        if not files:
            return
        entry, add = rng.choice(files), []
        for _ in range(rng.choice([1, 1, 2])):
            columns = sorted({*rng.sample(self.equality_columns(), rng.choice([1, 1, 2]))})
            some = [row for _, row in table.rows_of(entry)] + self.drawn(2)
            rows = [_only(row, columns) for row in rng.sample(some, min(len(some), rng.randint(1, 4)))]
            of: dict[str, Any] = {"spec": entry.file["spec_id"], "partition": entry.file["partition"]}
            if free and rng.random() < 0.6:
                spec = rng.choice(free)
                of = {"spec": spec, "partition": {one["name"]: None for one in spec_of(table.meta, spec)}}
            self.steps[-1] += f" {columns} {'everywhere' if of['spec'] in free else 'in ' + repr(of['partition'])}"
            add.append(table.equality(rows, columns, rng.choice(self.forms), bounds=rng.random() < 0.7, **of))
        table.commit(add + (self.write(self.drawn(3)) if rng.random() < 0.5 else []))

    def equality_columns(self) -> list[str]:
        """Columns that may tell what is deleted, of a struct one field, and the keys more often."""
        found = ["id"] * 3
        for field in self.table.fields:
            if not isinstance(field["type"], dict):
                found.append(field["name"])
            elif field["type"]["type"] == "struct":
                found.append(f"{field['name']}.{self.rng.choice(field['type']['fields'])['name']}")
        return found

    def places_in(self, entry: Entry) -> list[int]:
        count = entry.file["record_count"]
        return sorted(self.rng.sample(range(count), self.rng.randint(1, count)))

    def delete_positions(self) -> None:
        """In files for one data file or for several of a partition."""
        table, rng, files = self.table, self.rng, self.some_files()
        if not files:
            return
        near = [entry for entry in files if entry.partition == files[0].partition][: rng.choice([1, 1, 3])]
        places = [(entry.file, place) for entry in near for place in self.places_in(entry)]
        referenced = len(near) == 1 and rng.random() < 0.5
        made = table.positions(
            places, rng.choice(self.forms), referenced=referenced, bounds=rng.choice([None, 16, 1000])
        )
        table.commit([made] + (self.write(self.drawn(2)) if rng.random() < 0.3 else []))

    def delete_by_vectors(self) -> None:
        """A file has one, which names what was deleted before, too."""
        table = self.table
        files = self.some_files()
        if not files:
            return
        gone = {entry.file["file_path"]: table.deleted_places(entry) for entry in files}
        old = [one for one in table.live() if is_vector(one.file) and one.file["referenced_data_file"] in gone]
        made = [(one.file, [*self.places_in(one), *gone[one.file["file_path"]]]) for one in files]
        table.commit(table.vectors(made), old)

    # --- metadata -----------------------------------------------------------------------------------

    def evolve(self) -> None:
        table, rng = self.table, self.rng
        default = spec_of(table.meta, table.meta["default-spec-id"])
        partitioned = {one["source-id"] for one in default if one["transform"] != "void"}
        free = [field for field in table.fields if field["name"] != "id" and field["id"] not in partitioned]
        way = rng.choice(["add", "add", "rename", "drop", "again", "widen", "widen", "reorder", "inside"])
        self.steps[-1] += f" {way}"
        if way == "add" or not free:
            kind = rng.choice([*DEFAULTS])
            default_value = DEFAULTS[kind] if table.meta["format-version"] > 2 and rng.random() < 0.7 else None
            table.add_column(f"new{table.next_id}", kind, default_value)
        elif way == "rename":
            field = rng.choice(free)
            names = {one["name"] for one in table.fields}
            freed = sorted({one["name"] for schema in table.meta["schemas"] for one in schema["fields"]} - names)
            name = rng.choice([f"{field['name']}_", *(one for one in freed if self.may_be(one, field["type"]))])
            table.change_column(field["name"], name=name)
        elif way == "drop":
            table.drop_column(rng.choice(free)["name"])
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
        """Whether a column may take a name: where names tell the columns of files, all of the name are of one type."""
        schemas = self.table.meta["schemas"]
        had = [field["type"] for schema in schemas for field in schema["fields"] if field["name"] == name]
        return not self.is_mapped or all(one == kind for one in had)

    def evolve_inside(self, field: Field) -> None:
        """A struct's fields: one more, a wider one, another name."""
        inner = [dict(one) for one in field["type"]["fields"]]
        one = self.rng.choice(inner)
        if one["type"] == "int" and self.rng.random() < 0.5:
            one["type"] = "long"
        elif self.rng.random() < 0.3:
            one["name"] += "_"
        else:
            number = self.table.next_id
            new = {"id": number, "name": f"in{number}", "required": False, "type": "string"}
            if self.table.meta["format-version"] > 2:
                new |= {"initial-default": "inner", "write-default": "inner"}
            inner.append(new)
        self.table.change_column(field["name"], type={"type": "struct", "fields": inner})

    def evolve_spec(self) -> None:
        spec = self.rng.choice(_specs_of({field["name"]: field["type"] for field in self.table.fields}))
        self.steps[-1] += f" {spec}"
        self.table.set_spec(spec)

    def refer(self) -> None:
        if self.rng.random() < 0.5:
            self.table.add_branch(self.rng.choice(["audit", "b/2"]))
        else:
            self.table.add_tag(f"tag{len(self.steps)}")

    def write_branch(self) -> None:
        """Append to a branch; then it may become the main one."""
        branches = [name for name, ref in self.table.meta["refs"].items() if ref["type"] == "branch" and name != "main"]
        if branches:
            made = self.table.commit(self.write(self.drawn(3)), branch=self.rng.choice(branches))
            if self.rng.random() < 0.3:
                self.table.set_current(made)

    def roll_back(self) -> None:
        self.table.set_current(self.rng.choice(self.table.meta["snapshots"])["snapshot-id"])

    def expire(self) -> None:
        self.table.expire(self.rng.randint(1, 4))

    def upgrade(self) -> None:
        self.table.upgrade(self.table.meta["format-version"] + 1)

    def map_names(self) -> None:
        self.table.map_names()


def _specs_of(columns: Mapping[str, Kind]) -> list[list[tuple[str, str]]]:
    """Those of `SPECS` that fit columns."""
    fits = {
        name: name in COLUMNS and kind in (COLUMNS[name], WIDER.get(str(COLUMNS[name])))
        for name, kind in columns.items()
    }
    return [spec for spec in SPECS if all(fits.get(name) for name, _ in spec)]


def _only(row: dict[str, Any], columns: Sequence[str]) -> dict[str, Any]:
    """A row with nothing but some columns, fields of structs as `struct.field`."""
    found = {}
    for column in columns:
        name, _, inner = column.partition(".")
        value = row[name]
        found[name] = value if not inner or value is None else {inner: value[inner]}
    return found
