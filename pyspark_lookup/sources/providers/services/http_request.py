"""`RequestTemplate`: the requests that ask an HTTP API for the rows of keys, as the options of a table describe them."""

from __future__ import annotations

import dataclasses
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa

from pyspark_lookup.errors import OptionError
from pyspark_lookup.sources.providers.functions import FinalLookupError
from pyspark_lookup.sources.providers.services.templates import KeyTemplate, check_names, texts_of_keys

URL, BODY = "lookup.http.url", "lookup.http.body"
_KEYS = "keys"  # in braces: the keys of a batch


@dataclasses.dataclass(frozen=True)
class Request:
    url: str
    body: bytes | None


class RequestTemplate:
    """Makes the requests for the rows of keys. `batch`: whether a request can have several keys. Raises OptionError for a URL with wrong braces."""

    def __init__(self, url: str, body: str | None) -> None:
        self._url = KeyTemplate(URL, url)
        self._body_text, self._body = body, None if body is None else json.loads(body)
        self._names_in_body = list(_names_in(self._body))
        self.method = "GET" if body is None else "POST"
        self.batch = _KEYS in (*self._url.names, *self._names_in_body)
        self._short_segments = _count_short_segments(self._url.fill(["x"] * len(self._url.names)))

    def check(self, keys: Sequence[str]) -> None:
        """Raise OptionError unless requests name each of the columns `keys`, and no other column."""
        names = [*self._url.names, *self._names_in_body]
        lower_keys = {key.lower() for key in keys}
        is_url_wrong = any(name != _KEYS if self.batch else name.lower() not in lower_keys for name in self._url.names)
        option, text = (URL, self._url.text) if self._body_text is None or is_url_wrong else (BODY, self._body_text)
        if not self.batch:
            check_names(option, text, names, keys)
        elif set(names) != {_KEYS}:
            raise OptionError(
                f"option {option} = {text!r}: {{keys}} stands for all key columns: remove the other names in braces"
            )
        elif _KEYS in self._url.names and len(keys) > 1:
            raise OptionError(
                f"option {URL} = {self._url.text!r}: {{keys}} in a URL stands for the values of one key column, and lookup.keys names "
                f"{len(keys)}: put it into {BODY}"
            )

    def make(self, keys: pa.Table) -> Request | None:
        """The request for `keys`, which are one key unless `batch`. None if the key has no address, so that no row has it.

        Raises FinalLookupError for a key that could be taken for another one.
        """
        if _KEYS in self._url.names:
            texts = [text for (text,) in texts_of_keys(keys, keys.column_names)]
            if (text := next((text for text in texts if "," in text), None)) is not None:
                raise FinalLookupError(
                    f"option {URL} = {self._url.text!r}: the key {text!r} has a comma, which separates keys: put {{keys}} into {BODY}"
                )
            url = self._url.fill([",".join(map(_encode, texts))])
        else:
            url = self._url.fill(texts_of_keys(keys, self._url.names)[0] if self._url.names else (), _encode)
            # With an empty segment, or one of dots, the path would be that of another resource, such as the list of all rows.
            if _count_short_segments(url) != self._short_segments:
                return None
        if self._body_text is None:
            return Request(url, None)
        values = [{name: _plain(value) for name, value in key.items()} for key in keys.to_pylist()]
        key = {name.lower(): value for name, value in values[0].items()}
        by_name = {_KEYS: [next(iter(key.values())) if len(key) == 1 else key for key in values]} if self.batch else key
        return Request(url, json.dumps(_fill(self._body, by_name), ensure_ascii=False).encode())


def _count_short_segments(url: str) -> int:
    path = url.partition("?")[0].split("/")[3:]
    return sum(segment in ("", ".", "..") for segment in path)


def _encode(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _name_in(text: str) -> str | None:
    """The name in a text that consists of a name in braces."""
    name = text[1:-1]
    return name if text == f"{{{name}}}" and name and not set(name) & set("{}") else None


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if (name := _name_in(value)) is not None:
            yield name
    elif isinstance(value, (list, dict)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _names_in(item)


def _fill(value: Any, by_name: Mapping[str, Any]) -> Any:
    """A JSON value in which each string that is a name in braces is replaced by the value with this name."""
    if isinstance(value, str):
        return value if (name := _name_in(value)) is None else by_name[name.lower()]
    if isinstance(value, list):
        return [_fill(item, by_name) for item in value]
    return {name: _fill(item, by_name) for name, item in value.items()} if isinstance(value, dict) else value


def _plain(value: Any) -> Any:
    """A key's value as JSON has it: a date as its text."""
    return value if isinstance(value, (str, int)) else str(value)
