"""`EventFiles`: the events of a managed table's log as they lie in the store, each in a file of its position's name."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark_lookup.base.errors import DamagedFileError, UfsNotFoundError
from pyspark_lookup.io.stores import LOG_DIRECTORY, FileVersion
from pyspark_lookup.io.ufs import Ufs
from pyspark_lookup.options.conf_file import redact
from pyspark_lookup.table.log.events import Event, event_of

DIGITS = 20


class EventFiles:
    """The events of the table at `url`."""

    def __init__(self, ufs: Ufs, url: str) -> None:
        self._ufs = ufs
        self.url = url
        self._directory = f"{url}/{LOG_DIRECTORY}/log"

    @staticmethod
    def path_of(url: str, position: int) -> str:
        """The file of the event at a position of the log of the table at `url`."""
        return f"{url}/{LOG_DIRECTORY}/log/{position:0{DIGITS}d}.json"

    def path(self, position: int) -> str:
        return self.path_of(self.url, position)

    def get_meta(self, position: int) -> FileVersion:
        """The file of an event, asked from the store. Raises UfsNotFoundError if it is not there."""
        return self._ufs.get_meta(self.path(position))

    def list_after(self, position: int, at_most: int | None = None) -> list[tuple[int, FileVersion]]:
        """(position, file) of the events after one, in their order, as one LIST names them."""
        listed = self._ufs.list_files(self._directory, after=f"{position:0{DIGITS}d}.json", at_most=at_most)
        named = ((file.url.rsplit("/", 1)[-1], file) for file in listed)
        return [(self._position_of(name, file), file) for name, file in named if name.endswith(".json")]

    def _position_of(self, name: str, file: FileVersion) -> int:
        stem = name.removesuffix(".json")
        if not stem.isdecimal():
            raise DamagedFileError(f"{redact('path', file.url)} is no event of a table's log")
        return int(stem)

    def after(self, position: int, table_id: str | None) -> list[tuple[FileVersion, Event]]:
        """All events after a position, with their files, which one LIST names. `table_id` None: the first event says it."""
        files = dict(self.list_after(position))
        following: list[FileVersion] = []
        while files:
            next_ = position + len(following) + 1
            file = files.pop(next_, None) or self._find_missed(next_)
            if file is None:
                break
            following.append(file)
        found = self.read(following)
        if files:
            own = table_id or (found[0][1].table_id if found else None)
            # A writer that was slow puts one into the table that took its own's place, and takes it back.
            if own is None or any(event.table_id == own for _, event in self.read(list(files.values()))):
                raise DamagedFileError(
                    f"{redact('path', self.url)}: the log has no event {position + len(found) + 1} but {min(files)}: "
                    "restore it, or drop the table"
                )
        return found

    def _find_missed(self, position: int) -> FileVersion | None:
        """The file of an event that a listing did not name, though it named a later one; None if it is not there.

        A local directory that is listed while somebody adds to it may show the later of two new files only.
        """
        try:
            return self.get_meta(position)
        except UfsNotFoundError:
            return None

    def delete(self, positions: Sequence[int]) -> None:
        """Remove events, which are given in their order: who asks for the one after a known one, and then for that, misses none.

        S3 removes a thousand at once, in no order; see `TRUSTED_S`.
        """
        self._ufs.delete_many(self._directory, [f"{position:0{DIGITS}d}.json" for position in positions])

    def read(self, files: Sequence[FileVersion]) -> list[tuple[FileVersion, Event]]:
        """The events in such files. Raises DamagedFileError, NotSupportedError for one of a later format."""
        texts = self._ufs.read_many([(file.as_immutable(), [(0, file.size)]) for file in files])
        return [(file, self._event(file, text)) for file, (text,) in zip(files, texts, strict=True)]

    def _event(self, file: FileVersion, text: bytes) -> Event:
        position = self._position_of(file.url.rsplit("/", 1)[-1], file)
        try:
            return event_of(text, position, redact("path", file.url))
        except DamagedFileError:  # on its way here, perhaps
            (again,) = self._ufs.read_ranges(file.as_immutable(), [(0, file.size)])
            return event_of(again, position, redact("path", file.url))

    def lists(self, position: int, nonce: str) -> bool:
        """Whether a listing of the log shows an event: asked in another way than by its name."""
        found = [file for _, file in self.list_after(position - 1, at_most=1)]
        return any((event.position, event.nonce) == (position, nonce) for _, event in self.read(found))
