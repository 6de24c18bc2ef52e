"""The errors of pyspark_lookup. Each is a `PysparkLookupError`, and also the built-in error that a caller would guess, such as a ValueError.

No error shows a credential: each removes them from its own text. `raise_ours` makes a foreign error (one that another library raised) the
cause of an error of ours, and removes credentials from the cause, too.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

from pyspark_lookup.core.credentials import printable, without_credentials

_LONGEST = 100_000  # characters that a message takes from a foreign text: nobody reads more, and the search for credentials takes time


def foreign_text(text: str) -> str:
    """A text from outside this package, made safe for our messages: credentials hidden, control characters escaped, cut if very long."""
    more = f"… ({len(text)} characters)" if len(text) > _LONGEST else ""
    return printable(without_credentials(text[:_LONGEST]), lines=True) + more


def foreign_repr(value: object) -> str:
    """The repr of a foreign value or error; only its type if the repr fails."""
    try:
        return repr(value)
    except Exception:
        return f"<{type(value).__name__}, whose repr() fails>"


class _RedactedError(Exception):
    """Replaces, in a traceback, a foreign error that would show a credential."""


def redact_cause(error: BaseException) -> BaseException:
    """The cause that an error of ours may have: the foreign `error` itself, or a replacement if its traceback would show credentials."""
    pending: list[BaseException | None] = [error]
    seen_ids: set[int] = set()
    while pending:
        link = pending.pop()
        if link is None or id(link) in seen_ids:
            continue
        seen_ids.add(id(link))
        text = _full_text(link)
        # Tabs do no harm, and servers and the JVM write them: a cause with tabs keeps its type and traceback.
        if text is None or foreign_text(plain := text.replace("\t", " ")) != plain:
            return _RedactedError(foreign_text(f"{type(error).__name__}: {_error_text(error)}"))
        pending += [link.__cause__, link.__context__, *_members(link)]
    return error


def _members(error: BaseException) -> Iterator[BaseException]:
    """The errors that an ExceptionGroup consists of; nothing for an error of another class."""
    try:
        members = getattr(error, "exceptions", ())
    except Exception:
        return
    if isinstance(members, (tuple, list)):
        yield from (member for member in members if isinstance(member, BaseException))


def _full_text(error: BaseException) -> str | None:
    """All that a traceback or a log may show of an error: its text, its notes and its repr; None if one of these raises an error itself."""
    try:
        return "".join(traceback.format_exception_only(type(error), error)) + repr(error)
    except Exception:
        return None


def reason_of(error: BaseException) -> str:
    """Why a call of foreign code failed: the repr of its error, or the text of an error of ours."""
    return str(error) if isinstance(error, PysparkLookupError) else foreign_repr(error)


def _error_text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "it has no text"


def raise_ours(own_error: BaseException, foreign: BaseException | None) -> NoReturn:
    """Raise `own_error`; its cause is what `redact_cause` returns for `foreign` (None: no cause).

    `own_error` has no other reference to `foreign`, not even as its `__context__`.
    """
    try:
        if foreign is own_error:
            raise own_error
        raise own_error from None if foreign is None else redact_cause(foreign)
    finally:
        own_error.__context__ = None  # code that walks the chain of errors would find `foreign` here, unredacted


class PysparkLookupError(Exception):
    """Base of every error this package raises on purpose."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(foreign_text(arg) if isinstance(arg, str) else arg for arg in args))


class OptionError(PysparkLookupError, ValueError):
    """An option is unknown, has a bad value, or contradicts another."""


class PredicateError(OptionError):
    """`lookup.where` is not a predicate that this table can answer exactly."""


class SchemaError(PysparkLookupError, TypeError):
    """Columns or types do not match: those of two files, or those that a query was planned with and those that it reads."""


class NotSupportedError(PysparkLookupError, NotImplementedError):
    """A feature that this version does not have; the message says what to use instead."""


class UnreadableColumnError(SchemaError, NotSupportedError):
    """A requested column has a type that cannot be read. A read that selects no columns requests all of them."""


class NotATableError(PysparkLookupError, ValueError):
    """There is no table at the path, or its files are not in a state in which they can be read."""


class TableFormatError(NotATableError):
    """The directory belongs to a table of a format with its own log, which says which files are current: its files alone do not."""


class TableEmptyError(NotATableError):
    """The directory or glob has no data file, or no longer any."""


class TableBusyError(NotATableError):
    """A job is still writing the files of a directory, or has not marked the directory complete.

    `listing`: the store's listing of the directory; None if it was not listed.
    """

    listing: Any = None


class NonUniqueKeyError(PysparkLookupError, ValueError):
    """A lookup that returns one row found several for a key."""


class OverlapError(PysparkLookupError, ValueError):
    """Two rows of a key are valid at the same time, but an as-of lookup returns one row."""


class WriteConflictError(PysparkLookupError, RuntimeError):
    """Another commit makes this write impossible, or somebody has aborted this write. No row of this write is visible."""


class VersionGoneError(PysparkLookupError, LookupError):
    """The requested version was replaced or removed before it was read."""


class ReloadFailedError(PysparkLookupError, RuntimeError):
    """A reload of a full cache failed, and the options forbid answering from the snapshot that was loaded before."""


class LookupFunctionError(PysparkLookupError, RuntimeError):
    """A provider's function (its lookup, scan or version) failed in every attempt, or returned something invalid.

    If only some keys of a lookup failed, `failures` has the errors by the positions of these keys, and `rows` has the rows of the other keys.
    """

    rows: Any = None
    failures: Mapping[int, LookupFunctionError] = MappingProxyType({})


class LookupTimeoutError(LookupFunctionError, TimeoutError):
    """A provider did not answer in time."""


class DamagedFileError(PysparkLookupError, ValueError):
    """A data file cannot be parsed: the bytes in the store are bad, not those in the cache."""


class NoMemoryError(DamagedFileError, NotSupportedError):
    """A data file claims to contain more than fits in memory: the file is too large for this host, or damaged."""


class CacheDirectoryError(PysparkLookupError, PermissionError):
    """The cache directory belongs to another program, is open to others, or is not a directory."""


class CacheFullError(PysparkLookupError, OSError):
    """The cache directory would take more bytes than its budget (`lookup.cache.max-bytes`) allows.

    `more`: the number of bytes that were to be added. If these were to become a snapshot (the full cache of a table), `wanted` is about
    how many bytes the whole snapshot needs, and `of_bytes` is the size of the data files whose rows it was to contain.
    """

    more: int = 0
    wanted: int = 0
    of_bytes: int = 1


class UfsError(PysparkLookupError, OSError):
    """The store failed: in every attempt, or in a way that another attempt will not fix.

    `expired`: whether expired credentials are the reason; None: the store refused the credentials, and did not say why. `reason`: the store's own
    words, without advice; None: it gave none.
    """

    expired: bool | None = False
    reason: str | None = None


class UfsNotFoundError(UfsError, FileNotFoundError):
    """The path does not exist in the store."""


class UfsPermissionError(UfsError, PermissionError):
    """The store refused: credentials are missing, expired or too weak."""


class UfsTimeoutError(UfsError, TimeoutError):
    """The store did not answer in time, in any attempt."""


class UfsUnavailableError(UfsError, ConnectionError):
    """In every attempt, the store could not be reached, or answered that it is overloaded or has failed (HTTP status 5xx, SlowDown)."""


class UfsThrottledError(UfsUnavailableError):
    """The store refused a request because it gets too many requests (S3's SlowDown, HTTP status 429)."""


class CatalogUnavailableError(UfsUnavailableError):
    """A catalog gave no answer, or an invalid one."""


class PutUnknownError(UfsUnavailableError):
    """The store did not answer an attempt to write a file, nor the question whether the file exists now. So it may have been written."""


class CommitUnknownError(UfsError):
    """It is unknown whether a commit got into a managed table's log: its rows may be visible."""


class SourceChangedError(UfsError):
    """A file was replaced or removed after a query had decided to read it, before or while the query read it."""


CHANGED_KIND = (UfsNotFoundError, TableFormatError)
"""The errors that a read may raise if a table of another format replaced the table: its files are gone, or belong to the new table."""
