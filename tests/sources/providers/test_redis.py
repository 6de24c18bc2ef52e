"""Redis as a lookup table: which keys are asked for, which values are rows, and what its failures do."""

import contextlib
import datetime
import decimal
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pyarrow as pa
import pytest

from pyspark_lookup import LookupTable
from pyspark_lookup.errors import LookupFunctionError, OptionError
from pyspark_lookup.sources.providers.services.redis import RedisFunction
from tests.support.followed_tables import AGED, History, Requests, System, Way, Write
from tests.support.fuzzing import BY_NIGHT, seeds
from tests.support.lookup_functions import ONCE, PARTIAL, TEXTS, Desk, Options, ids
from tests.support.redis_server import RedisServer

SCHEMA = "id BIGINT, name STRING, balance DECIMAL(20, 2), address STRUCT<city: STRING>, since DATE, photo BINARY"
HASH = {
    "name": "ä",
    "balance": "1.50",
    "address": '{"city": "Oslo", "zip": 1}',
    "since": "2026-02-28",
    "photo": b"\xff\0",
    "unused": b"\xff",
}
ROW = {
    "id": 1, "name": "ä", "balance": decimal.Decimal("1.50"), "address": {"city": "Oslo"}, "since": datetime.date(2026, 2, 28), "photo": b"\xff\0",
}  # fmt: skip


@pytest.fixture
def shop(redis_server: RedisServer) -> RedisServer:
    redis_server.client.flushall()
    redis_server.client.config_resetstat()
    return redis_server


def open_table(desk: Desk, server: RedisServer, *more: Options) -> LookupTable:
    options: dict[str, Any] = {"lookup.redis.key-pattern": "customer:{id}", "lookup.schema": SCHEMA}
    for group in more:
        options |= group
    return desk.table("redis", options, server.url)


def test_rows_of_hashes(shop: RedisServer, desk: Desk) -> None:
    """Fields are columns in their types, a missing field is null, a missing key has no row; each key is asked for once."""
    shop.client.hset("customer:1", mapping=HASH)
    shop.client.hset("customer:2", mapping={"name": "b", "balance": "", "id": "2"})
    second = {**dict.fromkeys(ROW), "id": 2, "name": "b"}
    rows = open_table(desk, shop).get_many(ids(2, 9, 1, None, 2)).to_pylist()
    assert rows == [{**second, "key_index": 0}, {**ROW, "key_index": 2}, {**second, "key_index": 4}]
    assert shop.calls()["hgetall"] == 3


def test_rows_of_json(shop: RedisServer, desk: Desk) -> None:
    """A string with an object is a row; one that is no object is an error that names its key, and other keys are answered."""
    of_json = {"lookup.redis.value": "json", "lookup.schema": "id BIGINT, name STRING, tags ARRAY<STRING>"}
    shop.client.set("customer:1", json.dumps({"name": "a", "tags": ["x", None], "more": 1}))
    table = open_table(desk, shop, of_json, PARTIAL, ONCE)
    assert table.get(1) == [{"id": 1, "name": "a", "tags": ["x", None]}]
    for value, expected in (
        (b"[1]", r"Redis key 'customer:2' does not hold a JSON object: \[1\]"), (b"", "does not hold a JSON object"), (b'{"name": "\xff"}', "does not hold a JSON object"),
        (b'{"name": "a", "name": "b"}', "has the name 'name' twice"), (b"[" * 100_000, "nested"), (b'{"tags": "x"}', r"column 'tags' of Redis key 'customer:2'"),
        (b'{"id": 3}', r"which is not among the requested keys \(key id = 2\)"),
    ):  # fmt: skip
        shop.client.set("customer:2", value)
        with pytest.raises(LookupFunctionError, match=expected) as caught:
            table.get_many(ids(1, 2, 9))
        assert caught.value.rows["id"].to_pylist() == [1]


def test_values_of_another_type(shop: RedisServer, desk: Desk) -> None:
    """The error names the key of a value of another kind, or the column of a text that is no number, or not UTF-8."""
    shop.client.rpush("customer:1", "x")
    shop.client.set("customer:2", "{}")
    shop.client.hset("customer:3", mapping={"balance": "much"})
    shop.client.hset("customer:4", mapping={"name": b"\xff"})
    table = open_table(desk, shop, ONCE)
    for key, expected in (
        (1, r"Redis key 'customer:1' holds a list, but lookup.redis.value = 'HASH' needs a hash"), (2, "Redis key 'customer:2' holds a string"),
        (3, r"column 'balance' of Redis key 'customer:3': 'much' is not a valid decimal"), (4, "column 'name' of Redis key 'customer:4'"),
    ):  # fmt: skip
        with pytest.raises(LookupFunctionError, match=expected):
            table.get(key)
    json_of = open_table(desk, shop, ONCE, {"lookup.redis.value": "JSON"})
    with pytest.raises(
        LookupFunctionError,
        match=r"Redis key 'customer:1' holds a list, but lookup.redis.value = 'JSON' needs a string with JSON",
    ):
        json_of.get(1)  # MGET would say that there is none


def test_names_of_keys(shop: RedisServer, desk: Desk) -> None:
    """Any text is part of a name as it is; two keys of two columns never have one name; braces of cluster slots are doubled."""
    for text in ["", *TEXTS]:
        shop.client.hset("{c}:" + text + ":x", mapping={"name": text.upper()})
    texts = {"lookup.schema": "id STRING, name STRING", "lookup.redis.key-pattern": "{{c}}:{id}:x"}
    rows = open_table(desk, shop, texts).get_many(pa.table({"id": ["", *TEXTS]})).to_pylist()
    assert [row["name"] for row in rows] == [text.upper() for text in ["", *TEXTS]]
    pair = {"lookup.schema": "a STRING, b STRING, v INT", "lookup.keys": "b,a", "lookup.redis.key-pattern": "o:{a}:{b}"}
    shop.client.hset("o:x:y:z", mapping={"v": 1})
    table = open_table(desk, shop, pair, ONCE)
    assert table.get(("y:z", "x")) == [{"a": "x", "b": "y:z", "v": 1}]
    with pytest.raises(LookupFunctionError, match=r"a = 'x:y' contains ':', which separates it"):
        table.get(("z", "x:y"))


def test_many_keys_are_few_round_trips(shop: RedisServer, desk: Desk) -> None:
    """Each key is asked for once, in pipelines."""
    with shop.client.pipeline() as pipeline:
        for number in range(0, 5000, 2):
            pipeline.hset(f"customer:{number}", mapping={"name": str(number)})
        pipeline.execute()
    rows = open_table(desk, shop).get_many(pa.table({"id": range(5000)}))
    assert rows["name"].to_pylist() == [str(number) for number in range(0, 5000, 2)]
    assert shop.calls()["hgetall"] == 5000


class Customers(System):
    """Hashes. The server's log of slow commands has all of them."""

    options: ClassVar[Options] = {
        "lookup.provider": "redis", "lookup.redis.key-pattern": "customer:{id}", "lookup.schema": "id INT, city STRING",
    }  # fmt: skip
    ways = (Way("NONE", {}), Way("PARTIAL", AGED, age_s=60, expires_s=60))

    def __init__(self, server: RedisServer) -> None:
        self.path, self._client, self._rows = server.url, server.client, dict[int, str]()
        self._client.config_set("slowlog-log-slower-than", 0)
        self._client.config_set("slowlog-max-len", 100_000)

    def write(self, writes: Sequence[Write], keys: set[int], commit: bool) -> None:
        if commit:
            before = self._rows
            for write in writes:
                self._rows, _ = write.apply(self._rows)
            with self._client.pipeline() as pipeline:
                for key in before:
                    pipeline.delete(f"customer:{key}")
                for key, city in self._rows.items():
                    pipeline.hset(f"customer:{key}", mapping={"city": city})
                pipeline.execute()

    def take_requests(self) -> Requests:
        commands = [entry["command"].decode().split() for entry in reversed(self._client.slowlog_get(100_000))]
        self._client.slowlog_reset()
        return Requests([int(words[1].partition(":")[2]) for words in commands if words[0] == "HGETALL"])

    def disconnect(self) -> None:
        self._client.client_kill_filter(_type="normal", skipme=True)

    @contextlib.contextmanager
    def interrupted(self, between: Callable[[], None]) -> Iterator[None]:
        ask = RedisFunction._ask

        def ask_between(function: RedisFunction, names: Sequence[str]) -> list[Any]:
            between()
            answers = ask(function, names)
            between()
            return answers

        with mock.patch.object(RedisFunction, "_ask", ask_between):
            yield


def test_histories(shop: RedisServer, cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside random writes no row is older than promised, and no key is asked for that is cached, on two hosts."""
    for seed in seeds(2):
        shop.client.flushall()
        history = History(Customers(shop), cache_dir / str(seed), seed, 2, monkeypatch)
        try:
            history.run(200 if BY_NIGHT else 30)
        except AssertionError as problem:
            pytest.fail(f"seed {seed}: {problem}", pytrace=False)


def test_a_cluster(desk: Desk) -> None:
    """A server that sends a lookup to another one of its cluster leads to all of them."""
    more = ("--cluster-enabled", "yes")
    with contextlib.closing(RedisServer(*more)) as first, contextlib.closing(RedisServer(*more)) as second:
        first.client.execute_command("CLUSTER ADDSLOTSRANGE", 0, 8000)
        second.client.execute_command("CLUSTER ADDSLOTSRANGE", 8001, 16383)
        second.client.execute_command("CLUSTER SET-CONFIG-EPOCH", 2)
        first.client.execute_command("CLUSTER MEET", "127.0.0.1", second.port, second.cluster_port)
        for server in (first, second):
            wait_until(lambda server=server: server.client.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        for number in range(40):
            slot = first.client.execute_command("CLUSTER KEYSLOT", f"customer:{number}")
            (first if slot <= 8000 else second).client.hset(f"customer:{number}", mapping={"name": str(number)})
        table = open_table(desk, first)
        for _ in range(2):
            assert table.get_many(pa.table({"id": range(41)}))["name"].to_pylist() == [
                str(number) for number in range(40)
            ]


def wait_until(holds: Any) -> None:
    """Wait until a cluster has found itself: its servers tell each other by themselves."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


LOGIN = {"user": "reader", "password": "hunter2"}


def of_server(url: str) -> dict[str, str]:
    """The function that `lookup.credentials` names."""
    return LOGIN


def test_credentials(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials come from the environment, as for redis-cli, or from a function, which is asked again if the server refuses them; the error about a
    wrong one does not show it."""
    with contextlib.closing(RedisServer("--requirepass", "s3cr3t")) as server:
        server.client.execute_command("AUTH", "s3cr3t")
        server.client.execute_command("ACL", "SETUSER", "reader", "on", ">hunter2", "~customer:*", "+hgetall")
        server.client.hset("customer:1", mapping={"name": "a"})
        with pytest.raises(LookupFunctionError, match=r"AuthenticationError|NOAUTH"):
            open_table(desk, server, ONCE).get(1)
        table = open_table(desk, server, {"lookup.credentials": f"{__name__}:of_server"})
        assert table.get(1)[0]["name"] == "a"
        monkeypatch.setitem(LOGIN, "password", "hunter3")
        server.client.execute_command("ACL", "SETUSER", "reader", "resetpass", ">hunter3")
        server.client.execute_command("CLIENT", "KILL", "USER", "reader")
        assert table.get(1)[0]["name"] == "a"
        desk.restart()
        monkeypatch.setenv("REDISCLI_AUTH", "s3cr3t")
        assert open_table(desk, server, ONCE).get(1)[0]["name"] == "a"
        desk.restart()
        monkeypatch.setenv("REDISCLI_AUTH", "wrong-s3cr3t")
        with pytest.raises(LookupFunctionError, match="AuthenticationError") as caught:
            open_table(desk, server, ONCE).get(1)
        assert "wrong-s3cr3t" not in f"{caught.value} {caught.value.__cause__!r}"
    desk.restart()
    with contextlib.closing(
        RedisServer("--rename-command", "AUTH", "LOGIN")
    ) as server:  # it repeats what it does not know
        with pytest.raises(LookupFunctionError, match="shows a credential, so it is left out") as caught:
            open_table(desk, server, ONCE).get(1)
        assert "wrong-s3cr3t" not in f"{caught.value} {caught.value.__cause__!r}"


WRONG: list[tuple[str, dict[str, str], str]] = [
    ("/t", {}, r"option path = '/t': expected the URL of a Redis server"),
    ("redis://h:x/0", {}, r"expected the URL of a Redis server"),
    ("redis://[::1/0", {}, r"option path = 'redis://\[::1/0': expected the URL of a Redis server"),
    ("redis://me:hunter2@[::1/0", {}, r"option path: expected the URL of a Redis server"),
    ("redis://m/e:hunter2@h/0", {}, r"option path: expected the URL of a Redis server"),
    ("redis://m#e:hunter2@h/0", {}, r"option path: expected the URL of a Redis server"),
    ("redis://h/a", {}, r"expected the URL of a Redis server"),
    ("redis://me:hunter2@h/0", {}, r"option path is a URL that holds a password; make it redis://host:port/database"),
    ("rediss://h/0?ssl_cert_reqs=none", {}, r"option path is a URL that has parameters, which are not accepted: make it rediss://host:port/database"),
    ("redis://h/0", {"lookup.redis.key-pattern": ""}, r"option lookup.redis.key-pattern = '' .*non-empty text"),
    ("redis://h/0", {"lookup.redis.key-pattern": "customer"}, r"option lookup.redis.key-pattern = 'customer': the key column \{id\} is missing"),
    ("redis://h/0", {"lookup.redis.key-pattern": "{id}{name}", "lookup.keys": "id,name"}, r"put a separator between the values"),
    ("redis://h/0", {"lookup.redis.value": "LIST"}, r"option lookup.redis.value = 'LIST' \(read option\): expected one of HASH, JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "options", "expected"), WRONG, ids=[expected for *_, expected in WRONG])
def test_options_that_are_wrong(cache_dir: Path, path: str, options: dict[str, str], expected: str) -> None:
    """Wrong options are refused by name, without a connection and without a password."""
    whole = {
        "lookup.provider": "redis",
        "lookup.keys": "id",
        "lookup.schema": "id BIGINT, name STRING",
        "lookup.redis.key-pattern": "c:{id}",
    }
    with pytest.raises(OptionError, match=expected) as caught:
        LookupTable(path, {**whole, "lookup.cache.dir": str(cache_dir), **options})
    assert "hunter2" not in str(caught.value)
