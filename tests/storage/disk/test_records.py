"""Counters of processes: sums are exact whatever happens to the processes, and to who adds them up."""

import os
import struct
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.storage.disk import CounterFile, Counts, Disk
from tests.support.disks import Opened
from tests.support.fakes import FakeClock
from tests.support.fuzzing import fuzzed

NAMES = ("a", "b")
pair = struct.Struct("=2q").pack


class Host(Opened):
    def __init__(self, root: Path) -> None:
        super().__init__(root, 10**9, FakeClock(1_000_000.0))
        self.counters = self.root / "counters"

    def open_counters(self, name: str, a: int, b: int) -> CounterFile:
        file = self.disk.new_counters(name, {"url": "/t"}, dict.fromkeys(NAMES, 0))
        file.write(pair(a, b))
        return file

    def files(self) -> list[str]:
        return sorted(os.listdir(self.counters))

    def sums(self, prefix: str = "t") -> dict[str, int]:
        counters = self.disk.counters(prefix)
        return {name: sum(counts.values[name] for counts in counters) for name in NAMES}

    def fold(self, dies: bool = False) -> None:
        """Fold the counters. `dies`: before the files in the total are removed."""
        with pytest.MonkeyPatch.context() as patch:
            if dies:
                patch.setattr(Disk, "_drop", lambda self, kind, path: False)
            self.disk.merge_counters("t", 0, added)


def added(parts: list[Counts]) -> tuple[dict[str, str], dict[str, int]]:
    return {"url": "/t"}, {name: sum(part.values[name] for part in parts) for name in NAMES}


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "cache")


@fuzzed(30)
@given(st.lists(st.sampled_from(["begin", "begin", "count", "end", "fold", "die"]), max_size=30))
def test_the_sum_stays(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    """Files of processes that have ended become one, whoever dies while folding them; each process counts once, with what it put last."""
    host, living = Host(tmp_path_factory.mktemp("counters")), dict[str, CounterFile]()
    reader, starts, counted = host.open_counters("u-1", 100, 100), list[int](), dict[str, int]()
    for number, step in enumerate(steps):
        if step == "begin":
            living[f"t-{number:02}"] = host.open_counters(f"t-{number:02}", number, 1)
            starts.append(number)
            counted[f"t-{number:02}"] = number
        elif step == "count" and living:
            name = sorted(living)[number % len(living)]
            counted[name] = (-1) ** number * 2**50 + number
            living[name].write(pair(counted[name], 1))
        elif step == "end" and living:
            del living[sorted(living)[number % len(living)]]
        elif step in ("fold", "die"):
            before = host.files()
            host.fold(dies=step == "die")
            total = ["t-ended"] if len(starts) > len(living) else []
            assert host.files() == sorted({*(before if step == "die" else living), *total, "u-1"})
        assert host.sums() == {"a": sum(counted.values()), "b": len(starts)}
    assert host.sums("u") == {"a": 100, "b": 100}
    assert os.listdir(host.counters.parent / "tmp") == []
    del reader


# The file that is folded: before the total in the order of names, and after it; and what is read just before.
@pytest.mark.parametrize(("name", "read"), [("t-0", "t-0"), ("t-x", "t-ended")])
def test_folded_while_somebody_adds_up(host: Host, monkeypatch: pytest.MonkeyPatch, name: str, read: str) -> None:
    """A file that is folded between the reading of the total and its own is neither missed nor counted twice."""
    host.open_counters("t-1", 1, 1)
    host.fold()
    host.open_counters(name, 10, 1)
    counts, folded = Disk._counts, list[str]()

    def beside(self: Disk, prefix: str) -> Counts | None:
        actual = counts(self, prefix)
        if not folded and prefix == read:
            folded.append(prefix)
            host.fold()
        return actual

    monkeypatch.setattr(Disk, "_counts", beside)
    assert host.sums() == {"a": 11, "b": 2}
    assert folded


@pytest.mark.parametrize("how", ["cut", "bit", "head", "fifo"])
def test_damaged_files(host: Host, how: str) -> None:
    """A damaged file is left out and counted; `check` names it, and with `repair` removes it."""
    keep, damaged = host.open_counters("t-1", 1, 1), host.open_counters("t-2", 2, 2)
    path = host.counters / "t-2"
    data = bytearray(path.read_bytes())
    if how == "fifo":
        path.unlink()
        os.mkfifo(path)
    else:
        data[-6 if how == "bit" else 30] ^= 0x10
        path.write_bytes(data[:-3] if how == "cut" else data)
    before = host.count("cacheFailureCount")
    assert host.sums() == {"a": 1, "b": 1}
    assert host.count("cacheFailureCount") > before
    assert host.disk.check().damaged == ("counters/t-2",)
    host.disk.check(repair=True)
    assert host.disk.check().damaged == ()
    assert host.sums() == {"a": 1, "b": 1}
    del keep, damaged


def test_a_process_that_ends(tmp_path: Path) -> None:
    """The counts of a process's last moment are not lost if it ends well, whatever its children do."""
    pq.write_table(pa.table({"id": range(10)}), tmp_path / "dim.parquet")
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache")}
    code = (
        "import os\nfrom pyspark_lookup import LookupTable\n"
        f"table = LookupTable({str(tmp_path / 'dim.parquet')!r}, {options!r})\n"
        "for key in range(7): table.get(key)\n"
        "if not os.fork(): raise SystemExit\n"
        "os.wait()\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parents[3])
    assert LookupTable(str(tmp_path / "dim.parquet"), options).metrics()["lookupTimeCount"] == 7
