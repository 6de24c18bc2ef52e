"""How far a build is: shown to whoever watches, told to the log otherwise, and only when it takes long."""

from __future__ import annotations

import logging

import pytest

from pyspark_lookup.base import progress


class Steady:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_long_build_is_told_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Without a terminal, a build of half a minute is two lines and one at its end."""
    clock = Steady()
    with caplog.at_level(logging.INFO), progress.shown("dim", clock, interactive=False) as report:
        for second in range(1, 31):
            clock.now_s = second
            report(second * 100 // 30, 100)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "dim: 33 % of 100 bytes after 10 s",
        "dim: 66 % of 100 bytes after 20 s",
        "dim: 100 % of 100 bytes after 30 s",
    ]


def test_a_short_build_says_nothing(caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]) -> None:
    """What is done in no time leaves neither a line nor a bar."""
    for interactive in (False, True):
        with caplog.at_level(logging.INFO), progress.shown("dim", Steady(), interactive) as report:
            report(0, 100)
            report(100, 100)
    assert caplog.records == []
    assert "dim" not in capsys.readouterr().err


def test_a_terminal_gets_a_bar(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody who watches sees bytes and their share, and the bar is gone at the end."""
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.0)
    with progress.shown("loading dim", Steady(), interactive=True) as report:
        report(50_000, 200_000)
        report(100_000, 200_000)
    shown = capsys.readouterr().err
    assert "loading dim" in shown
    assert "200k" in shown


def test_who_watches_is_found_out(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A captured stderr is nobody; a notebook's kernel is somebody."""
    clock = Steady()
    with caplog.at_level(logging.INFO), progress.shown("dim", clock) as report:
        clock.now_s = 11
        report(1, 2)
    assert [record.getMessage() for record in caplog.records] == ["dim: 50 % of 2 bytes after 11 s"]
