"""CSV and JSON files as tables: types that lose nothing, in one file or in several, schemas that are declared, dialects."""

import contextlib
import datetime
import decimal
import json
import math
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import DamagedFileError, OptionError, PysparkLookupError, SchemaError
from pyspark_lookup.scan.formats.inference import NOTHING, convert, infer_texts, join_inferred
from tests.support import fakes
from tests.support.fuzzing import fuzzed

D = decimal.Decimal
UTC = datetime.timezone.utc
CACHES = {mode.lower(): options and {"lookup.keys": "id", **options} for mode, options in fakes.CACHES.items()}


@pytest.fixture
def dim(tmp_path: Path) -> Path:
    (tmp_path / "dim").mkdir()
    return tmp_path / "dim"


def open_dim(dim: Path, options: dict[str, str] | None = None) -> LookupTable:
    return LookupTable(str(dim), {"lookup.cache.dir": str(dim.parent / "cache"), **(options or {})})


def read(dim: Path, **options: str) -> pa.Table:
    """All rows; options by the ends of their names."""
    named = {f"lookup.{key.replace('__', '.')}".replace("_", "-"): text for key, text in options.items()}
    return open_dim(dim, named).scan()


def write(dim: Path, name: str, content: str | bytes | pa.Array) -> None:
    if isinstance(content, pa.Array):
        pq.write_table(pa.table({"v": content}), dim / name)
    else:
        (dim / name).write_bytes(content if isinstance(content, bytes) else content.encode())


BLANK_LINES = ["", "N", "NNN", " N", "\tN", " \t N N", "\x0b\x1fN"]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=ascii)
@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["", "BOM"])
def test_blank_lines_of_csv(dim: Path, mark: str, line_end: str) -> None:
    """Blank lines are skipped wherever they are, except in quoted text; DuckDB and Spark read the same rows."""
    rows = [{"id": 1, "v": f"a{line_end} {line_end}b"}, {"id": 2, "v": '5" of it'}, {"id": 3, "v": "c"}]
    for before, between in zip(BLANK_LINES * 2, [*BLANK_LINES, *reversed(BLANK_LINES)], strict=True):
        lines = ["id,v", '1,"aN Nb"', '2,5" of it', "3,c"]
        content = (mark + before + "".join(f"{line}N{between}" for line in lines)).replace("N", line_end)
        write(dim, "a.csv", content)
        assert read(dim).to_pylist() == rows, ascii(content)


@pytest.mark.parametrize(
    ("content", "options", "expected"),
    [
        (" \nid,v\n \n", {}, {"id": [], "v": []}),
        (" \n\t\n1\ta\n", {"csv__sep": "\t", "csv__header": "false"}, {"_c0": [None, 1], "_c1": [None, "a"]}),
        ('id,v\n \n1,"\n', {"csv__quote": ""}, {"id": [1], "v": ['"']}),
        ('\nid,v\n1,"a \\"\n \n b"\n \n', {"csv__escape": "\\"}, {"id": [1], "v": ['a "\n \n b']}),
        ("\ufeff\r\n \r\nid,v\r\n1,a\r\n".encode("utf-16-le"), {"csv__encoding": "utf-16-le"}, {"id": [1], "v": ["a"]}),
    ],
    ids=ascii,
)
def test_blank_lines_of_dialects(
    dim: Path, content: str | bytes, options: dict[str, str], expected: dict[str, list[Any]]
) -> None:
    """A line with the separator is a row, if it is a tab."""
    write(dim, "a.csv", content)
    assert read(dim, **options).to_pydict() == expected


NUMBERS = st.one_of(
    st.integers(-(2**70), 2**70).map(str),
    st.integers(-99, 99).map(str),
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.decimals(-1000, 1000, places=2).map(str),
    st.decimals(-(10**20), 10**20, places=3).map(str),
)
WORDS = st.sampled_from(
    [
        "", " 1", "1 ", "007", "+5", "1e3", "1.50", "-0", "-0.0", "0.1", "0.30000000000000004", "1.", ".5", "1_000", "0x1f", "٣", "x",
        "true", "TRUE", "False", "NaN", "Infinity", "infinity", "9007199254740993", "9223372036854775808", "-9223372036854775808", "10:11:12",
        "2020-01-01", "2020-02-30", "20200101", "2020-01-01 00:00:00", "2020-01-01T10:00", "2020-01-01T00:00:00Z", "2020-01-01T00:00:00+02:00",
    ]
)  # fmt: skip
COLUMNS = st.one_of(
    st.lists(NUMBERS, max_size=6),
    st.lists(st.decimals(-1000, 1000, places=2).map(str), max_size=6),
    st.lists(st.floats(allow_nan=False, allow_infinity=False).map(repr), max_size=6),
    st.lists(WORDS, max_size=6),
    st.lists(st.one_of(NUMBERS, WORDS), max_size=6),
    st.lists(st.datetimes(timezones=st.just(UTC)).map(lambda at: at.isoformat()), max_size=4),
)


def is_back(text: str, value: Any) -> bool:
    """Whether a value is written as the text it was read from; times are as they are meant, numbers may lack a `.0`."""
    if value is None:
        return text == ""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, float):
        special = {"NaN": math.isnan(value), "Infinity": value == math.inf, "-Infinity": value == -math.inf}
        return special.get(text, False) or text == repr(value) or D(text) == D(repr(value))
    if isinstance(value, datetime.datetime):
        return datetime.datetime.fromisoformat(text.replace("Z", "+00:00")) == value
    return text == (value.isoformat() if isinstance(value, datetime.date) else str(value))


@fuzzed(150)
@given(texts=COLUMNS, data=st.data())
def test_nothing_is_lost(texts: list[str], data: st.DataObject) -> None:
    """Every value of a column is written back as it was read; whatever files they are in, its type is the same."""
    whole = infer_texts(pa.array(texts, pa.string()))
    converted = convert(pa.array(texts, pa.string()), whole.type())
    assert all(is_back(text, value) for text, value in zip(texts, converted.to_pylist(), strict=True)) or not texts
    cut = data.draw(st.integers(0, len(texts)))
    parts = [infer_texts(pa.array(part, pa.string())) for part in (texts[:cut], texts[cut:])]
    assert join_inferred(*parts).type() == join_inferred(*reversed(parts)).type()
    assert join_inferred(*parts).type() == whole.type()
    assert join_inferred(whole, NOTHING) == whole


TYPES: dict[pa.DataType, list[list[str]]] = {
    pa.int64(): [["1", "-20"], ["1", ""]],
    pa.float64(): [["1", "2.5"], ["-0.0", "1.1"]],
    pa.decimal128(18, 2): [["1.50", "22.25"]],
    # The second is of as many digits as some that fit in 64 bits.
    pa.decimal128(20, 0): [["18446744073709551615", "1"], ["9223372036854775808", "1"]],
    pa.bool_(): [["true", "false"]],
    pa.date32(): [["2020-01-01"]],
    pa.timestamp("us", "UTC"): [["2020-01-01T01:00:00+01:00"]],
    pa.timestamp("us"): [["2020-01-01 01:00:00"]],
    pa.string(): [
        ["01234", "98765"], ["1", "x"], ["x", ""], [""], ["1.50", "22.5"], ["9007199254740993", "0.5"], ["9" * 39], ["1e3"], ["TRUE", "false"],
        ["2020-02-30"], ["2020-01-01 01:00:00", "2020-01-01T01:00:00Z"], ["2020-01-01T01:00:00.1234567Z"], ["10:11:12"], ["-0.00", "1.10"],
        ["0000-01-01"], ["9999-12-31T23:59:59-05:00"], ["9" * 5000],
    ],
}  # fmt: skip
DECIMALS = [pa.decimal128(*digits) for digits in ((10, 2), (38, 0), (38, 38), (38, 20), (1, 0), (1, 1))]
ODD_NUMBERS = [
    "1", "1.", "+1", ".5", "-.5", "00", "-0", "0.10", "0.101", "1e2", "1E-2", "1e28", "9" * 28, "9" * 38, "9" * 39, "99.5", "1e-41", f"0.{'0' * 40}1",
    f"{'5' * 41}.{'5' * 41}", "0" * 99 + "1", f"1.{'0' * 60}", "1e-300000000", "0e-300000000", "1e300000000", f"1e{10**20}", "1" * 9999, "1e", "x", ".",
]  # fmt: skip


@pytest.mark.parametrize("kind", DECIMALS, ids=str)
def test_decimals_are_exact_or_refused(kind: pa.DataType) -> None:
    """Decimals are exact or refused, although Arrow lets some such texts overflow, and ends the process at others."""
    exact = decimal.Context(prec=200, traps=[decimal.Inexact, decimal.InvalidOperation], Emin=-(10**17), Emax=10**17)
    for text in ODD_NUMBERS:
        expected: decimal.Decimal | None = None
        with contextlib.suppress(decimal.InvalidOperation, decimal.Inexact), decimal.localcontext(exact):
            expected = D(text).quantize(D(1).scaleb(-kind.scale))
        if expected and expected.adjusted() >= kind.precision - kind.scale:
            expected = None
        texts = pa.array(["0", text, None])
        if expected is None:
            with pytest.raises(SchemaError, match=re.escape(repr(text[:80]))):
                convert(texts, kind)
        else:
            assert convert(texts, kind).to_pylist() == [0, expected, None], text


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_types(kind: pa.DataType) -> None:
    """Types by example; in one file, and with a file for each value."""
    for texts in TYPES[kind]:
        assert infer_texts(pa.array(texts)).type() == kind, texts
        inferred = NOTHING
        for text in texts:
            inferred = join_inferred(inferred, infer_texts(pa.array([text])))
        assert inferred.type() == kind, texts


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.integers(-9, 9), st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=3), st.sampled_from(["2020-01-01", "2020-01-01T00:00:00Z", "2020-01-01T01:00:00+01:00", "1", "true"]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(["x", "y"]), inner, max_size=2)),
    max_leaves=5,
)  # fmt: skip
OBJECTS = st.lists(st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES, max_size=3), max_size=4)


def means(value: Any, actual: Any, kind: pa.DataType) -> bool:
    """Whether what was read of a JSON value has all of it."""
    if value is None or actual is None:
        return value is None and actual is None
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        return value.keys() <= fields.keys() and all(means(value.get(n), actual[n], of) for n, of in fields.items())
    if pa.types.is_list(kind):
        pairs = zip(value, actual, strict=True)
        return len(value) == len(actual) and all(means(a, b, kind.value_type) for a, b in pairs)
    if pa.types.is_string(kind) and not isinstance(value, str):
        return bool(json.loads(actual) == value)
    if pa.types.is_timestamp(kind):
        return datetime.datetime.fromisoformat(value.replace("Z", "+00:00")) == actual
    if isinstance(value, bool) or isinstance(actual, bool):
        return value is actual
    return bool(actual == value) and (not isinstance(value, int) or int(actual) == value)


@fuzzed(150)
@given(rows=OBJECTS, cut=st.integers(0, 4), array=st.booleans())
def test_any_json(tmp_path_factory: pytest.TempPathFactory, rows: list[dict[str, Any]], cut: int, array: bool) -> None:
    """JSON lines and arrays, in one file or two, of values of all types at once: all of every value is there."""
    dim = tmp_path_factory.mktemp("json") / "dim"
    dim.mkdir()
    write(dim, "a.json", json.dumps(rows[:cut]) if array else "\n".join(map(json.dumps, rows[:cut])))
    write(dim, "b.json", "\n".join(map(json.dumps, rows[cut:])))
    if not any(rows):
        return  # without any column there is no row
    actual = read(dim)
    assert actual.num_rows == len(rows)
    assert set(actual.column_names) == {name for row in rows for name in row}
    for row, actual_row in zip(rows, actual.to_pylist(), strict=True):
        for field in actual.schema:
            assert means(row.get(field.name), actual_row[field.name], field.type), (row, actual_row)


DEEP = 20_000
OPEN = {
    'id,v\n1,"a\n2,b\n': None, 'id,v\n1,"a\n2,b': None, 'id,v\r\n1,"a\r\n2,b\r\n': None, 'id,v\n1,"a""\n': None, 'id\n"a\n\n': None,
    'id,v\n1,"a\n"\n': "a\n", 'id,v\n1,"a\n"': "a\n", 'id,v\n1,"a""\n"\n\n': 'a"\n', 'id,v\r1,"a\r"\r': "a\r", 'id,v\n1,"a"""\n': 'a"',
}  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), OPEN.items())
def test_csv_that_ends_inside_of_quotes(dim: Path, content: str, expected: str | None) -> None:
    """A quote without its counterpart is an error: the rows behind it would be one text. Texts may end with a line end."""
    write(dim, "a.csv", content)
    if expected is None:
        with pytest.raises(DamagedFileError, match="quoted text has no end"):
            read(dim)
        assert open_dim(dim, {"lookup.csv.quote": ""}).scan().num_rows == len(content.split()) - 1
    else:
        assert read(dim)["v"].to_pylist() == [expected]


BEHIND_QUOTES: dict[str, str | None] = {
    '"5" pipe': None, '"5"x': None, '"a"b"c"': None, '"" x': None, '""x': None, '" a"b"': None, '"a" "b"': None, '"a, b"c': None, '"a" b ': None,
    '"a"b""': None, '"a""b"c': '"a"b"c', '"""" x': '""" x', '"5" ': "5", '"5" \t': "5", '"" ': "", ' "a"b': None, 'x"y"z': None, '"a""b"': 'a"b',
}  # fmt: skip


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"], ids=ascii)
@pytest.mark.parametrize("quote", ['"', "'"])
def test_csv_text_behind_a_closing_quote(dim: Path, line_end: str, quote: str) -> None:
    """Text behind a closing quote makes the quotes ordinary characters (where `None` is expected), as in Spark with multiLine; blanks are dropped."""
    lines = ["id,v,w", '0,5" pipe,"x, ""y"""', *(f'{n},{text},"N""N"' for n, text in enumerate(BEHIND_QUOTES, 1))]
    content = "".join(f"{line}N" for line in lines).replace("N", line_end)
    expected = ['5" pipe', *(text if value is None else value for text, value in BEHIND_QUOTES.items())]
    write(dim, "a.csv", content.replace('"', quote))
    table = read(dim, csv__quote=quote)
    assert table["v"].to_pylist() == [value.replace('"', quote) for value in expected]
    assert set(table["w"].to_pylist()[1:]) == {f'{line_end}"{line_end}'.replace('"', quote)}


@pytest.mark.parametrize("content", ['id,v\n1,"a\nb"c\n', 'id,v\n1,"a\n2,"b"\n', 'id,v\r1,"a""\r2,"b"\r'], ids=ascii)
def test_csv_text_behind_quotes_that_may_be_several_rows(dim: Path, content: str) -> None:
    """Text behind quotes that may be several rows, or that can be read in several ways with an escape character, is refused."""
    for text, value in (('"a\\"b"c', '"a"b"c'), ('"5" pipe', '"5" pipe')):
        write(dim, "a.csv", f'id,v\n1,"x"\n2,{text}\n')
        assert read(dim, csv__escape="\\")["v"].to_pylist() == ["x", value]
    for text in ('"a""b"', '"a"b\\"', '"a\\"', '"a"" '):
        write(dim, "a.csv", f'id,v\n1,"x"\n2,{text}\n')
        with pytest.raises(DamagedFileError, match=r"a\.csv .*line 3: quoted text .*or lookup\.csv\.escape"):
            read(dim, csv__escape="\\")
    write(dim, "a.csv", content)
    with pytest.raises(DamagedFileError, match=r"a\.csv .*line 2: quoted text is followed by .*set lookup\.csv\.quote"):
        read(dim)


@pytest.mark.parametrize(("kind", "text"), [("INT", "0xFFFFFFFF"), ("SMALLINT", "0XFF"), ("BIGINT", "-0x1")])
def test_csv_of_hexadecimal_numbers(dim: Path, kind: str, text: str) -> None:
    """Hexadecimal numbers are not integers, as in Spark; to Arrow 0xFFFFFFFF is -1."""
    write(dim, "a.csv", f"id,v\n1,{text}\n")
    with pytest.raises(SchemaError, match=text):
        open_dim(dim, {"lookup.schema": f"id INT, v {kind}"}).scan()


DEPTHS = {
    "objects": ('{"id": 1, "v": ' + '{"a": ' * DEEP + "1" + "}" * DEEP + "}", False),
    "cut off": ('{"id": 1, "v": ' + '[{"a": ' * DEEP, False),
    "behind a text": ('{"id": 1, "w": "\\\\", "v": ' + "[" * DEEP + "]" * DEEP + "}", False),
    "in an array": ('[{"id": 1, "v": ' + "[" * DEEP + "]" * DEEP + "}]", False),
    "101": ('{"id": 1, "v": ' + "[" * 101 + "]" * 101 + "}", False),
    "100": ('{"id": 1, "v": ' + "[" * 100 + "]" * 100 + "}", True),
    "in texts": ('{"id": 1, "v": "' + "[{" * DEEP + '\\"' + "[{" * DEEP + '\\\\"}', True),
    "many rows": ("\n".join(f'{{"id": {n}, "v": [[["\\"[", "[\\\\"]]]}}' for n in range(5000)), True),
}


@pytest.mark.parametrize(("content", "readable"), DEPTHS.values(), ids=list(DEPTHS))
def test_json_nested_deep(dim: Path, content: str, readable: bool) -> None:
    """Values that are nested deeper than a column can be are refused before a parser sees them. Brackets inside JSON strings do not count."""
    write(dim, "a.json", content)
    for mode in CACHES.values():
        refused = pytest.raises(DamagedFileError, match="nested more than 100 deep")
        with contextlib.nullcontext() if readable else refused:
            assert len(open_dim(dim, mode).get(1) if mode else read(dim)) >= 1


@pytest.mark.parametrize("mode", CACHES)
@pytest.mark.parametrize(
    "order", ['NULL\n{"id": 1}', '\ufeff NULL NULL {"id": 1}', '{"id": 1}\nNULL', '[NULL, {"id": 1}]', "NULL"]
)
def test_json_of_null(dim: Path, mode: str, order: str) -> None:
    """A null in the place of an object is a row of nulls, wherever it stands, as in Spark. Arrow's parser ends the process at the first."""
    write(dim, "b.json", '{"id": 2}')
    write(dim, "a.json", order.replace("NULL", "null"))
    table = open_dim(dim, {"lookup.keys": "id"} | CACHES[mode])
    expected = [*["1"] * order.count("1"), "2", *["None"] * order.count("NULL")]
    assert sorted(str(n) for n in table.scan()["id"].to_pylist()) == expected
    assert len(table.get(1)) == order.count("1") and len(table.get(2)) == 1


@pytest.mark.parametrize("mode", CACHES)
@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("1", "01234", ["1", "01234"]), ("1", "2.5", [1.0, 2.5]),
        ("1", "99999999999999999999", [D(1), D("99999999999999999999")]),
        ("2020-01-01", "", [datetime.date(2020, 1, 1), None]), ("Infinity", "2.5", [math.inf, 2.5]),
    ],
)  # fmt: skip
def test_a_second_file_decides_the_type(dim: Path, mode: str, first: str, second: str, expected: list[Any]) -> None:
    """A table whose second file has other-looking values goes on, in every mode, and the first file's values are their texts."""
    table = open_dim(dim, CACHES[mode])
    write(dim, "a.csv", f"id,v\n1,{first}\n")
    before = table.scan()["v"].to_pylist()
    assert len(before) == 1
    write(dim, "b.csv", f"id,v\n2,{second}\n")
    assert table.scan().sort_by("id")["v"].to_pylist() == expected
    if mode != "none":
        assert [table.get(n)[0]["v"] for n in (1, 2)] == expected


HALVES = {
    r"\ud83d": "?", r"\ude00": "?", r"\uD83Dx": "?x", r"\ude00\ud83d": "??", r"\ud83d\ud83d\ude00": "?\U0001f600", r"\ud83d\n\ude00": "?\n?",
    r"\ud83d\ude00\ude00": "\U0001f600?", r"\\ud83d": r"\ud83d", r"\\\ud83d": r"\?", r"\ud83d\\": "?\\", r"\ud83d\"": '?"', "\\ud83d\U0001f600": "?\U0001f600",
}  # fmt: skip


@pytest.mark.parametrize("nested", ['"TEXT"', '["TEXT"]', '{"a": ["TEXT"]}', '{"TEXT": 1}'])
def test_json_with_half_of_a_pair(dim: Path, nested: str) -> None:
    """A value of which UTF-16 has one half of a pair has a `?` there, as in Spark; others are as they were."""
    for escaped, text in HALVES.items():
        write(dim, "a.json", f'{{"id": 1, "v": {nested.replace("TEXT", escaped)}}}')
        assert read(dim).column("v").to_pylist() == [json.loads(nested.replace("TEXT", json.dumps(text)[1:-1]))]


DECLARED = "zip STRING, n DECIMAL(5, 2), at TIMESTAMP, ok BOOLEAN, gone INT"


@pytest.mark.parametrize("mode", CACHES)
@pytest.mark.parametrize(
    "content",
    [
        {"a.csv": "id,zip,n,at,ok,more\n1,01234,1.5,2020-01-01T00:00:00Z,true,x\n", "b.csv": "zip,id\n0,2\n"},
        {"a.json": '{"id": 1, "zip": "01234", "n": 1.5, "at": "2020-01-01T00:00:00Z", "ok": true, "more": "x"}', "b.json": '[{"id": 2, "zip": 0}]'},
    ],
    ids=["csv", "json"],
)  # fmt: skip
def test_a_declared_schema_is_what_one_gets(dim: Path, mode: str, content: dict[str, str]) -> None:
    """Columns, their order and types as declared, whatever the texts look like; what no file has is null."""
    for name, text in content.items():
        write(dim, name, text)
    table = open_dim(dim, {**CACHES[mode], "lookup.schema": f"{DECLARED}, id SMALLINT"})
    rows = table.scan()
    assert rows.schema == pa.schema(
        [("zip", pa.string()), ("n", pa.decimal128(5, 2)), ("at", pa.timestamp("us", "UTC")), ("ok", pa.bool_()), ("gone", pa.int32()), ("id", pa.int16())]
    )  # fmt: skip
    at = datetime.datetime(2020, 1, 1, tzinfo=UTC)
    first = {"zip": "01234", "n": D("1.50"), "at": at, "ok": True, "gone": None, "id": 1}
    second = {**dict.fromkeys(first), "zip": "0", "id": 2}
    assert rows.sort_by("id").to_pylist() == [first, second]  # a snapshot has an order of its own
    if mode != "none":
        assert (table.get(1), table.get(2), table.get(3)) == ([first], [second], [])


@pytest.mark.parametrize("mode", CACHES)
def test_a_declared_schema_casts_what_it_can(dim: Path, mode: str) -> None:
    """Parquet is cast where no value changes, and pruned no wrong way; a value that would change is an error that names it."""
    columns = {"id": [1, 2], "n": [1.0, 2.0], "s": [b"a", b"b"], "f": [0.5, 0.25], "t": pa.array([{"x": 1}, None])}
    pq.write_table(pa.table(columns), dim / "a.parquet")
    options = {**CACHES[mode], "lookup.schema": "s STRING, id INT, n INT, f FLOAT, t STRUCT<x: TINYINT>"}
    table = open_dim(dim, options)
    expected = [{"s": "a", "id": 1, "n": 1, "f": 0.5, "t": {"x": 1}}, {"s": "b", "id": 2, "n": 2, "f": 0.25, "t": None}]
    assert table.scan().sort_by("id").to_pylist() == expected
    assert table.scan(predicate="s = 'b' AND n = 2").to_pylist() == expected[1:]
    pq.write_table(pa.table({"id": [3], "n": [2.5], "s": [b"c"], "f": [0.1]}), dim / "b.parquet")
    with pytest.raises(SchemaError, match=r"column 'n' .*b\.parquet does not fit int32"):
        table.scan()
    assert open_dim(dim, {**options, "lookup.schema": "id INT, s STRING"}).scan().num_rows == 3


def test_declared_columns_of_directories(dim: Path) -> None:
    """Partition columns have the declared types and places; one that is not declared is not there."""
    for name in ("r=01/q=x", "r=2/q=y"):
        (dim / name).mkdir(parents=True)
        write(dim / name, "a.csv", f"id\n{len(name)}\n")
    assert read(dim).column_names == ["id", "r", "q"]
    rows = read(dim, schema="r STRING, id BIGINT")
    assert rows.to_pylist() == [{"r": "01", "id": 8}, {"r": "2", "id": 7}]
    assert read(dim, schema="id INT, r INT", partition="r=1").to_pylist() == [{"id": 8, "r": 1}]
    with pytest.raises(
        SchemaError, match=r"column 'R' of lookup\.schema or \.schema.…. is spelled 'r' in the directories"
    ):
        read(dim, schema="id INT, R INT")


@pytest.mark.parametrize("options", [{"lookup.schema": "id INT"}, {"lookup.csv.sep": ";"}])
def test_a_managed_table_has_its_own_schema(dim: Path, options: dict[str, str]) -> None:
    """Options that describe text files are refused, because a managed table's log says what its columns are."""
    open_dim(dim).write(pa.table({"id": [1]}))
    with pytest.raises(OptionError, match=f"option {next(iter(options))} has no meaning for .* a managed table"):
        open_dim(dim, options).scan()


Content = str | bytes | pa.Array


def file_name(content: Content) -> str:
    json_ = isinstance(content, str) and content.startswith("{")
    return f"a.{'parquet' if isinstance(content, pa.Array) else 'json' if json_ else 'csv'}"


def texts(text: str) -> tuple[str, str]:
    return f"id,v\n1,{text}\n", json.dumps({"id": 1, "v": text})


OTHER_VALUES: list[tuple[Content, str, str]] = [
    *((form, "INT", "string .*'x' is not a valid ") for form in texts("x")),
    *((form, "DECIMAL(5, 2)", r".*'1\.255.*' is not a valid ") for form in texts("1.255")),
    *((form, "TIMESTAMP", ".*'2020.*' is not a valid ") for form in texts("2020-01-01 00:00:00")),
    *((form, "INT", ".*'3000000000' is not a valid ") for form in texts("3000000000")),
    # A number is not an instant, and the file is not damaged.
    *((form, kind, "int64 ") for kind in ("TIMESTAMP", "BOOLEAN", "ARRAY<INT>") for form in ("id,v\n1,7\n", '{"id": 1, "v": 7}')),
    # What a cast would round or cut; types that are not numbers, whatever the values.
    (pa.array([2**40]), "INT", ""), (pa.array([0.1]), "FLOAT", ""), (pa.array([float(2**53)]), "DECIMAL(5, 0)", ""),
    (pa.array([D("1.25")], pa.decimal128(5, 2)), "DECIMAL(5, 1)", ""), (pa.array([2**53 + 1]), "DOUBLE", ""),
    (pa.array([b"\xff"]), "STRING", ""), (pa.array([], pa.int64()), "STRING", "int64 "),
]  # fmt: skip


@pytest.mark.parametrize(("content", "declared", "reason"), OTHER_VALUES, ids=str)
def test_a_value_that_is_none_of_the_declared_type(dim: Path, content: Content, declared: str, reason: str) -> None:
    """No value is rounded, cut or invented: the error names the column, its types and the value; other columns can be read."""
    write(dim, file_name(content), content)
    words = rf"column 'v' of .*{file_name(content)} (is .* and cannot be read as|does not fit)"
    with pytest.raises(SchemaError, match=words) as caught:
        read(dim, schema=f"v {declared}, id INT")
    assert re.search(reason, str(caught.value).partition(" is ")[2])
    if isinstance(content, str):
        assert open_dim(dim, {"lookup.schema": f"v {declared}, id INT"}).scan(columns=["id"]).to_pylist() == [{"id": 1}]


WHOLE: list[Content] = ["v\n5\n", '{"v": 5}', pa.array([5])]
ROWS: list[tuple[dict[str, str], Content, Any]] = [
    ({"csv__header": "false"}, "1,a\n2,b\n", [{"_c0": 1, "_c1": "a"}, {"_c0": 2, "_c1": "b"}]),
    ({"csv__header": "false", "schema": "n INT, s STRING"}, "1,a\n", [{"n": 1, "s": "a"}]),
    ({"csv__sep": ";"}, "a;b\n1,5;x\n", [{"a": "1,5", "b": "x"}]),
    ({"csv__sep": "\\t"}, "a\tb\n1\tx\n", [{"a": 1, "b": "x"}]),
    ({"csv__quote": "'"}, "a,b\n'x,\"y',''''\n", [{"a": 'x,"y', "b": "'"}]),
    ({"csv__quote": ""}, 'a,b\n"x,y"\n', [{"a": '"x', "b": 'y"'}]),
    ({"csv__null_value": "NA"}, 'a,b\nNA,"NA"\n,""\n', [{"a": None, "b": None}, {"a": None, "b": ""}]),
    ({"csv__infer_schema": "false"}, "a,b\n1,\n", [{"a": "1", "b": None}]),
    ({"csv__encoding": "ISO-8859-1"}, "a\nß\n".encode("latin-1"), [{"a": "ß"}]),
    ({"csv__encoding": "UTF-16"}, "a,b\nß,1\n".encode("utf-16"), [{"a": "ß", "b": 1}]),
    ({}, "\ufeffa\n1\n", [{"a": 1}]),
    *(({}, header, []) for header in ("id,name", "id,name\n", "id,name\r\n")),
    ({}, 'a,b\n1,\n,""\n3,NA\n4,null\n', [{"a": 1, "b": None}, {"a": None, "b": ""}, {"a": 3, "b": "NA"}, {"a": 4, "b": "null"}]),
    ({}, 'a,b\r\n1,x\r\n2,"y, ""z""\nw"', [{"a": 1, "b": "x"}, {"a": 2, "b": 'y, "z"\nw'}]),
    ({}, "a,,c\n1,2,3\n", [{"a": 1, "_c1": 2, "c": 3}]),
    ({}, 'a,b\n"x ""y""",\\\n', [{"a": 'x "y"', "b": "\\"}]),
    ({}, 'a,b\n1,x\\"y\n', [{"a": 1, "b": 'x\\"y'}]),
    ({"csv__escape": '"'}, 'a\n"x\\""y"\n', [{"a": 'x\\"y'}]),
    ({"csv__escape": "\\"}, 'a,b\n"x\\"y","c,\\\\"\nd\\\\e,"\\n"\n', [{"a": 'x"y', "b": "c,\\"}, {"a": "d\\\\e", "b": "\\n"}]),
    # Whole numbers are of each type that has them, whatever the file's format; names are compared in any letter case.
    *(({"schema": f"V {kind}"}, form, [{"V": v}]) for form in WHOLE for kind, v in (("DECIMAL(10, 2)", D("5.00")), ("DOUBLE", 5.0), ("TINYINT", 5))),
    *(({"schema": "v STRING"}, form, [{"v": "5"}]) for form in WHOLE[:2]),
    *(({"schema": "v BOOLEAN"}, form, [{"v": True}]) for form in ("v\n1\n", '{"v": 1}')),
    ({"schema": "v STRUCT<inner: INT>"}, '{"v": {"Inner": 5}}', [{"v": {"inner": 5}}]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "content", "expected"), ROWS, ids=str)
def test_dialects_and_declared_types(dim: Path, options: dict[str, str], content: Content, expected: list[Any]) -> None:
    """Each option of `lookup.csv`, and values as `lookup.schema` declares them, by example."""
    write(dim, file_name(content), content)
    rows = read(dim, **options)
    assert rows.to_pylist() == expected
    assert expected or rows.schema == pa.schema([("id", pa.string()), ("name", pa.string())])


@pytest.mark.parametrize(
    ("options", "content", "message"),
    [
        *(({}, text, r"has \\\" inside quoted text, as Spark writes it: set lookup\.csv\.escape") for text in ('a,b\n"x\\"y",1\n', 'a,b\n"x\\",y\\"z"\n')),
        ({}, "a\n\xff\n".encode("latin-1"), r"bytes that are not valid utf-8 .if it is in another encoding, set lookup\.csv\.encoding"),
        ({"csv__header": "false", "schema": "a INT"}, "1,2\n", r"has 2 columns and no header, but lookup\.schema or \.schema.…. has 1: a: declare all"),
        ({"csv__sep": ";;"}, "a\n", r"option lookup\.csv\.sep = ';;'.*: expected one ASCII character"),
        ({"csv__encoding": "klingon"}, "a\n", r"option lookup\.csv\.encoding = 'klingon'.*: expected the name of an encoding"),
        ({"schema": "a"}, "a\n", r"option lookup\.schema = 'a'.*: expected columns and their types as in CREATE TABLE"),
        ({}, "a,b\n1,2,3\n", r"not a readable csv file"),
        *(({}, f"{header}\n1,2,3\n", r"a\.csv: columns .* differ at most in letter case") for header in ("id,a,a", "id,a,A", "id,,_c1")),
        *(({}, text, r"a\.json is not a readable json file") for text in ('{"a": 1', '{"a": 1} x', "[1, 2]", '[{"a": 1}')),
        ({"csv__sep": ";"}, '{"a": 1}', r"option lookup\.csv\.sep is for CSV files: .* has json files: remove the option"),
    ],
)  # fmt: skip
def test_what_is_said_of_other_files(dim: Path, options: dict[str, str], content: str | bytes, message: str) -> None:
    """Damage is told by the file's name; errors name the option to set, and nothing is ignored without a word."""
    write(dim, "a.json" if "json" in message else "a.csv", content)
    with pytest.raises(PysparkLookupError, match=message):
        read(dim, **options)


def test_two_readers_of_one_path(dim: Path) -> None:
    """What one reader makes of the files by its options has no effect on the other, in the same cache."""
    write(dim, "a.csv", "id;v\n1;01\n")
    schemas: list[dict[str, str]] = [{}, {"lookup.schema": "id INT, v INT"}]
    tables = [open_dim(dim, {**CACHES["full"], "lookup.csv.sep": ";", **schema}) for schema in schemas]
    for _ in range(2):
        assert [table.get(1) for table in tables] == [[{"id": 1, "v": "01"}], [{"id": 1, "v": 1}]]
