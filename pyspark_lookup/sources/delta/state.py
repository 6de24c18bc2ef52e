"""`DeltaState`: a Delta table at one version, as the actions of its log describe it. `Replay` applies the actions."""

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
        "variantShredding",
        "variantShredding-preview",
        "variantType",
        "variantType-preview",
    }
)
"""The reader features that are supported, however the table is named."""
_CATALOG_FEATURES = frozenset({"catalogManaged", "catalogOwned-preview"})
"""The names of one feature: the table may have commits that are not in its log yet, so only its catalog knows its newest version."""
Rewrites = tuple[tuple[tuple[Key, ...], tuple[Key, ...]], ...]
"""For each of the latest commits that changed no data: (keys of the files that it added, keys of the files that it removed)."""
_LEGACY_VERSION, _FEATURES_VERSION = 2, 3
_END_OF_TIME_MS = 253_402_300_800_000  # the year 10000


@dataclasses.dataclass(frozen=True)
class DataFiles:
    """The data files of a state: those `added` since `base`, by key, and those in the rows of `base` that are not `gone`.

    Only a large table has a base. The files of other tables are all in `added`.
    """

    added: Mapping[Key, Add]
    base: BaseFiles | None = None
    gone: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.added) + (0 if self.base is None else self.base.rows - len(self.gone))

    @cached_property
    def rows(self) -> Numbers:
        """The rows of the base whose files are in the state, ascending."""
        if self.base is None:
            return np.zeros(0, np.int64)
        return np.delete(np.arange(self.base.rows), sorted(self.gone))

    @cached_property
    def sums(self) -> Sums:
        """Sums over the keys of the files. States with the same files have the same sums."""
        added = sum_keys(self.added)
        if self.base is None:
            return added
        return combine_sums(self.base.sums, added, sum_keys(map(self.base.key, self.gone)))


@dataclasses.dataclass(frozen=True)
class DeltaState:
    """A table at a version: its `metaData` and `protocol` actions, and its data files.

    `rewrites`: see `Rewrites`. `memo`: values that callers have computed from this state.
    """

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
        """How the table maps columns to the names in its files: `none`, `name` or `id`. Raises NotSupportedError for another mode."""
        mode = self.configuration.get("delta.columnMapping.mode", "none")
        if mode not in ("none", "name", "id"):
            raise NotSupportedError(
                f"it has delta.columnMapping.mode = {mode!r}, which is not supported: read it with format('delta')"
            )
        return mode if self._maps_columns() else "none"

    def _maps_columns(self) -> bool:
        if self.protocol["minReaderVersion"] == _LEGACY_VERSION:
            return True
        # In tables that were upgraded from reader version 2, Delta on Spark lists the feature only for writers.
        feature_lists = (self.protocol.get(f"{role}Features") or () for role in ("reader", "writer"))
        return any("columnMapping" in features for features in feature_lists)

    @property
    def is_catalog_managed(self) -> bool:
        """Whether only the table's catalog knows its newest version."""
        return not _CATALOG_FEATURES.isdisjoint(self.protocol.get("readerFeatures") or ())

    def check(self, in_catalog: bool = False) -> None:
        """Raise NotSupportedError if the table requires a reader version or a reader feature that this package does not support.

        `in_catalog`: the table is named by its catalog. Raises one of `decoding.UNREADABLE` for malformed metadata.
        """
        least = as_count(self.protocol["minReaderVersion"])
        if least > _FEATURES_VERSION:
            raise NotSupportedError(
                f"it requires reader version {least}, and this package supports up to {_FEATURES_VERSION}: read it with format('delta')"
            )
        required_features = set(as_texts(self.protocol["readerFeatures"])) if least == _FEATURES_VERSION else set()
        of_catalog = sorted(required_features & _CATALOG_FEATURES)
        if of_catalog and not in_catalog:
            raise NotSupportedError(
                f"it requires the reader feature {', '.join(of_catalog)}: only its catalog knows its newest commits, so name it by its catalog "
                "(lookup.catalog = unity, path = catalog.schema.table)"
            )
        unknown = sorted(required_features - READER_FEATURES - _CATALOG_FEATURES)
        if unknown:
            raise NotSupportedError(
                f"it requires the reader feature {', '.join(unknown)}, which is not supported: read it with format('delta')"
            )
        _ = self.mapping, self.table_id
        names = {field["name"] for field in self.schema["fields"]}
        for place, name in enumerate(self.partition_columns):
            if name not in names:
                raise ValueError(f"the table has no column {name}, by which it is partitioned")
            if name in self.partition_columns[:place]:
                raise ValueError(f"the table is partitioned by the column {name} twice")


@dataclasses.dataclass
class Replay:
    """A state under construction, to which the actions of the log are applied, one version after the other.

    `base`: the files of an earlier state, as columns. `gone`: rows of the base whose files were removed or replaced since. `added`: the files
    that were added since; without a base, all files.
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
        """Apply the actions of one commit, or of a `checkpoint`.

        All actions of a checkpoint are marked as changing no data, so they say nothing about compactions. Raises one of `decoding.UNREADABLE`
        for malformed actions.
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
        for (
            key
        ) in removed_keys:  # before the added files: a commit may remove a file and add it with another deletion vector
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
        """The state after the applied actions, unchecked. Raises ValueError if the table's metadata or protocol is missing."""
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
    """Raise one of `decoding.UNREADABLE` if a commit contradicts itself, or if its time is out of range."""
    Replay().apply(actions)
    for action in actions:
        info = action.get("commitInfo")
        at_ms = None if info is None else info.get("inCommitTimestamp")
        if at_ms is not None and as_count(at_ms) >= _END_OF_TIME_MS:
            raise ValueError(f"its inCommitTimestamp {at_ms} is out of range")
