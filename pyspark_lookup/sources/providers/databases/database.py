"""`Database` and `Connection`: what this package needs of a kind of database. `Column` and `Source`: what is read there.

All SQL of this package comes from here and from the modules of the kinds. Names are quoted; values are parameters, never text.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.core.credentials import redact_server_text
from pyspark_lookup.errors import LookupFunctionError, OptionError, raise_ours
from pyspark_lookup.sources.credentials import Credentials
from pyspark_lookup.sources.providers.databases.address import Address

UUID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}$"
"""The texts of UUIDs, as databases spell them."""
_COMMENTS = ("--", "/*", "#")


def tokens_of(*dialect: str) -> re.Pattern[str]:
    """The tokens of a statement: quoted texts and comments, which are one token each, `::`, `:since`, and single characters except spaces and
    semicolons. `dialect`: expressions for those that only some databases have."""
    common = (
        r"'(?:[^']|'')*'",
        r'"(?:[^"]|"")*"',
        "`[^`]*`",
        r"--[^\n]*",
        r"/\*(?!M?!).*?\*/",
        "::",
        r":since\b",
        r"[^\s;]",
    )
    return re.compile("|".join((*dialect, *common)), re.DOTALL)


BACKSLASHES = r"'(?:[^'\\]|\\.|'')*'", r'"(?:[^"\\]|\\.|"")*"'
"""Quoted texts in dialects in which a backslash escapes the next character."""
DOLLARS = r"\$(?P<tag>\w*)\$.*?\$(?P=tag)\$", r"[eE]'(?:[^'\\]|\\.|'')*'"
"""Quoted texts in the dialects of PostgreSQL."""
BATCH_ROWS = 10_000
"""The rows in a batch, where a driver returns rows one by one."""


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of a source.

    `type`: its Arrow type here. `value`: SQL of its value in that type, selected from the source `t`. `key`: SQL that is compared with keys.
    `parameter`: how a parameter is cast before it is compared (`{}` is the parameter, `{array}` is `[]` where the parameter is an array).
    `exact`: whether the database compares the column as this package does; otherwise it may also return other rows. `ordered`: whether `<`
    may be left to the database, too. `findable`: whether the column can be a key.
    `pattern`: a regular expression of the texts that the column may have; the database takes no other as a parameter. `finite`: whether it takes
    no NaN and no infinite value, and so has none. `range`: the first and the last number, date or time that the database takes, as numbers of the type
    (None: it takes all). `infinite`: the SQL type of a column of dates or times that may be infinite, which `STAND_INS` stand for.
    """

    name: str
    type: pa.DataType
    value: str
    key: str
    parameter: str = "{}"
    exact: bool = True
    ordered: bool = False
    findable: bool = True
    pattern: str = ""
    finite: bool = False
    range: tuple[int, int] | None = None
    infinite: str = ""

    @property
    def field(self) -> pa.Field:
        return pa.field(self.name, self.type)


@dataclasses.dataclass(frozen=True)
class Source:
    """What is read: a table or a query. `sql`: what comes after FROM, with the alias `t`. `label`: its name in messages."""

    sql: str
    label: str


@dataclasses.dataclass(frozen=True)
class Condition:
    """A condition in SQL, with its parameters: values, each with its column."""

    sql: str
    parameters: tuple[tuple[Any, Column], ...] = ()


# Spark has no infinite times. Its JDBC source of PostgreSQL reads them as these two, too.
STAND_INS = {"infinity": "9999-12-31 23:59:59.999999", "-infinity": "0001-01-01"}


def replace_infinite(raw: str, kind: str) -> str:
    """The SQL of a date or time, with its stand-in where it is infinite. `kind`: its SQL type."""
    cases = " ".join(f"WHEN '{infinite}' THEN '{finite}'::{kind}" for infinite, finite in STAND_INS.items())
    return f"CASE {raw} {cases} ELSE {raw} END"


def add_infinite_keys(sql: str, names: Sequence[str], keys: Sequence[Column], values: pa.Table) -> str:
    """The SQL of requested keys, and of the infinite keys for which some of them stand. `sql`: a SELECT of `names`, which has `values`."""
    times = pa.array([*STAND_INS.values()]).cast(pa.timestamp("us"))
    for name, key in zip(names, keys, strict=True):
        if not key.infinite:
            continue
        if not pc.any(pc.is_in(values[key.name], value_set=times.cast(key.type, safe=False))).as_py():
            continue
        cases = " ".join(
            f"WHEN '{finite}'::{key.infinite} THEN '{infinite}'::{key.infinite}"
            for infinite, finite in STAND_INS.items()
        )
        infinite_names = ", ".join(f"CASE {name} {cases} END" if other == name else other for other in names)
        sql += f" UNION ALL SELECT {infinite_names} FROM ({sql}) AS k ({', '.join(names)})"
    return sql


class Connection(abc.ABC):
    """A connection, used by one thread. Each statement sees what was committed before it began."""

    @abc.abstractmethod
    def columns(self, source: Source) -> list[Column]:
        """The columns of a source. It is described, not run."""

    @abc.abstractmethod
    def rows(self, source: Source, columns: Sequence[Column], condition: Condition | None) -> Iterator[pa.RecordBatch]:
        """The rows of the source for which the condition holds, streamed, in one read-only transaction that sees one state. If the
        caller stops before the last row, the connection cannot be used again."""

    @abc.abstractmethod
    def rows_of_keys(
        self,
        source: Source,
        columns: Sequence[Column],
        keys: Sequence[Column],
        values: pa.Table,
        condition: Condition | None,
    ) -> pa.Table:
        """The rows whose `keys` have any of `values`, and maybe more rows where a key column is not exact."""

    @abc.abstractmethod
    def query(self, statement: str, most: int, since: pa.Array | None = None) -> pa.Table | None:
        """The result of a statement of the user's. None if it has more than `most` rows: the connection cannot be used again then. `since`: an
        array of one value, the parameter `:since`."""

    @abc.abstractmethod
    def close(self) -> None: ...


class Database(abc.ABC):
    """A kind of database, at one address.

    `extra`: the extra of this package that installs the driver. `is_file`: whether the database is a file, which is opened for each lookup:
    another may be put in its place. `has_logins`: whether a user and a password mean anything to it.
    """

    extra: ClassVar[str] = ""
    is_file: ClassVar[bool] = False
    has_logins: ClassVar[bool] = True
    quote_mark: ClassVar[str] = '"'
    tokens: ClassVar[re.Pattern[str]] = tokens_of()

    def __init__(self, address: Address, credentials: Credentials | None) -> None:
        self.address = address
        self._credentials = credentials
        self.check()

    def check(self) -> None:  # noqa: B027 # most take all parameters
        """Raise OptionError if this kind of database cannot have such an address."""

    @abc.abstractmethod
    def connect(self) -> Connection:
        """A new connection, on which nothing can be written."""

    def keys_at_once(self, columns: int) -> int:
        """The most keys in one statement, if a key has this many columns."""
        return 10_000

    def quote(self, name: str) -> str:
        """A name as an identifier, by the dialect's rule."""
        mark = self.quote_mark
        return mark + name.replace(mark, mark * 2) + mark

    def placeholder(self, number: int) -> str:
        """The parameter with this number (from 1) in a statement."""
        return "?"

    def table(self, name: str) -> Source:
        """The source of a table's name, which is spelled as in the database's catalog: `table`, `schema.table`, or with parts in quotes."""
        return Source(f"{'.'.join(map(self.quote, split_name(name, self.quote_mark)))} AS t", f"table {name}")

    def subquery(self, text: str) -> Source:
        return Source(f"({self.without_end(text)}) AS t", "lookup.query")

    @classmethod
    def without_end(cls, statement: str) -> str:
        """The statement without semicolons and comments at its end."""
        ends = (token.end() for token in cls.tokens.finditer(statement) if not token[0].startswith(_COMMENTS))
        return statement[: max(ends, default=0)]

    @classmethod
    def place_since(cls, statement: str, placeholder: str) -> tuple[str, int]:
        """The statement with `placeholder` in the place of each `:since`, and how many there are. Quoted texts and comments stay as they are."""
        pieces, place = list[str](), 0
        for token in cls.tokens.finditer(statement):
            if token[0] == ":since":
                pieces.append(statement[place : token.start()])
                place = token.end()
        return placeholder.join([*pieces, statement[place:]]), len(pieces)

    def select(self, source: Source, columns: Sequence[Column], condition: Condition | None, *more: str) -> str:
        """A SELECT of these columns, each under its name, of the rows for which the condition and those in `more` hold."""
        values = ", ".join(f"{column.value} AS {self.quote(column.name)}" for column in columns)
        conditions = [*([] if condition is None else [condition.sql]), *more]
        where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        return f"SELECT {values} FROM {source.sql}{where}"

    @contextlib.contextmanager
    def connecting(self, password: str | None) -> Iterator[None]:
        """A block in which a driver connects. An error whose message shows the password is replaced by one that does not."""
        try:
            yield
        except Exception as problem:
            if redact_server_text(str(problem), (password or "",)) != str(problem):
                raise_ours(
                    LookupFunctionError(
                        f"cannot connect to {self.address.place}: {type(problem).__name__}. The driver's message shows the password, so it is left "
                        "out: check the address, the user and the password"
                    ),
                    None,
                )
            raise

    def login(self) -> dict[str, str]:
        """`user` and `password`, as far as the function of `lookup.credentials` and the URL state them."""
        login = {"user": self.address.user} if self.address.user else {}
        if self._credentials is not None:
            answer = self._credentials(self.address.url)
            known = isinstance(answer, Mapping) and answer.keys() <= {"user", "password"}
            if not known or not all(isinstance(text, str) for text in answer.values()):
                raise OptionError(
                    "the function of option lookup.credentials must return a dictionary with 'user', 'password' or both, whose values are str"
                )
            login.update(answer)
        return login

    def missing(self, driver: str, problem: ImportError) -> NoReturn:
        """Raise OptionError, which names the extra, because the driver cannot be imported."""
        raise_ours(
            OptionError(
                f"option path: {self.address.scheme}:// needs the package {driver}, which cannot be imported: "
                f"pip install 'pyspark-lookup[{self.extra}]' on each machine"
            ),
            problem,
        )


def split_name(name: str, quote: str) -> list[str]:
    """The parts of a table's name between its dots. A part in quotes may have dots; a doubled quote in it is a quote."""
    parts, place = list[str](), 0
    while True:
        if name.startswith(quote, place):
            part, place = "", place + 1
            while True:
                end = name.find(quote, place)
                if end < 0:
                    raise OptionError(
                        f"option lookup.table = {name!r}: a quote ({quote}) is never closed: close it, or double it if it is part of the name"
                    )
                part, place = part + name[place:end], end + 1
                if not name.startswith(quote, place):
                    break
                part, place = part + quote, place + 1
        else:
            end = name.find(".", place)
            end = len(name) if end < 0 else end
            part, place = name[place:end], end
        parts.append(part)
        if not part or (place < len(name) and name[place] != "."):
            raise OptionError(
                f"option lookup.table = {name!r}: expected table or schema.table; put a name that has dots in quotes ({quote})"
            )
        if place >= len(name):
            return parts
        place += 1


def values_of(condition: Condition | None) -> list[Any]:
    """The values of a condition's parameters, in their order."""
    return [] if condition is None else [value for value, _ in condition.parameters]


def table_of_batches(batches: Iterator[pa.RecordBatch], most: int, schema: pa.Schema) -> pa.Table | None:
    """Batches as a table; None if they have more than `most` rows in all."""
    taken, rows = list[pa.RecordBatch](), 0
    for batch in batches:
        taken.append(batch)
        rows += batch.num_rows
        if rows > most:
            return None
    return pa.Table.from_batches(taken, schema)


def batch_from_rows(
    rows: Sequence[Sequence[Any]], columns: Sequence[Column], array_of: Callable[[Sequence[Any], Column], pa.Array]
) -> pa.RecordBatch:
    """Rows that a driver returns one by one as a batch. `array_of`: makes the array of a column's values."""
    values = zip(*rows, strict=True) if rows else ((),) * len(columns)
    arrays = [array_of(cells, column) for cells, column in zip(values, columns, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, [column.name for column in columns])
