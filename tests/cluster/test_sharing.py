"""Jobs that share slots: JOBS.yaml, the loop over jobs that are numbers, and what it can say of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from patrickstar.cli.main import main
from patrickstar.cluster.figures import figures
from patrickstar.cluster.job_view import Allocation, PolicyError
from patrickstar.cluster.report import page
from patrickstar.errors import ConfigError
from patrickstar.sharing.jobs_file import SharedJob, read_jobs
from patrickstar.sharing.live_job import LiveJob, Standing
from patrickstar.sharing.sharing_directory import explain
from tests.cluster.shared_jobs import FakeExecutor, dispatcher, job, write_jobs

GOOD = "gpus: 4\njobs:\n  - name: a\n    run: python a.py --lr 3e-4\n    max: 9\n    steps: 20\n  - {name: b, run: b, min: 2}\n"


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "JOBS.yaml"
    path.write_text(GOOD)
    a = SharedJob(name="a", run="python a.py --lr 3e-4", min=1, max=4, steps=20)
    assert read_jobs(path) == (4, (a, SharedJob(name="b", run="b", min=2, max=2)))
    assert read_jobs(path, gpus=2)[1][0].max == 2


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("steps: 20", "stesp: 20", "line 6, column 5: unknown key 'stesp'; did you mean \"steps\"?"),
        ("jobs:", "job:", "line 2, column 1: unknown key 'job'; did you mean \"jobs\"?"),
        ("min: 2", "min: 5", "line 7, column 28: min: 5 GPUs, more than the 4 that there are"),
        ("min: 2", "min: 2, max: 1", "line 7, column 36: max: 1 is less than min, 2"),
        ("name: b", "name: a", "line 7, column 5: a second job 'a'"),
        ("name: b", "name: b/c", "line 7, column 12: name: 'b/c' has other signs"),
        ("name: b", "name: 7", "line 7, column 12: name: 7; a text is expected, in quotes"),
        ("steps: 20", "steps: many", "line 6, column 12: steps: 'many'; a number is expected"),
        ("steps: 20", "steps: !!python/name:os.sep", "line 6, column 12: steps: could not determine a constructor"),
        ("steps: 20", "steps: 0", "line 6, column 12: steps: 0 is less than 1"),
        ("steps: 20", "submit: .nan", "line 6, column 13: submit: nan is less than 0 or without end"),
        ("steps: 20", "pinned: 1", "line 6, column 13: pinned: 1; true or false"),
        ("steps: 20", "run: b", "line 6, column 5: 'run' is there twice"),
        ("    run: python a.py --lr 3e-4\n", "", "line 3, column 5: a job without `run:`"),
        ("3e-4", "'3", 'line 4, column 10: run: "python a.py --lr \'3": No closing quotation'),
        ("gpus: 4\n", "", "line 1, column 1: `gpus:` is missing"),
        ("min: 2}", "min: 2", "line 8, column 1: expected ',' or '}'"),
    ],
)
def test_what_is_wrong_in_a_file_is_named_with_its_line(
    before: str, after: str, told: str, tmp_path: Path, capsys
) -> None:
    path = tmp_path / "JOBS.yaml"
    assert before in GOOD
    path.write_text(GOOD.replace(before, after))
    assert main(["cluster", "share", str(path)]) == 2
    assert f"{path}: {told}" in capsys.readouterr().err
    assert not path.with_suffix(".share").exists()


@pytest.mark.parametrize("policy", ["fifo", "las", "ones", "soonest"])
def test_jobs_run_to_their_end_and_no_slot_is_given_twice(policy: str, tmp_path: Path) -> None:
    jobs = [job(f"j{n}", steps=30 + 17 * n % 40, max=1 + n % 4, submit=2 * n) for n in range(8)]
    jobs += [job("crash", submit=1), job("plain", run="plain", min=2), job("pinned", pinned=True, steps=40, max=2)]
    made, told = dispatcher(write_jobs(tmp_path / "JOBS.yaml", *jobs), policy)
    made.run()
    executor = made.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.closed
    assert Counter(one.state for one in made.jobs.values()) == {"done": 10, "failed": 1}
    assert any("crash: failed with exit status 7" in line for line in told)
    assert all(executor.steps[f"j{n}"] >= 30 + 17 * n % 40 for n in range(8))
    assert (len(executor.seen["plain"]), len(executor.seen["pinned"])) == (1, 1)  # never resized, never stopped
    changes = [one for name, one in executor.seen.items() if len(one) > 1]
    assert bool(changes) == (policy != "fifo")
    held = Counter(event["job"] for event in made.directory.events() if not event["gpus"])
    assert all(held[name] >= 1 for name in made.jobs)
    outcome = made.outcome()
    text = page({policy: outcome}, [figures(outcome, policy=policy, seed=0)], is_simulated=False)
    assert "as they were measured" in text


def test_jobs_grow_shrink_and_are_stopped_for_shorter_ones(tmp_path: Path) -> None:
    jobs = [
        job("long", steps=400, max=4),
        job("late", steps=40, submit=30, max=4),
        job("wide", steps=60, submit=40, min=4, max=4),
    ]
    made, told = dispatcher(write_jobs(tmp_path / "JOBS.yaml", *jobs))
    made.run()
    assert isinstance(made.executor, FakeExecutor)
    assert made.executor.seen["long"][0] == 4
    assert 0 in made.executor.seen["long"]
    assert made.jobs["long"].resizes >= 1
    assert any("long: 4 -> " in line and "ends in" in line for line in told)
    found = made.jobs["wide"]
    assert found.predicted is not None
    assert found.predicted == pytest.approx(found.finish, rel=0.1)


def test_an_edited_file_brings_jobs_and_drops_those_that_have_not_started(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "JOBS.yaml", job("a", steps=50), job("b", steps=20, submit=500), gpus=1)
    made, told = dispatcher(path, "fifo")
    executor = made.executor
    assert isinstance(executor, FakeExecutor)
    edits = {
        10.0: lambda: path.write_text("jobs: ["),
        20.0: lambda: write_jobs(path, job("a", steps=60, run="another"), job("c", steps=10), gpus=1),
    }

    def wait(seconds: float) -> None:
        if executor.now in edits:
            edits[executor.now]()
        executor.wait(seconds)

    made.wait = wait
    made.run()
    assert {name: one.state for name, one in made.jobs.items()} == {"a": "done", "c": "done"}
    assert made.jobs["c"].submit == pytest.approx(20.25)
    assert made.jobs["a"].of == SharedJob(name="a", run="elastic", max=1, steps=60)
    assert len([line for line in told if "jobs stay as they were" in line]) == 1
    assert any("b: not in" in line for line in told)


def test_one_that_was_killed_is_resumed(tmp_path: Path) -> None:
    path = write_jobs(tmp_path / "JOBS.yaml", job("a", steps=20), job("b", steps=90, max=2), job("c", steps=30), gpus=2)
    made, _ = dispatcher(path, "soonest")
    first = made.executor
    assert isinstance(first, FakeExecutor)

    def wait(seconds: float) -> None:
        first.wait(seconds)
        if "c" in first.runs and first.runs["c"].ends == (first.now, 0):
            raise KeyboardInterrupt

    made.wait = wait
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert first.closed
    assert made.jobs["c"].state == "done"  # it has come to its end in that moment
    again, _ = dispatcher(path, executor=FakeExecutor(2, steps=first.steps))
    again.run(resume=True)
    assert {one.state for one in again.jobs.values()} == {"done"}
    assert again.jobs["a"].finish == made.jobs["a"].finish is not None
    assert "a" not in again.executor.seen  # type: ignore[attr-defined]
    assert again.jobs["b"].finish > 33  # type: ignore[operator]
    assert again.jobs["b"].start == made.jobs["b"].start


def test_a_decision_that_cannot_be_carried_out_is_named(tmp_path: Path) -> None:
    def twice(jobs, cluster, now, state, rng):
        return {one.name: Allocation((0,), 1.0, "") for one in jobs}, None

    made, _ = dispatcher(write_jobs(tmp_path / "JOBS.yaml", job("a"), job("b")), twice)
    with pytest.raises(PolicyError, match="decision 1 of policy twice, at 0 s: it gives GPU 0 to 'a' and to 'b'"):
        made.run()
    assert made.executor.closed  # type: ignore[attr-defined]


def test_speeds_are_measured_between_steps_at_the_same_size() -> None:
    one = LiveJob(SharedJob(name="a", run="a", max=4, steps=1000), 0.0)
    assert one.step_seconds([one]) == pytest.approx((0.05, 0.95))
    for now, size, step in [
        (0, 0, 0),
        (5, 1, 0),
        (7, 1, 1),
        (17, 1, 6),
        (20, 1, 6),
        (21, 2, 6),
        (25, 2, 8),
        (30.5, 2, 13),
    ]:
        one.take(Standing(size=size, step=step, has_begun=size > 0), now)
    assert one.measured == {1: [5, 10.0], 2: [5, 5.5]}
    assert one.step_seconds() == pytest.approx((0.2, 1.8))
    view = one.view([one])
    assert view.rest == pytest.approx(987 * 2.0)
    assert view.rest / view.speed.own_rates([2])[0] == pytest.approx(987 * 1.1)
    other = LiveJob(SharedJob(name="b", run="b", max=4), 0.0)
    assert other.step_seconds([one, other]) == pytest.approx((0.2, 1.8))
    one.state = "done"
    assert other.rest([one, other]) == 13
    other.step = 40
    assert other.rest([one, other]) == 40


def test_why_says_what_jobs_have_wait_for_and_would_gain(tmp_path: Path, capsys) -> None:
    path = write_jobs(
        tmp_path / "JOBS.yaml",
        job("a", steps=200, max=2),
        job("b", min=3, max=3),
        job("c", submit=99),
        job("d", run="plain"),
    )
    made, _ = dispatcher(path, "fifo")
    executor = made.executor
    assert isinstance(executor, FakeExecutor)

    def wait(seconds: float) -> None:
        if executor.now >= 20:
            there.update(made.directory.read())
            raise KeyboardInterrupt
        executor.wait(seconds)

    there: dict[str, object] = {}
    made.wait = wait
    with pytest.raises(KeyboardInterrupt):
        made.run()
    assert next(explain(made.directory.read())).startswith("a: waits at step 34 of 200 for at least 1 GPUs")
    made.directory.write(there)
    told = [*explain(made.directory.read())]
    assert told[0].startswith("a: 2 GPUs (0, 1; submitted at 0 s, as asked), at step 34 of 200, ends in 8")
    assert told[0].endswith("; it has its max")
    assert told[1].startswith("b: waits at step 0 for at least 3 GPUs (others come first; 2 of 4 are free, a has 2)")
    assert told[2] == "c: is submitted at 99 s, in 79 s"
    assert main(["cluster", "why", str(made.directory.path), "a"]) == 0
    assert capsys.readouterr().out == f"{told[0]}\n"
    with pytest.raises(ConfigError, match="no job 'aa' here: there are a, b, c, d"):
        [*explain(made.directory.read(), "aa")]
    state = json.loads((made.directory.path / "state.json").read_text())
    state["jobs"][0]["of"]["max"] = 4
    (line,) = explain(state, "a")
    assert line.endswith("one GPU more would bring that forward by 25 s")
    assert main(["cluster", "why", str(tmp_path)]) == 2
