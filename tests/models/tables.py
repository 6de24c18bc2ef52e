"""The table of a history: what lies on disk, and how each step changes it."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from tests.models.histories import Setup, Step
from tests.models.lake import DeltaLake, IcebergLake
from tests.models.managed import Managed
from tests.models.modelled import Modelled
from tests.models.provided import Provided
from tests.models.shapes import column, draw_numbers
from tests.models.writers import file_bytes

_FILLER_ROWS = 200
_MODELLED: dict[str, type[Modelled]] = {
    "managed": Managed,
    "delta": DeltaLake,
    "iceberg": IcebergLake,
    "provider": Provided,
}


class Place:
    """One path, and what is there: nothing, a file, a directory, a link to a directory, or a table that is `modelled`."""

    def __init__(self, root: Path, setup: Setup) -> None:
        self._root = root
        self._setup = setup
        self.path = root / f"dim.{setup.format}"
        self.kind = "nothing"
        self.modelled: Modelled | None = None
        self._aside: Managed | None = None
        self._past: list[tuple[Path, bytes, int]] = []
        self._serial = 0
        self._count = 0

    # --- steps ------------------------------------------------------------------------------------

    def take(self, step: Step) -> None:
        """Take a step. One that makes no sense now does nothing. Raises what a write of a managed table raises."""
        self.wait_for_a_tick()
        rng = random.Random(step.salt)
        if step.op == "become":
            self._become(step.args[0], step.args[1:], rng)
        elif isinstance(self.modelled, Managed):
            self._take_managed(self.modelled, step, rng)
        elif self.modelled is not None:
            self.modelled.take(step, rng)
        elif self.kind != "nothing" and hasattr(self, f"_{step.op}"):
            getattr(self, f"_{step.op}")(step.args, rng)

    def wait_for_a_tick(self) -> None:
        """Return once a file that is written now has another time than any before: some clocks tick each few ms only."""
        probe = self._root / "probe"
        probe.touch()
        before = probe.stat().st_ctime_ns
        while probe.stat().st_ctime_ns == before:
            os.utime(probe)

    def _become(self, kind: str, args: tuple[Any, ...], rng: random.Random) -> None:
        self._remove_all()
        self.kind = kind
        if kind in _MODELLED:
            columns = [name for name, _ in self._setup.partitions]
            hosts = self._root / "hosts"
            self.modelled = _MODELLED[kind](self.path, hosts, self._setup.keys, columns, self._new_serial)
            self.modelled.take(Step("append", ("here", 8)), rng)
        elif kind == "file":
            self._put(args, rng)
        else:
            self._fill(self._new_directory(kind), args, rng)

    def _remove_all(self) -> None:
        if self.path.is_symlink() or self.path.is_file():
            self.path.unlink()
        elif self.path.is_dir():
            shutil.rmtree(self.path)
        self.modelled = None
        self._past.clear()

    def _new_directory(self, kind: str) -> Path:
        """The empty directory of a new table, which is there by its path."""
        if kind == "directory":
            self.path.mkdir()
            return self.path
        self._count += 1
        place = self._root / f"v{self._count}"
        place.mkdir()
        self._link(place)
        return place

    def _link(self, place: Path) -> None:
        new = self._root / "new-link"
        new.symlink_to(place.name)
        os.replace(new, self.path)

    def _take_managed(self, table: Managed, step: Step, rng: random.Random) -> None:
        aside = self._root / "aside"
        if step.op == "copy_aside" or (step.op in ("restore", "swap_copies") and self._aside is None):
            shutil.rmtree(aside, ignore_errors=True)
            shutil.copytree(self.path, aside)
            self._aside = table.copied()
        elif step.op == "restore":
            assert self._aside is not None
            shutil.rmtree(self.path)
            shutil.copytree(aside, self.path)
            self.modelled = self._aside.copied()
        elif step.op == "swap_copies":
            between = self._root / "between"
            os.rename(self.path, between)
            os.rename(aside, self.path)
            os.rename(between, aside)
            self.modelled, self._aside = self._aside, table
        else:
            table.take(step, rng)

    # --- files of others --------------------------------------------------------------------------

    def _put(self, args: tuple[Any, ...], rng: random.Random) -> None:
        slot, places, key, shape, count, how, writer = args
        target = self.path if self.kind == "file" else self._file_of(self.path, slot, places)
        self._write(target, self.drawn_rows(rng, key, shape, count), how, writer)

    def _file_of(self, directory: Path, slot: int, places: tuple[int, ...] | None) -> Path:
        pairs = zip(self._setup.partitions, places or (), strict=False)
        parts = [f"{name}={values[place % len(values)]}" for (name, values), place in pairs]
        return directory.joinpath(*parts, f"f{slot}.{self._setup.format}")

    def drawn_rows(self, rng: random.Random, key: str, shape: str, count: int) -> pa.Table:
        """Rows of a file: keys that many files have, small values, a number of its own for each."""
        ids: list[int | None] = [None if rng.random() < 0.05 else rng.randrange(12) for _ in range(count)]
        values: list[int | None] = [None if rng.random() < 0.1 else rng.randrange(8) for _ in range(count)]
        named = {
            "id": column(key, ids) if self._setup.format != "json" else pa.array(ids, pa.int64()),
            "v": pa.array(values, rng.choice((pa.int32(), pa.int64()))),
            "s": pa.array([self._new_serial() for _ in range(count)], pa.int64()),
        }
        if shape != "absent":
            named["c"] = column(shape, draw_numbers(rng, count, rng.choice((0.0, 0.3, 1.0))))
        names = list(named)
        if rng.random() < 0.2:
            rng.shuffle(names)
        return pa.table({name: named[name] for name in names})

    def _new_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _bytes(self, rows: pa.Table, writer: str = "pyarrow") -> bytes:
        if writer == "pyarrow" and self._serial % 5 == 0:
            writer = "int96"
        return file_bytes(rows, self._setup.format, writer, self._root)

    def _write(self, target: Path, table: pa.Table, how: str, writer: str) -> None:
        content = self._bytes(table, writer)
        self._keep(target)
        if how == "same size" and target.is_file() and table.num_rows and self._setup.format == "json":
            # Lines of JSON may end in spaces; other formats come as they are.
            content = content[:-1].ljust(target.stat().st_size - 1) + b"\n"
        if how != "rename" and target.is_file():
            with open(target, "r+b") as file:
                file.write(content)
                file.truncate()
        else:
            self._replace(target, content)

    def _keep(self, target: Path) -> None:
        """Remember a file as it is, if it is there."""
        if target.is_file():
            self._past.append((target, target.read_bytes(), target.stat().st_mtime_ns))

    def _replace(self, target: Path, content: bytes, mtime_ns: int | None = None) -> None:
        new = self._root / "new-file"
        new.write_bytes(content)
        if mtime_ns is not None:
            os.utime(new, ns=(mtime_ns, mtime_ns))
        target.parent.mkdir(parents=True, exist_ok=True)
        os.replace(new, target)

    def _fill(self, directory: Path, args: tuple[Any, ...], rng: random.Random) -> None:
        """The first files of a directory, one of them large in some, so that the others are small changes of it."""
        slot, places, key, shape, count, _, writer = args

        def put(slot: int, values: tuple[int, ...] | None, rows: pa.Table) -> None:
            target = self._file_of(directory, slot, values)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(self._bytes(rows, writer))

        for number in range(rng.randint(1, 4)):
            others = places and tuple(place + rng.randrange(2) for place in places)
            rows = self.drawn_rows(rng, key, rng.choice((shape, shape, "null")), rng.choice((count, 5)))
            put((slot + number) % 4, others, rows)
        if rng.random() < 0.5:
            put(9, places, self.drawn_rows(rng, key, shape, _FILLER_ROWS))

    def _swap(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """Another directory in place of this one, or one that was there before."""
        if self.kind == "file":
            return
        if self.kind == "linked":
            place = rng.choice(sorted(self._root.glob("v[0-9]*")))
            if rng.random() < 0.7 or place.name == os.readlink(self.path):
                self._count += 1
                place = self._root / f"v{self._count}"
                self._fill(place, args, rng)
            self._link(place)
        else:
            self._fill(self._root / "new-directory", args, rng)
            os.rename(self.path, self._root / "old-directory")
            os.rename(self._root / "new-directory", self.path)
            shutil.rmtree(self._root / "old-directory")
        self._past.clear()

    def _files(self) -> list[Path]:
        return [path for path, _ in self.walk() if "_temporary" not in path.parts]

    def _remove(self, args: tuple[Any, ...], rng: random.Random) -> None:
        files = self._files()
        if len(files) > 1 or (files and self.kind == "file"):
            target = files[args[0] % len(files)]
            self._keep(target)
            target.unlink()
            with contextlib.suppress(OSError):
                target.parent.rmdir()

    def _roll_back(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """An older state of a file, with the time it had (`cp -p`)."""
        if self._past:
            self._replace(*self._past[-1 - args[0] % len(self._past)])

    def _touch(self, args: tuple[Any, ...], rng: random.Random) -> None:
        for path in self._files()[: args[0]]:
            os.utime(path)

    def _clear(self, args: tuple[Any, ...], rng: random.Random) -> None:
        for path in self._files() if args[0] == 0 else ():
            path.unlink()

    def _junk(self, args: tuple[Any, ...], rng: random.Random) -> None:
        """Files that are not data."""
        if self.kind != "file":
            for name in ("_SUCCESS", ".f0.crc", f"empty.{self._setup.format}", "_started_1"):
                (self.path / name).write_bytes(b"" if name.startswith("empty") else b"x")
            (self.path / "_hidden").mkdir(exist_ok=True)
            (self.path / "_hidden" / f"f0.{self._setup.format}").write_bytes(b"no data")

    def _begin_job(self, args: tuple[Any, ...], rng: random.Random) -> None:
        if self.kind != "file":
            attempt = self.path / "_temporary" / "0" / "task_0"
            attempt.mkdir(parents=True, exist_ok=True)
            content = self._bytes(self.drawn_rows(rng, "int64", "absent", 3))
            (attempt / f"f{args[0]}.{self._setup.format}").write_bytes(content)

    def _end_job(self, args: tuple[Any, ...], rng: random.Random) -> None:
        temporary = self.path / "_temporary"
        if self.kind != "file" and temporary.is_dir():
            for path in temporary.rglob(f"*.{self._setup.format}"):
                target = self._file_of(self.path, 8, (0,) * len(self._setup.partitions))
                target.parent.mkdir(parents=True, exist_ok=True)
                os.replace(path, target)
            shutil.rmtree(temporary)

    # --- what is there ----------------------------------------------------------------------------

    def walk(self) -> Iterator[tuple[Path, tuple[tuple[str, str | None], ...]]]:
        """Each data file of a plain table, in the order of their names, with the values that its directories say."""
        if self.path.is_file():
            yield self.path, ()
            return
        found = []
        for directory, names, files in os.walk(self.path, followlinks=True):
            names[:] = [name for name in names if not _is_skipped(name)]
            for name in files:
                path = Path(directory, name)
                if not _is_skipped(name) and path.stat().st_size:
                    found.append(path)
        for path in sorted(found, key=str):
            pairs = [part.split("=", 1) for part in path.relative_to(self.path).parts[:-1] if "=" in part]
            yield path, tuple((unquote(k), None if v == "__HIVE_DEFAULT_PARTITION__" else unquote(v)) for k, v in pairs)

    @property
    def busy(self) -> bool:
        """Whether a job is writing here."""
        return self.kind in ("directory", "linked") and (self.path / "_temporary").is_dir()


def _is_skipped(name: str) -> bool:
    return name.startswith(".") or (name.startswith("_") and "=" not in name)
