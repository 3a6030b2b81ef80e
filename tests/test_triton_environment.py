"""tests/triton/__main__.py: tests that could not run are a failure, but where Triton cannot be."""

from __future__ import annotations

import platform

import pytest

from tests.triton import __main__ as program
from tests.triton import environment


@pytest.fixture
def no_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise environment.EnvironmentFailure("no index answers")

    monkeypatch.setattr(environment, "installed", fail)
    monkeypatch.setattr(environment, "why_not", lambda: None)


@pytest.mark.usefixtures("no_installation")
@pytest.mark.parametrize(("system", "status"), [("Linux", 1), ("Darwin", 0)])
def test_a_triton_that_is_not_installed_is_a_failure_but_where_there_is_none(
    system: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    assert program.main([]) == status
    assert "NOT TESTED: Triton's kernels" in capsys.readouterr().err


def test_so_is_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(environment, "why_not", lambda: "it needs 1024 MiB of disk")
    assert program.main([]) == 1
