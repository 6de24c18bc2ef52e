"""`ListedFiles`: the files of a large listing, as columns. An object is made only for a file that somebody asks for."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, overload

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pyspark_lookup.columnar.keys import Numbers, as_bools, as_indices, as_int64
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.storage.disk import key_of
from pyspark_lookup.storage.stores.store import FileVersion

_SCHEMA = pa.schema(
    {
        "url": pa.string(),
        "size": pa.int64(),
        "identity": pa.string(),
        "modified_at_s": pa.float64(),
        "settled": pa.bool_(),
    }
)
_NS = 10**9


class ListedFiles(Sequence[FileVersion]):
    """The files in a listing, ascending by URL. `batch`: one row for each, with those fields of `FileVersion` that a listing shows.

    `least`: listings of fewer files are tuples of objects instead.
    """

    least: ClassVar[int] = 1000
    schema: ClassVar[pa.Schema] = _SCHEMA

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.batch = batch
        self.urls, self.identities = batch.column("url"), batch.column("identity")
        self.sizes = as_int64(batch.column("size"))

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> ListedFiles:
        """The files in a batch that another process wrote. Raises ValueError or an ArrowException if the batch cannot be one of a listing."""
        batch.validate(full=True)
        if batch.schema != _SCHEMA or any(
            batch.column(name).null_count for name in ("url", "size", "identity", "settled")
        ):
            raise ValueError("these are not the columns of a listing")
        files = cls(batch)
        if not _is_ascending(files.urls) or (files.sizes < 0).any():
            raise ValueError("the files of a listing must be ascending, and have sizes")
        return files

    @classmethod
    def from_files(cls, files: Sequence[FileVersion]) -> ListedFiles:
        """The files as columns. Raises UnicodeEncodeError for a name that is not UTF-8."""
        rows = ((f.url, f.size, f.identity, f.modified_at_s, f.settled) for f in files)
        columns = zip(*rows, strict=True) if files else ((),) * len(_SCHEMA)
        return cls.from_columns(
            [pa.array(list(values), field.type) for values, field in zip(columns, _SCHEMA, strict=True)]
        )

    @classmethod
    def from_columns(cls, columns: list[pa.Array]) -> ListedFiles:
        """The files with these URLs, sizes, identities, times and `settled` values, in any order."""
        batch = pa.RecordBatch.from_arrays(columns, schema=_SCHEMA)
        if not _is_ascending(columns[0]):
            batch = batch.take(pc.sort_indices(columns[0]))
        return cls(batch)

    @classmethod
    def concat(cls, parts: Sequence[ListedFiles]) -> ListedFiles:
        """The files of all parts."""
        columns = zip(*(part.batch.columns for part in parts), strict=True)
        return cls.from_columns([pa.concat_arrays(arrays) for arrays in columns])

    def __len__(self) -> int:
        return int(self.batch.num_rows)

    @overload
    def __getitem__(self, place: int) -> FileVersion: ...
    @overload
    def __getitem__(self, place: slice) -> ListedFiles: ...
    def __getitem__(self, place: int | slice) -> FileVersion | ListedFiles:
        if isinstance(place, slice):
            return self.take(np.arange(len(self))[place])
        return FileVersion(*(column[place].as_py() for column in self.batch.columns))

    def __iter__(self) -> Iterator[FileVersion]:
        return map(FileVersion, *(column.to_pylist() for column in self.batch.columns))

    def take(self, rows: Numbers) -> ListedFiles:
        """The files in some rows. `rows`: ascending."""
        return ListedFiles(self.batch.take(as_indices(rows)))

    def filter(self, mask: Numbers) -> ListedFiles:
        """The files for which the mask is true."""
        return self if mask.all() else ListedFiles(self.batch.filter(pa.array(mask)))

    def urls_ending(self, end: str) -> list[str]:
        """The URLs that end with `end`."""
        urls: list[str] = self.urls.filter(pc.ends_with(self.urls, end)).to_pylist()
        return urls

    @cached_property
    def modified_at_s(self) -> Numbers:
        """When each file was modified (Unix time); 0.0 if that is not known."""
        return np.asarray(pc.fill_null(self.batch.column("modified_at_s"), 0.0))

    @cached_property
    def settled(self) -> Numbers:
        return as_bools(self.batch.column("settled"))

    @cached_property
    def cacheable(self) -> Numbers:
        """`FileVersion.cacheable` of each file."""
        return self.settled & as_bools(pc.not_equal(self.identities, ""))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """Three hashes: of all URLs, of all sizes and of all identities, as `key_of_texts` computes them."""
        return tuple(map(key_of_column, (self.urls, self.batch.column("size").cast(pa.string()), self.identities)))

    def find(self, other: ListedFiles) -> Numbers:
        """For each file of `other`, the row of this listing that has the same file in the same state; -1 if there is none."""
        if not len(self) or not len(other):
            return np.full(len(other), -1)
        rows = as_int64(pc.fill_null(pc.index_in(other.urls, value_set=self.urls), -1).cast(pa.int64()))
        places = as_indices(np.maximum(rows, 0))
        same = (self.sizes[np.maximum(rows, 0)] == other.sizes) & as_bools(
            pc.equal(self.identities.take(places), other.identities)
        )
        return np.where((rows >= 0) & same, rows, -1)


def key_of_column(texts: pa.Array) -> str:
    """The hash of the texts, as `key_of_texts` computes it. None of the texts is null."""
    if not len(texts):
        return key_of("", "")
    lengths = pc.utf8_length(texts).cast(pa.string())
    return key_of(_join(lengths, ","), _join(texts, ""))


def _join(texts: pa.Array, separator: str) -> str:
    return str(pc.binary_join(pa.ListArray.from_arrays([0, len(texts)], texts), separator)[0].as_py())


def split_urls(urls: pa.Array) -> tuple[list[str], Numbers, pa.Array]:
    """(the distinct directories of the files; for each file, the position of its directory among them; the names of the files)."""
    parts = pc.split_pattern(urls, "/", max_splits=1, reverse=True)
    directories = pc.list_element(parts, 0).dictionary_encode()
    places = as_int64(directories.indices.cast(pa.int64()))
    return directories.dictionary.to_pylist(), places, pc.list_element(parts, 1)


def _is_ascending(urls: pa.Array) -> bool:
    return len(urls) < 2 or bool(pc.all(pc.less(urls.slice(0, len(urls) - 1), urls.slice(1))).as_py())


def listed_local_files(
    prefix: str, names: Sequence[str], times: array.array[int], inodes: array.array[int], settled_until_s: float
) -> ListedFiles:
    """Files of this machine, as columns.

    `prefix`: the directory's URL and a slash. `times`: size, mtime and ctime of each file, one after the other, both times in ns.
    `settled_until_s`: files that last changed before this time (Unix) are settled. Raises UnicodeEncodeError for a name that is not UTF-8.
    """
    urls = pc.binary_join_element_wise(prefix, pa.array(names, pa.string()), "")
    sizes, modified_ns, changed_ns = np.frombuffer(times, np.int64).reshape(-1, 3).T
    signs = (modified_ns, changed_ns, np.frombuffer(inodes, np.uint64))
    identities = pc.binary_join_element_wise(*(pa.array(sign).cast(pa.string()) for sign in signs), ":")
    modified_s, changed_s = (ns // _NS + 1e-9 * (ns % _NS) for ns in (modified_ns, changed_ns))
    settled = np.maximum(modified_s, changed_s) < settled_until_s
    return ListedFiles.from_columns([urls, pa.array(sizes), identities, pa.array(modified_s), pa.array(settled)])


def sort_files(files: Iterable[FileVersion]) -> tuple[FileVersion, ...] | ListedFiles:
    """The files of a listing by URL, as columns if they are many."""
    files = list(files)
    if len(files) >= ListedFiles.least:
        try:
            return ListedFiles.from_files(files)
        except UnicodeEncodeError:  # a name that is not UTF-8
            pass
    return tuple(sorted(files, key=lambda file: file.url))
