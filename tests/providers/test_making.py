"""Tables of other systems: making a provider."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.providers.functions import LookupContext, LookupFunctionProvider, LookupProvider
from tests.providers.common import CACHES, SCHEMA, USERS, Desk, Options, SyncFunction, names, provider, rows_of


def test_what_a_factory_is_told(desk: Desk) -> None:
    """Keys, options without their prefix, and the path; what was not given is None. Once more if not all columns are wanted."""
    told: list[LookupContext] = []

    def factory(context: LookupContext) -> LookupProvider:
        told.append(context)
        schema = pa.schema([("id", pa.int64()), ("more", pa.int64()), ("name", pa.string()), ("flag", pa.bool_())])
        return provider(SyncFunction(lambda keys: keys), schema)

    desk.table(factory)
    assert told == [LookupContext(("id",), None, {}, None)]
    told.clear()
    options = {
        "lookup.keys": "name,id",
        "lookup.provider.table": "users",
        "lookup.provider.connect.timeout": 5,
        "lookup.provider.safe": True,
    }
    context = LookupContext(
        ("name", "id"),
        None,
        {"table": "users", "connect.timeout": "5", "safe": "true"},
        "jdbc:anything/at all",
    )
    desk.table(factory, options, path="jdbc:anything/at all")
    assert told == [context]
    told.clear()
    more = {"lookup.columns": "flag, `name`", "lookup.where": "more = 1"}
    desk.table(factory, {**options, **more}, path="jdbc:anything/at all")
    assert told == [context, dataclasses.replace(context, columns=("more", "flag"))]
    with pytest.raises(AttributeError):
        context.keys = ()  # type: ignore[misc]


class Nested:
    """A factory may be an attribute of an attribute."""

    @staticmethod
    def users(context: LookupContext) -> LookupProvider:
        return provider(SyncFunction(rows_of(USERS)))


def test_a_factory_is_named_by_its_module_and_name(desk: Desk) -> None:
    """Packages and classes have dots."""
    assert names(desk.table(f"{__name__}:Nested.users"), 1) == ["Alice"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("no_such_module_of_ours:make", r"cannot be made: ModuleNotFoundError"),
        ("tests.no_such_module:make", r"cannot be made: ModuleNotFoundError"),
        (f"{__name__}:nobody", r"cannot be made: AttributeError"),
        (f"{__name__}:Nested.nobody", r"cannot be made: AttributeError"),
        (f"{__name__}:USERS", r"cannot be made: TypeError\(.*not callable"),
        (f"{__name__}:Nested", r"cannot be made: TypeError"),
        (f"{__name__}:LookupFunctionProvider", r"cannot be made: TypeError"),
        ("nocolon", "expected module:factory"),
        (":make", "expected module:factory"),
        ("a module:make", "expected module:factory"),
        ("module:", "expected module:factory"),
    ],
)
def test_factories_that_are_none(desk: Desk, name: str, says: str) -> None:
    """A factory that is not there, or is none, is an error of the option, with what was wrong."""
    with pytest.raises(OptionError, match=f"option lookup.provider = '{name}'.*{says}"):
        desk.table(name)


def test_a_module_that_cannot_be_imported(desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a module raises while it is imported is in the error; mended, it can be used."""
    (tmp_path / "broken_provider_of_ours.py").write_text("raise RuntimeError('half of a module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=r"RuntimeError\('half of a module'\)"):
        desk.table("broken_provider_of_ours:make")
    assert "broken_provider_of_ours" not in sys.modules


def test_a_factory_that_raises(desk: Desk) -> None:
    """Its error is in ours, and its own OptionError is ours; the next table tries again."""
    problems: list[Exception] = [
        ValueError("no table of that name"),
        OptionError("option lookup.provider.table is missing"),
    ]

    def factory(context: LookupContext) -> LookupProvider:
        if problems:
            raise problems.pop(0)
        return provider(SyncFunction(rows_of(USERS)))

    name = desk.name(factory)
    with pytest.raises(OptionError, match=rf"{name}' cannot be made: ValueError\('no table of that name'\)"):
        desk.table(name)
    with pytest.raises(OptionError, match=r"^option lookup.provider.table is missing$"):
        desk.table(name)
    assert names(desk.table(name), 1) == ["Alice"]


@pytest.mark.parametrize("returned", [None, SyncFunction(rows_of(USERS)), LookupFunctionProvider, "provider", SCHEMA])
def test_a_factory_that_returns_something_else(desk: Desk, returned: Any) -> None:
    """What is no provider is refused, and shown."""
    with pytest.raises(OptionError, match=r"provider_1:make' returned (.|\n)*: return a LookupProvider"):
        desk.table(lambda context: returned)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (pa.schema([("id", pa.int64()), ("ID", pa.int64())]), "'id' and 'ID' differ at most in letter case"),
        (pa.schema([("id", pa.int64()), ("at", pa.time64("us"))]), "column 'at': type time64"),
    ],
)
def test_schemas_that_spark_cannot_take(desk: Desk, schema: pa.Schema, says: str) -> None:
    """A schema that is none for Spark is refused, naming the provider."""
    with pytest.raises(SchemaError, match=f"provider provider_1:make: .*{says}"):
        desk.serve(SyncFunction(rows_of(USERS)), schema=schema)


def test_a_provider_without_a_function(desk: Desk) -> None:
    """A provider that is neither asked by key nor scanned can be made, and answers nothing."""
    table = desk.table(lambda context: LookupProvider(SCHEMA))
    with pytest.raises(OptionError, match=r"provider_1:make.* has no lookup function"):
        table.get(1)


def test_a_schema_that_is_none(desk: Desk) -> None:
    """A provider whose schema is no schema is refused like one that is no provider."""
    with pytest.raises(OptionError, match="provider_1:make"):
        desk.serve(SyncFunction(rows_of(USERS)), schema=None)


@CACHES
def test_a_column_that_is_always_null(desk: Desk, cache: Options) -> None:
    """A column of nothing but nulls is one of texts, as Spark infers it."""
    schema = pa.schema([("id", pa.int64()), ("name", pa.null())])
    table = desk.serve(SyncFunction(lambda keys: keys.append_column("name", pa.nulls(keys.num_rows))), cache, schema)
    for _ in range(2):
        assert table.get(1) == [{"id": 1, "name": None}]
    assert table.describe()["columns"]["name"] == "string"


@CACHES
def test_names_in_another_case(desk: Desk, cache: Options) -> None:
    """Keys and columns may be spelled in another letter case; a factory is told them as its schema spells them."""
    told: list[LookupContext] = []

    def factory(context: LookupContext) -> LookupProvider:
        told.append(context)
        return provider(SyncFunction(rows_of(USERS)))

    table = desk.table(factory, {**cache, "lookup.keys": "ID", "lookup.columns": "NAME"})
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert (told[-1].keys, told[-1].columns) == (("id",), ("name",))
