"""A file whose blocks the processes of a host read through one cache directory."""

from pathlib import Path
from typing import Any

from pyspark_lookup.storage.block_cache import BlocksAndLocations
from pyspark_lookup.storage.stores import FileVersion
from tests.support.disks import random_data
from tests.support.fakes import Host, make_host

Range = tuple[int, int]


class Source:
    """A local file of random bytes, and hosts that read it through one cache directory."""

    def __init__(self, path: Path, cache_dir: Path | None, size: int = 100_000) -> None:
        self.path = path
        self.cache_dir = cache_dir
        self.write(1, size)
        self.host = self.another()

    def write(self, seed: int, size: int = 100_000) -> None:
        self.path.write_bytes(random_data(seed, size))

    def another(self, **options: Any) -> Host:
        """A host's next process: the same directory, counters and calls of its own."""
        return make_host(str(self.path.parent), self.cache_dir, **options)

    def version(self, host: Host | None = None) -> FileVersion:
        """The version now, for which no call is noted."""
        host = host or self.host
        version = host.ufs.get_meta(str(self.path))
        host.store.calls.clear()
        return version

    def locate(self, host: Host | None = None, version: FileVersion | None = None) -> BlocksAndLocations:
        host = host or self.host
        version = version or self.version(host)
        return host.blocks.get_blocks_and_locations(version.url, version)

    def read(self, *blocks: Range, host: Host | None = None, version: FileVersion | None = None) -> list[bytes]:
        host = host or self.host
        location = self.locate(host, version)
        return [bytes(data) for data in host.blocks.read([(location, blocks)])[0]]

    def right(self, *blocks: Range) -> list[bytes]:
        """What reading these blocks should give now."""
        content = self.path.read_bytes()
        return [content[offset : offset + length] for offset, length in blocks]

    def gets(self, host: Host | None = None) -> list[Range]:
        """The ranges asked of the store, in order of offset."""
        return sorted(subject[1:] for kind, subject in (host or self.host).store.calls if kind == "get")  # type: ignore[index]

    def apart(self, count: int, version: FileVersion) -> list[Range]:
        """Blocks of ten bytes none of which shares its lock, or its request, with another."""
        assert self.host.disk is not None
        blocks: dict[Path, Range] = {}
        for offset in range(0, self.path.stat().st_size, 70_000):
            block = (offset, 10)
            name = self.locate(version=version).key(block).name
            blocks.setdefault(self.host.disk.lock_path("block", name), block)
        return sorted(blocks.values())[:count]
