"""What all tests share."""

import os

import pytest


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """Don't wait for the disk: what is written need not outlive a power cut here, and waiting is most of the time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
