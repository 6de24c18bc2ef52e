"""`ValidWriteIdList`, checked against plain sets of write ids."""

import pickle
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyspark_lookup.core.write_ids import NO_OPEN_WRITE_ID, RangeResponse, ValidWriteIdList
from tests.support.fuzzing import MORE

HISTORIES = 5_000 * MORE


@st.composite
def lists(draw: st.DrawFn, table: str | None = "t", most: int = 12) -> ValidWriteIdList:
    watermark = draw(st.integers(0, most))
    states = draw(st.lists(st.sampled_from("ova"), min_size=watermark, max_size=watermark))
    named = table or draw(st.text(min_size=1, max_size=8))
    by_state = {state: [n for n, s in enumerate(states, 1) if s == state] for state in "ova"}
    return ValidWriteIdList(named, watermark, by_state["o"], by_state["a"])


def valid(ids: ValidWriteIdList, most: int = 30) -> set[int]:
    return {n for n in range(1, most) if ids.is_valid(n)}


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (ValidWriteIdList("t1", 5, open=(4, 2)), "t1:5:2:2,4:"),
        (ValidWriteIdList("t1", 1), f"t1:1:{NO_OPEN_WRITE_ID}::"),
        (ValidWriteIdList("t1", 0), f"t1:0:{NO_OPEN_WRITE_ID}::"),
        (ValidWriteIdList("db.t", 9, [3], [5, 7]), "db.t:9:3:3:5,7"),
        (ValidWriteIdList("a:b,c$d%e", 2, aborted=[1]), f"a%3Ab%2Cc%24d%25e:2:{NO_OPEN_WRITE_ID}::1"),
    ],
)
def test_hives_form(ids: ValidWriteIdList, text: str) -> None:
    """The text is Hive's, with separators in names escaped, and is read back. Its third part is any of the open ids."""
    assert str(ids) == text
    assert ValidWriteIdList.parse(text) == ids
    assert str(ValidWriteIdList.parse(text.replace(":5:2:2,4", ":5:4:2,4"))) == text


@pytest.mark.parametrize(
    "text",
    ["", "t1:5:2:2,4", ":5:2:2:", "t1:-1:2::", "t1:5:3:2,4:", "t1:5:2::", "t1:5:2:2,2:", "t1:5:6:6:", "t1:05:2:2:", "t1:5:2:2:x",
     "t$1:5:2:2:", "t1:9223372036854775807:9223372036854775807::", "t1:5:0:0:", "t1:５:2:2:"],
)  # fmt: skip
def test_damaged_text(text: str) -> None:
    """Anything but a whole list is an error, above all what Hive reads as "everything is valid"."""
    with pytest.raises(ValueError, match=r"write id|watermark"):
        ValidWriteIdList.parse(text)


@given(lists(table=None), st.integers(1, 15), st.integers(0, 6))
def test_questions(ids: ValidWriteIdList, low: int, more: int) -> None:
    """Single ids and ranges are answered as a walk over all ids answers them. Text, pickle and hash keep a list, whatever its table is called."""
    high = low + more
    inside = [n in valid(ids) for n in range(low, high + 1)]
    aborted = [n in ids.aborted_ids for n in range(low, high + 1)]
    for answer, flags in ((ids.is_range_valid(low, high), inside), (ids.is_range_aborted(low, high), aborted)):
        assert answer is (RangeResponse.ALL if all(flags) else RangeResponse.SOME if any(flags) else RangeResponse.NONE)
    assert [ids.is_aborted(n) for n in range(low, high + 1)] == aborted
    assert valid(ids) == set(range(1, ids.high_watermark + 1)) - {*ids.open_ids, *ids.aborted_ids}
    assert ids.min_open == min(ids.open_ids, default=None)
    again = ValidWriteIdList.parse(str(ids))
    assert again == ids == pickle.loads(pickle.dumps(ids))
    assert (hash(again), again.table) == (hash(ids), ids.table)


@given(lists(), lists())
def test_comparisons_are_inclusions(one: ValidWriteIdList, other: ValidWriteIdList) -> None:
    """`covers` is inclusion of what is let through, `equivalent` equality."""
    assert one.covers(other) == (valid(other) <= valid(one))
    assert one.equivalent(other) == (valid(one) == valid(other))


def test_histories() -> None:
    """After each event lists let through what is committed; an earlier one is covered by every later one."""
    rng = random.Random(20211)
    for _ in range(HISTORIES):
        ids, states, earlier = ValidWriteIdList("t", 0), dict[int, str](), ValidWriteIdList("t", 0)
        for _ in range(rng.randrange(1, 7)):
            id_ = rng.randrange(1, 6)
            event = rng.choice(("open", "commit", "abort"))
            state = states.get(id_, "open")
            allowed = {"open": state == "open", "commit": state != "abort", "abort": state != "commit"}[event]
            if not allowed:
                with pytest.raises(ValueError, match="cannot be"):
                    getattr(ids, event)(id_)
                continue
            ids = getattr(ids, event)(id_)
            states[id_] = event
        committed = {id_ for id_, state in states.items() if state == "commit"}
        assert valid(ids, 8) == committed
        assert set(ids.aborted_ids) == {id_ for id_, state in states.items() if state == "abort"}
        assert ids.high_watermark == max(states, default=0)
        assert ids.covers(earlier)
        assert ids.equivalent(earlier) == (not committed)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: ValidWriteIdList("", 1), "name"),
        (lambda: ValidWriteIdList("t", 2, open=(3,)), "write id 3"),
        (lambda: ValidWriteIdList("t", 2, (1,), (1,)), "open and aborted"),
        (lambda: ValidWriteIdList("t", 2).is_range_valid(2, 1), "2 to 1"),
        (lambda: ValidWriteIdList("t", 2).covers(ValidWriteIdList("u", 2)), "t and u"),
        (lambda: ValidWriteIdList("t", 2, aborted=(1,)).commit(1), "was aborted"),
        (lambda: ValidWriteIdList("t", 2).abort(1), "was committed"),
    ],
)
def test_refusals(call: object, says: str) -> None:
    """A call without a meaning is an error that says what is wrong."""
    with pytest.raises(ValueError, match=says):
        call()  # type: ignore[operator]
