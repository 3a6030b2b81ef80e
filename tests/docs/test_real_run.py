"""`docs/make_real_run.py`: runs that go on where they stopped, a comparison that can fail, a page that is made of figures."""

import copy
import importlib
import json

import pytest

from patrickstar.errors import CheckpointError
from tests.cli.runs import TINY
from tests.docs.pages import ROOT

SIZES = {"vocab_size": 320, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0}
SETTINGS = {**TINY, **SIZES, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}


@pytest.fixture
def stage(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("real_run_stage")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("make_real_run")


@pytest.fixture
def course(stage, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{n} bottles stand on the wall, and {n} bottles stay.\n" for n in range(400)))
    numbers = {"steps": 6, "batch_size": 2, "seq_len": 16, "lr": 1e-3, "seed": 0, "look_every": 3, "save_every": 2}
    return stage.Course(settings=SETTINGS, data=[str(text)], **numbers)


def home_of(tmp_path, name):
    home = tmp_path / name
    home.mkdir()
    (home / "machine.json").write_text("{}")
    return home


def figures(script, home):
    """What does not depend on the clock."""
    found = script.figures_of(home)
    return {"losses": found["losses"], "held_out": found["held_out"]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "fp32", pytest.param("bf16", marks=pytest.mark.campaign), "fp16"])
def test_a_run_that_was_stopped_goes_on_with_the_bits_of_not_stopping(stage, script, course, tmp_path, name):
    whole, stopped = home_of(tmp_path, "whole"), home_of(tmp_path, "stopped")
    run = stage.Run(
        stage.RUNS[name].precision, share=2.0 if name == "fp32" else None
    )  # half of so little is too little
    assert stage.train(run, course, whole, seconds=600)
    calls = 1
    while not stage.train(run, course, stopped, seconds=0):
        calls += 1
    assert calls == course.steps
    assert figures(script, whole) == figures(script, stopped)
    assert [at for at, _, _ in script.figures_of(whole)["held_out"]] == [0, 3, 6]
    ends = [json.loads((home / "end.json").read_text()) for home in (whole, stopped)]
    assert ends[0]["digests"] == ends[1]["digests"]
    assert len(ends[0]["digests"]) > 10


@pytest.mark.slow
def test_plain_pytorch_and_fp32_agree_and_the_comparison_sees_where_they_would_not(stage, script, course, tmp_path):
    runs, ends = {}, {}
    for name, share in (("plain", None), ("fp32", 2.0)):
        home = home_of(tmp_path, name)
        assert stage.train(stage.Run(stage.RUNS[name].precision, share=share), course, home, seconds=600)
        runs[name] = script.figures_of(home)
        ends[name] = json.loads((home / "end.json").read_text())
    assert runs["fp32"]["budget_bytes"] == 32 * ends["fp32"]["parameters"]
    assert script.compare(runs, ends) == ({"losses": 6, "looks": 3, "tensors": len(ends["plain"]["digests"])}, "")
    for spoil, says in (
        (lambda runs, ends: runs["fp32"]["losses"].__setitem__(4, 1.0), "losses, 5"),
        (lambda runs, ends: runs["fp32"]["held_out"][1].__setitem__(2, 0.5), "held_out, 2"),
        (
            lambda runs, ends: ends["fp32"]["digests"].update({"transformer.wpe.weight": "other"}),
            "transformer.wpe.weight first",
        ),
    ):
        others = copy.deepcopy((runs, ends))
        spoil(*others)
        assert says in script.compare(*others)[1]


@pytest.mark.slow
def test_a_run_of_other_text_does_not_go_on(stage, course, tmp_path):
    home = home_of(tmp_path, "home")
    assert not stage.train(stage.RUNS["plain"], course, home, seconds=0)
    (tmp_path / "text.txt").write_text("Other words altogether, and enough of them.\n" * 200)
    with pytest.raises(CheckpointError, match="tokens was"):
        stage.train(stage.RUNS["plain"], course, home, seconds=0)


def test_a_row_that_a_killed_process_left_half_written_is_none(stage, tmp_path):
    log = tmp_path / "log.jsonl"
    log.write_text('{"step": 1}\n{"step": 2}\n{"ste')
    assert [row["step"] for row in stage.read_log(log)] == [1, 2]


def test_the_learning_rate_is_that_of_the_verb(stage, course):
    assert [round(course.factor(step), 3) for step in (0, 5)] == [1.0, 0.16]


def test_the_farthest_point_of_two_curves(script):
    assert script.farthest([[0, 2.0], [5, 1.5], [10, 1.0]], [[0, 2.0], [5, 1.25], [10, 1.1]]) == "0.25 at step 5"


def test_the_runs_of_both_halves_have_the_same_names(stage, script):
    assert tuple(stage.RUNS) == script.NAMES == tuple(script.TITLES)


def test_the_picture_was_drawn_from_the_figures_that_the_page_has(script):
    assert script.mark(script.FIGURES.read_text()) in script.PICTURE.read_text()


def test_the_figures_are_of_a_run_as_long_and_large_as_promised(script):
    kept = script.read_figures()
    assert kept["parameters"] > 20_000_000
    assert kept["course"]["steps"] >= 1000
    assert all(len(run["losses"]) == kept["course"]["steps"] for run in kept["runs"].values())
    assert kept["same_bits"]["losses"] == kept["course"]["steps"]
    assert kept["runs"]["plain"]["losses"] == kept["runs"]["fp32"]["losses"]
