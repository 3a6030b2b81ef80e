import os
from pathlib import Path

import pytest

from patrickstar.cli import reexec

LIBRARY = Path("/lib/libtcmalloc_minimal.so.4")


@pytest.fixture
def executed(monkeypatch):
    """What the process would be replaced by: (program, arguments, environment), one entry a replacement."""
    calls = []
    monkeypatch.delenv(reexec.GUARD, raising=False)
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: LIBRARY)
    monkeypatch.setattr(reexec.os, "execve", lambda *call: calls.append(call))
    monkeypatch.setattr(reexec.sys, "orig_argv", ["python", "-X", "dev", "-m", "patrickstar", "train", "--steps", "3"])
    return calls


def test_where_a_host_budget_binds_it_starts_over_once_with_the_same_arguments(executed, capsys, monkeypatch):
    reexec.under_tcmalloc(device="cpu", host_memory="1GiB")
    ((program, arguments, environment),) = executed
    assert program == reexec.sys.executable
    assert arguments == [program, "-X", "dev", "-m", "patrickstar", "train", "--steps", "3"]
    assert environment["LD_PRELOAD"] == str(LIBRARY)
    assert len(capsys.readouterr().err.splitlines()) == 1
    for name in (reexec.GUARD, "LD_PRELOAD"):
        monkeypatch.setenv(name, environment[name])
    reexec.under_tcmalloc(device="cpu", host_memory="1GiB")
    assert len(executed) == 1


@pytest.mark.parametrize("given", [{"device": "emulated"}, {"device": "cuda:0"}, {"host_memory": None}])
def test_where_no_budget_of_the_cpu_binds_it_goes_on(executed, given):
    reexec.under_tcmalloc(**{"device": "cpu", "host_memory": "1GiB", **given})
    assert executed == []


def test_without_the_library_it_goes_on(executed, monkeypatch):
    monkeypatch.setattr("patrickstar.memory.allocator.tcmalloc_library", lambda: None)
    reexec.under_tcmalloc(device="cpu", host_memory="1GiB")
    assert executed == []


@pytest.mark.parametrize("name", [reexec.GUARD, "LD_PRELOAD"])
def test_whoever_has_chosen_keeps_their_allocator(executed, monkeypatch, name):
    monkeypatch.setenv(name, "something")
    reexec.under_tcmalloc(device="cpu", host_memory="1GiB")
    assert executed == []
    assert os.environ[name] == "something"
