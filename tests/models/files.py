"""A file, a directory or a link to a directory that anybody may write, and how each step changes what lies there."""

import contextlib
import functools
import os
import random
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import duckdb
import polars as pl
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

from tests.models.adapter import Ground, Table
from tests.models.answers import Content, Row, is_date, is_number, is_whole, partition_value
from tests.models.histories import Step
from tests.models.shapes import column, draw_numbers
from tests.models.values import ImpossibleError, converted, finished, shown, united_type

DataFile = tuple[Path, tuple[tuple[str, str | None], ...]]
"""A file, and the values that its directories say."""


def read_content(data_files: Iterable[DataFile], busy: bool) -> Content:
    """The content of these files, row by row and by the documented rules, without the package. `busy`: whether a job is writing there."""
    try:
        return _content(list(data_files), busy)
    except ImpossibleError as problem:
        return Content(problem=str(problem), busy=busy)


def _content(data_files: list[DataFile], busy: bool) -> Content:
    if not data_files:
        raise ImpossibleError("no files")
    if len({tuple(name for name, _ in values) for _, values in data_files}) > 1:
        raise ImpossibleError("files in different partition columns")
    files = [_read(path) for path, _ in data_files]
    types: dict[str, pa.DataType] = {}
    conflicts: dict[str, str] = {}
    for name in dict.fromkeys(field.name for schema, _, _ in files for field in schema):
        kinds = [shown(field.type) for schema, _, _ in files for field in schema if field.name == name]
        try:
            types[name] = united_type(kinds)
        except ImpossibleError as problem:
            conflicts[name] = str(problem)
    types |= dict.fromkeys(conflicts, pa.null())
    data = pa.schema([(name, finished(kind)) for name, kind in types.items()])
    file_values = [dict(values) for _, values in data_files]
    partitions = pa.schema(
        [(name, _partition_type({values[name] for values in file_values} - {None})) for name in file_values[0]]
    )
    content: list[tuple[Row, tuple[Row, ...]]] = []
    for (_, values), (_, rows, instants) in zip(data_files, files, strict=True):
        partition = {name: partition_value(value, partitions.field(name).type) for name, value in values}
        file_rows: list[Row] = []
        columns = [(field.name, field.type, field.name in instants) for field in data if field.name not in conflicts]
        for row in rows:
            row_values = {name: converted(row.get(name), kind, utc) for name, kind, utc in columns}
            file_rows.append({**dict.fromkeys(conflicts), **row_values, **partition})
        content.append((partition, tuple(file_rows)))
    return Content(data, partitions, tuple(content), conflicts, busy=busy, ordered=True)


@functools.lru_cache(maxsize=256)
def _read_version(path: Path, identity: tuple[int, ...]) -> tuple[pa.Schema, list[Row], set[str]]:
    if path.suffix == ".parquet":
        with pq.ParquetFile(path) as file:
            leaves = [file.metadata.schema.column(number) for number in range(file.metadata.num_columns)]
            instants = {leaf.path.split(".")[0] for leaf in leaves if leaf.physical_type == "INT96"}
            table = file.read()
    else:
        with pa.OSFile(str(path)) as source, pa.ipc.open_file(source) as reader:
            table, instants = reader.read_all(), set()
    instant = pa.timestamp("us", "UTC")
    fields = [f.with_type(instant) if f.name in instants and pa.types.is_timestamp(f.type) else f for f in table.schema]
    columns = [column.to_pylist() for column in table.columns]
    rows = [dict(zip(table.schema.names, row, strict=True)) for row in zip(*columns, strict=True)]
    return pa.schema(fields), rows, instants


def _read(path: Path) -> tuple[pa.Schema, list[Row], set[str]]:
    """(its columns, its rows, the columns whose times are instants although their types do not say so)."""
    status = path.stat()
    return _read_version(path, (status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_size))


def _partition_type(values: set[Any]) -> pa.DataType:
    """Whole numbers become int, bigint or a decimal, ISO dates become dates, other numbers doubles, and all other values text."""
    if not values:
        return pa.string()
    whole = [int(value) for value in values if is_whole(value)]
    small = all(-(2**31) <= number < 2**31 for number in whole)
    if len(whole) == len(values):
        if small:
            return pa.int32()
        if all(-(2**63) <= number < 2**63 for number in whole):
            return pa.int64()
        return pa.decimal128(max(len(str(abs(number))) for number in whole), 0)
    if all(is_date(value) for value in values):
        return pa.date32()
    return pa.float64() if small and all(is_number(value) for value in values) else pa.string()


def _group_rows(table: pa.Table) -> int:
    """A number of rows that gives each file several row groups, but not too many."""
    return max(4, table.num_rows // 6)


def file_bytes(table: pa.Table, form: str, writer: str, scratch: Path) -> bytes:
    """The file that `writer` writes for a table; pyarrow's if the writer lacks one of the types."""
    path = scratch / f"written.{form}"
    path.unlink(missing_ok=True)
    try:
        _WRITERS[form, writer](table, path)
    except Exception:  # each library has errors of its own for types it does not know
        path.unlink(missing_ok=True)
        _WRITERS[form, "pyarrow"](table, path)
    content = path.read_bytes()
    os.unlink(path)
    return content


def _parquet(table: pa.Table, path: Path, int96: bool = False) -> None:
    how: dict[str, Any] = {"compression": "none", "use_dictionary": False, "use_deprecated_int96_timestamps": int96}
    pq.write_table(table, path, row_group_size=_group_rows(table), **how)


def _duckdb_parquet(table: pa.Table, path: Path) -> None:
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("rows", table)
        connection.execute(f"COPY rows TO '{path}' (FORMAT parquet, ROW_GROUP_SIZE {_group_rows(table)})")


def _arrow(table: pa.Table, path: Path) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as out:
        out.write_table(table, max_chunksize=_group_rows(table))


_WRITERS: dict[tuple[str, str], Callable[[pa.Table, Path], object]] = {
    ("parquet", "pyarrow"): _parquet,
    ("parquet", "int96"): lambda table, path: _parquet(table, path, True),  # as Spark writes times
    ("parquet", "duckdb"): _duckdb_parquet,
    ("parquet", "polars"): lambda table, path: pl.DataFrame(table).write_parquet(
        path, row_group_size=_group_rows(table)
    ),
    ("arrow", "pyarrow"): _arrow,
    ("arrow", "duckdb"): lambda table, path: pyarrow.feather.write_feather(table, path, compression="lz4"),
    ("arrow", "polars"): lambda table, path: pl.DataFrame(table).write_ipc(path),
}


_FILLER_ROWS = 200


class Files(Table):
    """Files of one format. `kind`: `file`, `directory`, or `linked` for a link to one."""

    def __init__(self, ground: Ground, kind: str, args: tuple[Any, ...], rng: random.Random) -> None:
        super().__init__(ground)
        self.path, self._root, self._setup, self.kind = ground.path, ground.root, ground.setup, kind
        self._earlier: list[tuple[Path, bytes, int]] = []
        if kind == "file":
            self._put(args, rng)
            return
        place = self.path
        if kind == "linked":
            place = self._next_directory()
            self._link(place)
        place.mkdir()
        self._fill(place, args, rng)

    def take(self, step: Step, rng: random.Random) -> None:
        if hasattr(self, f"_{step.op}"):
            getattr(self, f"_{step.op}")(step.args, rng)

    def content(self) -> Content:
        return read_content(self._walk(), self.busy)

    def may_change_meanwhile(self, step: Step) -> bool:
        # A directory is swapped by two renames, between which others see anything.
        return self.kind in (("linked", "file") if step.op == "swap" else ("directory", "linked", "file"))

    @property
    def busy(self) -> bool:
        """Whether a job is writing here."""
        return self.kind in ("directory", "linked") and (self.path / "_temporary").is_dir()

    def _next_directory(self) -> Path:
        """The path of another directory, for a link."""
        return self._root / f"v{len(list(self._root.glob('v[0-9]*'))) + 1}"

    def _link(self, place: Path) -> None:
        new = self._root / "new-link"
        new.symlink_to(place.name)
        os.replace(new, self.path)

    def _put(self, args: tuple[Any, ...], rng: random.Random) -> None:
        slot, places, key, shape, count, how, writer = args
        target = self.path if self.kind == "file" else self._file_of(self.path, slot, places)
        self._write(target, self._drawn_rows(rng, key, shape, count), how, writer)

    def _file_of(self, directory: Path, slot: int, places: tuple[int, ...] | None) -> Path:
        pairs = zip(self._setup.partitions, places or (), strict=False)
        parts = [f"{name}={values[place % len(values)]}" for (name, values), place in pairs]
        return directory.joinpath(*parts, f"f{slot}.{self._setup.format}")

    def _drawn_rows(self, rng: random.Random, key: str, shape: str, count: int) -> pa.Table:
        """The rows of a file: keys that other files have, too, small values, and a unique number for each row."""
        ids: list[int | None] = [None if rng.random() < 0.05 else rng.randrange(12) for _ in range(count)]
        values: list[int | None] = [None if rng.random() < 0.1 else rng.randrange(8) for _ in range(count)]
        named = {
            "id": column(key, ids),
            "v": pa.array(values, rng.choice((pa.int32(), pa.int64()))),
            "s": pa.array([self.ground.new_serial() for _ in range(count)], pa.int64()),
        }
        if shape != "absent":
            named["c"] = column(shape, draw_numbers(rng, count, rng.choice((0.0, 0.3, 1.0))))
        names = list(named)
        if rng.random() < 0.2:
            rng.shuffle(names)
        return pa.table({name: named[name] for name in names})

    def _bytes(self, rows: pa.Table, writer: str = "pyarrow") -> bytes:
        if writer == "pyarrow" and self.ground.serial % 5 == 0:
            writer = "int96"
        return file_bytes(rows, self._setup.format, writer, self._root)

    def _write(self, target: Path, table: pa.Table, how: str, writer: str) -> None:
        content = self._bytes(table, writer)
        self._keep(target)
        if how != "rename" and target.is_file():
            with open(target, "r+b") as file:
                file.write(content)
                file.truncate()
        else:
            self._replace(target, content)

    def _keep(self, target: Path) -> None:
        """Remember a file as it is, if it is there."""
        if target.is_file():
            self._earlier.append((target, target.read_bytes(), target.stat().st_mtime_ns))

    def _replace(self, target: Path, content: bytes, mtime_ns: int | None = None) -> None:
        new = self._root / "new-file"
        new.write_bytes(content)
        if mtime_ns is not None:
            os.utime(new, ns=(mtime_ns, mtime_ns))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, target)

    def _fill(self, directory: Path, args: tuple[Any, ...], rng: random.Random) -> None:
        """Write the first files of a directory. In half of them one file is large, so that changes of the others are small."""
        slot, places, key, shape, count, _, writer = args

        def write_new(slot: int, values: tuple[int, ...] | None, rows: pa.Table) -> None:
            target = self._file_of(directory, slot, values)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._bytes(rows, writer))

        for number in range(rng.randint(1, 4)):
            file_places = places and tuple(place + rng.randrange(2) for place in places)
            rows = self._drawn_rows(rng, key, rng.choice((shape, shape, "null")), rng.choice((count, 5)))
            write_new((slot + number) % 4, file_places, rows)
        if rng.random() < 0.5:
            write_new(9, places, self._drawn_rows(rng, key, shape, _FILLER_ROWS))

    def _swap(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """Put another directory in place of this one: a new one, or one that was there before."""
        if self.kind == "file":
            return
        if self.kind == "linked":
            place = rng.choice(sorted(self._root.glob("v[0-9]*")))
            if rng.random() < 0.7 or place.name == os.readlink(self.path):
                place = self._next_directory()
                self._fill(place, args, rng)
            self._link(place)
        else:
            self._fill(self._root / "new-directory", args, rng)
            os.rename(self.path, self._root / "old-directory")
            os.rename(self._root / "new-directory", self.path)
            shutil.rmtree(self._root / "old-directory")
        self._earlier.clear()

    def _files(self) -> list[Path]:
        return [path for path, _ in self._walk() if "_temporary" not in path.parts]

    def _remove(self, args: tuple[Any, ...], rng: random.Random) -> None:
        files = self._files()
        if len(files) > 1 or (files and self.kind == "file"):
            target = files[args[0] % len(files)]
            self._keep(target)
            target.unlink()
            with contextlib.suppress(OSError):
                target.parent.rmdir()

    def _roll_back(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """Put back an older state of a file, with its time (`cp -p`)."""
        if self._earlier:
            self._replace(*self._earlier[-1 - args[0] % len(self._earlier)])

    def _touch(self, args: tuple[Any, ...], rng: random.Random) -> None:
        for path in self._files()[: args[0]]:
            os.utime(path)

    def _clear(self, args: tuple[Any, ...], rng: random.Random) -> None:
        for path in self._files() if args[0] == 0 else ():
            path.unlink()

    def _junk(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """Write files that are not data."""
        if self.kind != "file":
            for name in ("_SUCCESS", ".f0.crc", f"empty.{self._setup.format}", "_started_1"):
                (self.path / name).write_bytes(b"" if name.startswith("empty") else b"x")
            (self.path / "_hidden").mkdir(exist_ok=True)
            (self.path / "_hidden" / f"f0.{self._setup.format}").write_bytes(b"no data")

    def _begin_job(self, args: tuple[Any, ...], rng: random.Random) -> None:
        if self.kind != "file":
            attempt = self.path / "_temporary" / "0" / "task_0"
            attempt.mkdir(parents=True, exist_ok=True)
            content = self._bytes(self._drawn_rows(rng, "int64", "absent", 3))
            (attempt / f"f{args[0]}.{self._setup.format}").write_bytes(content)

    def _end_job(self, args: tuple[Any, ...], rng: random.Random) -> None:
        temporary = self.path / "_temporary"
        if self.kind != "file" and temporary.is_dir():
            for path in temporary.rglob(f"*.{self._setup.format}"):
                target = self._file_of(self.path, 8, (0,) * len(self._setup.partitions))
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(temporary)

    def _walk(self) -> Iterator[DataFile]:
        """Each data file of a plain table, in the order of their names, with the values that its directories say."""
        if self.path.is_file():
            yield self.path, ()
            return
        paths = []
        for directory, names, files in os.walk(self.path, followlinks=True):
            names[:] = [name for name in names if not _is_skipped(name)]
            for name in files:
                path = Path(directory, name)
                if not _is_skipped(name) and path.stat().st_size:
                    paths.append(path)
        for path in sorted(paths, key=str):
            pairs = [part.split("=", 1) for part in path.relative_to(self.path).parts[:-1] if "=" in part]
            yield path, tuple((unquote(k), None if v == "__HIVE_DEFAULT_PARTITION__" else unquote(v)) for k, v in pairs)


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)
