"""`patrickstar cluster`, from the command line."""

import json
import subprocess
import sys

import pytest

from patrickstar.cli.main import main
from patrickstar.cluster.policies.catalogue import POLICIES

TRACE = "job,submit,gpus,duration,noise,grow\na,0,2,100,2,4\nb,10,4,50,0,1\nc,20,1,400,1,2\n"


@pytest.fixture
def trace(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def simulate(capsys, *arguments):
    status = main(["cluster", "simulate", *map(str, arguments)])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("verb", [("cluster",), ("cluster", "simulate"), ("cluster", "policies")])
def test_help_loads_neither_torch_nor_numpy(verb):
    code = "import sys; from patrickstar.cli.main import main; main(sys.argv[1:]); print({'torch', 'numpy'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, *verb, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: patrickstar {' '.join(verb)}")
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_simulation_loads_no_torch(trace):
    code = "import sys; from patrickstar.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    words = [sys.executable, "-c", code, "cluster", "simulate", str(trace), "--policy", "all"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout.splitlines()[-1] == "False"


def test_policies_are_listed_with_what_they_know(capsys):
    assert main(["cluster", "policies"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines()[1:]] == list(POLICIES)
    assert "Tiresias" in out


def test_one_object_of_one_policy_and_a_list_of_all(capsys, trace):
    status, out, _ = simulate(capsys, trace, "--json", "--gpus", 8, "--policy", "fifo", "--seed", 5)
    one = json.loads(out)
    assert (status, one["policy"], one["gpus"], one["seed"]) == (0, "fifo", 8, 5)
    assert [job["job"] for job in one["jobs"]] == ["a", "b", "c"]
    assert set(one["jobs"][0]) == {"job", "submit", "start", "finish", "jct", "ideal", "resizes"}
    assert set(one) == {
        *("policy", "gpus", "seed", "jobs", "mean_jct", "p50_jct", "p99_jct", "makespan"),
        *("gpu_seconds_lost", "utilisation", "worst_ftf", "decision_seconds"),
    }
    assert [job["finish"] for job in one["jobs"]] == [130.0, 90.0, 450.0]
    _, out, _ = simulate(capsys, trace, "--json", "--policy", "all")
    assert [told["policy"] for told in json.loads(out)] == list(POLICIES)


def test_without_json_there_is_a_table_that_says_it_is_simulated(capsys, trace):
    _, out, _ = simulate(capsys, trace, "--policy", "all")
    assert out.splitlines()[0] == "3 jobs on 64 GPUs, simulated (JCT: from submission to end)"
    assert len(out.splitlines()) == 2 + len(POLICIES)


def test_one_seed_gives_the_same_bytes(capsys, trace, tmp_path):
    told = []
    for name in ("first", "second"):
        _, out, _ = simulate(capsys, trace, "--json", "--events", tmp_path / name, "--gpus", 8, "--seed", 3)
        found = json.loads(out)
        del found["decision_seconds"]
        told.append((json.dumps(found), (tmp_path / name).read_bytes()))
    assert told[0] == told[1]


def test_events_are_lines_in_order_of_time(capsys, trace, tmp_path):
    path = tmp_path / "events.jsonl"
    assert simulate(capsys, trace, "--events", path, "--gpus", 8, "--policy", "srtf")[0] == 0
    events = [json.loads(line) for line in path.read_text().splitlines()]
    told = tuple(events[0].values())
    assert told == ("allocate", 0.0, "a", [0, 1], 1.0, 30.0, "100 s left, shorter ones first")
    assert list(events[0]) == ["event", "t", "job", "gpus", "batch", "hold", "why"]
    assert [event["t"] for event in events] == sorted(event["t"] for event in events)
    assert {event["job"] for event in events if event["gpus"] == []} == {"a", "b", "c"}


def test_the_costs_of_changes_are_given(capsys, trace):
    _, out, _ = simulate(capsys, trace, "--json", "--policy", "fifo", "--start-seconds", 0)
    assert json.loads(out)["jobs"][0]["finish"] == 100.0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--policy", "pollx"), 'did you mean "pollux"?'),
        (("--policy", "nowhere:f"), "module 'nowhere' cannot be imported"),
        (("--policy", "json:nothing"), "has no 'nothing'"),
        (("--policy", "json:__name__"), "is a str, not a function"),
        (("--policy", "all", "--events", "x"), "--events is of one policy"),
        (("--gpus", "3"), "line 3: column gpus: 4 GPUs, more than the 3"),
        (("--tick", "0"), "--tick"),
        (("--gpus", "0"), "--gpus"),
    ],
)
def test_wrong_arguments_end_with_2(capsys, trace, arguments, says):
    status, out, err = simulate(capsys, trace, *arguments)
    assert (status, out) == (2, "")
    assert says in err


def test_a_report_without_matplotlib_is_refused_before_anything_is_simulated(capsys, trace, tmp_path, monkeypatch):
    monkeypatch.setattr("patrickstar.cli.cluster.find_spec", lambda name: None)
    status, _, err = simulate(capsys, trace, "--report", tmp_path / "r.html")
    assert (status, "pip install 'patrickstar[cluster]'" in err) == (2, True)
    assert not (tmp_path / "r.html").exists()


OWN = """
from patrickstar.cluster import Allocation

def greedy(jobs, cluster, now, state, rng):
    return {jobs[0].name: Allocation(tuple(range(2)), 1.0, "the first")}, state

def twice(jobs, cluster, now, state, rng):
    return {job.name: Allocation((0,), 1.0, "all") for job in jobs}, state

def breaks(jobs, cluster, now, state, rng):
    raise ValueError("no idea")
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "policy_of_mine.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    yield "policy_of_mine"
    sys.modules.pop("policy_of_mine", None)


def test_a_policy_of_ones_own(capsys, tmp_path, own):
    (tmp_path / "t.csv").write_text("job,submit,gpus,duration\na,0,2,100\n")
    status, out, _ = simulate(capsys, "t.csv", "--policy", f"{own}:greedy", "--json")
    assert (status, json.loads(out)["policy"], json.loads(out)["mean_jct"]) == (0, "policy_of_mine:greedy", 130.0)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("twice", "decision 2 of policy twice, at 10 s: it gives GPU 0 to 'a' and to 'b'"),
        ("breaks", "decision 1 of policy breaks, at 0 s: it raised ValueError: no idea"),
    ],
)
def test_a_policy_of_ones_own_that_fails_ends_with_1(capsys, trace, own, name, says):
    status, out, err = simulate(capsys, trace, "--policy", f"{own}:{name}")
    assert (status, out) == (1, "")
    assert says in err
