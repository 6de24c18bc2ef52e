"""`ManifestReader`: the files in manifests, read through the block cache."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pyspark_lookup.errors import DamagedFileError, OptionError, SourceChangedError, raise_ours
from pyspark_lookup.sources.iceberg.entries import Entry, Manifest
from pyspark_lookup.sources.iceberg.entry_columns import EntryBuilder
from pyspark_lookup.sources.iceberg.metadata import Locations, Snapshot
from pyspark_lookup.storage.block_cache import BlockCache
from pyspark_lookup.storage.stores import IMMUTABLE, FileVersion
from pyspark_lookup.storage.ufs import Ufs

_PACKAGE = "pyspark_lookup.sources.iceberg"
_ENTRIES_KEPT = 5000  # entries of manifests that a process caches
_TOGETHER_BYTES = 64 * 1024  # of a manifest that is decoded together with others
_TOGETHER = 512  # manifests that are decoded together

RecentEntries = dict[str, list[Entry]]
"""The entries of manifests that this process has read, by location."""


class ManifestReader:
    """Reads the manifests of one table. PyIceberg is imported when the first is decoded.

    `recent`: the entries that are known, to which those of other manifests are added.
    """

    def __init__(self, ufs: Ufs, blocks: BlockCache, locations: Locations, recent: RecentEntries) -> None:
        self._ufs = ufs
        self._blocks = blocks
        self._locations = locations
        self._recent = recent

    def list_manifests(self, snapshot: Snapshot) -> list[Manifest]:
        """The manifests of a snapshot, each once."""
        if snapshot.manifest_list is None:
            return [Manifest(location, None, None, 0) for location in dict.fromkeys(snapshot.manifests)]
        url = self._locations.resolve_url(snapshot.manifest_list)
        manifests = _import("manifests").read_manifest_list(url, self._read_whole([(url, None)])[0])
        return list({manifest.location: manifest for manifest in manifests}.values())

    def read(self, manifests: Sequence[Manifest], keeps: bool) -> Iterator[list[Entry]]:
        """The live files in each of the manifests. Manifests that this process has cached are not read again.

        `keeps`: whether the block cache keeps the manifests that are read. It need not if the caller stores their entries on this host.
        """
        data = self._read_contents([manifest for manifest in manifests if manifest.location not in self._recent], keeps)
        count = sum(len(some) + 1 for some in self._recent.values())
        for manifest in manifests:
            entries = self._recent.get(manifest.location)
            if entries is None:
                entries = self._decode(manifest, data.get(manifest.location))
                count += len(entries) + 1
                if count < _ENTRIES_KEPT:
                    self._recent[manifest.location] = entries
            yield entries

    def fill(self, builder: EntryBuilder, manifests: Sequence[Manifest], keeps: bool) -> None:
        """Add the live files of manifests to a builder, those of most data files without an `Entry` for each. `keeps`: as for `read`."""
        data = self._read_contents([manifest for manifest in manifests if manifest.location not in self._recent], keeps)
        together: list[tuple[Manifest, bytes]] = []
        for manifest in manifests:
            content = data.get(manifest.location)
            if content is None or not manifest.has_data:
                entries = self._recent.get(manifest.location)
                builder.add(manifest.location, self._decode(manifest, content) if entries is None else entries)
            elif len(content) > _TOGETHER_BYTES:
                self._fill(builder, [(manifest, content)])
            else:
                together.append((manifest, content))
                if len(together) == _TOGETHER:
                    self._fill(builder, together)
                    together = []
        self._fill(builder, together)

    def _fill(self, builder: EntryBuilder, manifests: Sequence[tuple[Manifest, bytes]]) -> None:
        if not manifests:
            return
        try:
            batches = list(_import("manifest_columns").decode_manifests(manifests))
        except Exception:  # something is unusual or damaged, and the other decoder says what
            for manifest, content in manifests:
                builder.add(manifest.location, self._decode(manifest, content))
            return
        numbers = np.array([builder.begin(manifest.location) for manifest, _ in manifests], np.int64)
        for batch in batches:
            builder.add_batch(dataclasses.replace(batch, manifests=numbers[batch.manifests]))

    def _decode(self, manifest: Manifest, content: bytes | None) -> list[Entry]:
        """The live files of a manifest, decoded from its bytes `content` (None: they could not be read).

        If the content is damaged or missing, the manifest list may state a wrong length, as in tables whose metadata was edited. So the
        manifest is read again, with the size that the store reports.
        """
        decode = _import("manifests").read_manifest
        if content is not None:
            try:
                return list(decode(manifest, content))
            except DamagedFileError:
                pass
        return list(decode(manifest, self._read_whole([(self._locations.resolve_url(manifest.location), None)])[0]))

    def _read_contents(self, manifests: Sequence[Manifest], keeps: bool) -> dict[str, bytes]:
        """The bytes of manifests, by location; none if one of them could not be read in the length that its list has."""
        urls = [(self._locations.resolve_url(manifest.location), manifest.length) for manifest in manifests]
        try:
            contents = self._read_whole(urls, keeps)
        except (SourceChangedError, DamagedFileError):
            return {}
        return {manifest.location: content for manifest, content in zip(manifests, contents, strict=True)}

    def _read_whole(self, requested_files: Sequence[tuple[str, int | None]], keeps: bool = True) -> list[bytes]:
        """The contents of files that never change, read through the block cache. `keeps`: whether the block cache keeps them.

        `requested_files`: (URL, size) of each file; size None: the store is asked for it.
        """
        blocks = self._blocks if keeps else self._blocks.read_only()
        files = [
            FileVersion(url, self._ufs.get_meta(url).size if size is None else size, IMMUTABLE)
            for url, size in requested_files
        ]
        locations = [blocks.get_blocks_and_locations(file.url, file) for file in files]
        return [
            bytes(parts[0]) for parts in blocks.read([(location, [(0, location.file.size)]) for location in locations])
        ]


def _import(module: str) -> Any:
    try:
        return importlib.import_module(f"{_PACKAGE}.{module}")
    except ImportError as problem:
        raise_ours(
            OptionError(
                "Iceberg tables need PyIceberg, which this machine does not have: pip install 'pyspark-lookup[iceberg]' "
                f"({problem})"
            ),
            problem,
        )
