"""Delta tables that a Unity catalog names: what is read, what is asked, who may read, and that no credential is written anywhere."""

import json
import logging
import random
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import (
    CatalogUnavailableError,
    NotSupportedError,
    OptionError,
    UfsNotFoundError,
    UfsPermissionError,
    VersionGoneError,
)
from pyspark_lookup.lookup import lookup_table as api
from pyspark_lookup.lookup.runtime import Runtime
from pyspark_lookup.lookup.version_token import VersionToken, resolve_and_secure, version_of_token
from pyspark_lookup.sources.delta import unity
from pyspark_lookup.sources.delta.unity import UnityCatalog, UnityCredentialVendor
from pyspark_lookup.sources.registry import parse_options
from tests.support.fakes import FakeClock
from tests.support.fuzzing import by_day
from tests.support.lake_tables import MODES, counting
from tests.support.s3server import Mirror, S3Server
from tests.support.short_credentials import ShortCredentials
from tests.support.unity_catalog import Table, UnityServer, make_catalog_managed, publish, stage
from tests.support.version_tokens import ONE

NAME = "main.travel.airports"
TABLE, LEND, COMMITS = f"GET /tables/{NAME}", "POST /temporary-table-credentials", "GET /delta/preview/commits"
CACHED = {"metadata_source": "CACHE", "metadata_sync-interval": "1 h"}
MANAGED = "GET /delta/v1/catalogs/main/schemas/travel/tables/airports"


def rows(first: int, count: int = 2) -> pa.Table:
    numbers = range(first, first + count)
    return pa.table({"id": numbers, "name": [f"n{number}" for number in numbers]})


class Lake:
    """A catalog in front of a store that checks the credentials that it vends; tables are written on this disk and sent there.

    What is opened after `start` is of another process.
    """

    def __init__(self, home: Path, s3: S3Server, patch: pytest.MonkeyPatch) -> None:
        self.home, self.s3, self.patch = home, s3, patch
        self.store = ShortCredentials(s3)
        self.catalog = UnityServer(self.store.vend)
        self.clock = FakeClock(time.time())
        self.errors: list[str] = []
        self._mirrors: dict[str, Mirror] = {}
        # The process's own credentials are not those of the tests' client.
        for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY"):
            patch.setenv(f"AWS_{name}", "of-this-process")
        self.catalog.tokens |= {"token-of-ann-1": "ann", "token-of-bob-1": "bob"}
        self.start("ann")

    def start(self, principal: str | None) -> None:
        self.patch.delenv("UNITY_CATALOG_TOKEN", raising=False)
        if principal is not None:
            self.patch.setenv("UNITY_CATALOG_TOKEN", f"token-of-{principal}-1")
        self.runtime = runtime = Runtime(self.clock.host(), random.Random())
        self.patch.setattr(api, "runtime", lambda: runtime)

    def write(self, directory: str, data: pa.Table) -> None:
        """Append rows to the table in a directory."""
        write_deltalake(str(self.home / directory), data, mode="append")
        self.send(directory)

    def send(self, directory: str) -> Mirror:
        if directory not in self._mirrors:
            bucket = f"u-{directory}-{self.home.name}"
            self._mirrors[directory] = Mirror(self.home / directory, bucket, self.s3)
        self._mirrors[directory].send()
        return self._mirrors[directory]

    def create(self, directory: str, *readers: str, **info: Any) -> Table:
        """Name the table in a directory in the catalog; it has the rows 0 and 1 unless it has been written before."""
        if not (self.home / directory).exists():
            self.write(directory, rows(0))
        return self.catalog.create(NAME, self.send(directory).url, *(readers or ("ann",)), **info)

    def options(self, mode: str = "none", **more: str) -> dict[str, str]:
        return {
            "lookup.catalog": "unity", "lookup.catalog.uri": self.catalog.uri, "lookup.keys": "id", "lookup.max-retries": "0",
            "lookup.cache.dir": str(self.home / "cache"), "lookup.storage.endpoint_url": self.s3.endpoint, **MODES[mode],
            **{f"lookup.{name.replace('_', '.')}": text for name, text in more.items()},
        }  # fmt: skip

    def table(self, mode: str = "none", name: str = NAME, **more: str) -> LookupTable:
        return LookupTable(name, self.options(mode, **more))

    def refused(self, kind: type[Exception], match: str, table: LookupTable | None = None) -> None:
        with pytest.raises(kind, match=match) as caught:
            (table or self.table()).scan()
        self.errors.append(repr(caught.value))

    def secrets(self) -> set[str]:
        vended = {text for credentials in self.store.issued for text in credentials.values()}
        return vended | {*self.catalog.tokens} | {secret for secret, _ in self.catalog.clients.values()}


@pytest.fixture
def lake(
    tmp_path: Path, s3: S3Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[Lake]:
    """After each test, no credential is in a file of the cache, in a log or in an error."""
    caplog.set_level(logging.DEBUG, "pyspark_lookup")
    home = Lake(tmp_path, s3, monkeypatch)
    with home.catalog:
        yield home
        texts = [caplog.text.encode(), "".join(home.errors).encode()]
        texts += [path.read_bytes() for path in (tmp_path / "cache").rglob("*") if path.is_file()]
        assert [secret for secret in home.secrets() for text in texts if secret.encode() in text] == []


def ids(table: LookupTable) -> list[int]:
    return sorted(table.scan().column("id").to_pylist())


@pytest.mark.parametrize("mode", by_day(["full", "none", "partial"], 2))
def test_a_table_is_read_by_its_name(lake: Lake, mode: str) -> None:
    """A query asks the catalog once, and the store once whether there is a new commit. Credentials are vended to each process once."""
    lake.create("a")
    table = lake.table(mode)
    assert table.get(1) == [{"id": 1, "name": "n1"}]
    assert lake.catalog.count() == [TABLE, LEND]
    assert counting(table, lambda: table.get(1))[:3] == (0, 1, 0)
    assert lake.catalog.count() == [TABLE]
    lake.write("a", rows(2))
    assert table.get_many([1, 2, 3]).num_rows == 3
    assert ids(table) == [0, 1, 2, 3]
    assert {*lake.catalog.count()} == {TABLE}
    assert table.describe()["path"] == f"catalog://unity/{NAME}"
    assert [row["version"] for row in table.versions()] == [0, 1]
    assert ids(lake.table(mode, version="0")) == [0, 1]
    lake.start("ann")
    lake.catalog.count()
    assert table.metrics()["ufsGetBytes"] > 0
    reopened = lake.table(mode)
    assert ids(reopened) == [0, 1, 2, 3]
    # For the listing: this process may read what the host has cached, without being asked.
    assert lake.catalog.count() == [TABLE, LEND]
    assert lake.store.refused == []


@pytest.mark.parametrize("has_delta_api", [True, False])
def test_a_table_that_the_catalog_manages(lake: Lake, has_delta_api: bool) -> None:
    """Ratified commits count, published or not; others do not, though they lie there. Nothing new costs no call to the store."""
    lake.write("m", rows(0))
    make_catalog_managed(lake.home / "m")
    (add,) = (json.loads(line)["add"] for line in (lake.home / f"m/_delta_log/{0:020}.json").open() if '"add"' in line)
    commits = []
    for version in range(1, 6):
        shutil.copy(lake.home / "m" / add["path"], lake.home / f"m/{version}.parquet")
        commits.append(stage(lake.home / "m", version, [{"add": {**add, "path": f"{version}.parquet"}}]))
    managed = lake.create("m", table_type="MANAGED", properties={"delta.feature.catalogManaged": "supported"})
    lake.catalog.has_delta_api, lake.catalog.page = has_delta_api, 1
    table = lake.table("full")
    assert table.scan().num_rows == 2
    assert lake.catalog.count() == [TABLE, LEND, MANAGED, *([] if has_delta_api else [COMMITS])]
    calls_per_query = [MANAGED] if has_delta_api else [TABLE, COMMITS]
    assert counting(table, table.scan)[:3] == (0, 0, 0)
    assert lake.catalog.count() == calls_per_query
    managed.staged, managed.latest = {1: commits[0], 2: commits[1]}, 2
    assert counting(table, table.scan)[:2] == (0, 0)
    assert table.scan().num_rows == 6
    # Published up to the third, of which a wrong copy lies there; the catalog still has the second and the third; the fourth is not ratified.
    for commit in commits[:2]:
        publish(lake.home / "m", commit)
    (lake.home / f"m/_delta_log/{3:020}.json").write_text("not what was ratified")
    publish(lake.home / "m", commits[3])
    lake.send("m")
    managed.staged, managed.latest = {2: commits[1], 3: commits[2]}, 3
    assert table.scan().num_rows == 8
    new_host = lake.table("none", cache_dir=str(lake.home / "late"))
    assert new_host.scan().num_rows == 8
    assert [row["version"] for row in new_host.versions()] == [0, 1, 2, 3]
    assert [row["committed_at"].timestamp() for row in new_host.versions()] == [1, 2, 3, 4]
    assert lake.table(version="2").scan().num_rows == 6
    # Published between the catalog's answer and the next question: the catalog no longer names them.
    publish(lake.home / "m", commits[2])
    lake.send("m")
    managed.staged, managed.latest = {}, 4
    assert counting(table, table.scan)[:2] == (0, 1)
    assert table.scan().num_rows == 10


def test_a_managed_table_is_refused_by_its_path(lake: Lake) -> None:
    lake.write("m", rows(0))
    make_catalog_managed(lake.home / "m")
    with pytest.raises(NotSupportedError, match=r"catalogManaged: only its catalog knows .* name it by its catalog"):
        LookupTable(str(lake.home / "m"), {"lookup.keys": "id"}).scan()


@pytest.mark.parametrize("source", by_day(["CACHE", "UFS"], 2))
def test_another_table_under_the_name(lake: Lake, source: str) -> None:
    """A table that was dropped and created is another one: at another place, and at the same place with another log, or with the same."""
    every = {} if source == "UFS" else {"metadata_source": "CACHE", "metadata_sync-interval": "1 s"}
    lake.create("a")
    lake.write("b", rows(10))
    table = lake.table("partial", **every)
    assert table.get_many([0, 10]).num_rows == 1
    lake.create("b")
    lake.clock.tick(2)
    assert table.get_many([0, 10]).column("id").to_pylist() == [10]
    shutil.rmtree(lake.home / "b")
    lake.write("b", rows(20, 1))
    lake.create("b")
    lake.clock.tick(2)
    assert table.get_many([0, 10, 20]).column("id").to_pylist() == [20]
    before = lake.catalog.tables[NAME].id
    lake.create("b")
    lake.clock.tick(2)
    assert lake.catalog.tables[NAME].id != before
    lake.catalog.count()
    assert table.get(20)
    assert LEND in lake.catalog.count()  # nobody has authorised this principal for the new table yet


@pytest.mark.parametrize("clocks", [(0.0, 0.0), (7200.0, -7200.0)])
def test_credentials_are_renewed(lake: Lake, clocks: tuple[float, float]) -> None:
    """Credentials are renewed five minutes before their end by the catalog's clock, and once the store says that they have expired. No clock need be right."""
    lake.catalog.ahead_s, lake.store.ahead_s = clocks
    lake.create("a")
    table = lake.table()
    assert ids(table) == [0, 1]
    lake.catalog.count()
    lake.store.expire()
    assert ids(table) == [0, 1]
    assert lake.store.refused == ["ExpiredToken"]
    assert lake.catalog.count().count(LEND) == 1
    assert ids(table) == [0, 1]
    assert lake.catalog.count() == [TABLE]
    lake.clock.tick(3600 - 290)
    lake.catalog.lives_s = 3600.0
    assert ids(table) == [0, 1]
    assert lake.catalog.count().count(LEND) == 1
    assert len(lake.store.refused) == 1


@pytest.mark.parametrize("mode", ["partial", "full"])
def test_a_grant_that_is_revoked(lake: Lake, mode: str) -> None:
    """In CACHE mode, access to cached rows ends within `lookup.catalog.authorise-every`; in UFS mode with the next query. A catalog that is down
    is no refusal within that time."""
    lake.create("a")
    every = "metadata_sync-interval" if mode == "partial" else "full-cache_periodic-reload_interval"
    cached = {"metadata_source": "CACHE", every: "1 h"}
    table = lake.table(mode, **cached)
    assert table.get(1)
    lake.catalog.readers[NAME].clear()
    lake.catalog.count()
    assert table.get(1)
    assert lake.catalog.count() == []
    message = r"does not let this principal read main.travel.airports \(Access denied.\)"
    lake.refused(UfsPermissionError, message, lake.table(mode))
    with pytest.raises(UfsPermissionError):  # the refusal holds for all processes of this principal
        table.get(1)
    lake.catalog.readers[NAME].add("ann")
    assert table.get(1)
    lake.catalog.fault = lambda method, path: (503, b"")
    lake.clock.tick(200)
    assert table.get(1)
    lake.clock.tick(101)
    with pytest.raises(CatalogUnavailableError, match="answers with status 503"):
        table.get(1)
    lake.catalog.fault = None
    assert table.get(1)


def test_a_catalog_that_is_silent(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process waits for a silent catalog in vain. Another one does not wait again for a minute; cached rows are answered while the principal is
    authorised."""
    lake.create("a")
    cached, asked = lake.table("partial", **CACHED), threading.Event()
    assert cached.get(1)

    def say_nothing(method: str, path: str) -> tuple[int, Any] | None:
        lake.clock.tick(60)
        asked.wait(60)
        return None

    monkeypatch.setattr(unity, "CALL_S", 0.1)
    lake.catalog.fault = say_nothing
    lake.clock.tick(301)
    lake.catalog.count()
    with pytest.raises(
        CatalogUnavailableError, match=r"the Unity catalog 'unity' gave no answer at http.*: ReadTimeoutError"
    ):
        cached.get(1)
    assert lake.catalog.count() == [TABLE]
    lake.start("ann")
    for table in (cached, lake.table("partial", **CACHED)):
        lake.refused(CatalogUnavailableError, "gave no answer to a process of this host a moment ago", table)
    assert lake.catalog.count() == []
    lake.catalog.fault = None
    asked.set()
    lake.clock.tick(61)
    assert cached.get(1)
    lake.catalog.fault = say_nothing
    assert cached.get(1)


def test_two_principals_on_a_host(lake: Lake) -> None:
    """Two principals share what is cached only while both may read the table."""
    lake.create("a")
    assert lake.table("partial", **CACHED).get(1)
    lake.start("bob")
    lake.refused(UfsPermissionError, "does not let this principal read", lake.table("partial", **CACHED))
    lake.refused(UfsPermissionError, "does not let this principal read", lake.table("full"))
    lake.catalog.readers[NAME].add("bob")
    lake.catalog.count()
    table = lake.table("partial", **CACHED)
    heads, _, gets, _ = counting(table, lambda: table.get(1))
    assert (heads, gets) == (0, 0)
    assert LEND in lake.catalog.count()
    lake.catalog.readers[NAME].remove("ann")
    assert table.get(1)


def test_a_table_that_names_files_of_another(lake: Lake) -> None:
    """A table's owner decides which files and which id its log names; who may not read the other table gets none of it from the host's caches."""
    lake.create("a")
    assert ids(lake.table("partial")) == [0, 1]
    actions = [json.loads(line) for line in (lake.home / f"a/_delta_log/{0:020}.json").open()]
    metadata, add = (next(action[name] for action in actions if name in action) for name in ("metaData", "add"))
    add["path"] = f"{lake.catalog.tables[NAME].location}/{add['path']}"
    lake.write("mine", rows(90))
    log = lake.home / f"mine/_delta_log/{1:020}.json"
    log.write_text("\n".join(map(json.dumps, ({"metaData": metadata}, {"add": add}))))
    lake.catalog.create("main.travel.mine", lake.send("mine").url, "bob")
    lake.start("bob")
    lake.refused(UfsPermissionError, "vended do not cover the location", lake.table("partial", name="main.travel.mine"))


@pytest.mark.parametrize(
    ("location", "credentials", "options"),
    [
        ("gs://bucket/table", {"gcp_oauth_token": {"oauth_token": "SESAME"}}, {"token": "SESAME"}),
        ("abfss://box@shop.dfs.core.windows.net/table", {"azure_user_delegation_sas": {"sas_token": "SESAME"}}, {"account_name": "shop", "sas_token": "SESAME"}),
        ("abfss://box@shop.dfs.core.chinacloudapi.cn/table", {"azure_user_delegation_sas": {"sas_token": "SESAME"}}, {"account_name": "shop", "account_host": "shop.blob.core.chinacloudapi.cn", "sas_token": "SESAME"}),
    ],
)  # fmt: skip
def test_credentials_for_google_and_azure(
    lake: Lake, location: str, credentials: dict[str, Any], options: dict[str, str]
) -> None:
    """Vended credentials are as these file systems take them, for the table's location, until the end by the catalog's clock."""
    lake.catalog.create(NAME, location, "ann")
    lake.catalog.ahead_s = 86400.0
    answer = {**credentials, "expiration_time": int((time.time() + lake.catalog.ahead_s + 600) * 1000)}
    lake.catalog.fault = lambda method, path: (200, answer) if method == "POST" else None
    catalog = UnityCatalog("unity", lake.catalog.uri, clock=lake.clock.host(), draw=random.random)
    (vended,) = UnityCredentialVendor(catalog, NAME).vend()
    assert vended.options == options
    assert vended.covers(f"{location}/1.parquet")
    assert vended.expires_in_s == pytest.approx(600, abs=10)


CLIENT = {"UNITY_CATALOG_CLIENT_ID": "client", "UNITY_CATALOG_CLIENT_SECRET": "client-secret-1"}


def test_a_catalog_that_repeats_a_token(lake: Lake) -> None:
    """The error leaves out a message that shows the token, also where the message is cut."""
    lake.create("a")
    token = next(token for token, principal in lake.catalog.tokens.items() if principal == "ann")
    answer = {"error_code": "DENIED", "message": "x" * 290 + token}
    lake.catalog.fault = lambda method, path: (403, answer)
    lake.refused(UfsPermissionError, "does not let this principal read .*shows a credential, so it is left out")
    assert token[:5] not in lake.errors[-1]


def test_a_client_gets_tokens(lake: Lake) -> None:
    """A client's tokens are kept until shortly before their end, and replaced if the catalog refuses them."""
    lake.create("a")
    lake.start(None)
    message = r"denies access without a token .*set UNITY_CATALOG_TOKEN, or UNITY_CATALOG_CLIENT_ID and"
    lake.refused(UfsPermissionError, message)
    lake.start(None)
    for name, text in CLIENT.items():
        lake.patch.setenv(name, text)
    lake.refused(UfsPermissionError, "issues no token for the Unity catalog 'unity' .status 401")
    lake.catalog.clients["client"] = "client-secret-1", "ann"
    lake.catalog.count()
    table = lake.table()
    assert ids(table) == [0, 1]
    token = "POST /oidc/v1/token"
    assert lake.catalog.count() == [token, TABLE, LEND]
    assert ids(table) == [0, 1]
    assert lake.catalog.count() == [TABLE]
    revoked = next(name for name in lake.catalog.tokens if name.startswith("token-of-") and "-1" not in name[-2:])
    del lake.catalog.tokens[revoked]
    assert ids(table) == [0, 1]
    assert lake.catalog.count() == [TABLE, token, TABLE]
    lake.clock.tick(3600)
    assert ids(table) == [0, 1]
    assert token in lake.catalog.count()


logins = {"token": "token-of-ann-1"}


def of_catalog(url: str) -> dict[str, str]:
    """The function that `lookup.credentials` names."""
    return logins


def test_a_function_gives_credentials(lake: Lake) -> None:
    lake.create("a")
    lake.start("bob")
    table = lake.table(credentials=f"{__name__}:of_catalog")
    assert ids(table) == [0, 1]
    lake.catalog.tokens["token-of-ann-2"] = lake.catalog.tokens.pop("token-of-ann-1")
    lake.refused(UfsPermissionError, "with this token, which is wrong or has expired", table)
    lake.patch.setitem(logins, "token", "token-of-ann-2")
    assert ids(table) == [0, 1]


def test_a_process_that_has_come_to_ask_for_another_principal(lake: Lake) -> None:
    """What the catalog allows the second principal is no permission for processes that still ask for the first."""
    lake.create("a", "ann", "bob")
    table = lake.table("partial", credentials=f"{__name__}:of_catalog", **CACHED)
    assert table.get(1)
    lake.catalog.readers[NAME].remove("ann")
    del lake.catalog.tokens["token-of-ann-1"]
    lake.patch.setitem(logins, "token", "token-of-bob-1")
    lake.clock.tick(301)
    assert table.get(1)
    lake.start("ann")
    with pytest.raises(UfsPermissionError, match="with this token, which is wrong or has expired"):
        lake.table("partial", **CACHED).get(1)


def test_a_principal_that_changes_during_a_question(lake: Lake) -> None:
    """The answer permits nothing to the first principal, nor to the second."""
    lake.create("a")
    names = ["ann"]
    lake.patch.setattr(UnityCatalog, "principal", lambda catalog: names[-1])
    lake.catalog.fault = lambda method, path: names.append("bob") if method == "POST" else None
    assert lake.table("partial", **CACHED).get(1)
    lake.catalog.fault = None
    lake.catalog.readers[NAME].remove("ann")
    for name in ("bob", "ann"):
        names[:] = [name]
        lake.start(name)
        with pytest.raises(UfsPermissionError, match="does not let this principal read"):
            lake.table("partial", **CACHED).get(1)


FILTER = {"function_name": "main.travel.only_mine", "input_column_names": ["name"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"table_type": "VIEW"}, "is a view, whose rows only the catalog's own engines can return"),
    ({"table_type": "MATERIALIZED_VIEW"}, "is a materialized view"),
    ({"table_type": "STREAMING_TABLE"}, "is a streaming table"),
    ({"table_type": "FOREIGN"}, "is a foreign table, whose"),
    ({"data_source_format": "CSV"}, "is not a Delta table, but CSV"),
    ({"data_source_format": "ICEBERG"}, r"is an Iceberg table: .*/iceberg-rest, lookup.catalog.warehouse = main and path = travel.airports"),
    ({"row_filter": FILTER}, "has a row filter"),
    ({"columns": [{"name": "name", "mask": FILTER}]}, r"has a column mask \(name\)"),
]  # fmt: skip


def test_what_is_refused(lake: Lake) -> None:
    """What is not a Delta table that may be read whole is refused before any credentials are vended."""
    for info, error in REFUSED:
        lake.catalog.create(NAME, "s3://bucket/table", "ann", **info)
        lake.refused(NotSupportedError, error)
    assert {*lake.catalog.count()} == {TABLE}


def test_errors_tell_apart(lake: Lake) -> None:
    lake.create("a")
    unknown = "main.travel.none"
    lake.refused(UfsNotFoundError, f"the Unity catalog 'unity' has no table {unknown}", lake.table(name=unknown))
    for uri, message in (
        (f"{lake.catalog.uri}/x", "not as a Unity Catalog does: check lookup.catalog.uri"),
        ("http://127.0.0.1:1", r"gave no answer at http://127.0.0.1:1/[^?]*: .*check lookup.catalog.uri"),
    ):
        lake.refused(CatalogUnavailableError, message, lake.table(catalog_uri=uri))
    for body in (b"<html>", b"[]", b"{}", b'{"table_type": "EXTERNAL", "data_source_format": "DELTA", "table_id": 5}'):
        lake.catalog.fault = lambda method, path, body=body: (200, body)  # type: ignore[misc]
        lake.refused(CatalogUnavailableError, "the answer of the Unity catalog|its answer is not that of")
    lake.catalog.fault = lambda method, path: (302, b"")
    lake.refused(CatalogUnavailableError, "status 302, not as a Unity Catalog does")
    lake.catalog.fault = None
    # The catalog vends credentials for a place that is not the table's location, as it states it.
    elsewhere = {**lake.store.vend(lake.catalog.tables[NAME].location, 3600)}
    vended = {"aws_temp_credentials": elsewhere, "expiration_time": None, "url": "s3://elsewhere/table"}
    lake.catalog.fault = lambda method, path: (200, vended) if method == "POST" else None
    message = "the credentials that the Unity catalog 'unity' has vended do not cover the location"
    lake.refused(UfsPermissionError, message)
    lake.catalog.fault = None
    lake.store.withdraw()
    lake.start("ann")
    narrow = {**vended, "aws_temp_credentials": lake.store.vend("s3://elsewhere/table", 3600), "url": None}
    lake.catalog.fault = lambda method, path: (200, narrow) if method == "POST" else None
    lake.refused(UfsPermissionError, "the store refuses them: they do not cover the location")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"catalog_token": "x"}, r"lookup.catalog.token looks like a credential .*UNITY_CATALOG_TOKEN.*lookup.credentials"),
        ({"catalog_client-secret": "x"}, r"lookup.catalog.client-secret looks like a credential"),
        ({"catalog_warehouse": "x"}, r"lookup.catalog.warehouse is not a property of a Unity catalog"),
        ({"catalog_uri": "unity.example.com"}, r"lookup.catalog.uri = 'unity.example.com': expected the URL of a server"),
        ({"path": "travel.airports"}, r"path = 'travel.airports': .* catalog.schema.table"),
    ],
)  # fmt: skip
def test_options_that_are_wrong(lake: Lake, options: dict[str, str], error: str) -> None:
    path = options.pop("path", NAME)
    with pytest.raises(OptionError, match=error):
        lake.table(name=path, **options).scan()


def test_credentials_of_the_environment_are_for_one_server(lake: Lake) -> None:
    lake.patch.setenv("UNITY_CATALOG_URI", "https://unity.example.com")
    message = r"is a different server from https://unity.example.com \(UNITY_CATALOG_URI\), and the credentials"
    lake.refused(OptionError, message)
    assert lake.catalog.count() == []
    elsewhere = {"lookup.catalog": "unity", "lookup.catalog.oauth2-server-uri": "https://other.example/token"}
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("UNITY_CATALOG_TOKEN", raising=False)
        patch.setenv("UNITY_CATALOG_CLIENT_ID", "client")
        patch.setenv("UNITY_CATALOG_CLIENT_SECRET", "SESAME")
        with pytest.raises(
            OptionError, match=r"oauth2-server-uri = 'https://other\.example/token' is a different server"
        ):
            LookupTable(NAME, elsewhere).scan()
    lake.create("a")
    lake.patch.setenv("UNITY_CATALOG_URI", lake.catalog.uri)
    options = {name: text for name, text in lake.options().items() if name != "lookup.catalog.uri"}
    assert ids(LookupTable(NAME, {**options, "lookup.catalog": "prod", "lookup.catalog.type": "unity"})) == [0, 1]


def test_a_process_that_is_told_the_version(lake: Lake) -> None:
    """A process that was told the version asks whether the principal may still read the table, and nothing while what it needs is cached and authorised lately."""
    lake.create("a")
    options = parse_options({"path": NAME, **lake.options("partial")})
    table, first = lake.table("partial"), lake.runtime.engine(options).reader
    assert table.get(1)
    token = VersionToken.from_version(first.kinds, *resolve_and_secure(first, options, ONE, None))
    lake.write("a", rows(2))

    def look_up_version() -> list[str]:
        lake.start("ann")
        lake.catalog.count()
        reader = lake.runtime.engine(options).reader
        assert version_of_token(reader, options, token, ONE)[1].metadata.position == 0  # type: ignore[union-attr]
        return lake.catalog.count()

    assert look_up_version() == []
    lake.clock.tick(301)
    assert look_up_version() == [TABLE, LEND]
    assert look_up_version() == []
    lake.catalog.tables[NAME].info["row_filter"] = FILTER
    lake.clock.tick(301)
    with pytest.raises(NotSupportedError, match="has a row filter"):
        look_up_version()
    lake.catalog.tables[NAME].info.clear()
    lake.catalog.readers[NAME].clear()
    with pytest.raises(UfsPermissionError, match="does not let this principal read"):
        look_up_version()
    lake.catalog.readers[NAME].add("ann")
    assert look_up_version() == [TABLE, LEND]
    # Another table of this name: a process that has read the first one goes over to it, though another has had it confirmed.
    lake.write("b", rows(5))
    lake.create("b")
    lake.start("ann")
    assert ids(lake.table("partial")) == [5, 6]
    assert ids(table) == [5, 6]
    lake.clock.tick(301)
    with pytest.raises(VersionGoneError, match=r"the name main\.travel\.airports now means a different table"):
        look_up_version()
