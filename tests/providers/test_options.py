"""Tables of other systems: options."""

from __future__ import annotations

from pathlib import Path

import pytest

from pyspark_lookup.base.errors import OptionError
from pyspark_lookup.engine.lookup_table import LookupTable
from pyspark_lookup.providers.functions import LookupContext
from tests.providers.common import (
    KINDS,
    PARTIAL,
    RETRY,
    USERS,
    Desk,
    Options,
    SyncFunction,
    counted,
    made,
    names,
    provider,
    rows_of,
)

BAD_OPTIONS: dict[str, tuple[Options, str]] = {
    "predicate, another": ({**RETRY, "lookup.retry.predicate": "exception"}, "lookup.retry.predicate = 'exception'"),
    "predicate, a dash": ({**RETRY, "lookup.retry.predicate": "lookup-miss"}, "did you mean lookup_miss"),
    "delay, no unit": ({**RETRY, "lookup.retry.fixed-delay": "100 nano sec"}, "lookup.retry.fixed-delay = '100 nano sec'"),
    "delay below zero": ({**RETRY, "lookup.retry.fixed-delay": "-10s"}, "lookup.retry.fixed-delay = '-10s'"),
    "delay of nothing": ({**RETRY, "lookup.retry.fixed-delay": "0 s"}, "greater than zero"),
    "attempts below zero": ({**RETRY, "lookup.retry.max-attempts": "-3"}, "lookup.retry.max-attempts = '-3'"),
    "no attempts": ({**RETRY, "lookup.retry.max-attempts": "0"}, "1 or more"),
    "attempts, a fraction": ({**RETRY, "lookup.retry.max-attempts": "100.0"}, "lookup.retry.max-attempts = '100.0'"),
    "timeout, no unit": ({"lookup.async.timeout": "300 si"}, "lookup.async.timeout = '300 si'"),
    "timeout of nothing": ({"lookup.async.timeout": "0 s"}, "greater than zero"),
    "no capacity": ({"lookup.async.capacity": "0"}, "lookup.async.capacity = '0'.*1 or more"),
    "capacity below zero": ({"lookup.async.capacity": "-1"}, "lookup.async.capacity = '-1'"),
    "retries below zero": ({"lookup.max-retries": "-1"}, "lookup.max-retries = '-1'"),
    "an unknown one": ({"lookup.async.time-out": "1 s"}, "did you mean lookup.async.timeout"),
    "another unknown one": ({"lookup.retry.strategy": "fixed_delay"}, "unknown option lookup.retry.strategy"),
    "a view": ({"lookup.view": "files"}, r"describe\(\) or metrics\(\)"),
    "format": ({"lookup.format": "csv"}, "lookup.format is for tables of files"),
    "partition": ({"lookup.partition": "max_pt()"}, "lookup.partition is for tables of files"),
    "success file": ({"lookup.success-file": "true"}, "lookup.success-file is for tables of files"),
    "settle": ({"lookup.settle": "1 s"}, "lookup.settle is for tables of files"),
    "block size": ({"lookup.block.size": "64 KiB"}, "lookup.block.size is for tables of files"),
    "storage": ({"lookup.storage.endpoint_url": "http://h"}, "lookup.storage.endpoint_url is for tables of files"),
    "no cache for its options": ({"lookup.partial-cache.max-rows": 5}, "should be 'PARTIAL'"),
    "full": ({"lookup.cache": "FULL"}, "has no scan function; return a FullCachingLookupProvider"),
    "partial, nothing to tell a change": ({**PARTIAL, "lookup.partial-cache.expire-after-write": ""}, "expire-after-write"),
    "partial by rows alone": ({"lookup.cache": "PARTIAL", "lookup.partial-cache.max-rows": 5}, r"has no version\(\).*set lookup.partial-cache.expire-after-write"),
    "partial by access alone": ({"lookup.cache": "PARTIAL", "lookup.partial-cache.expire-after-access": "1 h"}, r"has no version\(\)"),
    "partial without a bound": ({"lookup.cache": "PARTIAL"}, r"has no version\(\)"),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD_OPTIONS)
@KINDS
def test_bad_options(desk: Desk, kind: str, bad: str) -> None:
    """An option that cannot be meant is refused when the table is made, with its name; the function is not touched."""
    options, says = BAD_OPTIONS[bad]
    function = made(kind, rows_of(USERS))
    with pytest.raises(OptionError, match=says):
        desk.serve(function, options)
    assert function.log.events == []


@pytest.mark.parametrize("option", ["async.capacity", "async.timeout", "retry.predicate", "provider.table"])
def test_options_of_providers_need_one(tmp_path: Path, option: str) -> None:
    """Where no provider is named, an option of providers would be ignored, and is refused."""
    values = {"async.capacity": 5, "async.timeout": "1 s", "retry.predicate": "lookup_miss", "provider.table": "t"}
    more = RETRY if option.startswith("retry") else {}
    with pytest.raises(
        OptionError, match=rf"lookup\.{option.split('.', maxsplit=1)[0]}\..* is for tables of a provider"
    ):
        LookupTable(str(tmp_path), {f"lookup.{option}": values[option], **more})


def test_a_table_needs_a_path_or_a_provider() -> None:
    """Without both there is no table; with a provider there need be no path."""
    with pytest.raises(OptionError, match="path is missing"):
        LookupTable(None, {"lookup.keys": "id"})


def test_a_provider_needs_keys(desk: Desk) -> None:
    """A table that is asked by key says by which."""
    name = desk.name(lambda context: provider(SyncFunction(rows_of(USERS))))
    with pytest.raises(OptionError, match=r"lookup.keys = '': provider .* has the columns id, name"):
        LookupTable(None, {"lookup.provider": name})


def test_a_partial_cache_with_a_version_needs_a_bound(desk: Desk) -> None:
    """Where a version tells changes, any of the four bounds will do, and one is needed."""
    function = SyncFunction(rows_of(USERS))
    with pytest.raises(OptionError, match="would grow for ever"):
        desk.serve(function, {"lookup.cache": "PARTIAL"}, version=lambda: "1")
    for bound, value in (("max-rows", 5), ("max-bytes", "1 MiB"), ("expire-after-access", "1 h")):
        options = {"lookup.cache": "PARTIAL", f"lookup.partial-cache.{bound}": value}
        assert names(desk.serve(function, options, version=lambda: "1"), 1) == ["Alice"]


@pytest.mark.parametrize("option", [{"lookup.version": "3"}, {"lookup.valid-write-ids": "t:0:5::"}], ids=str)
def test_a_version_of_a_provider_is_refused(desk: Desk, option: Options) -> None:
    """No version of a provider's table can be chosen: an option that asks for one is refused, not ignored."""
    with pytest.raises(OptionError, match=next(iter(option))):
        desk.serve(SyncFunction(rows_of(USERS)), {**option}).get(1)


def test_options_mean_the_same_in_small_letters(desk: Desk) -> None:
    """Values that are one of a few are taken in any case."""
    options = {**PARTIAL, **RETRY, "lookup.cache": "partial", "lookup.retry.predicate": "LOOKUP_MISS"}
    table = desk.serve(SyncFunction(rows_of(USERS)), options)
    assert (names(table, 1), names(table, 1)) == (["Alice"], ["Alice"])
    assert counted(table)["hitCount"] == 1


SECRETS = {
    "password": "hunter2",
    "access_key": "hunter2",
    "auth-token": "hunter2",
    "url": "postgres://reader:hunter2@db/users",
    "endpoint": "https://db/?user=x&api_key=hunter2",
    "extra": '{"auth": {"password": "hunter2"}}',
}


@pytest.mark.parametrize("key", SECRETS)
def test_credentials_are_refused(desk: Desk, key: str) -> None:
    """An option that looks like a credential never gets to the factory, nor into the message."""
    made_with: list[LookupContext] = []
    with pytest.raises(OptionError, match=f"lookup.provider.{key} looks like a credential") as caught:
        desk.table(made_with.append, {f"lookup.provider.{key}": SECRETS[key]})
    assert "hunter2" not in str(caught.value)
    assert made_with == []
