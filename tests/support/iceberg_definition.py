"""The metadata of Iceberg tables that tests write: columns, name mappings, specs, and how a new metadata.json is published."""

import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pyiceberg.catalog.sql import IcebergTables, SqlCatalog
from sqlalchemy import update

from tests.support.iceberg_manifests import Meta, find_spec
from tests.support.iceberg_values import Field, Kind

Publish = Callable[[str], None]
_Table = TypeVar("_Table", bound="Definition")
_MAPPING = "schema.name-mapping.default"


def sql_catalog(home: Path) -> tuple[SqlCatalog, dict[str, str]]:
    """A catalog in a file of a directory, and its properties; it has the namespace `ns`."""
    properties = {"type": "sql", "uri": f"sqlite:///{home / 'catalog.db'}"}
    catalog = SqlCatalog("tests", **{**properties, "warehouse": home.as_uri()})
    catalog.create_namespace_if_not_exists("ns")
    return catalog, properties


def in_catalog(catalog: SqlCatalog, identifier: str) -> Publish:
    """A way to publish: as a table of a catalog, of which the namespace exists."""

    def publish(location: str) -> None:
        if not catalog.table_exists(identifier):
            catalog.register_table(identifier, location)
            return
        namespace, _, name = identifier.rpartition(".")
        row = (IcebergTables.table_namespace == namespace) & (IcebergTables.table_name == name)
        with catalog.engine.begin() as connection:
            connection.execute(update(IcebergTables).where(row).values(metadata_location=location))

    return publish


class Definition:
    """The metadata.json of a table on this disk: each change is one of its own, which `version-hint.text` or a catalog names."""

    def __init__(self, home: Path, meta: Meta, publish: Publish | None = None) -> None:
        self.home, self.meta, self.publish = home, meta, publish
        self._number = 0
        self.metadata = home / "metadata" / "none"
        """The current metadata.json."""

    @classmethod
    def create(
        cls: type[_Table],
        home: Path,
        columns: Mapping[str, Kind],
        version: int = 2,
        spec: Sequence[tuple[str, str]] = (),
        publish: Publish | None = None,
        location: str | None = None,
    ) -> _Table:
        """An empty table. `spec`: as `[("id", "bucket[4]")]`; `location`: what the metadata says, if not the URL of `home`."""
        fields = [{"id": number, "name": name, "required": False, "type": kind} for number, (name, kind) in enumerate(columns.items(), 1)]  # fmt: skip
        meta = {
            "format-version": version, "table-uuid": str(uuid.uuid4()), "location": location or home.as_uri(),
            "last-updated-ms": 0, "last-column-id": max(_field_ids({"type": "struct", "fields": fields})),
            "schemas": [{"type": "struct", "schema-id": 0, "fields": fields}], "current-schema-id": 0,
            "partition-specs": [{"spec-id": 0, "fields": []}], "default-spec-id": 0, "last-partition-id": 999,
            "sort-orders": [{"order-id": 0, "fields": []}], "default-sort-order-id": 0, "properties": {},
            "snapshots": [], "snapshot-log": [], "metadata-log": [], "refs": {},
        }  # fmt: skip
        table = cls(home, meta | ({"last-sequence-number": 0} if version > 1 else {}), publish)
        if version > 2:
            table.meta["next-row-id"] = 0
        if spec:
            table.meta["partition-specs"] = [{"spec-id": 0, "fields": table._spec_fields(spec, [])}]
        table.save()
        return table

    def save(self, at_ms: int | None = None) -> None:
        """Write metadata.json, and make it the current one."""
        meta = self.meta
        self._number += 1
        if meta["format-version"] == 1:
            meta["schema"] = self.schema
            meta["partition-spec"] = find_spec(meta, meta["default-spec-id"])
        meta["last-updated-ms"] = at_ms or self._now_ms()
        self.metadata = self.home / "metadata" / f"v{self._number}.metadata.json"
        self.metadata.parent.mkdir(parents=True, exist_ok=True)
        self.metadata.write_text(json.dumps(meta))
        if self.publish is not None:
            self.publish(f"{meta['location']}/metadata/{self.metadata.name}")
        else:
            (self.metadata.parent / "version-hint.text").write_text(str(self._number))

    def _now_ms(self) -> int:
        """Later than all before."""
        last: int = self.meta["last-updated-ms"]
        return max(int(time.time() * 1000), last + 1)

    def upgrade(self, version: int) -> None:
        """To a later format; the files stay."""
        self.meta["format-version"] = version
        for name in ("schema", "partition-spec"):
            self.meta.pop(name, None)
        self.meta.setdefault("last-sequence-number", 0)
        if version > 2:
            self.meta["next-row-id"] = 0
        self.save()

    @property
    def schema(self) -> dict[str, Any]:
        return next(schema for schema in self.meta["schemas"] if schema["schema-id"] == self.meta["current-schema-id"])

    @property
    def fields(self) -> list[Field]:
        return self.schema["fields"]

    def field(self, name: str) -> Field:
        return next(field for field in self.fields if field["name"] == name)

    def evolve(self, fields: Sequence[Field]) -> None:
        """Make these the columns; new ones have ids of `next_id` on."""
        number = max(schema["schema-id"] for schema in self.meta["schemas"]) + 1
        self.meta["schemas"].append({"type": "struct", "schema-id": number, "fields": [*fields]})
        self.meta["current-schema-id"] = number
        self.meta["last-column-id"] = max(self.meta["last-column-id"], *_field_ids(self.schema))
        if _MAPPING in self.meta["properties"]:
            self._map_names()
        self.save()

    @property
    def next_id(self) -> int:
        return int(self.meta["last-column-id"]) + 1

    def add_column(self, name: str, kind: Kind, default: Any = None) -> None:
        """`default`: what older rows have, as JSON; of format 3."""
        defaults = {} if default is None else {"initial-default": default, "write-default": default}
        self.evolve([*self.fields, {"id": self.next_id, "name": name, "required": False, "type": kind, **defaults}])

    def change_column(self, column: str, **to: Any) -> None:
        """As `name="other"` or `type="long"`."""
        self.evolve([{**field, **to} if field["name"] == column else field for field in self.fields])

    def drop_column(self, name: str) -> None:
        self.evolve([field for field in self.fields if field["name"] != name])

    def map_names(self) -> None:
        """Have a name mapping from now on, for files without field ids: of all names that columns have had, the last to have each."""
        self._map_names()
        self.save()

    def _map_names(self) -> None:
        mapping = _name_mapping([schema["fields"] for schema in self.meta["schemas"]])
        self.meta["properties"][_MAPPING] = json.dumps(mapping)

    def set_spec(self, spec: Sequence[tuple[str, str]]) -> None:
        """Partition what is written from now on by these. Format 1 keeps old fields, as `void`."""
        meta = self.meta
        old = find_spec(meta, meta["default-spec-id"]) if meta["format-version"] == 1 else []
        number = max(known_spec["spec-id"] for known_spec in meta["partition-specs"]) + 1
        meta["partition-specs"].append({"spec-id": number, "fields": self._spec_fields(spec, old)})
        meta["default-spec-id"] = number
        self.save()

    def _spec_fields(self, spec: Sequence[tuple[str, str]], old: Sequence[Field]) -> list[Field]:
        fields = [{**field, "transform": "void"} for field in old]
        for column, transform in spec:
            self.meta["last-partition-id"] += 1
            number = self.meta["last-partition-id"]
            name = (
                f"{column}_{number}" if transform == "identity" else f"{column}_{transform.partition('[')[0]}_{number}"
            )
            source = self.field(column)["id"]
            fields.append({"name": name, "transform": transform, "source-id": source, "field-id": number})
        return fields


def _inner(kind: Kind) -> list[Field]:
    """The fields of a struct, list or map."""
    if not isinstance(kind, dict):
        return []
    if kind["type"] == "struct":
        return list(kind["fields"])
    names = [name for name in ("element", "key", "value") if name in kind]
    return [{"id": kind[f"{name}-id"], "name": name, "type": kind[name]} for name in names]


def _field_ids(kind: Kind) -> Iterator[int]:
    for field in _inner(kind):
        yield field["id"]
        yield from _field_ids(field["type"])


def _name_mapping(states: Sequence[Sequence[Field]]) -> list[dict[str, Any]]:
    """Of the columns that a table, or the fields that a struct, has had: all names of each, unless a later one has taken a name."""
    owners = {field["name"]: field["id"] for fields in states for field in fields}
    by_id: dict[int, dict[str, Any]] = {}
    for name, number in owners.items():
        by_id.setdefault(number, {"field-id": number, "names": []})["names"].append(name)
    for number, entry in by_id.items():
        kinds = [_inner(field["type"]) for fields in states for field in fields if field["id"] == number]
        if any(kinds):
            entry["fields"] = _name_mapping(kinds)
    return [*by_id.values()]
