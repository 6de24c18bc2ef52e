"""Lookups by range, network, prefix and time while a table changes, in every cache mode, beside DuckDB's joins and Python's `ipaddress`."""

from __future__ import annotations

import dataclasses
import ipaddress
import random
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import DamagedFileError, OptionError, OverlapError, SchemaError
from tests.support.delta_tables import give_vectors, replay_files, set_properties, write_vector
from tests.support.fuzzing import by_day, seeds
from tests.support.iceberg_writing import IcebergTable
from tests.support.lake_tables import MODES, opened

_STEPS = 3
_ROWS, _FACTS = 8, 14
_BELOW = {"[": "<=", "(": "<"}, {"]": "<=", ")": "<"}


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is looked up: the argument, the option that names the columns, the type of the bounds, that of the values, and SQL (DuckDB) for a
    value of a number from 0 to 12. `width`: whether DuckDB subtracts such values."""

    argument: str
    columns: str
    bound_type: str
    value: str
    sql: str = "{}"
    width: bool = False


_NETWORKS = "CASE WHEN {0} % 3 = 0 THEN '2001:db8:' || to_hex({0}) || '::' ELSE '10.' || {0} // 4 || '.' || ({0} % 4) * 64 || '.0' END"
_TEXT = "substr('abcabdacbbca', 1 + {0} % 7, {0} % 5)"
SHAPES = [
    Shape("between", "low..high", "INTEGER", "BIGINT", "{} - 6", True),
    Shape("between", "low..high", "DECIMAL(9,2)", "DECIMAL(12,4)", "{} / 4 - 1", True),
    Shape("between", "low..high", "DECIMAL(38,6)", "DECIMAL(38,6)", "({}::DECIMAL(38,6) - 6) * 1000000000000000000000000", True),
    Shape("between", "low..high", "DOUBLE", "DOUBLE", "CASE {0} WHEN 12 THEN 'nan'::DOUBLE WHEN 6 THEN -0.0::DOUBLE ELSE {0} - 6 END"),
    Shape("between", "low..high", "DATE", "DATE", "DATE '1969-12-28' + {}::INTEGER", True),
    Shape("between", "low..high", "TIMESTAMP", "TIMESTAMP", "make_timestamp(({} - 6) * 1000000000000)"),
    Shape("between", "low..high", "VARCHAR", "VARCHAR", _TEXT),
    Shape("between", "low..high", "BLOB", "BLOB", f"encode({_TEXT})"),
    Shape("as_of", "low..high", "TIMESTAMP", "TIMESTAMP", "make_timestamp(({} - 6) * 1000000000000)"),
    Shape("as_of", "low", "SMALLINT", "BIGINT"),
    Shape("starts_with", "low", "VARCHAR", "VARCHAR", _TEXT),
    Shape("starts_with", "low", "BLOB", "BLOB", f"encode({_TEXT})"),
    Shape("cidr", "low", "VARCHAR", "VARCHAR", _NETWORKS),
    Shape("cidr", "low..high", "VARCHAR", "VARCHAR", _NETWORKS),
]  # fmt: skip
_OPTIONS = {"between": "lookup.range", "starts_with": "lookup.starts-with", "cidr": "lookup.cidr"}


class History:
    """A managed table of rows `number`, `key`, `low`, `high`, and what lookups of it must return."""

    def __init__(self, seed: int, directory: Path) -> None:
        self._draw, self._home = random.Random(seed), directory
        self.shape = SHAPES[seed % len(SHAPES)]
        self.keyed = self.shape.argument == "as_of" or self._draw.random() < 0.5
        self._database = duckdb.connect(config={"threads": 1})
        self._rows: dict[int, tuple[int, int | None, int | None]] = {}
        self._next = 0
        self.bounds = self._draw.choice(["[]", "[)", "(]", "()"]) if self.shape.argument == "between" else None
        self._table = LookupTable(directory / "table", {"lookup.keys": "number", "lookup.cache.dir": str(directory / "cache")})  # fmt: skip

    def step(self) -> None:
        """Add rows, change some, delete some."""
        draw = self._draw
        numbers = [self._next + n for n in range(_ROWS)] + draw.sample(sorted(self._rows), len(self._rows) // 4)
        self._next += _ROWS
        for number in numbers:
            low = draw.randrange(12)
            high = min(low + draw.choice([-1, 0, 1, 2, 5]), 12)
            optional = (None if draw.random() < 0.1 else n for n in (low, max(high, 0)))
            self._rows[number] = (draw.randrange(3), *optional)
            if self.shape.columns == "low" and self.shape.argument == "as_of":
                # DuckDB's ASOF JOIN takes any of two rows that begin at once; ours takes the later one.
                self._rows[number] = number % 3, number * 5 % 13, None
        self._table.upsert(
            self._typed("VALUES " + ", ".join(str((n, *self._rows[n])).replace("None", "NULL") for n in numbers))
        )
        deleted = draw.sample(sorted(self._rows), len(self._rows) // 6)
        if deleted:
            self._table.delete(deleted)
        for number in deleted:
            del self._rows[number]
        if draw.random() < 0.3:
            self._table.compact()
        content = ", ".join(str((n, *row)).replace("None", "NULL") for n, row in self._rows.items())
        self._database.execute("DROP TABLE IF EXISTS t")
        rows = self._typed(f"VALUES {content}")
        self._database.execute("CREATE TABLE t AS SELECT * FROM rows")
        assert rows.num_rows == len(self._rows)
        self._bounds = {row[0]: (row[2], row[3]) for row in self._database.execute("SELECT * FROM t").fetchall()}

    def _typed(self, values: str) -> pa.Table:
        shape = self.shape
        bounds = [f"CAST({shape.sql.format(side)} AS {shape.bound_type})" for side in ("low", "high")]
        if shape.argument == "cidr":
            low, length = shape.sql.format("low"), "CASE WHEN low % 3 = 0 THEN 40 + high ELSE 14 + high END"
            bounds = [f"{low} || '/' || {length}", "low"] if shape.columns == "low" else [low, f"({length})::INTEGER"]
        columns = ", ".join(
            f"CASE WHEN {side} IS NOT NULL THEN {end_text} END AS {side}" for side, end_text in zip(("low", "high"), bounds, strict=True)
        )  # fmt: skip
        return self._arrow(
            f"SELECT number::INTEGER AS number, key, {columns} FROM ({values}) v(number, key, low, high)"
        )

    def _arrow(self, sql: str) -> pa.Table:
        return self._database.sql(sql).to_arrow_table()

    def facts(self) -> pa.Table:
        """Keys (some that no row has, some null), and values (some null)."""
        shape, draw = self.shape, self._draw
        rows = [
            (n, draw.choice(["0", "1", "2", "9", "NULL"]), draw.choice([*map(str, range(13)), "NULL"]))
            for n in range(_FACTS)
        ]
        values = ", ".join(f"({n}, {key}, {value})" for n, key, value in rows)
        value = f"CAST({shape.sql.format('v')} AS {shape.value})"
        if shape.argument == "cidr":
            value = f"CASE WHEN v % 5 = 4 THEN 'none' ELSE replace({value}, '.0', '.1') END"
        facts = self._arrow(f"SELECT n, k, CASE WHEN v IS NOT NULL THEN {value} END AS v FROM (VALUES {values}) f(n, k, v) ORDER BY n")  # fmt: skip
        self._database.execute("DROP TABLE IF EXISTS f")
        self._database.execute("CREATE TABLE f AS SELECT * FROM facts")
        return facts

    def expected(self) -> list[tuple[int, int]]:
        """All pairs of a fact and the number of a row that matches it, in order."""
        shape = self.shape
        if shape.argument == "cidr":
            return self._by_python()
        on = "f.k = t.key" if self.keyed else "TRUE"
        if shape.argument == "starts_with":
            begins = "starts_with(f.v, t.low)" if shape.bound_type == "VARCHAR" else "hex(f.v) LIKE hex(t.low) || '%'"
            on += f" AND {begins}"
        elif shape.columns == "low":
            return self._pairs("SELECT n, number FROM f ASOF JOIN t ON f.k = t.key AND f.v >= t.low")
        else:
            low, high = self.bounds or "[)"
            on += f" AND f.v IS NOT NULL AND (low IS NULL OR low {_BELOW[0][low]} v) AND (high IS NULL OR v {_BELOW[1][high]} high)"
        return self._pairs(f"SELECT n, number FROM f JOIN t ON {on}")

    def _pairs(self, sql: str) -> list[tuple[int, int]]:
        return sorted(self._database.execute(sql).fetchall())

    def _by_python(self) -> list[tuple[int, int]]:
        rows = self._database.execute("SELECT number, key, low, high FROM t").fetchall()
        pairs = []
        for n, key, text in self._database.execute("SELECT * FROM f").fetchall():
            for number, row_key, low, high in rows:
                if low is None or (self.shape.columns != "low" and high is None) or text in (None, "none"):
                    continue
                network = self._network(low, high)
                if network is not None and ipaddress.ip_address(text) in network and (not self.keyed or key == row_key):
                    pairs.append((n, number))
        return sorted(pairs)

    def _network(self, low: str, high: Any) -> Any:
        try:
            return ipaddress.ip_network(low if self.shape.columns == "low" else f"{low}/{high}")
        except ValueError:  # of which lookup.on-bad-network = SKIP makes nothing
            return None

    def rank(self, overlap: str, number: int) -> Any:
        """The key by which the best of a fact's rows sorts first; None if that is not known here."""
        shape, (low, high) = self.shape, self._bounds[number]
        if shape.argument == "starts_with":
            return -len(low) if overlap == "NARROWEST" else None
        if shape.argument == "cidr":
            network = self._network(low, high)
            return -network.prefixlen if overlap == "NARROWEST" else -int(network.network_address)
        if overlap == "NARROWEST":
            return (low is None or high is None, high - low if low is not None and high is not None else 0) if shape.width else None  # fmt: skip
        raw = self._rows[number][1]
        return (raw is None, -(raw or 0)) if shape.bound_type not in ("VARCHAR", "BLOB") else None

    def check(self, mode: str, overlap: str) -> None:
        """Compare the answer of a cache mode with what it must be."""
        shape, facts, expected = self.shape, self.facts(), self.expected()
        first, _, second = shape.columns.partition("..")
        named = {"lookup.valid-from": first} | ({"lookup.valid-to": second} if second else {})
        options: dict[str, str] = {
            **(named if shape.argument == "as_of" else {_OPTIONS[shape.argument]: shape.columns}),
            **({} if self.bounds is None else {"lookup.range.bounds": self.bounds}),
            **({} if shape.argument == "as_of" and not second else {"lookup.overlap": overlap}),
            **({"lookup.on-bad-network": "SKIP"} if shape.argument == "cidr" else {}),
            **MODES[mode],
            "lookup.keys": "key" if self.keyed else "number",
            "lookup.cache.dir": str(self._home / "cache"),
        }
        table = LookupTable(self._home / "table", options)
        keys: tuple[Any, ...] = (facts.column("k"),) if self.keyed else ()

        def pairs() -> list[tuple[int, int]]:
            rows = table.get_many(*keys, **{shape.argument: facts.column("v")})
            assert not rows.schema.field("key_index").nullable  # in every mode, so that answers can be concatenated
            assert rows.column("key_index").to_pylist() == sorted(rows.column("key_index").to_pylist())
            return sorted(zip(rows.column("key_index").to_pylist(), rows.column("number").to_pylist(), strict=True))

        if mode == "partial" and not self.keyed:
            with pytest.raises(OptionError, match="caches rows by key, and"):
                pairs()
            return
        counts: dict[int, list[int]] = {}
        for fact, number in expected:
            counts.setdefault(fact, []).append(number)
        is_single = all(len(numbers) == 1 for numbers in counts.values())
        if overlap == "ERROR" and not is_single:
            with pytest.raises(OverlapError, match=r"e\.g\. "):
                pairs()
            return
        matches = pairs()
        if overlap in ("ALL", "ERROR") or is_single:
            assert matches == expected
            return
        assert [fact for fact, _ in matches] == sorted(counts)
        for fact, number in matches:
            ranks = {ranked: self.rank(overlap, ranked) for ranked in counts[fact]}
            assert number in ranks
            assert ranks[number] is None or ranks[number] == min(ranks.values())


@pytest.mark.parametrize("seed", by_day([first * len(SHAPES) + n for first in seeds(1) for n in range(len(SHAPES))], 2))
def test_lookups_while_a_table_changes(seed: int, tmp_path: Path) -> None:
    history = History(seed, tmp_path)
    for number in range(_STEPS):
        history.step()
        for place, mode in enumerate(MODES):
            history.check(mode, ("ALL", "NARROWEST", "NEWEST", "ERROR")[(seed + number + place) % 4])


def test_a_network_that_cannot_be_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The error names the file and the row in it, whichever cache answers; SKIP counts it. So are ranges counted that hold nothing."""
    (tmp_path / "t").mkdir()
    for number, networks in enumerate((["10.0.0.0/8"], ["10.0.0.0/8", None, "10.1.1.0/16"])):
        pq.write_table(
            pa.table({"network": networks, "low": range(len(networks)), "high": [1] * len(networks)}),
            tmp_path / "t" / f"{number}.parquet",
        )
    caches = {
        "lookup.cache.dir": str(tmp_path / "cache"),
        "lookup.keys": "high",
        "lookup.cidr": "network",
        "lookup.range": "low..high",
    }
    for mode in MODES.values():
        for keys in ((), (1,)):
            table = LookupTable(tmp_path / "t", {**caches, **mode})
            if mode is MODES["partial"] and not keys:
                continue
            with pytest.raises(
                DamagedFileError, match=r"/1.parquet, row 3.*: network = '10.1.1.0/16' has host bits set"
            ):
                table.get(*keys, cidr="10.1.2.3")
            skipping = LookupTable(
                tmp_path / "t", {**caches, **mode, "lookup.on-bad-network": "SKIP", "lookup.overlap": "ALL"}
            )
            counts = ("networkSkippedCount", "rangeEmptyCount")
            before = [skipping.metrics()[name] for name in counts]
            assert [row["network"] for row in skipping.get(*keys, cidr="10.1.2.3")] == ["10.0.0.0/8"] * 2
            if not keys:  # beside a key of the range, there is none
                assert len(skipping.get(between=2)) == 0
            assert [skipping.metrics()[name] - n for name, n in zip(counts, before, strict=True)] == [
                1,
                0 if keys else 1,
            ]
    assert "rows-match-nothing" in caplog.text


def test_what_gets_refuse(tmp_path: Path) -> None:
    """Two values to match, none and no key, values of other types or another number, and tables that do not say what matches."""
    table = LookupTable(tmp_path / "t", {"lookup.keys": "network", "lookup.cache.dir": str(tmp_path / "cache")})
    table.write([{"network": "10.0.0.0/8", "code": "4"}])
    gets: list[tuple[dict[str, Any], str]] = [
        ({}, "a key is missing: give a key, or between, cidr"),
        ({"cidr": ["10.0.0.1"], "between": [1]}, "arguments between and cidr: give only one of them"),
        ({"cidr": ["10.0.0.1"]}, r"lookup.cidr is missing: .*LookupTable\(path, \{'lookup.cidr': 'network'\}\)"),
    ]
    for arguments, words in gets:
        with pytest.raises(OptionError, match=words):
            table.get_many(**arguments)
    table.alter(properties={"lookup.cidr": "NETWORK", "lookup.starts-with": "code"})
    assert table.get(cidr="10.0.0.1") == [{"network": "10.0.0.0/8", "code": "4"}]
    addresses = [ipaddress.ip_address(text) for text in ("10.0.0.1", "::ffff:10.0.0.1", "::1")]
    assert table.get_many(cidr=[*addresses, None]).column("key_index").to_pylist() == [0, 1]
    assert table.get("10.0.0.0/8", starts_with="49") == table.get(starts_with="49") == table.get("10.0.0.0/8")
    answer = table.get_many(cidr=[0x0A000001, None, -1, 2**32, 0x0AFFFFFF, 0x0B000000])
    assert answer.column("key_index").to_pylist() == [0, 4]
    assert table.get(cidr=None) == table.get_many(cidr=[None, None]).to_pylist() == []
    gets = [
        ({"cidr": "10.0.0.1"}, "argument cidr = '10.0.0.1': give a list or an array"),
        ({"cidr": [1.5]}, "argument cidr has the type double; addresses must be"),
        ({"starts_with": [1]}, "argument starts_with has the type int64"),
        ({"keys": ["a"], "starts_with": ["a", "b"]}, "argument starts_with has 2 values for 1 keys"),
        ({"keys": ["a"], "cidr": ["a"]}, "lookup.keys = 'network' names only columns that argument cidr compares"),
    ]
    for arguments, words in gets:
        with pytest.raises((OptionError, SchemaError), match=words):
            table.get_many(**arguments)


def test_a_delta_table_that_knows_its_columns(tmp_path: Path) -> None:
    """The properties of a Delta table say what matches, as those of a managed table do, for all options of matches; options of the read go before them."""
    rows = pa.table({"network": ["10.0.0.0/8", "10.1.0.0/16"], "other": ["10.1.0.0/16", "10.0.0.0/8"]})
    properties = {"lookup.cidr": "network", "lookup.overlap": "ALL", "owner": "x"}
    write_deltalake(str(tmp_path / "t"), rows)
    set_properties(tmp_path / "t", properties)
    options = {"lookup.cache.dir": str(tmp_path / "cache")}
    for more, networks in (
        ({}, ["10.0.0.0/8", "10.1.0.0/16"]),
        ({"lookup.overlap": "NARROWEST"}, ["10.1.0.0/16"]),
        ({"lookup.cidr": "other"}, ["10.0.0.0/8"]),  # then no property counts
    ):
        table = LookupTable(tmp_path / "t", {**options, **more})
        assert [row["network"] for row in table.get(cidr="10.1.2.3")] == networks


@pytest.mark.parametrize("kind", ["iceberg", "delta"])
def test_rows_that_a_lake_deletes_match_nothing(kind: str, tmp_path: Path) -> None:
    """Rows that Iceberg deletes by value or by position, and Delta by deletion vectors, match nothing, after each commit and in every cache mode."""
    draw = random.Random(kind)
    lake = _IcebergNetworks(tmp_path / "t") if kind == "iceberg" else _DeltaNetworks(tmp_path / "t")
    readers = [
        (opened(tmp_path / "t", tmp_path / "cache", mode, keys=key), key)
        for mode in MODES
        for key in ("company", "number")
        if (mode, key) != ("partial", "number")
    ]
    addresses = [*map(str, [ipaddress.ip_address(f"10.{n}.0.1") for n in range(4)]), None]
    facts = [(company, address) for company in range(3) for address in addresses]
    for _ in range(5):
        rows = [
            {"number": len(lake.rows) + n, "company": draw.randrange(3), "network": f"10.{draw.randrange(4)}.0.0/{draw.choice([16, 24])}"}
            for n in range(4)
        ]  # fmt: skip
        lake.add(rows)
        deleted = draw.sample(sorted(lake.alive), 2)
        lake.delete(deleted[:1])
        lake.delete(deleted[1:])
        for table, key in readers:
            keys = ([company for company, _ in facts],) if key == "company" else ()
            matches = table.get_many(*keys, cidr=[address for _, address in facts])
            pairs = sorted(
                zip(matches.column("key_index").to_pylist(), matches.column("number").to_pylist(), strict=True)
            )
            assert pairs == [
                (fact, number)
                for fact, (company, address) in enumerate(facts)
                for number in sorted(lake.alive)
                if address is not None
                and ipaddress.ip_address(address) in ipaddress.ip_network(lake.rows[number]["network"])
                and (not keys or lake.rows[number]["company"] == company)
            ]


_STORED = {"lookup.cidr": "network", "lookup.overlap": "ALL"}


class _Networks:
    """A table whose properties say what matches, and which of its rows are alive."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self.alive: set[int] = set()

    def add(self, rows: list[dict[str, Any]]) -> None:
        self.rows += rows
        self.alive |= {row["number"] for row in rows}
        self._write(rows)

    def delete(self, numbers: list[int]) -> None:
        self.alive -= {*numbers}
        self._delete(numbers)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        raise NotImplementedError

    def _delete(self, numbers: list[int]) -> None:
        raise NotImplementedError


class _IcebergNetworks(_Networks):
    def __init__(self, home: Path) -> None:
        super().__init__()
        self._table = IcebergTable.create(home, {"number": "int", "company": "int", "network": "string"})
        self._table.meta["properties"] |= _STORED
        self._table.save()
        self._is_by_value = False

    def _write(self, rows: list[dict[str, Any]]) -> None:
        self._table.commit(self._table.data(rows))

    def _delete(self, numbers: list[int]) -> None:
        self._is_by_value = not self._is_by_value
        if self._is_by_value:
            self._table.commit([self._table.equality([self.rows[number] for number in numbers], ["number"])])
            return
        places = [
            (entry.file, place)
            for entry in self._table.live()
            if not entry.file["content"]
            for place, row in self._table.live_rows(entry)
            if row["number"] in numbers
        ]
        self._table.commit([self._table.positions(places)])


class _DeltaNetworks(_Networks):
    def __init__(self, home: Path) -> None:
        super().__init__()
        self._home, self._schema = home, pa.schema([("number", pa.int32()), ("company", pa.int32()), ("network", pa.string())])  # fmt: skip
        write_deltalake(str(home), self._schema.empty_table())
        set_properties(home, _STORED)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        write_deltalake(str(self._home), pa.Table.from_pylist(rows, self._schema), mode="append")

    def _delete(self, numbers: list[int]) -> None:
        version = DeltaTable(str(self._home)).version()
        for add in replay_files(self._home, version).values():
            file_numbers = pq.read_table(self._home / add["path"]).column("number").to_pylist()
            if {*numbers} & {*file_numbers}:
                places = [place for place, number in enumerate(file_numbers) if number not in self.alive]
                give_vectors(self._home, [add], [write_vector(self._home, places, "i")])
