"""`EventFiles`: the events of a managed table's log in the store. Each is a file, named after its position."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark_lookup.errors import DamagedFileError, UfsNotFoundError
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.sources.managed.log.events import Event, parse_event
from pyspark_lookup.storage.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.storage.ufs import Ufs

DIGITS = 20


class EventFiles:
    """The events of the table at `url`."""

    def __init__(self, ufs: Ufs, url: str) -> None:
        self._ufs = ufs
        self.url = url
        self._directory = f"{url}/{LOG_DIRECTORY}/log"

    @staticmethod
    def event_path(url: str, position: int) -> str:
        """The URL of the event at a position of the log of the table at `url`."""
        return f"{url}/{LOG_DIRECTORY}/log/{position:0{DIGITS}d}.json"

    def path(self, position: int) -> str:
        return self.event_path(self.url, position)

    def get_meta(self, position: int) -> FileVersion:
        """The file of the event at a position, from the store. Raises UfsNotFoundError if there is none."""
        return self._ufs.get_meta(self.path(position))

    def list_following(self, position: int, at_most: int | None = None) -> list[tuple[int, FileVersion]]:
        """(position, file) of the events after a position, in their order. One LIST."""
        files = self._ufs.list_files(self._directory, after=f"{position:0{DIGITS}d}.json", at_most=at_most)
        named_files = ((file.url.rsplit("/", 1)[-1], file) for file in files)
        return [(self._parse_position(name, file), file) for name, file in named_files if name.endswith(".json")]

    def _parse_position(self, name: str, file: FileVersion) -> int:
        stem = name.removesuffix(".json")
        if not stem.isdecimal():
            raise DamagedFileError(f"{redact('path', file.url)} is not an event of a table's log")
        return int(stem)

    def read_following(self, position: int, table_id: str | None) -> list[tuple[FileVersion, Event]]:
        """(file, event) of all events after a position. One LIST, and one read per event. `table_id`: the table's; None: the first event's.

        Raises DamagedFileError if the log lacks an event of this table but has a later one.
        """
        files = dict(self.list_following(position))
        following: list[FileVersion] = []
        while files:
            next_position = position + len(following) + 1
            file = files.pop(next_position, None) or self._find_missed(next_position)
            if file is None:
                break
            following.append(file)
        events = self.read(following)
        if files:
            own_id = table_id or (events[0][1].table_id if events else None)
            # The race: a slow writer may put its event into the log of the table that has replaced its own, and then removes it. So an
            # event after a gap is damage only if it is this table's.
            if own_id is None or any(event.table_id == own_id for _, event in self.read(list(files.values()))):
                raise DamagedFileError(
                    f"{redact('path', self.url)}: the log lacks event {position + len(events) + 1} but has event {min(files)}: "
                    "restore the missing file, or drop the table"
                )
        return events

    def _find_missed(self, position: int) -> FileVersion | None:
        """The file of an event that a listing lacked although it had a later one; None if there is none.

        The race: a listing of a local directory in which somebody puts two files may show only the later one.
        """
        try:
            return self.get_meta(position)
        except UfsNotFoundError:
            return None

    def delete(self, positions: Sequence[int]) -> None:
        """Remove events, in the order of their positions.

        The race: a reader may be reading them. It asks for the next event first, and then again for the last one that it knows, so it
        notices that one of them is gone. S3 removes a thousand at once, in no order; see `TRUSTED_S`.
        """
        self._ufs.delete_many(self._directory, [f"{position:0{DIGITS}d}.json" for position in positions])

    def read(self, files: Sequence[FileVersion]) -> list[tuple[FileVersion, Event]]:
        """(file, event) of event files. Raises DamagedFileError, NotSupportedError for an event of a later format."""
        texts = self._ufs.read_many([(file.as_immutable(), [(0, file.size)]) for file in files])
        return [(file, self._event(file, text)) for file, (text,) in zip(files, texts, strict=True)]

    def _event(self, file: FileVersion, text: bytes) -> Event:
        position = self._parse_position(file.url.rsplit("/", 1)[-1], file)
        try:
            return parse_event(text, position, redact("path", file.url))
        except DamagedFileError:  # the bytes may have been damaged in transfer: read them once more
            (reread_text,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
            return parse_event(reread_text, position, redact("path", file.url))

    def is_listed(self, position: int, nonce: str) -> bool:
        """Whether a LIST of the log shows an event. For stores that may give a wrong answer when asked for the file itself."""
        files = [file for _, file in self.list_following(position - 1, at_most=1)]
        return any((event.position, event.nonce) == (position, nonce) for _, event in self.read(files))
