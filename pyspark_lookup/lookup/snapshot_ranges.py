"""`SnapshotRanges`: finds the rows of a snapshot that have a key and whose range holds a value, without reading the key's other rows.

A *group* is all rows of one key. A `RangeIndex` (`columnar.ranges`) finds the rows of a group. The first index has the groups of the
snapshot's base, and is computed once for the base. If a version has overlays or deleted rows, it has a second index, with the groups that
have rows in overlays or deleted rows. So a reload computes only the groups that have changed since the base was written. In a lookup
without keys, all rows are one group, and each version has one index. All indexes are stored beside the snapshot (`DerivedArrays`), and
mapped by the processes of the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from pyspark_lookup.cache.full.derived import Derived, DerivedArrays
from pyspark_lookup.cache.full.snapshot import Layer, Marks, Snapshot, plan_columns
from pyspark_lookup.cache.full.store import name_derived
from pyspark_lookup.cache.segments import concat
from pyspark_lookup.columnar.keys import Keys, Numbers, as_bools, as_indices, sort_distinct
from pyspark_lookup.columnar.predicate import evaluate, referenced_columns
from pyspark_lookup.columnar.ranges import RangeIndex, SortedBytes, Stabbing
from pyspark_lookup.columnar.types import text_of_schema
from pyspark_lookup.core.decoding import as_count
from pyspark_lookup.lookup.range_match import Match, MatchedRanges, MatchedValues, decimal_of_both, find_rows
from pyspark_lookup.lookup.read import ReadPlan
from pyspark_lookup.options.enums import OnBadNetwork, Overlap
from pyspark_lookup.scan.formats import BATCH_ROWS
from pyspark_lookup.storage.disk import key_of

_FORMAT = 1  # of the stored arrays; it is part of their name


@dataclasses.dataclass(frozen=True)
class _Part:
    """An index of some groups, which are numbered from 0.

    `tree`: finds all rows of a group that match; None if no rows overlap, or if the match wants only one row. `rows`: for each row in the
    index its number in the snapshot; None: both numbers are the same. `bad`: for each row whose network cannot be read, the row's group. `empty`:
    for each other row whose range holds no value, the row's group; both are ascending. Only the second index has `changed`: the key numbers
    (in the base) of its first groups, ascending; and `later`: for each overlay, the group of each of the overlay's keys.
    """

    values: MatchedValues
    index: RangeIndex
    tree: Stabbing | None
    rows: Numbers | None
    bad: Numbers
    empty: Numbers
    changed: Numbers | None = None
    marks: Marks | None = None
    later: tuple[Numbers, ...] = ()

    def to_derived(self) -> Derived:
        named = {"index": self.index.arrays, "": {"bad": self.bad, "empty": self.empty}}
        if self.values.bounds is not None:
            named["bounds"] = self.values.bounds.arrays
        if self.tree is not None:
            named["tree"] = self.tree.arrays
        if self.rows is not None:
            named[""]["rows"] = self.rows
        if self.changed is not None and self.marks is not None:
            named[""] |= {"changed": self.changed, "marks": self.marks.bits}
            named["later"] = {f"{number}": groups for number, groups in enumerate(self.later)}
        arrays = {f"{group}.{name}": array for group, arrays in named.items() for name, array in arrays.items()}
        return Derived({"is_ipv4": self.values.is_ipv4, "later": len(self.later)}, arrays)

    @classmethod
    def from_derived(cls, match: Match, decimal: pa.DataType | None, derived: Derived) -> _Part:
        """The index that `to_derived` turned into `derived`. Raises one of `UNREADABLE` for arrays of another form."""

        def named(group: str) -> dict[str, Numbers]:
            prefix = f"{group}."
            return {
                name.removeprefix(prefix): array for name, array in derived.arrays.items() if name.startswith(prefix)
            }

        bounds, tree, others, later = named("bounds"), named("tree"), named(""), named("later")
        is_ipv4 = derived.meta["is_ipv4"] is True
        values = MatchedValues(match.kind, decimal, is_ipv4, SortedBytes(**bounds) if bounds else None)
        index = RangeIndex(**named("index"))
        if len(index.winners) != len(index.starts) + 1 or index.table[-1] != len(index.starts):
            raise ValueError("the segments of the ranges do not fit together")
        return cls(
            values,
            index,
            Stabbing(**tree) if tree else None,
            others.get("rows"),
            others["bad"],
            others["empty"],
            others.get("changed"),
            Marks(others["marks"]) if "changed" in others else None,
            tuple(later[f"{number}"] for number in range(as_count(derived.meta["later"]))),
        )

    def find(self, values: pa.Array, groups: Numbers | None) -> tuple[Numbers, Numbers, Numbers]:
        """What `find_rows` returns: (indices of values, the rows that match them, indices of the values that several ranges hold). The rows are
        numbers in the snapshot."""
        positions, valid = self.values.positions(values)
        known = None if valid.all() else np.flatnonzero(valid)
        if known is not None:
            positions, groups = positions[known], None if groups is None else groups[known]
        tree = self.tree
        numbers, rows, shared = find_rows(self.index, positions, groups, None if tree is None else lambda: tree)
        if self.rows is not None:
            rows = self.rows[rows].astype(np.int64)
        return (numbers, rows, shared) if known is None else (known[numbers], rows, known[shared])


class SnapshotRanges:
    """Finds rows of one `snapshot` by key and range.

    `plan`: gives the types of the columns, and a predicate; rows for which it is not true never match. `kind`: the type of the values.
    `is_keyed`: whether rows are looked up by the snapshot's keys as well. `arrays`: where the indexes are stored (None: in this process only).
    """

    def __init__(
        self,
        snapshot: Snapshot,
        plan: ReadPlan,
        match: Match,
        kind: pa.DataType,
        is_keyed: bool,
        arrays: DerivedArrays | None,
    ) -> None:
        self.snapshot, self._kind = snapshot, kind
        self._plan, self._match = plan, match
        projection = plan.projection
        self._names = list(dict.fromkeys([*match.columns, *sorted(referenced_columns(projection.predicate))]))
        fields = [
            (projection.data if n in projection.data.names else projection.partitions).field(n) for n in self._names
        ]
        self._decimal = decimal_of_both(fields[0].type, kind)
        self._what = key_of(
            _FORMAT, match.kind.value, match.columns, match.closed, text_of_schema(pa.schema(fields)), str(self._decimal), is_keyed,
            plan.options.read.where, match.overlap is Overlap.NARROWEST, match.overlap is Overlap.ALL,
        )  # fmt: skip
        self._arrays = arrays
        self._base: _Part | None = None
        self._changes: _Part | None = None
        layers = snapshot.layers
        if not is_keyed:
            self._changes = self._share(snapshot.layers_name, self._index_all)
            return
        self._base = self._share(snapshot.base_name, self._index_base)
        if len(layers) > 1 or layers[0].deleted is not None:
            self._changes = self._share(snapshot.layers_name, self._index_changes)

    def _share(self, layers: str, compute: Callable[[], _Part]) -> _Part:
        """The index of the layers that `layers` names: from the host's disk or, if it is not there, from `compute`."""
        if self._arrays is None or not layers:
            return compute()
        return self._arrays.get(
            name_derived(self._what, layers),
            lambda: compute().to_derived(),
            lambda derived: _Part.from_derived(self._match, self._decimal, derived),
        )

    @property
    def empty(self) -> int:
        """The number of rows whose range holds no value, because its lowest value is above its highest."""
        parts = [part.empty for part in (self._base, self._changes) if part is not None]
        return sum(map(len, parts)) - self._replaced(parts[0])

    @property
    def skipped(self) -> int:
        """The number of rows whose network cannot be read, if `lookup.on-bad-network` = SKIP."""
        if self._match.on_bad_network is OnBadNetwork.ERROR:
            return 0
        parts = [part.bad for part in (self._base, self._changes) if part is not None]
        return sum(map(len, parts)) - self._replaced(parts[0])

    def _replaced(self, groups: Numbers) -> int:
        """How many of the `groups` are in the second index too, and so are not found in the first one."""
        if self._base is None or self._changes is None or self._changes.changed is None:
            return 0
        return int(np.count_nonzero(_find_sorted(self._changes.changed, groups) >= 0))

    # --- lookups ----------------------------------------------------------------------------------

    def find(self, keys: Sequence[pa.Array], values: pa.Array) -> tuple[Numbers, Numbers] | None:
        """(indices of values, numbers of the rows that match them), ordered by value, and for one value by the rows' places in the version.

        `keys`: for each value its key, in the snapshot's types. Returns None if the lookup has to fail, because rows overlap or a network cannot be
        read.
        """
        if self._base is None:
            assert self._changes is not None
            return self._find_in(self._changes, None, None, values)
        base = self.snapshot.layers[0].segment
        request_keys = Keys(keys)
        hashes = request_keys.hashes(self.snapshot.seed)
        numbers = base.find_keys(request_keys, hashes)
        if self._changes is None:
            known = np.flatnonzero(numbers >= 0)
            if len(known) == len(numbers):
                return self._find_in(self._base, None, numbers, values)
            return self._find_in(self._base, known, numbers[known], values)
        groups = self._changed_groups(self._changes, keys, hashes, numbers)
        is_changed = groups >= 0
        changed, unchanged = np.flatnonzero(is_changed), np.flatnonzero(~is_changed & (numbers >= 0))
        first = self._find_in(self._base, unchanged, numbers[unchanged], values)
        second = self._find_in(self._changes, changed, groups[changed], values)
        if first is None or second is None:
            return None
        indices, rows = map(np.concatenate, zip(first, second, strict=True))
        order = np.argsort(indices, kind="stable")
        return indices[order], rows[order]

    def _find_in(
        self, part: _Part, selection: Numbers | None, groups: Numbers | None, values: pa.Array
    ) -> tuple[Numbers, Numbers] | None:
        """What `find` returns for the values with the indices `selection` (None: all).

        `groups`: for each of these values, the number of its key's group of ranges in the index `part` (None: the values are looked up without keys).
        """
        fails_when_bad = len(part.bad) > 0 and self._match.on_bad_network is OnBadNetwork.ERROR
        if fails_when_bad and (groups is None or np.isin(groups, part.bad).any()):
            return None
        if selection is not None:
            values = values.take(as_indices(selection))
        indices, rows, shared = part.find(values, groups)
        if len(shared) and self._match.overlap is Overlap.ERROR:
            return None
        return indices if selection is None else selection[indices], rows

    def _changed_groups(self, changes: _Part, keys: Sequence[pa.Array], hashes: Numbers, numbers: Numbers) -> Numbers:
        """For each key its group in the second index; -1 if it has none there. `numbers`: the number of each key in the base; -1: not in it."""
        assert changes.changed is not None
        assert changes.marks is not None
        groups = np.full(len(numbers), -1)
        is_in_base = numbers >= 0
        changed = np.flatnonzero(is_in_base & changes.marks.contains(np.maximum(numbers, 0)))
        groups[changed] = np.searchsorted(changes.changed, numbers[changed])
        missing = np.flatnonzero(~is_in_base)
        for layer, later in zip(self.snapshot.layers[1:], changes.later, strict=True):
            if not len(missing):
                break
            request_keys = Keys([column.take(as_indices(missing)) for column in keys])
            places = layer.segment.find_keys(request_keys, hashes[missing])
            groups[missing] = _groups_at(later, places)
            missing = missing[places < 0]
        return groups

    # --- indexes ----------------------------------------------------------------------------------

    def _index_base(self) -> _Part:
        segment = self.snapshot.layers[0].segment
        starts = segment.first_rows(np.arange(segment.key_count + 1))
        group = np.repeat(np.arange(segment.key_count), np.diff(starts))
        return self._index(None, group, segment.key_count)

    def _index_all(self) -> _Part:
        rows, positions = [], []
        for layer, first in zip(self.snapshot.layers, self.snapshot.first_numbers.tolist(), strict=False):
            visible = _visible(layer, np.arange(layer.segment.rows))
            rows.append(first + visible)
            positions.append(layer.positions(visible))
        places = np.concatenate(positions)
        numbers = np.concatenate(rows)
        if (places[1:] < places[:-1]).any():
            numbers = numbers[np.argsort(places, kind="stable")]
        return self._index(numbers, None, 1)

    def _index_changes(self) -> _Part:
        """Compute the second index: of all groups with rows in overlays, and of the base's groups with deleted rows."""
        base, *overlays = self.snapshot.layers
        keys_of = [self._keys_of(layer) for layer in overlays]
        in_base = [base.segment.find_keys(*keys) for keys in keys_of]
        touched = [numbers[numbers >= 0] for numbers in in_base]
        if base.deleted is not None:
            keyed = int(base.segment.first_rows(np.array([base.segment.key_count]))[0])
            deleted = np.flatnonzero(base.deleted.between(0, keyed))
            touched.append(base.segment.key_numbers(deleted))
        changed = sort_distinct(np.concatenate([np.zeros(0, np.int64), *touched]))
        count = len(changed)
        later: list[Numbers] = []
        for number in range(len(overlays)):
            groups = _find_sorted(changed, in_base[number])
            for earlier, earlier_groups in zip(overlays[:number], later, strict=True):
                places = earlier.segment.find_keys(*keys_of[number])
                groups = np.where(groups < 0, _groups_at(earlier_groups, places), groups)
            new = np.flatnonzero(groups < 0)
            groups[new] = np.arange(count, count + len(new))
            count += len(new)
            later.append(groups)
        starts, stops = base.segment.first_rows(changed), base.segment.first_rows(changed + 1)
        row_parts = [_spread(starts, stops)]
        group_parts = [np.repeat(np.arange(len(changed)), stops - starts)]
        for layer, groups in zip(overlays, later, strict=True):
            starts = layer.segment.first_rows(np.arange(layer.segment.key_count + 1))
            row_parts.append(np.arange(starts[-1]))
            group_parts.append(np.repeat(groups, np.diff(starts)))
        rows, group, positions = [], [], []
        for layer, first, layer_rows, layer_groups in zip(
            self.snapshot.layers, self.snapshot.first_numbers.tolist(), row_parts, group_parts, strict=False
        ):
            is_live = (
                np.ones(len(layer_rows), np.bool_) if layer.deleted is None else ~layer.deleted.contains(layer_rows)
            )
            rows.append(layer_rows[is_live] + first)
            group.append(layer_groups[is_live])
            positions.append(layer.positions(layer_rows[is_live]))
        groups, numbers = np.concatenate(group), np.concatenate(rows)
        order = np.lexsort((np.concatenate(positions), groups))
        part = self._index(numbers[order], groups[order], count)
        small = np.int32 if count < 2**31 else np.int64
        marks = Marks.from_rows(changed, max(base.segment.key_count, 1))
        return dataclasses.replace(
            part, changed=changed, marks=marks, later=tuple(groups.astype(small) for groups in later)
        )

    def _keys_of(self, layer: Layer) -> tuple[Keys, Numbers]:
        """(the keys of a layer in the order of their numbers, the hashes of these keys)."""
        rows = layer.segment.first_rows(np.arange(layer.segment.key_count))
        keys = Keys(layer.segment.take(self.snapshot.keys, rows))
        return keys, keys.hashes(self.snapshot.seed)

    def _index(self, rows: Numbers | None, group: Numbers | None, groups: int) -> _Part:
        """Compute an index of some rows, which are ordered by group, and in a group by their places in the version.

        `rows`: the numbers of the rows in the snapshot (None: all rows of the base that have a key). `group`: the group of each row (None: all are in
        one group). `groups`: how many groups there are.
        """
        count = len(group) if group is not None else 0 if rows is None else len(rows)
        columns, counts = self._read(rows, count)
        match = dataclasses.replace(self._match, on_bad_network=OnBadNetwork.SKIP)
        matched = MatchedRanges(match, columns, self._kind, str, group)
        ranges, is_bad, is_empty = matched.ranges, matched.is_bad, matched.is_empty
        if counts is not None:
            ranges = dataclasses.replace(ranges, is_empty=ranges.is_empty | ~counts)
            is_bad, is_empty = is_bad & counts, is_empty & counts
        index = RangeIndex.build(ranges, matched.pick, groups)
        wants_tree = match.overlap is Overlap.ALL and index.is_shared is not None
        tree = Stabbing.from_ranges(ranges, groups) if wants_tree else None
        bad, empty = (
            np.zeros(np.count_nonzero(mask), np.int64) if group is None else group[mask] for mask in (is_bad, is_empty)
        )
        if rows is not None:
            small = np.int32 if self.snapshot.first_numbers[-1] < 2**31 else np.int64
            rows = (
                None
                if len(rows) == self.snapshot.first_numbers[-1] and (np.diff(rows) > 0).all()
                else rows.astype(small)
            )
        return _Part(matched.values, index, tree, rows, bad, empty)

    def _read(self, rows: Numbers | None, count: int) -> tuple[list[pa.Array], Numbers | None]:
        """(the columns of the match for some rows, in the types of the plan; for each row whether the predicate is true, None without a predicate).
        `rows`: as in `_index`. `count`: how many rows there are."""
        projection, url = self._plan.projection, self._plan.table.url
        stored = [name for name in self._names if name in self.snapshot.schema.names]
        batches, masks = [plan_columns({}, 0, self._names, projection, url)], [np.zeros(0, np.bool_)]
        for start in range(0, count, BATCH_ROWS):
            stop = min(start + BATCH_ROWS, count)
            if rows is None:
                columns = self.snapshot.layers[0].segment.slice(stored, start, stop)
            else:
                columns = self.snapshot.take(stored, rows[start:stop])
            batch = plan_columns(dict(zip(stored, columns, strict=True)), stop - start, self._names, projection, url)
            batches.append(batch)
            if projection.predicate is not None:
                by_name = dict(zip(self._names, batch.columns, strict=True))
                masks.append(as_bools(evaluate(projection.predicate, by_name, batch.num_rows).fill_null(False)))
        arrays = [
            concat([batch.column(name) for batch in batches], batches[0].schema.field(name).type)
            for name in self._match.columns
        ]
        return arrays, None if projection.predicate is None else np.concatenate(masks)


def _visible(layer: Layer, rows: Numbers) -> Numbers:
    """Those of the `rows` of a layer that are not deleted."""
    return rows if layer.deleted is None else rows[~layer.deleted.contains(rows)]


def _find_sorted(values: Numbers, numbers: Numbers) -> Numbers:
    """For each of `numbers`, its position in `values`, which are ascending; -1 if it is not among them."""
    if not len(values):
        return np.full(len(numbers), -1)
    places = np.minimum(np.searchsorted(values, numbers), len(values) - 1)
    return np.asarray(np.where(values[places] == numbers, places, -1))


def _groups_at(groups: Numbers, places: Numbers) -> Numbers:
    """For each of `places`, the item of `groups` there; -1 for the place -1."""
    if not len(groups):
        return np.full(len(places), -1)
    return np.asarray(np.where(places >= 0, groups[places], -1))


def _spread(starts: Numbers, stops: Numbers) -> Numbers:
    """All numbers from each of `starts` to before the one at the same place of `stops`, one range after the other."""
    counts = stops - starts
    ends = np.cumsum(counts)
    return np.asarray(np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - counts), counts))
