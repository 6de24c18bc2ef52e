"""Credentials that a catalog vends: when they are renewed, by whom, and which of them a location gets; that they stay in the process."""

import copy
import pickle
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from fsspec.spec import AbstractFileSystem

from pyspark_lookup.errors import CatalogUnavailableError, OptionError, UfsError, UfsPermissionError
from pyspark_lookup.sources.iceberg.vending import parse_credentials
from pyspark_lookup.storage.stores import CredentialHolder, FileVersion, VendedCredentials, VendedStore, open_store
from pyspark_lookup.storage.stores.store import our_error
from pyspark_lookup.storage.stores.vended import canonical_url, with_vended
from tests.support.fakes import FakeClock

FILE = "s3://bucket/t/data/1.parquet"


class Bank:
    """A vendor whose `failure` a test sets; `vended` is what it has vended so far."""

    name = "the catalog"

    def __init__(self, *prefixes: str, lives_s: float | None = 3600.0) -> None:
        self.prefixes, self.lives_s = prefixes or ("s3://bucket/t",), lives_s
        self.vended: list[VendedCredentials] = []
        self.failure: Exception | None = None
        self.calls = 0

    def vend(self) -> Sequence[VendedCredentials]:
        self.calls += 1
        if self.failure is not None:
            raise self.failure
        new = [VendedCredentials(prefix, {"key": f"SESAME{self.calls}"}, self.lives_s) for prefix in self.prefixes]
        self.vended += new
        return new


def holding(bank: Bank, draw: Callable[[], float] = lambda: 0.0) -> tuple[CredentialHolder, FakeClock]:
    clock = FakeClock()
    return CredentialHolder(bank, clock.host(), draw), clock


@pytest.mark.parametrize(("lives_s", "good_s"), [(3600.0, 3300.0), (200.0, 100.0), (40.0, 30.0), (-86400.0, 30.0)])
def test_renewed_before_their_end(lives_s: float, good_s: float) -> None:
    """Credentials are renewed five minutes before their end, or at half of a short life; not in every call, if they seem to have ended before they were vended."""
    bank = Bank(lives_s=lives_s)
    holder, clock = holding(bank)
    first = holder.select(FILE)
    clock.tick(good_s - 1)
    assert holder.select(FILE) is first
    clock.wall_s -= 10**6  # the wall clock says nothing about them
    clock.tick(1)
    assert holder.select(FILE) is not first
    assert bank.calls == 2


@pytest.mark.parametrize(("lives_s", "first_s", "last_s"), [(3600.0, 3000, 3300), (200.0, 50, 100), (900.0, 300, 600)])
def test_processes_that_begin_together_do_not_renew_together(lives_s: float, first_s: int, last_s: int) -> None:
    """A thousand that got theirs in the same second ask for new ones spread over minutes, none later than five minutes before the end."""
    rng, bank = random.Random(1), Bank(lives_s=lives_s)
    holders = [holding(bank, rng.random) for _ in range(1000)]
    for holder, _ in holders:
        holder.select(FILE)
    renewals = []
    for holder, clock in holders:
        (credential_set,) = [part for part in vars(holder).values() if hasattr(part, "renew_s")]
        clock.tick(credential_set.renew_s - clock.steady_s - 0.001)
        calls = bank.calls
        holder.select(FILE)
        assert bank.calls == calls
        clock.tick(0.002)
        holder.select(FILE)
        assert bank.calls == calls + 1
        renewals.append(int(clock.steady_s - 1000.0))
    assert first_s <= min(renewals) < max(renewals) <= last_s
    most = max(renewals.count(second) for second in renewals)
    assert most <= 4 * 1000 / (last_s - first_s)


def test_without_a_stated_end_they_are_renewed_when_the_store_refuses_them() -> None:
    bank = Bank(lives_s=None)
    holder, clock = holding(bank)
    first = holder.select(FILE)
    assert first is not None
    clock.tick(10**6)
    assert holder.select(FILE) is first
    assert holder.renew(FILE, first, expired=True) is bank.vended[1]
    # Another thread was refused with the same ones.
    assert holder.renew(FILE, first, expired=True) is bank.vended[1]
    assert bank.calls == 2


def test_a_refusal_of_young_credentials_is_no_matter_of_time() -> None:
    bank = Bank()
    holder, clock = holding(bank)
    first = holder.select(FILE)
    assert first is not None
    clock.tick(59)
    assert holder.renew(FILE, first, expired=False) is None
    clock.tick(1)
    assert holder.renew(FILE, first, expired=False) is bank.vended[1]


def test_a_catalog_that_is_down() -> None:
    """A catalog that is down goes unnoticed while the store takes the old credentials, asked only every 30 seconds; then the error is the catalog's."""
    bank = Bank()
    holder, clock = holding(bank)
    first = holder.select(FILE)
    assert first is not None
    bank.failure = CatalogUnavailableError("the catalog gave no answer")
    clock.tick(3300)
    for _ in range(3):
        assert holder.select(FILE) is first
        clock.tick(1)
    assert bank.calls == 2
    clock.tick(30)
    assert holder.select(FILE) is first
    assert bank.calls == 3
    with pytest.raises(CatalogUnavailableError):
        holder.renew(FILE, first, expired=True)
    bank.failure = None
    assert holder.renew(FILE, first, expired=True) is bank.vended[1]


def test_a_catalog_that_is_silent() -> None:
    """A silent catalog keeps one thread waiting. For a minute after that, no other waits for it."""
    bank = Bank()
    holder, clock = holding(bank)

    def say_nothing() -> Sequence[VendedCredentials]:
        bank.calls += 1
        clock.tick(60)
        raise CatalogUnavailableError("the catalog has not answered within 60 s")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bank, "vend", say_nothing)
        for error in ("within 60 s", "the catalog gave no answer a moment ago"):
            with pytest.raises(CatalogUnavailableError, match=error):
                holder.select(FILE)
        assert bank.calls == 1
        clock.tick(60)
        with pytest.raises(CatalogUnavailableError, match="within 60 s"):
            holder.select(FILE)
    clock.tick(60)
    assert holder.select(FILE) is bank.vended[0]


def test_a_grant_that_ended_is_an_error_at_once() -> None:
    bank = Bank()
    holder, clock = holding(bank)
    holder.select(FILE)
    bank.failure = UfsPermissionError("403")
    clock.tick(3300)
    with pytest.raises(UfsPermissionError):
        holder.select(FILE)


@pytest.mark.parametrize("refused", [False, True])
def test_one_thread_renews(refused: bool) -> None:
    """One thread renews credentials. Others go on with the old ones meanwhile; those that were refused wait."""
    started, go_on = threading.Event(), threading.Event()
    bank = Bank()
    holder, clock = holding(bank)
    first = holder.select(FILE)
    assert first is not None
    vend = bank.vend

    def slowly() -> Sequence[VendedCredentials]:
        started.set()
        assert go_on.wait(30)
        return vend()

    bank.vend = slowly  # type: ignore[method-assign]
    clock.tick(3300)
    answers: list[object] = []

    def ask() -> None:
        answers.append(holder.renew(FILE, first, expired=True) if refused else holder.select(FILE))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    threads[0].start()
    assert started.wait(30)
    for thread in threads[1:]:
        thread.start()
    if not refused:
        for thread in threads[1:]:
            thread.join(30)
        assert answers == [first] * 3
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert bank.calls == 2
    assert answers == [bank.vended[1]] * 4 if refused else answers == [first] * 3 + [bank.vended[1]]


def test_credentials_of_other_answers() -> None:
    """Good credentials are kept, for their connections; those of another place, and those that are due, are replaced."""
    bank = Bank()
    holder, clock = holding(bank)
    first = holder.select(FILE)
    holder.put(bank.vend(), clock.steady_s)
    assert holder.select(FILE) is first
    clock.tick(3300)
    holder.put(bank.vend(), clock.steady_s)
    assert holder.select(FILE) is bank.vended[2]
    bank.prefixes = ("s3://bucket/u",)
    holder.put(bank.vend(), clock.steady_s)
    assert holder.select("s3a://bucket/u/1") is bank.vended[3]
    holder.put([], clock.steady_s)
    assert holder.select(FILE) is None


def test_the_longest_prefix() -> None:
    bank = Bank("s3", "s3a://bucket/t", "s3://bucket/t/data/hidden/")
    holder, _ = holding(bank)
    for url, place in (
        ("s3://bucket/t/data/hidden/1", 2),
        ("s3://bucket/t/1", 1),
        ("s3a://bucket/t/1", 1),
        ("s3://bucket/t2/1", 0),  # which only begins with the same letters
        ("s3://b", 0),
    ):
        assert holder.select(url) is bank.vended[place]
    message = r"abfs://c@a\.dfs/x: the credentials that the catalog has vended do not cover the location, only "
    with pytest.raises(UfsPermissionError, match=message):
        holder.select("abfs://c@a.dfs/x")
    assert holder.select("file:///x") is holder.select("/x") is None
    assert bank.calls == 1


def test_they_stay_in_the_process() -> None:
    vended = VendedCredentials("s3://bucket/t", {"key": "SESAME42"}, 1.0)
    holder, _ = holding(Bank())
    holder.put([vended], 0.0)
    for text in (repr(vended), str(vended), f"{vended!r}", repr(holder), repr(vars(holder))):
        assert "SESAME42" not in text
    for secret in (vended, holder):
        for copied in (pickle.dumps, copy.copy, copy.deepcopy):
            with pytest.raises(TypeError, match="must not leave the process"):
                copied(secret)


def test_options_of_the_user_and_of_the_catalog() -> None:
    """The user's endpoint is taken, and both parts of what has parts; a choice of other credentials is not."""
    vended = {"key": "k", "anon": False, "endpoint_url": "http://inside", "client_kwargs": {"region_name": "r"}}
    user = [("endpoint_url", "http://outside"), ("client_kwargs", {"verify": False}), ("anon", True), ("profile", "me")]
    assert with_vended(user, vended) == {
        "key": "k", "anon": False, "endpoint_url": "http://outside", "client_kwargs": {"region_name": "r", "verify": False},
    }  # fmt: skip


# --- stores of fsspec: the file systems here stand for those of Google and Azure ------------------

GOOGLE = {"gcs.oauth2.token": "ya29.SESAME42", "gcs.oauth2.token-expires-at": "1003600000", "gcs.project-id": "p"}
HOST = "acct.dfs.core.windows.net"
AZURE = {f"adls.sas-token.{HOST}": "sig=SESAME42", f"adls.sas-token-expires-at-ms.{HOST}": "1003600000"}
PLACES = [
    ("gs", "gs://bucket/t", "gcs://bucket/t/1", GOOGLE, {"project": "p"}),
    ("abfss", f"abfss://box@{HOST}/t", f"abfss://box@{HOST}/t/1", AZURE, {"account_name": "acct"}),
    ("abfss", "abfs://box@other.example/t", "abfs://box@other.example/t/1", {"adls.sas-token.other": "sig=SESAME42"}, {"account_name": "other", "account_host": "other.example"}),
]  # fmt: skip


class Guarded(AbstractFileSystem):
    """A file system that gives the bytes of one file to callers whose credential ends with `good`, and raises `refusal` for all others."""

    cachable = False
    good: ClassVar[str] = "SESAME42"
    instances: ClassVar[list[dict[str, Any]]] = []
    refusal: ClassVar[Exception] = PermissionError("no")

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.instances.append(options)
        token = options.get("token")
        self.credential = options["sas_token"] if token is None else token.token

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.partition("://")[2]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if not self.credential.endswith(self.good):
            raise self.refusal
        return b"bytes"[start:end]


class TokenOnly:
    """In the place of Google's class."""

    def __init__(self, token: str) -> None:
        self.token = token


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Guarded]]:
    for name in ("google", "google.oauth2", "google.oauth2.credentials"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setattr(sys.modules["google.oauth2.credentials"], "Credentials", TokenOnly, raising=False)
    for name in ("gs", "gcs", "abfs", "abfss"):
        monkeypatch.setitem(sys.modules["fsspec.registry"]._registry, name, Guarded)
    monkeypatch.setattr(Guarded, "instances", [])
    yield Guarded


class HttpError(Exception):
    """As gcsfs raises it."""

    code = 401


class AzureError(Exception):
    """As Azure's client raises it."""

    status_code = 403


@pytest.mark.parametrize(("scheme", "location", "url", "config", "options"), PLACES)
@pytest.mark.parametrize(
    "refusal", [HttpError("who?"), AzureError("no"), OSError("Forbidden: x\nno"), PermissionError("no")]
)
@pytest.mark.parametrize("how", ["config", "prefix"])
def test_google_and_azure(
    guarded: type[Guarded], scheme: str, location: str, url: str, config: dict[str, str], options: dict[str, Any],
    refusal: Exception, how: str, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Credentials that a catalog vends are those that these file systems take; refused ones are renewed, and the read goes on."""
    monkeypatch.setattr(guarded, "refusal", refusal)
    answer: dict[str, Any] = {
        "storage-credentials": [{"prefix": location, "config": config}] if how == "prefix" else []
    }

    class Rest(Bank):
        def vend(self) -> Sequence[VendedCredentials]:
            self.calls += 1
            return parse_credentials(answer, {} if how == "prefix" else config, location, 1_000_000.0)

    bank = Rest()
    holder, clock = holding(bank)
    store = VendedStore("scope", lambda path, vended: open_store(path, with_vended([], vended or {})), holder)
    file = FileVersion(store.url_of(url), 5, "immutable:")
    with store.pin(file) as read:
        assert read(0, 5) == b"bytes"
        assert {name: value for name, value in guarded.instances[-1].items() if name in options} == options
        assert "sas_token" in guarded.instances[-1] or isinstance(guarded.instances[-1]["token"], TokenOnly)
        monkeypatch.setattr(guarded, "good", "SESAME43")
        config = {name: value.replace("42", "43") for name, value in config.items()}
        if how == "prefix":
            answer["storage-credentials"][0]["config"] = config
        clock.tick(60)
        assert read(1, 2) == b"yt"
        assert bank.calls == 2
        monkeypatch.setattr(guarded, "good", "nothing")
        with pytest.raises(UfsPermissionError, match="credentials that the catalog has vended, but the store"):
            read(0, 5)


def test_spellings_of_one_place() -> None:
    for spelling in ("s3a://b/t", "s3n://b/t", "s3://b/t"):
        assert canonical_url(spelling) == "s3://b/t"
    for spelling in (f"abfss://box@{HOST}/t", f"wasbs://box@{HOST}/t", "abfs://box/t"):
        assert canonical_url(spelling) == "abfs://box/t"
    vended = VendedCredentials(f"abfss://box@{HOST}/t", {})
    assert vended.covers(f"wasbs://box@{HOST.replace('.dfs.', '.blob.')}/t/1.parquet")
    assert vended.covers("abfs://box/t/1.parquet")
    assert not vended.covers("abfss://box@other.dfs.core.windows.net/t/1.parquet")


@pytest.mark.parametrize("vended", [{"token": "of-google"}, {"account_name": "a", "sas_token": "of-azure"}])
def test_a_token_goes_nowhere_else(vended: dict[str, str]) -> None:
    """Options name servers for S3 only, which gets no secret."""
    assert with_vended([("endpoint_url", "http://s3")], {"key": "a", "secret": "b"})["endpoint_url"] == "http://s3"
    assert with_vended([("requests_timeout", 5), ("anon", True)], vended) == {**vended, "requests_timeout": 5}
    for name in ("endpoint_url", "account_host", "session_kwargs", "connection_string", "client_kwargs"):
        with pytest.raises(OptionError, match=rf"lookup\.storage\.{name}: the catalog vends a token"):
            with_vended([(name, "http://elsewhere")], vended)


def test_what_a_catalog_vends_for_s3() -> None:
    """Prefixes before what has none; an end by the catalog's clock; how the store is reached."""
    place = {"s3.endpoint": "http://s3", "client.region": "r", "s3.path-style-access": "true"}
    secret = {"s3.access-key-id": "a", "s3.secret-access-key": "b", "s3.session-token": "c"}
    answer = {
        "storage-credentials": [{"prefix": "s3://b/t", "config": secret | {"s3.session-token-expires-at-ms": "5000"}}]
    }
    first, second = parse_credentials(answer, place | secret | {"expiration-time": "9000"}, "s3://b/t", 2.0)
    reached = {
        "key": "a", "secret": "b", "token": "c", "anon": False, "endpoint_url": "http://s3",
        "client_kwargs": {"region_name": "r"}, "config_kwargs": {"s3": {"addressing_style": "path"}},
    }  # fmt: skip
    assert (first.prefix, first.options, first.expires_in_s) == ("s3://b/t", reached, 3.0)
    assert (second.prefix, second.options, second.expires_in_s) == ("s3://", reached, 7.0)
    assert parse_credentials({}, place, "s3://b/t", 0.0) == []


def test_errors_that_renewal_may_cure(tmp_path: Path) -> None:
    cases: list[tuple[Callable[[], Exception], bool | None]] = [
        (HttpError, True), (AzureError, None), (PermissionError, None), (lambda: OSError("Forbidden: b/k\nno"), None),
        (FileNotFoundError, False), (lambda: OSError("x"), False),
    ]  # fmt: skip
    for make, expired in cases:
        problem = our_error(make(), str(tmp_path))
        assert isinstance(problem, UfsError)
        assert problem.expired is expired
