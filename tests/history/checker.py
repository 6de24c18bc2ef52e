"""What must be true of a history, judged from its notes, the log's events and the data files, read here by themselves.

The model: a commit in log order adds its rows; one of an overwrite removes those of lower write ids first, one of an
upsert or delete all rows of its keys; a compaction changes nothing. Every read must equal the state after some prefix of that order.
"""

import collections
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow.parquet as pq

Rows = collections.Counter[tuple[int, str, int]]


@dataclasses.dataclass(frozen=True)
class State:
    """The table after a commit: its log position, and its rows as (id, tag, n)."""

    position: int
    rows: Rows
    mode: str = ""


Places = set[tuple[str, int]]


class _Replay:
    """The table as the events so far say it, write by write."""

    def __init__(self, read_file: Callable[[str], bytes]) -> None:
        self._read_file = read_file
        self._modes: dict[int, str] = {}
        self._files: dict[int, list[tuple[str, int]]] = collections.defaultdict(list)
        self._deleted: dict[int, list[str]] = collections.defaultdict(list)
        self._replaced: dict[int, list[int]] = collections.defaultdict(list)
        self._ranks: dict[int, int] = {}
        self._visible: dict[int, Rows] = {}

    def take(self, event: Mapping[str, Any]) -> tuple[str, Rows, Rows] | None:
        """(how it was committed, its own rows, all rows there are), if the event is a commit."""
        kind = event["kind"]
        if kind == "allocate":
            self._modes[event["write_id"]] = event["mode"]
        elif kind == "write":
            self._files[event["write_id"]] += [(path, count) for path, _, count in event["files"]]
            self._deleted[event["write_id"]] += [path for path, _, _ in event.get("deletes", [])]
            self._replaced[event["write_id"]] += event.get("replaces", [])
        elif kind == "commit":  # the files of a write that was aborted may be gone
            return self._committed(event["write_id"])
        return None

    def _committed(self, id_: int) -> tuple[str, Rows, Rows]:
        mode = self._modes[id_]
        hidden_keys, places = self._read_deletes(id_)
        write_rows = self._read_rows(id_, places)
        self._ranks[id_] = id_
        if mode == "compact":
            # Of a write that an overwrite has replaced the marks may still count, for rows of a higher id.
            before = sum((self._visible.pop(old, Rows()) for old in self._replaced[id_]), Rows())
            assert write_rows == before, (
                f"compaction {id_} has changed rows: {write_rows - before} are new, {before - write_rows} are gone"
            )
            self._ranks[id_] = max((self._ranks[old] for old in self._replaced[id_]), default=id_)
        else:
            if mode == "overwrite":
                self._visible = {
                    write_id: visible_rows
                    for write_id, visible_rows in self._visible.items()
                    if self._ranks[write_id] > id_
                }
            if mode == "upsert" and not places:
                # A transaction may append beside its upserts.
                hidden_keys |= {key for key, tag, _ in write_rows if "." not in tag}
            for write_id, visible_rows in self._visible.items():
                self._visible[write_id] = Rows({row: n for row, n in visible_rows.items() if row[0] not in hidden_keys})
        self._visible[id_] = write_rows
        return mode, write_rows, sum(self._visible.values(), Rows())

    def _read_deletes(self, id_: int) -> tuple[set[int], Places]:
        """The keys of rows of others that a write hides, and the places of rows that it hides in its own files."""
        own_paths = {path for path, _ in self._files[id_]}
        hidden_keys: set[int] = set()
        places: Places = set()
        for path in self._deleted[id_]:
            read = pq.read_table(io.BytesIO(self._read_file(path))).to_pydict()
            for key, file, row in zip(read["id"], read["_lookup_file"], read["_lookup_row"], strict=True):
                if file in own_paths:
                    places.add((file, row))
                elif self._modes[id_] != "compact":  # which says again what others have said
                    hidden_keys.add(key)
        return hidden_keys, places

    def _read_rows(self, id_: int, places: Places) -> Rows:
        rows = Rows()
        for path, count in self._files[id_]:
            read = pq.read_table(io.BytesIO(self._read_file(path))).to_pydict()
            assert len(read["id"]) == count
            numbered = enumerate(zip(read["id"], read["tag"], read["n"], strict=True))
            rows.update(row for place, row in numbered if (path, place) not in places)
        return rows


def states(events: Iterable[bytes], read_file: Callable[[str], bytes]) -> tuple[list[State], dict[str, int]]:
    """(the states after each commit, the first being the empty table; the log position of each tag's commit)."""
    replay = _Replay(read_file)
    history = [State(1, Rows())]
    tags: dict[str, int] = {}
    for number, event in enumerate(map(json.loads, events), 1):
        assert event["position"] == number
        committed = replay.take(event)
        if committed is None:
            continue
        mode, commit_rows, rows = committed
        for tag in {tag for _, tag, _ in commit_rows} if mode != "compact" else ():
            assert tag not in tags, f"{tag} was committed twice"
            tags[tag] = number
        history.append(State(number, rows, mode))
    return history, tags


def own_rows(steps: Iterable[Sequence[Any]]) -> Iterator[tuple[int, str]]:
    """(id, tag) of the rows that a transaction's steps (mode, tag, ids) leave of its own."""
    remaining: list[tuple[int, str]] = []
    for mode, tag, ids in steps:
        deleted_ids = set(ids) if mode in ("upsert", "delete") else set()
        kept_rows = [] if mode == "overwrite" else [row for row in remaining if row[0] not in deleted_ids]
        remaining = kept_rows if mode == "delete" else kept_rows + [(id_, tag) for id_ in ids]
    return iter(remaining)


def _check_transaction(note: Mapping[str, Any], history: list[State]) -> None:
    """The commit of a transaction leaves of its own rows those that its steps say, and of the keys that it wrote by key no other rows."""
    (state,) = [state for state in history if state.position == note["position"]]
    transaction_rows = collections.Counter(
        (id_, tag) for id_, tag, _ in state.rows.elements() if tag.startswith(f"{note['tag']}.")
    )
    assert transaction_rows == collections.Counter(own_rows(note["steps"])), (
        f"{note['tag']} was acknowledged and left {transaction_rows}"
    )
    overwrites = [number for number, (mode, _, _) in enumerate(note["steps"]) if mode == "overwrite"]
    steps = note["steps"][overwrites[-1] :] if overwrites else note["steps"]  # those before an overwrite are moot
    keyed = {id_ for mode, _, ids in steps if mode in ("upsert", "delete") for id_ in ids}
    beside = [row for row in state.rows if row[0] in keyed and not row[1].startswith(f"{note['tag']}.")]
    assert not beside, f"{note['tag']} was acknowledged and left {beside}"


def check(
    notes: Iterable[Mapping[str, Any]],
    history: list[State],
    tags: Mapping[str, int],
    current: Callable[[str], bool],
    sees_own_host: Callable[[str], bool],
) -> dict[str, int]:
    """How often each kind of note was there; AssertionError for what cannot be. `current`: whether a reader sees all acknowledged before."""
    note_counts = collections.Counter[str]()
    by_time = sorted(notes, key=lambda note: note["at"])
    acknowledged = sorted((note["at"], note["position"]) for note in by_time if note["kind"] == "acknowledged")
    last: dict[str, int] = {}
    for note in by_time:
        note_counts[note["kind"]] += 1
        if note["kind"] == "acknowledged":
            if note.get("mode") == "transaction":
                _check_transaction(note, history)
            elif note.get("mode") == "delete":
                deleted = [state for state in history if (state.position, state.mode) == (note["position"], "delete")]
                remaining = {row for state in deleted for row in state.rows if row[0] in set(note["keys"])}
                assert not remaining, f"{note['tag']} was acknowledged and leaves {remaining}"
            else:
                assert tags.get(note["tag"]) == note["position"], f"{note['tag']} was acknowledged and is not committed"
        elif note["kind"] in ("failed", "error"):
            # Requests fail here, bytes do not: a table that seems damaged is.
            assert "DamagedFileError" not in note.get("error", ""), f"{note['who']}: {note['error']}"
        if note["kind"] == "failed":
            parts = [note["tag"], *(tag for _, tag, _ in note.get("steps", []))]
            assert not tags.keys() & set(parts), f"{note['tag']} failed and is committed"
        elif note["kind"] in ("scan", "own", "get", "follow"):
            worker = note["who"]
            floor = last.get(worker, 1)
            # What it has written itself it sees; a read that says which version it was of is of that.
            floor = max(floor, note.get("position", 1), note.get("told", 1))
            if current(worker) or sees_own_host(worker):
                before = [position for at, position in acknowledged if at < note["began"]]
                floor = max([floor, *before])
            last[worker] = _earliest(note, history, floor)
            # A write without rows is acknowledged, and commits nothing.
            between = [s.position for s in history if note.get("told", last[worker]) < s.position <= last[worker]]
            assert not between, f"{worker} was told {note['told']} and read {between}"
    return note_counts


def _earliest(note: Mapping[str, Any], history: list[State], floor: int) -> int:
    """The position of the first state from `floor` on that gives what was read."""
    rows = Rows(map(tuple, note["rows"]))
    keys = set(note["keys"]) if note["kind"] == "get" else None
    for number, state in enumerate(history):
        until = history[number + 1].position if number + 1 < len(history) else None
        if until is not None and until <= floor:
            continue
        expected = state.rows if keys is None else Rows({row: n for row, n in state.rows.items() if row[0] in keys})
        if rows == expected:
            return max(state.position, floor)
    older = [s.position for s in history if s.rows == rows] if keys is None else []
    tags_read = sorted({str(tag) for _, tag, _ in rows})
    raise AssertionError(
        f"{note['who']} read ({note['kind']} at {note['at']}) what was never there from position {floor} on; it was at {older}; tags {tags_read[-5:]}"
    )
