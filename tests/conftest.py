"""One thread, so that runs compare and shared machines do not oversubscribe; Hypothesis derandomised, so that the suite is deterministic."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest

from tests.ranks import Team, Teams
from tests.sampling import mark_what_is_left_out

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in child processes

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.register_profile("few", deadline=None, derandomize=True, max_examples=30)
hypothesis.settings.register_profile("campaign", deadline=None, max_examples=2000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "suite"))


# Every combination of something: left out by `make test-fast`, as single tests of many seconds are.
SLOW: Final = frozenset(
    {
        "benchmarks/test_calls.py",
        "benchmarks/test_spans.py",
        "checkpoint/test_crash.py",
        "cli/test_configuration.py",
        "cli/test_train.py",
        "session/test_deferred.py",
        "session/test_departures.py",
        "session/test_disk_tier.py",
        "session/test_engine.py",
        "session/test_export.py",
        "session/test_forecasts.py",
        "session/test_forward_changes.py",
        "session/test_frozen.py",
        "session/test_generate.py",
        "session/test_gradient_homes.py",
        "session/test_hand_changes.py",
        "session/test_layerdrop.py",
        "session/test_random_programs.py",
        "session/test_scripts.py",
        "session/test_simulation.py",
        "session/test_optimizers.py",
        "session/test_sixteen_bits.py",
        "session/test_tiles.py",
        "session/test_weights_memory.py",
        "tracing/test_trial_operations.py",
    }
)


SAMPLED: Final = frozenset({"comm", "cuda", "loops", "optim", "parallel", "session"})
"""Folders all of whose tests are sampled."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Fast tests come first; where processes share files out, files that take long, so that all end together. Of some, most cases are campaigns."""
    tests = Path(__file__).parent
    for item in items:
        path = item.path.relative_to(tests)
        if path.as_posix() in SLOW:
            item.add_marker(pytest.mark.slow)
        if path.parts[0] in SAMPLED:
            item.add_marker(pytest.mark.sampled)
    mark_what_is_left_out(items)
    shared = hasattr(config, "workerinput")
    long = {"slow", "team_of"} if shared else {"slow"}
    items.sort(key=lambda item: shared == long.isdisjoint((*item.keywords, *getattr(item, "fixturenames", ()))))


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported and collected stays: tests that look for what is left need not look there


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """torch computes on one thread in every test, whatever the one before has set: tiny operations gain nothing from a second."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def binding(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models of tests fit, and are to show what becomes of those that do not: they are bound by use, but for tests marked `whole` or `blocks`."""
    from patrickstar.session.start import set_up

    marked = next((kind for kind in ("whole", "blocks") if request.node.get_closest_marker(kind) is not None), "use")
    monkeypatch.setitem(set_up.__kwdefaults__, "binding", marked)


@pytest.fixture(autouse=True, scope="session")
def no_bf16_by_default() -> Iterator[None]:
    """Where no precision is given, tests run in fp32 on every machine; those that ask for bf16 say what computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("patrickstar.step.resources.computes_bf16", lambda: False)
        yield


@pytest.fixture(scope="session")
def team_of() -> Iterator[Teams]:
    """Gives the team of so many ranks, which all tests share."""
    teams = Teams()
    yield teams
    teams.end()


@pytest.fixture
def two(team_of: Teams) -> Team:
    return team_of(2)


@pytest.fixture
def three(team_of: Teams) -> Team:
    return team_of(3)


@pytest.fixture(params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest, team_of: Teams) -> Team:
    return team_of(request.param)
