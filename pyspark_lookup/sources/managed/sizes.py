"""`WriteSizes`: the sizes at which writes and compactions of a managed table behave differently."""

from __future__ import annotations

import dataclasses

from pyspark_lookup.sources.managed.log.events import PAGE

_MIB = 1024 * 1024


@dataclasses.dataclass(frozen=True)
class WriteSizes:
    """Sizes in bytes, part of a `Runtime`. Tests make them smaller, so that small tables have many files, row groups and compactions.

    `file_bytes`: of rows in memory that are sorted and written as one file; rows that come in order are sorted four times as many at once.
    `row_group_bytes`: of a row group, with `row_group_rows` (at least, at most) rows. `merge_bytes`: of the files whose rows a compaction
    sorts together.

    `compact_bytes`: a compaction takes every write that is smaller. `unasked_compact_bytes`: the same for a compaction that a commit
    starts, which takes no write larger than `unasked_write_bytes`. `small_file_bytes`: files that are smaller on average are too many.
    `log_page`: the events in a page of a new table's log.
    """

    file_bytes: int = 128 * _MIB
    row_group_bytes: int = _MIB
    row_group_rows: tuple[int, int] = (1024, 128 * 1024)
    merge_bytes: int = 32 * _MIB
    compact_bytes: int = 64 * _MIB
    unasked_compact_bytes: int = 4 * _MIB
    unasked_write_bytes: int = 256 * _MIB
    small_file_bytes: int = 8 * _MIB
    log_page: int = PAGE
