"""What all tests share."""

import os

import pytest


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Tell a failure when it happens: a run that is stopped from outside never comes to its summary."""
    if report.failed:
        print(f"\n{report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't wait for the disk: what is written need not outlive a power cut here, and waiting is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
