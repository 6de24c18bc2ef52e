"""A writer of Iceberg tables, formats 1 to 3, for what PyIceberg does not write: format 3, delete files, deletion vectors, ORC."""

import dataclasses
import hashlib
import json
import struct
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

from tests.support.iceberg_definition import Definition
from tests.support.iceberg_manifests import ADDED, DELETED, EXISTING, Entry, File, find_spec, write_list, write_manifest
from tests.support.iceberg_oracle import DATA, EQUALITY, PATH_ID, PLACE_ID, POSITION, Oracle, is_vector
from tests.support.iceberg_values import Field, arrow_field, is_nan, ordered, transformed, truncated_bounds
from tests.support.lake_tables import roaring, sealed

Rows = Sequence[Mapping[str, Any]]
_ROW_POSITION = 2147483645
_DELETES = [{"id": PATH_ID, "name": "file_path", "type": "string"}, {"id": PLACE_ID, "name": "pos", "type": "long"}]


class IcebergTable(Definition):
    """A table on this disk: files are written first, and committed then."""

    def make_partition(self, row: Mapping[str, Any], spec: int | None = None) -> dict[str, Any]:
        """The partition in which a row of the current columns is written; dropped columns are null."""
        by_id = {field["id"]: field for field in self.fields}
        partition = {}
        for part in find_spec(self.meta, self.meta["default-spec-id"] if spec is None else spec):
            field = by_id.get(part["source-id"], {"name": "", "type": "int"})
            partition[part["name"]] = transformed(part["transform"], field["type"], row.get(field["name"]))
        return partition

    def data(
        self,
        rows: Rows,
        form: str = "parquet",
        *,
        ids: bool = True,
        bounds: bool = True,
        spec: int | None = None,
        without: Iterable[str] = (),
    ) -> list[File]:
        """Write rows of the current columns, a file for each partition, without field ids or some columns."""
        parts: dict[str, list[Mapping[str, Any]]] = {}
        for row in rows:
            parts.setdefault(repr(self.make_partition(row, spec)), []).append(row)
        fields = [field for field in self.fields if field["name"] not in {*without}]
        return [
            self._write(DATA, fields, part, form, self.make_partition(part[0], spec), spec, ids=ids, bounds=bounds)
            for part in parts.values()
        ]

    def equality(
        self,
        rows: Rows,
        columns: Sequence[str],
        form: str = "parquet",
        *,
        partition: Mapping[str, Any] | None = None,
        spec: int | None = None,
        bounds: bool = True,
    ) -> File:
        """Write an equality delete file over columns, those of a struct as `struct.field`, for a partition or, of a spec without fields, for all."""
        leaves = [_leaf(self.fields, column.split(".")) for column in columns]
        fields = [field for field, _ in leaves]
        numbers = [number for _, number in leaves]
        return self._write(EQUALITY, fields, rows, form, partition or {}, spec, bounds=bounds, equality_ids=numbers)

    def positions(
        self,
        places: Sequence[tuple[File, int]],
        form: str = "parquet",
        *,
        referenced: bool = False,
        bounds: int | None = 1000,
    ) -> File:
        """Write a position delete file for files of one partition. `referenced`: it names the only one; `bounds`: longest uncut paths in its bounds."""
        file = places[0][0]
        rows = [{"file_path": file["file_path"], "pos": place} for file, place in places]
        rows.sort(key=lambda row: (row["file_path"], row["pos"]))
        more = {"referenced_data_file": file["file_path"]} if referenced else {}
        file_entry = self._write(POSITION, _DELETES, rows, form, file["partition"], file["spec_id"], **more)
        if bounds is not None:
            low, high = truncated_bounds("string", rows[0]["file_path"], rows[-1]["file_path"], bounds)
            file_entry |= {"lower_bounds": {PATH_ID: low}} | ({} if high is None else {"upper_bounds": {PATH_ID: high}})
        return file_entry

    def vectors(self, many: Sequence[tuple[File, Iterable[int]]]) -> list[File]:
        """Write deletion vectors, in one Puffin file."""
        url = self._url("data", "puffin")
        blob, blobs, entries = b"PFA1", [], []
        for file, positions in many:
            places = sorted({*positions})
            data = sealed(roaring(places))
            vector_properties = {"referenced-data-file": file["file_path"], "cardinality": str(len(places))}
            blobs.append(
                {"type": "deletion-vector-v1", "fields": [_ROW_POSITION], "snapshot-id": -1, "sequence-number": -1}
                | {"offset": len(blob), "length": len(data), "properties": vector_properties}
            )
            entries.append(
                {"content": POSITION, "file_path": url, "file_format": "PUFFIN", "record_count": len(places)}
                | {"partition": file["partition"], "spec_id": file["spec_id"], "content_offset": len(blob)}
                | {"content_size_in_bytes": len(data), "referenced_data_file": file["file_path"]}
            )
            blob += data
        footer = json.dumps({"blobs": blobs}).encode()
        blob += b"PFA1" + footer + struct.pack("<i", len(footer)) + bytes(4) + b"PFA1"
        self.local(url).write_bytes(blob)
        return [file | {"file_size_in_bytes": len(blob)} for file in entries]

    def _url(self, directory: str, extension: str) -> str:
        """A place for a new file."""
        (self.home / directory).mkdir(parents=True, exist_ok=True)
        return f"{self.meta['location']}/{directory}/{uuid.uuid4()}.{extension}"

    def local(self, url: str) -> Path:
        return self.home / url.removeprefix(self.meta["location"] + "/")

    def _write(
        self,
        content: int,
        fields: Sequence[Field],
        rows: Rows,
        form: str,
        partition: Mapping[str, Any],
        spec: int | None,
        *,
        ids: bool = True,
        bounds: bool = False,
        **more: Any,
    ) -> File:
        schema = pa.schema([arrow_field(field, form, ids) for field in fields])
        packed = {field["name"] for field in fields if field["type"] == "uuid" and form == "orc"}
        table = pa.Table.from_pylist([{name: value.bytes if name in packed and value is not None else value for name, value in row.items()} for row in rows], schema)  # fmt: skip
        url = self._url("data", form)
        if form == "parquet":
            pq.write_table(table, self.local(url))
        else:
            orc.write_table(table, self.local(url))
        entry = {"content": content, "file_path": url, "file_format": form.upper(), "partition": dict(partition)}
        entry["spec_id"] = self.meta["default-spec-id"] if spec is None else spec
        entry |= {"record_count": len(rows), "file_size_in_bytes": self.local(url).stat().st_size}
        return entry | (_statistics(fields, table) if bounds else {}) | more

    def live(self) -> list[Entry]:
        return Oracle(self.metadata, branch="main").entries

    def live_rows(self, entry: Entry) -> list[tuple[int, dict[str, Any]]]:
        """The rows of a data file that are not deleted, by their positions."""
        return [*Oracle(self.metadata, branch="main").live_rows(entry)]

    def deleted_places(self, entry: Entry) -> set[int]:
        """The positions in a data file that position deletes or its deletion vector name."""
        return Oracle(self.metadata, branch="main").deleted_places(entry)

    def commit(
        self,
        add: Sequence[File] = (),
        remove: Sequence[Entry] = (),
        operation: str | None = None,
        *,
        branch: str = "main",
        rewrite: bool = False,
        sequence: int | None = None,
    ) -> int:
        """Make a snapshot, and its id. Deletion vectors of removed data files go, too. `rewrite`: put all files into new manifests;
        `sequence`: the data sequence number of the added files, if they are not new."""
        meta, oracle = self.meta, Oracle(self.metadata, branch=branch)
        sequence_number = meta.get("last-sequence-number", -1) + 1
        digest = hashlib.sha256(f"{branch} {len(meta['snapshots'])} {meta['last-updated-ms']}".encode()).digest()
        snapshot = int.from_bytes(digest[:8], "big") >> 2
        removed_keys = {entry.key for entry in remove}
        paths = {entry.file["file_path"] for entry in remove}
        groups: dict[tuple[int, int], list[tuple[int, Entry]]] = {}
        kept_manifests = []
        for manifest in oracle.manifests:
            if not remove and not rewrite:
                kept_manifests.append(manifest)
                continue
            marked = []
            for entry in oracle.read_entries(manifest):
                vector = is_vector(entry.file) and entry.file["referenced_data_file"] in paths
                if entry.key in removed_keys or vector:
                    marked.append((DELETED, dataclasses.replace(entry, snapshot=snapshot)))
                else:
                    marked.append((EXISTING, entry))
            if rewrite or any(status == DELETED for status, _ in marked):
                groups.setdefault((manifest["partition_spec_id"], manifest["content"]), []).extend(marked)
            else:
                kept_manifests.append(manifest)
        for file in add:
            entry = Entry(file, sequence_number if sequence is None else sequence, sequence_number, snapshot)
            groups.setdefault((file["spec_id"], min(file["content"], 1)), []).append((ADDED, entry))
        manifests = [
            self._manifest(spec, snapshot, sequence_number, entries) for (spec, _), entries in groups.items() if entries
        ] + kept_manifests
        change = "overwrite" if remove or any(file["content"] for file in add) else "append"
        self._add_snapshot(
            snapshot, sequence_number, manifests, operation or ("replace" if rewrite else change), branch
        )
        return snapshot

    def _manifest(
        self, spec: int, snapshot: int, sequence: int, entries: Sequence[tuple[int, Entry]]
    ) -> dict[str, Any]:
        url = self._url("metadata", "avro")
        return {"manifest_path": url, **write_manifest(self.local(url), self.meta, spec, snapshot, sequence, entries)}

    def _add_snapshot(
        self, snapshot: int, sequence: int, manifests: Sequence[Any], operation: str, branch: str
    ) -> None:
        meta, version = self.meta, self.meta["format-version"]
        url, at_ms = self._url("metadata", "avro"), self._now_ms()
        entry = {
            "snapshot-id": snapshot, "timestamp-ms": at_ms, "manifest-list": url, "summary": {"operation": operation},
        }  # fmt: skip
        entry["schema-id"] = meta["current-schema-id"]
        if branch in meta["refs"]:
            entry["parent-snapshot-id"] = meta["refs"][branch]["snapshot-id"]
        if version > 1:
            entry["sequence-number"] = meta["last-sequence-number"] = sequence
        if version > 2:
            first = meta["next-row-id"]
            for manifest in manifests:
                if not manifest["content"] and manifest.get("first_row_id") is None:
                    manifest["first_row_id"] = meta["next-row-id"]
                    meta["next-row-id"] += manifest["added_rows_count"] + manifest["existing_rows_count"]
            entry |= {"first-row-id": first, "added-rows": meta["next-row-id"] - first}
        write_list(self.local(url), meta, snapshot, sequence, manifests)
        meta["snapshots"].append(entry)
        self._point(branch, snapshot, at_ms)

    def _point(self, branch: str, snapshot: int, at_ms: int) -> None:
        self.meta["refs"][branch] = {"snapshot-id": snapshot, "type": "branch"}
        if branch == "main":
            self.meta["current-snapshot-id"] = snapshot
            self.meta["snapshot-log"].append({"snapshot-id": snapshot, "timestamp-ms": at_ms})
        self.save(at_ms)

    def set_current(self, snapshot: int) -> None:
        """Roll back, or forward."""
        self._point("main", snapshot, self._now_ms())

    def add_branch(self, name: str) -> None:
        self._point(name, self.meta["current-snapshot-id"], self._now_ms())

    def add_tag(self, name: str) -> None:
        self.meta["refs"][name] = {"snapshot-id": self.meta["current-snapshot-id"], "type": "tag"}
        self.save()

    def expire(self, keep: int) -> None:
        """Drop the snapshots that neither a branch nor a tag names, except the last ones, and the files that only they have."""
        meta = self.meta
        named = {ref["snapshot-id"] for ref in meta["refs"].values()}
        kept_snapshots = [
            entry_snapshot for entry_snapshot in meta["snapshots"][:-keep] if entry_snapshot["snapshot-id"] in named
        ] + meta["snapshots"][-keep:]
        before = self._list_files(meta["snapshots"])
        meta["snapshots"] = kept_snapshots
        log: list[Any] = []
        for entry in meta["snapshot-log"]:
            is_kept = any(entry_snapshot["snapshot-id"] == entry["snapshot-id"] for entry_snapshot in kept_snapshots)
            log = [*log, entry] if is_kept else []
        meta["snapshot-log"] = log
        after = self._list_files(kept_snapshots)
        self.save()
        for path in before - after:
            path.unlink()

    def _list_files(self, snapshots: Sequence[Mapping[str, Any]]) -> set[Path]:
        files = set()
        for snapshot in snapshots:
            oracle = Oracle(self.metadata, snapshot=snapshot["snapshot-id"])
            files |= {self.local(snapshot["manifest-list"])}
            files |= {self.local(manifest["manifest_path"]) for manifest in oracle.manifests}
            files |= {self.local(entry.file["file_path"]) for entry in oracle.entries}
        return files


def _leaf(fields: Sequence[Field], path: Sequence[str]) -> tuple[Field, int]:
    """A column with nothing but the field at a path, and the field's id."""
    field = next(field for field in fields if field["name"] == path[0])
    if len(path) == 1:
        return field, field["id"]
    inner, number = _leaf(field["type"]["fields"], path[1:])
    return {**field, "type": {"type": "struct", "fields": [inner]}}, number


def _statistics(fields: Sequence[Field], table: pa.Table) -> dict[str, Any]:
    """Counts and bounds of columns that are neither structs, lists nor maps."""
    statistics: dict[str, dict[int, Any]] = {"value_counts": {}, "null_value_counts": {}, "nan_value_counts": {}}
    statistics |= {"lower_bounds": {}, "upper_bounds": {}}
    for field, column in zip(fields, table.columns, strict=True):
        if isinstance(field["type"], dict):
            continue
        number = field["id"]
        values = [value for value in column.to_pylist() if value is not None]
        numbers = [value for value in values if not is_nan(value)]
        statistics["value_counts"][number] = len(column)
        statistics["null_value_counts"][number] = column.null_count
        if field["type"] in ("float", "double"):
            statistics["nan_value_counts"][number] = len(values) - len(numbers)
        if numbers:
            low, high = truncated_bounds(field["type"], min(numbers, key=ordered), max(numbers, key=ordered))
            statistics["lower_bounds"][number] = low
            if high is not None:
                statistics["upper_bounds"][number] = high
    return statistics
