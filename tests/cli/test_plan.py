import json

import pytest

from patrickstar.cli.main import main


def plan(capsys, *arguments):
    status = main(["plan", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, captured.out


def test_json_has_what_programs_need(runs, capsys):
    status, out = plan(capsys, "--model", runs.model, "--device", "cpu", "--json", "--batch-size", 2, "--seq-len", 16)
    row = json.loads(out)
    assert status == 0
    assert row["fits"] is True
    assert set(row["predicted"]) == {"peak", "moved", "step_seconds"}
    assert row["predicted"]["step_seconds"] is None
    assert row["model_data_bytes"] >= 16 * row["parameters"] > 0
    assert set(row["minimum"]) <= {"device", "host", "disk"}


def test_what_does_not_fit_is_reported_and_exits_3(runs, capsys):
    arguments = ["--model", runs.model, "--device", "emulated", "--device-memory", "4KiB", "--seq-len", 16]
    status, out = plan(capsys, *arguments, "--json")
    row = json.loads(out)
    assert (status, row["fits"]) == (3, False)
    assert row["minimum"]["device"] > 4096
    status, out = plan(capsys, *arguments)
    assert status == 3
    assert "does not fit" in out
    assert "smallest that fits" in out


def test_the_smallest_budget_that_fits_fits_and_less_does_not(runs, capsys):
    arguments = ["--model", runs.model, "--device", "emulated", "--seq-len", 16, "--json", "--device-memory"]
    _, out = plan(capsys, *arguments, "4KiB")
    smallest = json.loads(out)["minimum"]["device"]
    assert plan(capsys, *arguments, smallest)[0] == 0
    assert plan(capsys, *arguments, int(0.9 * smallest))[0] == 3


def test_a_name_needs_no_memory_for_its_weights(capsys):
    status, out = plan(
        capsys, "--model", "gpt2-xl", "--device", "emulated", "--device-memory", "3GiB", "--host-memory", "30GiB"
    )
    assert "1557.6M parameters, model data 23.21 GiB (16 bytes a parameter)" in out
    assert status == 0


@pytest.mark.parametrize("model", ["gpt2-120m", "qwen2.5-0.5b", "Bert"])
def test_every_family_can_be_planned(capsys, model):
    status, out = plan(capsys, "--model", model, "--device", "emulated", "--device-memory", "4GiB")
    assert status == 0, out
    assert "fits" in out
