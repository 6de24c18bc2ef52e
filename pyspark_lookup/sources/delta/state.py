"""`DeltaState`: a Delta table at one version, as the actions of its log say; `Replay` applies these actions."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pyspark_lookup.columnar.keys import Numbers
from pyspark_lookup.core.decoding import as_count, as_text, as_texts
from pyspark_lookup.core.forks import cached_property
from pyspark_lookup.errors import NotSupportedError
from pyspark_lookup.sources.delta.actions import Add, Key, Vector, key_of_file
from pyspark_lookup.sources.delta.base_files import BaseFiles, Sums, combine_sums, sum_keys

READER_FEATURES = frozenset(
    {
        "columnMapping",
        "deletionVectors",
        "timestampNtz",
        "typeWidening",
        "typeWidening-preview",
        "v2Checkpoint",
        "vacuumProtocolCheck",
    }
)
"""The reader features that are supported. Not `catalogManaged`: such a table may have commits that its log does not show yet."""
_OF_TYPES = frozenset({"variantType", "variantType-preview", "variantShredding-preview"})
"""Features of column types that are not supported. A table may list them, and only its columns of such types are refused: delta-rs lists them even
if no column has such a type."""
Rewrites = tuple[tuple[tuple[Key, ...], tuple[Key, ...]], ...]
"""For each of the latest commits that changed no data: (the files that it added, the files that these replace)."""
_LEGACY_VERSION, _FEATURES_VERSION = 2, 3
_END_OF_TIME_MS = 253_402_300_800_000  # the year 10000


@dataclasses.dataclass(frozen=True)
class DataFiles:
    """The data files of a state: those `added` since `base`, by key, and the rows of `base` that are not `gone`.

    Only a large table has a base; the files of other tables are all in `added`.
    """

    added: Mapping[Key, Add]
    base: BaseFiles | None = None
    gone: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.added) + (0 if self.base is None else self.base.rows - len(self.gone))

    @cached_property
    def rows(self) -> Numbers:
        """The rows of the base that are in the state, ascending."""
        if self.base is None:
            return np.zeros(0, np.int64)
        return np.delete(np.arange(self.base.rows), sorted(self.gone))

    @cached_property
    def sums(self) -> Sums:
        """Sums that are equal for the same files."""
        added = sum_keys(self.added)
        if self.base is None:
            return added
        return combine_sums(self.base.sums, added, sum_keys(map(self.base.key, self.gone)))


@dataclasses.dataclass(frozen=True)
class DeltaState:
    """A table at a version: its `metaData` and `protocol` actions, and its data files."""

    version: int
    metadata: Mapping[str, Any]
    protocol: Mapping[str, Any]
    files: DataFiles
    rewrites: Rewrites = ()
    memo: dict[Any, Any] = dataclasses.field(default_factory=dict, compare=False)

    @property
    def table_id(self) -> str:
        return as_text(self.metadata["id"])

    @cached_property
    def schema(self) -> Any:
        return json.loads(as_text(self.metadata["schemaString"]))

    @property
    def partition_columns(self) -> tuple[str, ...]:
        return as_texts(self.metadata["partitionColumns"])

    @property
    def configuration(self) -> dict[str, str]:
        configuration = self.metadata.get("configuration")
        pairs = (
            configuration.items()
            if isinstance(configuration, Mapping)
            else ()
            if configuration is None
            else configuration
        )
        return {as_text(name): as_text(value) for name, value in pairs}

    @property
    def mapping(self) -> str:
        """The mode of the column mapping: `none`, `name` or `id`."""
        mode = self.configuration.get("delta.columnMapping.mode", "none")
        if mode not in ("none", "name", "id"):
            raise NotSupportedError(f"delta.columnMapping.mode = {mode!r} is not supported")
        return mode if self._maps_columns() else "none"

    def _maps_columns(self) -> bool:
        if self.protocol["minReaderVersion"] == _LEGACY_VERSION:
            return True
        # In tables that were upgraded from reader version 2, Delta on Spark lists the feature only for writers.
        feature_lists = (self.protocol.get(f"{role}Features") or () for role in ("reader", "writer"))
        return any("columnMapping" in features for features in feature_lists)

    def check(self) -> None:
        """Raise NotSupportedError if this package does not support the table's reader version or one of its reader features.

        Raises one of `decoding.UNREADABLE` if the metadata is malformed.
        """
        least = as_count(self.protocol["minReaderVersion"])
        if least > _FEATURES_VERSION:
            raise NotSupportedError(f"it requires reader version {least}; up to {_FEATURES_VERSION} is supported")
        required_features = set(as_texts(self.protocol["readerFeatures"])) if least == _FEATURES_VERSION else set()
        unknown = sorted(required_features - READER_FEATURES - _OF_TYPES)
        if unknown:
            raise NotSupportedError(f"it requires the reader feature {', '.join(unknown)}, which is not supported")
        _ = self.mapping, self.table_id
        names = {field["name"] for field in self.schema["fields"]}
        for place, name in enumerate(self.partition_columns):
            if name not in names:
                raise ValueError(f"the table has no column {name}, by which it is partitioned")
            if name in self.partition_columns[:place]:
                raise ValueError(f"the table is partitioned by the column {name} twice")


@dataclasses.dataclass
class Replay:
    """A state under construction, to which the actions of one version after the other are applied.

    `base`: the files of an earlier state, as columns. `gone`: its rows that were removed or replaced since. `added`: the files that were added
    since. A table without a base has all its files there.
    """

    version: int = -1
    metadata: Mapping[str, Any] | None = None
    protocol: Mapping[str, Any] | None = None
    added: dict[Key, Add] = dataclasses.field(default_factory=dict)
    rewrites: Rewrites = ()
    base: BaseFiles | None = None
    gone: set[int] = dataclasses.field(default_factory=set)

    @classmethod
    def from_state(cls, state: DeltaState) -> Replay:
        files = state.files
        return cls(
            state.version, state.metadata, state.protocol, {**files.added}, state.rewrites, files.base, {*files.gone}
        )

    def apply(self, actions: Iterable[Mapping[str, Any]], checkpoint: bool = False) -> None:
        """Apply the actions of one commit, or of a `checkpoint`. (All actions of a checkpoint are marked as changing no data.)

        Raises one of `decoding.UNREADABLE` if they are malformed.
        """
        added_files: list[Add] = []
        removed_keys: list[Key] = []
        changes_data = False
        for action in actions:
            add, remove = action.get("add"), action.get("remove")
            if add is not None:
                added_files.append(Add.from_action(add))
                changes_data |= add.get("dataChange") is not False
            if remove is not None:
                removed_keys.append(
                    key_of_file(as_text(remove["path"]), Vector.from_descriptor(remove.get("deletionVector")))
                )
                changes_data |= remove.get("dataChange") is not False
            metadata, protocol = action.get("metaData"), action.get("protocol")
            self.metadata = self.metadata if metadata is None else metadata
            self.protocol = self.protocol if protocol is None else protocol
        for key in removed_keys:  # first: a file's vector may be replaced by another one in the same commit
            self.added.pop(key, None)
            self._remove_row(key)
        for add in added_files:
            self.added[add.key] = add
            self._remove_row(add.key)
        if added_files and removed_keys and not changes_data and not checkpoint:
            self.rewrites = (*self.rewrites[-7:], (tuple(add.key for add in added_files), tuple(removed_keys)))

    def _remove_row(self, key: Key) -> None:
        row = None if self.base is None else self.base.find(key)
        if row is not None:
            self.gone.add(row)

    def state(self) -> DeltaState:
        """The state so far, unchecked. Raises ValueError if the table's metadata or protocol is missing."""
        if self.metadata is None or self.protocol is None:
            raise ValueError(f"version {self.version} lacks the table's {'protocol' if self.metadata else 'metadata'}")
        for name in ("id", "schemaString"):
            if not isinstance(self.metadata.get(name), str):
                raise ValueError(f"its metadata has no {name}")
        vector_paths = [path for path, vector in self.added if vector]
        if (
            len({*vector_paths}) < len(vector_paths)
            or any((path, "") in self.added for path in vector_paths)
            or any(
                not self.gone.issuperset(self.base.find_path(path)) for path, _ in self.added if self.base is not None
            )
        ):
            raise ValueError("it lists a data file twice, with different deletion vectors")
        files = DataFiles(self.added, self.base, frozenset(self.gone))
        return DeltaState(self.version, self.metadata, self.protocol, files, self.rewrites)


def check_commit(actions: Sequence[Mapping[str, Any]]) -> None:
    """Raise one of `decoding.UNREADABLE` if a commit contradicts itself, or its time is out of range."""
    Replay().apply(actions)
    for action in actions:
        info = action.get("commitInfo")
        at_ms = None if info is None else info.get("inCommitTimestamp")
        if at_ms is not None and as_count(at_ms) >= _END_OF_TIME_MS:
            raise ValueError(f"its inCommitTimestamp {at_ms} is out of range")
