"""Checkpoints of a Delta log: finds the complete ones in a listing, and reads their actions."""

from __future__ import annotations

import dataclasses
import decimal
import json
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq

from pyspark_lookup.core.decoding import UNREADABLE, as_count, as_text
from pyspark_lookup.core.memory import check_room
from pyspark_lookup.errors import DamagedFileError, raise_ours
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.delta.actions import parse_actions
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion

_NAME = re.compile(
    r"(?P<version>\d{20})\.checkpoint"
    r"(?:\.(?P<part>\d{10})\.(?P<parts>\d{10})|\.(?P<uuid>[0-9a-fA-F-]{36}))?\.(?P<format>parquet|json)"
)
_COLUMNS = {
    "add": (
        "path",
        "partitionValues",
        "size",
        "modificationTime",
        "dataChange",
        "stats",
        "stats_parsed",
        "deletionVector",
    ),
    "metaData": None,
    "protocol": None,
    "sidecar": ("path", "sizeInBytes"),
}
"""The columns of a checkpoint that are read: of each these fields, or all."""

_ROW_BYTES = 1000  # of memory per file, approximately
_CHECKED_BYTES = 64 * 1024 * 1024  # after this many, free memory is checked

Read = Callable[[Sequence[FileVersion]], list[bytes]]


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint: its version, and the files that it is made of."""

    version: int
    files: tuple[FileVersion, ...]


def find_checkpoints(files: Sequence[FileVersion]) -> list[Checkpoint]:
    """The complete checkpoints in a listing, the newest first."""
    checkpoints: list[Checkpoint] = []
    parts: dict[tuple[int, int], dict[int, FileVersion]] = {}
    for file in files:
        match = _NAME.fullmatch(file.url.rsplit("/", 1)[-1])
        if match is None:
            continue
        version = int(match["version"])
        if match["part"] is None:
            if match["uuid"] is not None or match["format"] == "parquet":
                checkpoints.append(Checkpoint(version, (file,)))
        else:
            parts.setdefault((version, int(match["parts"])), {})[int(match["part"])] = file
    for (version, count), part_files in parts.items():
        if (len(part_files), min(part_files), max(part_files)) == (count, 1, count):
            checkpoints.append(Checkpoint(version, tuple(part_files[number] for number in sorted(part_files))))
    # Of one version, a checkpoint in a single file comes first, because the parts of another may come from two writers.
    return sorted(
        checkpoints, key=lambda checkpoint: (-checkpoint.version, len(checkpoint.files), checkpoint.files[0].url)
    )


def read_checkpoint(checkpoint: Checkpoint, read: Read) -> Iterator[dict[str, Any]]:
    """The actions of a checkpoint, with those of its sidecars. Raises DamagedFileError."""
    directory = checkpoint.files[0].url.rsplit("/", 1)[0]
    sidecars: list[FileVersion] = []
    for file, data in zip(checkpoint.files, read(checkpoint.files), strict=True):
        for action in _actions(file, data):
            sidecar = action.get("sidecar")
            if sidecar is None:
                yield action
            else:
                path = unquote(as_text(sidecar["path"]))
                url = path if ":" in path or path.startswith("/") else f"{directory}/_sidecars/{path}"
                sidecars.append(FileVersion(url, as_count(sidecar["sizeInBytes"]), IMMUTABLE))
    for file, data in zip(sidecars, read(sidecars), strict=True):
        yield from _actions(file, data)


def _actions(file: FileVersion, data: bytes) -> Iterator[dict[str, Any]]:
    redacted_path = redact("path", file.url)
    try:
        if file.url.endswith(".json"):
            yield from parse_actions(data, redacted_path)
            return
        # Spark writes bounds of instants as INT96, which may be in the year 9999.
        source = pq.ParquetFile(
            pa.BufferReader(data), page_checksum_verification=True, coerce_int96_timestamp_unit="us"
        )
        columns = {field.name: field for field in source.schema_arrow}
        selected_columns: list[str] = []
        for name, fields in _COLUMNS.items():
            if name in columns:
                field_names = [field.name for field in columns[name].type]
                selected_columns += (
                    [name] if fields is None else [f"{name}.{field}" for field in fields if field in field_names]
                )
        new = 0  # files; other rows, such as those of removed files, are dropped
        for batch in source.iter_batches(columns=selected_columns):
            new += batch.num_rows - batch.column("add").null_count if "add" in columns else 0
            if new * _ROW_BYTES > _CHECKED_BYTES:
                check_room(new * _ROW_BYTES, f"{redacted_path}: {new} rows of a Delta checkpoint")
                new = 0
            for action in _to_rows(batch):
                add = action.get("add")
                if add is not None and not add.get("stats") and add.get("stats_parsed"):
                    add["stats"] = json.dumps(add["stats_parsed"], default=_json_of_value)
                yield action
    except (*UNREADABLE, pa.ArrowException, OSError) as problem:
        raise_ours(DamagedFileError(f"{redacted_path} is not a Delta checkpoint: {problem}"), problem)


def _to_rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    try:
        return list(batch.to_pylist())
    except (OverflowError, ValueError):  # Python lacks such a day or time; the other bounds can still be used
        place = batch.schema.get_field_index("add")
        if place < 0:
            raise
        add = batch.column(place)
        fields = [field for field in add.type if field.name != "stats_parsed"]
        slim_add = pa.StructArray.from_arrays(
            [add.field(field.name) for field in fields], fields=fields, mask=add.is_null()
        )
        return list(batch.set_column(place, "add", slim_add).to_pylist())


def _json_of_value(value: Any) -> str | float:
    """A value of `stats_parsed` in the form that JSON statistics use, where a decimal is a number with a double's digits."""
    if isinstance(value, decimal.Decimal):
        return float(value)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
