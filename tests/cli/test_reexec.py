import os
from pathlib import Path

import pytest

from patrickstar.cli import train

LIBRARY = Path("/lib/libtcmalloc_minimal.so.4")


@pytest.fixture
def executed(monkeypatch):
    """What the process would be replaced by: (program, arguments, environment), one entry a replacement."""
    calls = []
    monkeypatch.delenv(train.GUARD, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: LIBRARY)
    monkeypatch.setattr(train.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(train.sys, "orig_argv", ["python", "-X", "dev", "-m", "patrickstar", "train", "--steps", "3"])
    return calls


def test_where_a_host_budget_binds_it_starts_over_once_with_the_same_arguments(executed, capsys, monkeypatch):
    train.under_tcmalloc(device="cpu", host_memory="1GiB")
    ((program, arguments, environment),) = executed
    assert program == train.sys.executable
    assert arguments == [program, "-X", "dev", "-m", "patrickstar", "train", "--steps", "3"]
    assert environment["LD_PRELOAD"] == str(LIBRARY)
    assert len(capsys.readouterr().err.splitlines()) == 1
    for name in (train.GUARD, "LD_PRELOAD"):
        monkeypatch.setenv(name, environment[name])
    train.under_tcmalloc(device="cpu", host_memory="1GiB")
    assert len(executed) == 1


@pytest.mark.parametrize(
    ("given", "chosen", "library"),
    [
        ({"device": "emulated"}, {}, LIBRARY),
        ({"device": "cuda:0"}, {}, LIBRARY),
        ({"host_memory": None}, {}, LIBRARY),
        ({}, {}, None),
        ({}, {train.GUARD: "something"}, LIBRARY),
        ({}, {"LD_PRELOAD": "something"}, LIBRARY),
    ],
    ids=["emulated", "cuda", "no budget", "no library", "guarded", "preloaded"],
)
def test_where_there_is_no_point_or_somebody_has_chosen_it_goes_on(executed, monkeypatch, given, chosen, library):
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: library)
    for name, value in chosen.items():
        monkeypatch.setenv(name, value)
    train.under_tcmalloc(**{"device": "cpu", "host_memory": "1GiB", **given})
    assert executed == []
    assert chosen.items() <= os.environ.items()
