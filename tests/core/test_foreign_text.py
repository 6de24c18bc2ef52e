"""Foreign text in our messages: credentials in every spelling, and characters that a terminal obeys."""

import io
import itertools
import json
import logging
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pyspark_lookup import errors
from pyspark_lookup.columnar.python_values import as_arrow_rows
from pyspark_lookup.core.credentials import has_unusual_login, printable, without_credentials, without_url_credentials
from pyspark_lookup.core.log_events import log_event
from pyspark_lookup.errors import LookupFunctionError, OptionError, PysparkLookupError, raise_ours, redact_cause
from pyspark_lookup.lookup.lookup_table import LookupTable
from pyspark_lookup.options.parsing import make
from pyspark_lookup.sources.providers.functions import KeyLookupFunction, LookupFunctionProvider
from pyspark_lookup.sources.providers.provider import get_attribute
from pyspark_lookup.sources.registry import parse_options
from pyspark_lookup.storage.stores.store import our_error
from tests.support.fuzzing import share

SECRET = "SESAME42"
NAMES = (
    "password", "Password", "PASSWD", "pwd", "PGPASSWORD", "MYSQL_PWD", "db_pass", "passphrase", "private_key_passphrase",
    "secret", "client_secret", "AZURE_CLIENT_SECRET", "aws_secret_access_key", "secretAccessKey", "fs.s3a.secret.key", "token",
    "access_token", "refresh_token", "id_token", "sas_token", "aws_session_token", "X-Amz-Security-Token", "api_key", "apikey",
    "x-api-key", "GOOGLE_API_KEY", "AccountKey", "account_key", "SharedAccessKey", "SharedAccessSignature", "accessKeyId",
    "encryption_key", "x-functions-key", "Ocp-Apim-Subscription-Key", "private_key", "credential", "signature", "sig", "sas",
    "ssl.keystore.password", "fs.azure.account.key.acct.dfs.core.windows.net", "fs.azure.sas.c.a.blob.core.windows.net",
)  # fmt: skip
FORMS = (
    "{name}={secret}", "{name} = {secret}", "{name}: {secret}", "{name}:{secret}", "{name}='{secret}'", '{name}="{secret}"',
    "{name}=b'{secret}'", "{name} => {secret}", '{{"{name}": "{secret}"}}', '{{"{name}":"{secret}"}}', "{{'{name}': '{secret}'}}",
    "[('{name}', '{secret}')]", "?x=1&{name}={secret}&y=2", "UID=u;{name}={secret};Database=d", "{name}={{a;{secret}}}",
    "{name}='a;{secret}'", "{name}=a/{secret}+b==;x", "<{name}>{secret}</{name}>", "{name}='a\\'{secret}'", "{name}='{secret}",
)  # fmt: skip
WHOLE = (
    "Driver={{x}};UID=u;PWD=my {secret};Database=d", "PWD={{a}}}};{secret}}};UID=u", "jdbc:sqlserver://h;user=u;password={{x;{secret}}};",
    "jdbc:oracle:thin:scott/{secret}@//h:1521/x", "jdbc:postgresql://h/d?user=u&password={secret}", "s3://AKIA:{secret}@b/x",
    "s3://AKIA:a/{secret}@b/x", "s3a://AKIA:1/{secret}/c@b/x", "gs://k:{secret}@b", "postgresql://u:{secret}@h:5432/d",
    "mongodb+srv://u:p%40/{secret}@c.mongodb.net/x", "redis://:{secret}@h:6379/0", "https://{secret}@github.com/x",
    "https://a.blob.core.windows.net/c/b?sv=2020&sig={secret}%3D", "https://h/t?X-Amz-Credential={secret}%2F2026&X-Amz-Date=1",
    "Authorization: Bearer {secret}", "'Authorization': 'Basic {secret}'", "Authorization: AWS4-HMAC-SHA256 Credential=A, Signature={secret}",
    "Proxy-Authorization: Basic {secret}", "Cookie: sid={secret}; a=b", "rejected: Bearer {secret}", "wrong password '{secret}'",
    "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n{secret}\n-----END RSA PRIVATE KEY-----\n", "-----BEGIN PRIVATE KEY-----\nMII{secret}",
    "DefaultEndpointsProtocol=https;AccountName=a;AccountKey={secret}/a+b==;EndpointSuffix=core.windows.net",
    'org.apache.kafka.PlainLoginModule required username="u" password="{secret}";', "run --password {secret} --host h",
    "auth=('u', '{secret}')", "credentials={{'a': '{secret}'}}", "tokens: ['a', '{secret}']",
    "<property><name>fs.s3a.secret.key</name>\n  <value>{secret}</value></property>", '<add key="Password" value="{secret}"/>',
    '{{"name": "DB_PASSWORD", "value": "{secret}"}}', '{{"value": "{secret}", "name": "password"}}', '<password encrypted="no" >{secret}</password>',
    "<password><![CDATA[{secret}]]></password>", "CREATE USER u IDENTIFIED BY 'a''{secret}'", "password: |\n  {secret}\n  b\nuser: u",
    "u:{secret}@tcp(h:3306)/db", "//u:{secret}@h/db", "curl -u me:{secret} https://h", "run -password {secret}", "machine h login u password {secret}",
    "password%3D{secret}%26x", "https%3A%2F%2Fu%3A{secret}%40h%2Fx", "{{%22password%22%3A%22{secret}%22}}", "Invalid API key: {secret}",
    "Incorrect API key provided: {secret}", 'password={{"v":{{"w":1}},"z":"{secret}"}}', "auth=HTTPBasicAuth('u', '{secret}')", "Credentials('u', '{secret}')",
    "SecretStr('{secret}')", "token=<Token {secret}>", 'Authorization: Digest username="u", response="{secret}"', "bad bearer '{secret}'",
    "x-amz-server-side-encryption-customer-key: {secret}", "jwt={secret}", "pw={secret}", "github_pat_{secret}abcdefghijklmnop",
    "glpat-{secret}abcdefghijkl", "hf_{secret}abcdefghijklmnop", "sk-proj-{secret}abcdefghijkl", "sk_live_{secret}abcdefghijkl", "ya29.{secret}abcdef",
)  # fmt: skip
SPELLINGS = [form.format(name=name, secret=SECRET) for name in NAMES for form in FORMS]
SPELLINGS += [form.format(secret=SECRET) for form in WHOLE]


class OfDriverError(Exception):
    """An error whose text is made from an attribute, as in HTTP clients and drivers."""

    def __init__(self, text: str) -> None:
        super().__init__(7)
        self.text = text

    def __str__(self) -> str:
        return f"refused ({self.text})"


def collect_texts(error: BaseException) -> Iterator[str]:
    """Every text of an error and of its causes: the traceback, `str`, `repr` and the arguments."""
    yield "".join(traceback.format_exception(error))
    pending: list[BaseException | None] = [error]
    while pending:
        link = pending.pop()
        if link is not None:
            yield from (str(link), repr(link), repr(link.args))
            pending += [link.__cause__, link.__context__]


def test_credentials_of_every_spelling() -> None:
    """Credentials are redacted whatever their name and form, also within a `repr`, a `repr` of that, and JSON."""
    within: tuple[Callable[[str], str], ...] = (
        str, repr, lambda text: repr(ValueError(text)), lambda text: repr(repr(text)), lambda text: json.dumps({"m": text}),
        lambda text: f"cannot connect: {text} (tried twice)",
    )  # fmt: skip
    forms = [(text, form) for number, text in enumerate(SPELLINGS) for form in share(within, number % 3, 3)]
    assert [text for text, form in forms if SECRET in without_credentials(form(text))] == []
    redacted = {without_credentials(text) for text in SPELLINGS}
    assert all("[redacted]" in text and SECRET not in text for text in redacted)
    assert [text for text in redacted if without_credentials(text) != text] == []


@pytest.mark.parametrize(
    "text",
    [
        "provider a:b failed to look up key id = 13: ValueError('id = 13')", "lookup.keys = 'id'", "http://h:9/x@y", "hdfs://h:8020/x",
        "option lookup.storage.token: local paths take no storage options: remove it", "abfss://container@account.dfs.core.windows.net/x",
        "primary_key=5, partition_key: 7", "tokenCount=1", "password authentication failed for user 'bob'", 'Bearer realm="x"',
        "s3://bucket/a:b@c/x", "SharedAccessKeyName=Root", "Basic authentication failed",
        "customer_key = 5", "primary key: 5", "the values of a key", "http://h//x/y@z", "kv.get_token()", "-u x",
    ],
)  # fmt: skip
def test_what_is_no_credential(text: str) -> None:
    """Text without a credential stays as it is, and so does an error that has no other text."""
    assert without_credentials(text) == text
    foreign = OfDriverError(text)
    assert redact_cause(foreign) is foreign


def test_long_texts_take_no_time() -> None:
    """Redacting a long text takes little time, whatever the text is made of."""
    started_s = time.process_time()
    for part in (
        "secret", "a:", "b@", "token ", "-----BEGIN PRIVATE KEY-----", "auth.x", "a-", "?", "password='\\", "eyJ", "s3://a:", "%3A%2F%2F%3A",
        "'value':'", "'a://", "'a:", "`a://b:\\", "password={{a}", "--a", "token(", 'pwd a="" ', "//a:", "password: |\n a", "a.b",
    ):  # fmt: skip
        without_credentials("password='" + part * (20_000 // len(part)) + "@key")
    assert time.process_time() - started_s < 10


class MuteError(OfDriverError):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def test_a_foreign_error_is_told_without_credentials() -> None:
    """No credential shows in our error, in its cause or context, or in a log with its traceback, wherever in the chain it stands."""
    for kind in [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, PysparkLookupError)
    ]:
        assert SECRET not in "".join(collect_texts(pickle.loads(pickle.dumps(kind(f"option path = {SPELLINGS[0]!r}")))))
    for text in SPELLINGS[::7] + SPELLINGS[-len(WHOLE) :]:
        try:
            try:
                raise OfDriverError(text)
            except OfDriverError as first:
                raise KeyError("unknown") from first
        except KeyError as foreign:
            with pytest.raises(PysparkLookupError) as caught:
                raise_ours(our_error(ConnectionError(text), "s3://b/x"), foreign)
            assert [leak for leak in collect_texts(caught.value) if SECRET in leak] == []
            stream = io.StringIO()
            log = logging.Logger("x")
            log.addHandler(logging.StreamHandler(stream))
            log.error("failed", exc_info=redact_cause(foreign))
            log_event(log, logging.ERROR, "failed", error=repr(OfDriverError(text)))
            assert SECRET not in stream.getvalue()
            assert "OfDriverError" in stream.getvalue()


@pytest.mark.parametrize(
    "path", ["s3://AKIA:{}@b/x", "s3a://AKIA:a/{}@b/x", "S3://{}@b/x", "gs://k:1/{}@b/x", "abfss://c:{}@a.dfs.core.windows.net/x"]
)  # fmt: skip
def test_a_bucket_takes_no_credentials(path: str) -> None:
    """A path with a key before its bucket is refused before any request, and the key is not shown."""
    with pytest.raises(OptionError, match=r"\[redacted\]@.* holds a credential before the bucket's name") as caught:
        LookupTable(path.format(SECRET))
    assert SECRET not in str(caught.value)
    # Here the text before the @ is the container, a part of the path.
    container = "abfss://container@account.dfs.core.windows.net/x"
    assert without_url_credentials(container) == container
    assert container in repr(parse_options({"path": container}))


@pytest.mark.parametrize("scheme", ["https", "s3", "sftp", "redis", "postgresql", "abfss", "jdbc:postgresql"])
def test_credentials_with_unusual_characters(scheme: str) -> None:
    """A URL that is a whole value, or in quotes, shows no credential, whatever characters that has; no store gets such a URL."""
    odd = (" ", "\t", "\n", "'", '"', "`", "é", "%20", "%", "@", "@@", "<", "{", "[", "\\", "\xa0", ";")
    logins = [f"{user}:{SECRET}" for user in ("", *(f"u{char}v" for char in odd))]
    logins += [f"{user}:a{char}{SECRET}" for user in ("u", "u v", "u'v") for char in (*odd, "/", "?", "#", ":", "//")]
    for login in logins:
        url = f"{scheme}://{login}@host:5/x"
        assert without_url_credentials(url) == f"{scheme}://[redacted]@host:5/x"
        for text in (f"option = {url!r}: no", json.dumps({"url": url}), f"delta.`{url}`" if "`" not in url else ""):
            assert SECRET not in without_credentials(text), text
        with pytest.raises(OptionError) as caught:
            parse_options({"path": url if scheme == "s3" else "", "lookup.max-retries": url})
        assert SECRET not in str(caught.value)
        if scheme == "https" and has_unusual_login(url):
            with pytest.raises(OptionError, match=r"'https://\[redacted\]@host:5/x' .*is percent-encoded"):
                parse_options({"path": url})
        elif scheme == "https":
            assert SECRET not in without_credentials(f"cannot open {url}: no route")


def test_paths_that_are_not_understood_show_no_login() -> None:
    """An error that proposes another path repeats none that may have a login."""
    for path in (
        f"dbfs:/u v:{SECRET}@h/x",
        f"https:/u v:{SECRET}@h/x",
        f"https:///u:{SECRET}@h/x",
        f"hdfs:/u:{SECRET}@h/x",
    ):
        with pytest.raises(OptionError, match="expected") as caught:
            parse_options({"path": path})
        assert SECRET not in str(caught.value)


TRICKS = "a\x1b[2J\r\nb\x9b1mc\u202ed\x00\x7f\u2028"


def test_what_a_terminal_obeys_is_escaped() -> None:
    """Escape sequences, line ends, C1 controls and changes of direction are escaped in values, errors and logs; the rest stays."""
    assert printable(TRICKS) == r"a\x1b[2J\r\nb\x9b1mc\u202ed\x00\x7f\u2028"
    assert printable("Ærøskøbing 東京 🙂") == "Ærøskøbing 東京 🙂"
    assert errors.foreign_text("one\ntwo\x1b[1m") == "one\ntwo\\x1b[1m"
    assert str(OptionError(f"bad {TRICKS}")).replace("\n", "").isprintable()


class Odd:
    """A value, a factory's answer, or an error's argument that cannot be printed."""

    def __repr__(self) -> str:
        raise RuntimeError(f"password={SECRET}")

    __str__ = __repr__


def entries(tmp_path: Path) -> dict[str, Callable[[str], object]]:
    """The places where texts of Arrow, drivers, parsers and users' objects enter, each as a function of the text."""
    ids = pa.schema([("id", pa.int64())])
    commit = '{{"metaData":{{"id":"x","schemaString":"{}","partitionColumns":[],"format":{{"provider":"parquet"}}}}}}\n'

    def options(**more_options: object) -> dict[str, Any]:
        return {
            "lookup.keys": "id",
            "lookup.max-retries": 0,
            "lookup.cache.dir": str(tmp_path / "cache"),
            **more_options,
        }

    def write(name: str, data: str, **more_options: object) -> object:
        (tmp_path / name).write_text(data)
        return LookupTable(tmp_path / name, options(**{"lookup.schema": "id INT"}, **more_options)).scan()

    def delta(text: str) -> object:
        log = tmp_path / f"d{len(list(tmp_path.iterdir()))}" / "_delta_log"
        log.mkdir(parents=True)
        (log / f"{0:020}.json").write_text(
            '{"protocol":{"minReaderVersion":1}}\n' + commit.format(json.dumps(text)[1:-1])
        )
        return LookupTable(log.parent, options()).scan()

    def returning(rows: object) -> Callable[[str], object]:
        def ask(text: str) -> object:
            Returning.rows = staticmethod(lambda: rows(text) if callable(rows) else rows)
            return LookupTable(None, options(**{"lookup.provider": f"{__name__}:returning"})).get(1)

        return ask

    return {
        "rows": lambda text: as_arrow_rows([{"id": text}], lambda: ids),
        "rows of objects": lambda text: as_arrow_rows([{"id": OfDriverError(text)}], lambda: ids),
        "keys": lambda text: LookupTable(tmp_path / "t", options()).get_many([{"id": text}]),
        "CSV": lambda text: write("a.csv", f'id\n"{text}"\n'),
        "JSON": lambda text: write("a.json", json.dumps({"id": text})),
        "no Parquet": lambda text: write("a.parquet", "PAR1" + text + "PAR1"),
        "Delta": delta,
        "returned": returning(lambda text: pa.table({"id": [1], "name": [b"\xff" + text.encode()]})),
        "returned type": returning(lambda text: pa.table({"id": [1], text: [1]})),
        "raised": returning(lambda text: (_ for _ in ()).throw(OfDriverError(text))),
        "raised ours": returning(lambda text: _raise_lookup_error(OfDriverError(text))),
        "an attribute": lambda text: get_attribute("a:b", Asking(text), "schema"),
        "a factory": lambda text: make("lookup.provider", "builtins:exec", f"raise ValueError({text!r})", LookupFunctionProvider),
        "a factory's answer": lambda text: make("lookup.provider", "builtins:list", [text], LookupFunctionProvider),
    }  # fmt: skip


class Asking:
    def __init__(self, text: str) -> None:
        self._text = text

    @property
    def schema(self) -> pa.Schema:
        raise OfDriverError(self._text)


def _raise_lookup_error(foreign: Exception) -> None:
    raise LookupFunctionError("it failed") from foreign


class Returning(KeyLookupFunction):
    schema = pa.schema([("id", pa.int64()), ("name", pa.string())])
    rows: Any = None

    def lookup_key(self, key: Any) -> Any:
        return type(self).rows()


def returning(context: Any) -> LookupFunctionProvider:
    return LookupFunctionProvider(Returning(), Returning.schema)


def test_causes_tell_no_credentials(tmp_path: Path) -> None:
    """Wherever foreign text enters, the error about it shows none: not in its text, nor in a cause, nor in a traceback."""
    pq.write_table(pa.table({"id": [1]}), tmp_path / "t")
    texts = [*SPELLINGS[:: 2 * len(FORMS) + 1], *SPELLINGS[-len(WHOLE) :: 4]]
    for place, enter in entries(tmp_path).items():
        for text in texts if place in ("rows", "raised", "raised ours", "a factory", "rows of objects") else texts[::9]:
            with pytest.raises((PysparkLookupError, TypeError)) as caught:
                enter(text)
            assert [leak for leak in collect_texts(caught.value) if SECRET in leak] == [], place


def test_objects_that_cannot_be_told(tmp_path: Path) -> None:
    """Our error names the place, whatever a user's object does when it is printed."""
    pq.write_table(pa.table({"id": [1]}), tmp_path / "t")
    options = {"lookup.keys": "id", "lookup.cache.dir": str(tmp_path / "cache"), "lookup.max-retries": 0}
    awkward_values: list[Any] = [
        Odd(), "x" * 10**6, "a\x1b[2J\ud800\n", MuteError("x"), ValueError("x" * 10**6 + f" password={SECRET}"),
        ValueError(Odd()), ValueError("\ud800\x1b[1m"),
    ]  # fmt: skip

    def answer(act: Callable[[], object]) -> object:
        Returning.rows = staticmethod(act)
        return LookupTable(None, {**options, "lookup.provider": f"{__name__}:returning"}).get(1)

    def throw(value: Any) -> None:
        raise value

    places: list[Callable[[Any], object]] = [
        lambda value: make("lookup.provider", "operator:itemgetter", value, LookupFunctionProvider),
        lambda value: make("lookup.provider", "copy:copy", value, LookupFunctionProvider),
        lambda value: as_arrow_rows([{"id": value}], lambda: Returning.schema),
        lambda value: answer(lambda: value),
        lambda value: answer(lambda: throw(value)),
    ]
    for value, place in itertools.product(awkward_values, places):
        with pytest.raises((PysparkLookupError, TypeError)) as caught:
            place(value)
        text = "".join(collect_texts(caught.value))
        assert SECRET not in text
        assert "\x1b" not in text
        assert len(text.encode()) < 10**6
