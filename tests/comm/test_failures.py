"""Nothing hangs and nothing is silently wrong: ranks that do something else, or are gone, are named by an error of every other one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from patrickstar.comm.watch import Patience, Process
from patrickstar.errors import RankError
from tests.comm import programs
from tests.ranks import Ended, Team, all_well, team

ROOT = Path(__file__).parents[2]
GATHER = ("gather", "block 3", 10)


@pytest.mark.parametrize(
    ("by_rank", "odd", "said"),
    [
        (
            [[GATHER], [GATHER], [("gather", "block 4", 10)]],
            (2,),
            ["ranks 0, 1: gather block 3", "rank 2: gather block 4"],
        ),
        ([[GATHER], [("reduce", "block 3", 10)], [GATHER]], (1,), ["gather block 3", "rank 1: reduce block 3"]),
        ([[("gather", "block 3", 5)], [GATHER], [GATHER]], (0,), ["rank 0: gather", ": 5 torch", ": 10 torch"]),
        (
            [[GATHER, GATHER], [GATHER, ("agree", "x", 0)], [GATHER, GATHER]],
            (1,),
            ["collective 3", "rank 1: agree value"],
        ),
        ([[GATHER], [("gather", "x" * 300 + "y", 10)], [("gather", "x" * 300 + "z", 10)]], (1, 2), ["xxx"]),
    ],
    ids=["another name", "another kind", "another size", "one left out", "names that are the same up to their end"],
)
def test_ranks_that_do_different_things_raise_on_all_and_exchange_nothing(
    three: Team, by_rank: list[list[tuple[str, str, int]]], odd: tuple[int, ...], said: list[str]
) -> None:
    answers = all_well(three.run(programs.calls, by_rank))
    for error, later, sent_bytes in answers:
        assert isinstance(error, RankError)
        assert isinstance(later, RankError)
        assert error.ranks == odd
        assert all(text in str(error) for text in said)
        assert sent_bytes == 2 * 4 * sum(n for *_, n in by_rank[0][:-1])


@pytest.mark.parametrize("when", ["between", "in it"])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_is_killed_is_named_by_all_others(who: int, when: str) -> None:
    with team(3, over_tcp=who == 0) as ranks:  # whose store goes with it
        answers = ranks.run(programs.loses, who, "killed", when)
    assert answers.pop(who) == Ended(-signal.SIGKILL)
    assert_all_see(answers, who, "has ended without a word: its process")


@pytest.mark.parametrize(
    ("how", "reason"),
    [("exits", "rank 1 has ended"), ("raises", "rank 1 has ended after ValueError: no loss")],
)
def test_a_rank_that_ends_says_so(three: Team, how: str, reason: str) -> None:
    answers = three.run(programs.loses, 1, how, "between")
    assert answers.pop(1) == Ended(0)
    assert_all_see(answers, 1, reason)
    assert all(error.action == "exit" for error, *_ in answers)


@pytest.mark.parametrize("when", ["between", "in it"])
def test_a_rank_that_does_not_answer_is_named_after_the_timeout(three: Team, when: str) -> None:
    answers = three.run(programs.loses, 2, "stopped", when, 1.5, without=[2])
    assert answers.pop(2) == Ended(None)
    assert_all_see(answers, 2, "did not answer")


def test_a_rank_that_does_not_come_is_named_after_the_timeout(two: Team) -> None:
    by_rank = [[("gather", "block 3", 10)], [("sleep", "", 4)]]
    (error, later, _), (theirs, theirs_later, _) = all_well(two.run(late_call, by_rank))
    assert isinstance(error, RankError)
    assert error.ranks == (1,)
    assert "gather block 3 has not ended within 1.5 s: rank 1 was at collective 1" in str(error)
    assert theirs is None
    assert isinstance(theirs_later, RankError)


def late_call(rank: int, by_rank: list[list[tuple[str, str, int]]]) -> object:
    return programs.calls(rank, by_rank, timeout_s=1.5)


def test_a_rank_whose_own_work_fails_keeps_its_error_and_the_others_hear_it(three: Team) -> None:
    answers = all_well(three.run(programs.fails_alone, 1))
    own, later = answers.pop(1)
    assert isinstance(own, OSError)
    assert isinstance(later, RankError)
    for error, after in answers:
        assert isinstance(error, RankError)
        assert isinstance(after, RankError)
        assert error.ranks == (1,)
        assert "rank 1 failed: OSError: no such sector" in str(error)


def test_a_rank_of_another_host_that_is_silent_is_gone(three: Team) -> None:
    answers = three.run(programs.on_hosts_of_their_own, 1)
    assert answers.pop(1) == Ended(-signal.SIGKILL)
    assert_all_see(answers, 1, "rank 1")


def test_memory_that_torch_still_uses_is_told(two: Team) -> None:
    assert two.run(programs.given_up, without=[1]) == [[False, True], Ended(None)]


def test_a_program_that_has_lost_a_rank_comes_to_its_end(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.comm.lost", str(tmp_path / "store")]
    stopped = subprocess.Popen([*command, "1"], cwd=ROOT)
    try:
        lost = subprocess.run([*command, "0"], cwd=ROOT, check=False, capture_output=True, text=True, timeout=100)
    finally:
        stopped.kill()
        stopped.wait()
    assert lost.returncode == 1
    assert "RankError: gather block 3 has not ended within 1 s: rank 1 did not answer" in lost.stderr


def assert_all_see(answers: list[object], who: int, reason: str) -> None:
    for answer in answers:
        assert isinstance(answer, list), answer
        error, later, seconds = answer
        assert isinstance(error, RankError), error
        assert isinstance(later, RankError), later
        assert error.ranks == (who,)
        assert reason in error.reason
        assert "block 3" in str(error) or not error.action
        assert seconds < 10, "close() waits for nobody"


def test_a_process_is_gone_once_it_has_ended_whoever_asks_for_its_status() -> None:
    own = Process.own()
    assert not own.is_gone
    child = os.fork()
    if child == 0:
        signal.pause()
    theirs = Process(own.host, child, (Path(f"/proc/{child}/stat")).read_text().rpartition(")")[2].split()[19])
    assert not theirs.is_gone
    assert Process(own.host, child, "1").is_gone, "a later process of the same number"
    os.kill(child, signal.SIGKILL)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert theirs.is_gone, "a zombie"
    os.waitpid(child, 0)
    assert theirs.is_gone


def test_patience_does_not_run_while_nobody_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr("patrickstar.comm.watch.time.monotonic", lambda: now)
    patience = Patience(10)
    seen = []
    for at in (0.5, 1000.5, 1001.0, *(1001.0 + 0.9 * i for i in range(1, 10))):
        now = at
        seen.append(patience.is_over)
    assert seen == [False] * 11 + [True]
