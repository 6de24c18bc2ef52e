"""Tables of other systems: making a provider, and the options that it is made of."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pyspark_lookup.base.errors import OptionError, SchemaError
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.providers.functions import LookupContext, LookupFunctionProvider, LookupProvider
from tests.providers.common import CACHES, SCHEMA, Desk, Options, SyncFunction, in_turn, names, provider, raises, users


def test_what_a_factory_is_told(desk: Desk) -> None:
    """Keys, options without their prefix, and the path; what was not given is None. Once more if not all columns are wanted."""
    told: list[LookupContext] = []
    schema = pa.schema([("id", pa.int64()), ("more", pa.int64()), ("name", pa.string()), ("flag", pa.bool_())])

    def factory(context: LookupContext) -> LookupProvider:
        told.append(context)
        return provider(users(), schema)

    desk.table(factory)
    assert told.pop() == LookupContext(("id",), None, {}, None)
    options = {
        "lookup.keys": "name,id",
        "lookup.provider.table": "users",
        "lookup.provider.connect.timeout": 5,
        "lookup.provider.safe": True,
    }
    given = {"table": "users", "connect.timeout": "5", "safe": "true"}
    context = LookupContext(("name", "id"), None, given, "jdbc:anything/at all")
    desk.table(factory, options, path="jdbc:anything/at all")
    assert told == [context]
    more = {"lookup.columns": "flag, `name`", "lookup.where": "more = 1"}
    desk.table(factory, {**options, **more}, path="jdbc:anything/at all")
    assert told[1:] == [context, dataclasses.replace(context, columns=("more", "flag"))]
    with pytest.raises(AttributeError):
        context.keys = ()  # type: ignore[misc]


class Nested:
    """A factory may be an attribute of an attribute."""

    @staticmethod
    def users(context: LookupContext) -> LookupProvider:
        return provider(users())


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
        (f"{__name__}:SCHEMA", r"cannot be made: TypeError\(.*not callable"),
        (f"{__name__}:Nested", r"cannot be made: TypeError"),
        (f"{__name__}:LookupFunctionProvider", r"cannot be made: TypeError"),
        ("broken_provider_of_ours:make", r"RuntimeError\('half of a module'\)"),
        ("nocolon", "expected module:factory"),
        (":make", "expected module:factory"),
        ("a module:make", "expected module:factory"),
        ("module:", "expected module:factory"),
    ],
)
def test_factories_that_are_none(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    """A factory that is not there, is none or cannot be imported is an error of the option, with what was wrong."""
    (tmp_path / "broken_provider_of_ours.py").write_text("raise RuntimeError('half of a module')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(OptionError, match=f"option lookup.provider = '{name}'.*{says}"):
        desk.table(name)


def test_a_factory_that_raises(desk: Desk) -> None:
    """Its error is in ours, and its own OptionError is ours; the next table tries again."""
    missing = OptionError("option lookup.provider.table is missing")
    made = provider(users())
    name = desk.name(in_turn(raises(ValueError("no table of that name")), raises(missing), lambda context: made))
    with pytest.raises(OptionError, match=rf"{name}' cannot be made: ValueError\('no table of that name'\)"):
        desk.table(name)
    with pytest.raises(OptionError, match=r"^option lookup.provider.table is missing$"):
        desk.table(name)
    assert names(desk.table(name), 1) == ["Alice"]


@pytest.mark.parametrize("returned", [None, users(), LookupFunctionProvider, "provider", SCHEMA])
def test_a_factory_that_returns_something_else(desk: Desk, returned: Any) -> None:
    """What is no provider is refused, and shown."""
    with pytest.raises(OptionError, match=r"provider_1:make' returned (.|\n)*: return a LookupProvider"):
        desk.table(lambda context: returned)


@pytest.mark.parametrize(
    ("schema", "kind", "says"),
    [
        ([("id", pa.int64()), ("ID", pa.int64())], SchemaError, ": .*'id' and 'ID' differ at most in letter case"),
        ([("id", pa.int64()), ("at", pa.time64("us"))], SchemaError, ": .*column 'at': type time64"),
        (None, OptionError, ""),
    ],
)
def test_schemas_that_spark_cannot_take(desk: Desk, schema: Any, kind: type[Exception], says: str) -> None:
    """A schema that is none, or none for Spark, is refused, naming the provider."""
    with pytest.raises(kind, match=f"provider_1:make{says}"):
        desk.serve(users(), schema=schema and pa.schema(schema))


def test_a_provider_without_a_function(desk: Desk) -> None:
    """A provider that is neither asked by key nor scanned can be made, and answers nothing."""
    table = desk.table(lambda context: LookupProvider(SCHEMA))
    with pytest.raises(OptionError, match=r"provider_1:make.* has no lookup function"):
        table.get(1)


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
        return provider(users())

    table = desk.table(factory, {**cache, "lookup.keys": "ID", "lookup.columns": "NAME"})
    assert table.get(1) == [{"id": 1, "name": "Alice"}]
    assert (told[-1].keys, told[-1].columns) == (("id",), ("name",))


# --- options -----------------------------------------------------------------------------------------------

BY_ROWS: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}
BY_ACCESS: Options = {"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-access": "1 h"}
# What no provider could change is refused in tests/test_options.py.
BAD_OPTIONS: list[tuple[Options, str]] = [
    ({"lookup.view": "files"}, r"describe\(\) or metrics\(\)"),
    ({"lookup.cache": "FULL"}, "has no scan function; return a FullCachingLookupProvider"),
    (BY_ROWS, r"has no version\(\).*set lookup.partial-cache.expire-after-write"),
    (BY_ACCESS, r"has no version\(\)"),
    ({"lookup.cache": "PARTIAL"}, r"has no version\(\)"),
    ({"lookup.provider.password": "hunter2"}, "lookup.provider.password looks like a credential"),
]


@pytest.mark.parametrize(("options", "says"), BAD_OPTIONS, ids=str)
def test_bad_options(desk: Desk, options: Options, says: str) -> None:
    """An option that cannot be meant is refused when the table is made, with its name; the function is not touched."""
    function = users()
    with pytest.raises(OptionError, match=says):
        desk.serve(function, options)
    assert function.log.events == []


def test_a_table_needs_a_path_or_a_provider_with_keys(desk: Desk) -> None:
    """Without a path and a provider there is no table; a table that is asked by key says by which."""
    with pytest.raises(OptionError, match="path is missing"):
        LookupTable(None, {"lookup.keys": "id"})
    with pytest.raises(OptionError, match=r"lookup.keys = '': provider .* has the columns id, name"):
        LookupTable(None, {"lookup.provider": desk.name(lambda context: provider(users()))})


def test_a_partial_cache_with_a_version_needs_a_bound(desk: Desk) -> None:
    """Where a version tells changes, any of the four bounds will do, and one is needed."""
    with pytest.raises(OptionError, match="would grow for ever"):
        desk.serve(users(), {"lookup.cache": "PARTIAL"}, version=lambda: "1")
    by_bytes = {"lookup.cache": "PARTIAL", "lookup.partial-cache.max-bytes": "1 MiB"}
    for options in (BY_ROWS, BY_ACCESS, by_bytes):
        assert names(desk.serve(users(), options, version=lambda: "1"), 1) == ["Alice"]


@pytest.mark.parametrize("option", [{"lookup.version": "3"}, {"lookup.valid-write-ids": "t:0:5::"}], ids=str)
def test_a_version_of_a_provider_is_refused(desk: Desk, option: Options) -> None:
    """No version of a provider's table can be chosen: an option that asks for one is refused, not ignored."""
    with pytest.raises(OptionError, match=next(iter(option))):
        desk.serve(users(), option).get(1)
