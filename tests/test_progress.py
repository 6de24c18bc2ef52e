"""How far a build is: shown to whoever watches, told to the log otherwise, and only when it takes long."""

from __future__ import annotations

import logging

import pytest

from pyspark_lookup.base import progress
from tests.fakes import FakeClock


def test_a_long_build_is_told_every_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    """Without a terminal, as where stderr is captured, a build of half a minute is two lines and one at its end."""
    clock = FakeClock().host()
    with caplog.at_level(logging.INFO), progress.show("dim", clock.steady_s) as report:
        for second in range(1, 31):
            clock.sleep(1.0)
            report(second * 100 // 30, 100)
    assert [record.getMessage() for record in caplog.records] == [
        "dim: 33 % of 100 bytes after 10 s",
        "dim: 66 % of 100 bytes after 20 s",
        "dim: 100 % of 100 bytes after 30 s",
    ]


def test_a_terminal_gets_a_bar(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody who watches sees bytes and their share; what is done in no time leaves neither a line nor a bar."""
    still = FakeClock().host().steady_s
    for interactive in (False, True):
        with caplog.at_level(logging.INFO), progress.show("dim", still, interactive) as report:
            report(0, 100)
            report(100, 100)
    assert caplog.records == []
    assert "dim" not in capsys.readouterr().err
    monkeypatch.setattr(progress, "_BAR_AFTER_S", 0.0)
    with progress.show("loading dim", still, interactive=True) as report:
        report(50_000, 200_000)
        report(100_000, 200_000)
    shown = capsys.readouterr().err
    assert "loading dim" in shown
    assert "200k" in shown
