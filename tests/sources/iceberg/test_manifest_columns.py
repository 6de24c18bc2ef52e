"""Manifests that are decoded as columns: file by file what PyIceberg's decoder makes of them."""

import decimal
import io
import itertools
import json
import random
import zlib
from pathlib import Path
from typing import Any

import fastavro
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.sources.iceberg import manifest_columns
from pyspark_lookup.sources.iceberg.entries import Entry, Manifest
from pyspark_lookup.sources.iceberg.entry_columns import EntryBuilder
from pyspark_lookup.sources.iceberg.manifest_reader import ManifestReader
from pyspark_lookup.sources.iceberg.manifests import read_manifest
from pyspark_lookup.sources.iceberg.source import IcebergSource
from tests.support.fuzzing import damaged, fuzzed, seeds
from tests.support.iceberg_manifests import ADDED, DELETED, EXISTING, write_manifest
from tests.support.iceberg_manifests import Entry as Written
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import opened
from tests.support.orc_files import varint

KINDS = {"i": "int", "d": "date", "f": "double", "s": "string", "b": "boolean", "n": "decimal(12,2)", "u": "uuid", "t": "timestamp", "x": "fixed[3]"}  # fmt: skip
PARTS = {"i": -70000, "d": 20000, "f": 0.5, "s": "ü" * 70, "b": True, "n": decimal.Decimal("1.50"), "u": bytes(16), "t": 1 << 50, "x": b"abc"}  # fmt: skip


def decode_files(manifests: list[tuple[Manifest, bytes]], as_columns: bool) -> list[str]:
    """What is known of each file, by either decoder."""
    builder = EntryBuilder(None, "table", lambda location: location, lambda entry: None)
    entries: list[Entry] = []
    if as_columns:
        for manifest, _ in manifests:
            builder.begin(manifest.location)
        for batch in manifest_columns.decode_manifests(manifests):
            assert {(entry.format, entry.partition) for entry in batch.samples} or not len(batch.locations)
            builder.add_batch(batch)
        columns = builder.finish(())
        entries = [columns.entry(row) for row in range(columns.rows)]
    else:
        for manifest, data in manifests:
            entries += read_manifest(manifest, data)
    sides = ("lower", "upper", "nulls", "values")
    values = ("location", "content", "format", "spec_id", "partition_ids", "partition", "sequence", "size", "rows")
    rows = [
        (*(getattr(entry, name) for name in values), *(sorted(getattr(entry, side).items()) for side in sides))
        for entry in entries
    ]
    return sorted(map(repr, rows))


def make_bound(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice([0, 1, 4, 8, 8, 8, 16, 63, 64, 200]))


def make_file(rng: random.Random, number: int, parts: dict[str, Any]) -> dict[str, Any]:
    """A file with counts and bounds of some columns."""
    ids = rng.choice([[1, 2, 3], [*range(1, 9)], [*range(60, 70), 9000, 2**31 - 1], rng.sample(range(90), 20), []])
    numbers = [0, 1, 63, 64, 1000, 8191, 8192, 2**40, 2**63 - 1, -1, -(2**63)]
    few = lambda: ids if rng.random() < 0.7 else rng.sample(ids, len(ids) // 2)  # noqa: E731
    width = rng.choice([None, 8])
    file: dict[str, Any] = {
        "content": 0,
        "file_path": f"file:/t/data/{'ü' * rng.choice([0, 40])}{number:07}.parquet",
        "file_format": rng.choice(["PARQUET", "parquet", "orc"]),
        "partition": {name: rng.choice([value, None]) for name, value in parts.items()},
        "record_count": rng.choice(numbers),
        "file_size_in_bytes": rng.choice(numbers),
        "split_offsets": rng.choice([None, [4], [4, 2**30]]),
    }
    for name in ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts"):
        file[name] = rng.choice([None, {id_: rng.choice(numbers[:6] if width else numbers) for id_ in few()}])
    for name in ("lower_bounds", "upper_bounds"):
        file[name] = rng.choice([None, {id_: rng.randbytes(width) if width else make_bound(rng) for id_ in few()}])
    return file


def make(path: Path, rng: random.Random, version: int, count: int) -> tuple[Manifest, bytes]:
    """A manifest of so many files."""
    parts = rng.choice([{}, {"i": 1}, {"s": "x", "b": False}, PARTS])
    fields = [(name, "identity") for name in parts]
    table = IcebergTable.create(path.with_suffix(""), KINDS, version, fields)
    spec = table.meta["partition-specs"][0]["fields"]
    parts = {field["name"]: value for field, value in zip(spec, parts.values(), strict=True)}
    entries = []
    for number in range(count):
        status = rng.choice([ADDED, EXISTING, DELETED]) if rng.random() < 0.3 else ADDED
        file = make_file(rng, number, parts) | {"spec_id": 0}
        entries.append((status, Written(file, rng.choice([7, 3]), 7, 1)))
    listed = write_manifest(path, table.meta, 0, 1, 7, entries)
    spec_id = rng.choice([0, None])
    return Manifest(str(path), listed["manifest_length"], spec_id, 7 if version > 1 else 0, count), path.read_bytes()


@pytest.mark.parametrize("seed", seeds(2))
def test_manifests_as_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Several manifests with other partitions and schemas give the same by either decoder, in batches of any size."""
    rng = random.Random(seed)
    monkeypatch.setattr(manifest_columns, "_BATCH_RECORDS", rng.choice([1, 3, 1024]))
    monkeypatch.setattr(manifest_columns, "_BATCH_BYTES", rng.choice([1, 20_000, 2**23]))
    manifests = [
        make(tmp_path / f"{number}.avro", rng, rng.choice([1, 2, 3]), rng.choice([1, 5, 60]))
        for number in range(rng.choice([1, 4]))
    ]
    decoded = decode_files(manifests, as_columns=True)
    assert decoded == decode_files(manifests, as_columns=False)


def encode(kind: Any, value: Any, rng: random.Random) -> bytes:
    """A value in Avro, with maps and lists in blocks as the specification allows: of any number, with or without their bytes in front."""
    if isinstance(kind, list):
        return varint(0) if value is None else varint(2) + encode(kind[1], value, rng)
    if isinstance(kind, dict) and kind["type"] == "record":
        return b"".join(encode(field["type"], value[field["name"]], rng) for field in kind["fields"])
    if isinstance(kind, dict) and kind["type"] == "array":
        blocks, remaining = b"", list(value)
        while remaining:
            count = rng.randint(1, len(remaining))
            items = b"".join(encode(kind["items"], item, rng) for item in remaining[:count])
            blocks += varint(2 * count) if rng.random() < 0.5 else varint(2 * count - 1) + varint(2 * len(items))
            blocks, remaining = blocks + items, remaining[count:]
        return blocks + varint(0)
    name = kind["type"] if isinstance(kind, dict) else kind
    if name in ("string", "bytes"):
        data = value.encode() if name == "string" else value
        return varint(2 * len(data)) + data
    assert name in ("int", "long"), kind
    return varint(2 * value if value >= 0 else -2 * value - 1)


@pytest.mark.parametrize("seed", seeds(1))
def test_maps_in_several_blocks(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    table = IcebergTable.create(tmp_path / "t", KINDS, 2, [])
    files = [make_file(rng, number, {}) | {"spec_id": 0} for number in range(20)]
    path = tmp_path / "m.avro"
    write_manifest(path, table.meta, 0, 1, 7, [(ADDED, Written(file, 7, 7, 1)) for file in files])
    data = path.read_bytes()
    reader: Any = fastavro.reader(io.BytesIO(data))
    records, schema = list(reader), json.loads(reader.metadata["avro.schema"])
    header = data[: data.index(data[-16:]) + 16]
    for cut in (0, 7):
        blocks = b""
        for batch in (records[:cut], records[cut:]):
            packer = zlib.compressobj(wbits=-15)
            block = packer.compress(b"".join(encode(schema, record, rng) for record in batch)) + packer.flush()
            blocks += varint(2 * len(batch)) + varint(2 * len(block)) + block + data[-16:]
        manifests = [(Manifest(str(path), None, 0, 7), header + blocks)]
        decoded = decode_files(manifests, as_columns=True)
        assert decoded == decode_files(manifests, as_columns=False)
        assert len(decoded) == 20


def test_damaged_manifests(tmp_path: Path) -> None:
    """Either decoder says the same of a manifest, or the one for columns says that it is unusual."""
    rng = random.Random(5)
    manifests = [make(tmp_path / f"{number}.avro", rng, 2, 6) for number in range(6)]
    plain = []
    for manifest, data in manifests:
        reader: Any = fastavro.reader(io.BytesIO(data))
        meta = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
        out = io.BytesIO()
        fastavro.writer(out, reader.writer_schema, list(reader), codec="null", metadata=meta)
        plain.append((manifest, out.getvalue()))

    def outcome(manifest: Manifest, data: bytes, as_columns: bool) -> Any:
        try:
            return decode_files([(manifest, data)], as_columns)
        except Exception:
            return None

    @fuzzed(60)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        manifest, whole = data.draw(st.sampled_from(plain))
        start = whole.index(whole[-16:]) + 18  # behind the header
        changed = whole[:start] + data.draw(damaged(whole[start:]))
        actual = outcome(manifest, changed, True)
        if actual is not None:
            assert actual == outcome(manifest, changed, False)

    check()


def test_no_entry_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped_from: int) -> None:
    """Manifests of a large table are decoded without an object for each entry."""
    table = IcebergTable.create(tmp_path / "t", {"id": "int", "name": "string"}, 2)
    for start in range(0, 60, 20):
        files = [table.data([{"id": number, "name": "x"}]) for number in range(start, start + 20)]
        table.commit([*itertools.chain(*files)])
    decoded: list[Manifest] = []
    monkeypatch.setattr(ManifestReader, "_decode", lambda self, manifest, data: decoded.append(manifest))
    monkeypatch.setattr(IcebergSource, "mapped_from", 10)
    reader = opened(table.home, tmp_path / "cache", keys="id")
    assert [row["id"] for row in reader.get(45)] == [45]
    assert reader.scan().num_rows == 60
    assert not decoded
