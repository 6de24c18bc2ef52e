"""What must be true of a history, judged from its notes, the log's events and the data files, read here by themselves.

The model: a commit in log order adds its rows; one of an overwrite removes those of lower write ids first, one of an
upsert or delete all rows of its keys. Every read must equal the state after some prefix of that order.
"""

from __future__ import annotations

import collections
import dataclasses
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pyarrow.parquet as pq

Rows = collections.Counter[tuple[int, str, int]]


@dataclasses.dataclass(frozen=True)
class State:
    """The table after a commit: its log position, and its rows as (id, tag, n)."""

    position: int
    rows: Rows
    mode: str = ""


def states(events: Iterable[bytes], read_file: Callable[[str], bytes]) -> tuple[list[State], dict[str, int]]:
    """(the states after each commit, the first being the empty table; the log position of each tag's commit)."""
    writes: dict[int, tuple[str, list[tuple[str, int]], list[str]]] = {}
    visible: dict[int, Rows] = {}
    found = [State(1, Rows())]
    tags: dict[str, int] = {}
    for number, event in enumerate(map(json.loads, events), 1):
        assert event["position"] == number
        if event["kind"] == "allocate":
            writes[event["write_id"]] = event["mode"], [], []
        elif event["kind"] == "write":
            writes[event["write_id"]][1].extend((path, count) for path, _, count in event["files"])
            writes[event["write_id"]][2].extend(path for path, _, _ in event.get("hidden", []))
        elif event["kind"] == "commit":
            mode, files, hidden = writes[event["write_id"]]
            rows = Rows()
            for path, count in files:  # those of a write that was aborted may be gone
                read = pq.read_table(io.BytesIO(read_file(path))).to_pydict()
                assert len(read["id"]) == count
                rows.update(zip(read["id"], read["tag"], read["n"], strict=True))
            if mode == "overwrite":
                visible = {id_: kept for id_, kept in visible.items() if id_ > event["write_id"]}
            if mode in ("upsert", "delete"):
                gone = {id_ for id_, _, _ in rows}
                for path in hidden:
                    gone |= set(pq.read_table(io.BytesIO(read_file(path))).column("id").to_pylist())
                visible = {
                    id_: Rows({row: n for row, n in kept.items() if row[0] not in gone})
                    for id_, kept in visible.items()
                }
            visible[event["write_id"]] = rows
            for tag in {tag for _, tag, _ in rows}:
                assert tag not in tags, f"{tag} was committed twice"
                tags[tag] = number
            found.append(State(number, sum(visible.values(), Rows()), mode))
    return found, tags


def check(
    notes: Iterable[Mapping[str, Any]],
    found: list[State],
    tags: Mapping[str, int],
    current: Callable[[str], bool],
    sees_own_host: Callable[[str], bool],
) -> dict[str, int]:
    """How often each kind of note was there; AssertionError for a history that cannot be.

    `current`: whether a reader of that name sees all that was acknowledged before it began. `sees_own_host`: whether it
    shares its cache with the writers, so that it sees what they have committed.
    """
    told = collections.Counter[str]()
    by_time = sorted(notes, key=lambda note: note["at"])
    acknowledged = sorted((note["at"], note["position"]) for note in by_time if note["kind"] == "acknowledged")
    last: dict[str, int] = {}
    for note in by_time:
        told[note["kind"]] += 1
        if note["kind"] == "acknowledged":
            if note.get("mode") == "delete":
                deleted = [state for state in found if (state.position, state.mode) == (note["position"], "delete")]
                left = {row for state in deleted for row in state.rows if row[0] in set(note["keys"])}
                assert not left, f"{note['tag']} was acknowledged and leaves {left}"
            else:
                assert tags.get(note["tag"]) == note["position"], f"{note['tag']} was acknowledged and is not committed"
        elif note["kind"] == "failed":
            assert note["tag"] not in tags, f"{note['tag']} failed and is committed"
        elif note["kind"] in ("scan", "own", "get"):
            who = note["who"]
            floor = last.get(who, 1)
            if note["kind"] == "own":
                floor = max(floor, note["position"])
            if current(who) or sees_own_host(who):
                before = [position for at, position in acknowledged if at < note["began"]]
                floor = max([floor, *before])
            last[who] = _earliest(note, found, floor)
    return told


def _earliest(note: Mapping[str, Any], found: list[State], floor: int) -> int:
    """The position of the first state from `floor` on that gives what was read."""
    rows = Rows(map(tuple, note["rows"]))
    keys = set(note["keys"]) if note["kind"] == "get" else None
    for number, state in enumerate(found):
        until = found[number + 1].position if number + 1 < len(found) else None
        if until is not None and until <= floor:
            continue
        expected = state.rows if keys is None else Rows({row: n for row, n in state.rows.items() if row[0] in keys})
        if rows == expected:
            return max(state.position, floor)
    older = [s.position for s in found if s.rows == rows] if keys is None else []
    seen = sorted({tag for _, tag, _ in rows})
    raise AssertionError(
        f"{note['who']} read ({note['kind']}) what was never there from position {floor} on; it was at {older}; tags {seen[-5:]}"
    )


def notes_of(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The notes in some files; a last one that a kill has cut off is none."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue
