"""`benchmarks/compare.py`: contenders are killed at the cap, what cannot run says why, and the README's table has all of it."""

import json

import pytest

from tests.benchmarks.scripts import run, script


@pytest.fixture
def compare():
    return script("benchmarks", "compare")


def table_of(result, tmp_path, monkeypatch):
    (tmp_path / "compare.json").write_text(json.dumps(result))
    tables = script("docs", "make_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    return [line.split(" | ") for line in tables.what_trains_under_a_cap().splitlines() if line.startswith("| ")]


def cells(*told):
    given = dict(zip(("contender", "model", "trained", "why"), told, strict=True))
    return {**given, "cap_bytes": 3 << 29, "peak_bytes": 1 << 30, "seconds": [1.0, 4.0, 2.0]}


def test_the_table_has_what_trained_and_why_the_rest_did_not(tmp_path, monkeypatch):
    told = [
        cells("ours", "small", True, ""),
        cells("ours", "large", False, "passed the cap"),
        cells("theirs", "small", False, "deepspeed is not installed"),
        cells("theirs", "large", False, "small did not train"),
    ]
    machine = {"cores": 2, "cpu": "a processor"}
    result = {
        "contenders": {"ours": "Ours", "theirs": "Theirs"},
        "cells": told,
        "tokens": 256,
        "machine": machine,
        "load": [1.0, 2.0],
        "versions": {},
    }
    assert table_of(result, tmp_path, monkeypatch) == [
        ["|", "small in 1.5 GiB", "large in 1.5 GiB |"],
        ["| Ours", "1.00 GiB, 2.0 s/step (1.0 to 4.0)", "no |"],
        ["| Theirs", "no: deepspeed is not installed", "no |"],
    ]


def test_without_deepspeed_its_rows_say_so(compare, monkeypatch):
    monkeypatch.setattr(compare, "installed", lambda _: False)
    why = {name: compare.cannot_run(name, compare.parse([])) for name in compare.CONTENDERS}
    assert why == {name: "deepspeed is not installed" * name.startswith("deepspeed") for name in compare.CONTENDERS}


@pytest.mark.campaign
@pytest.mark.slow
def test_a_process_that_passes_the_cap_is_killed_and_larger_models_are_not_tried(tmp_path, monkeypatch):
    out = tmp_path / "result.json"
    flags = ["--caps", "0.1", "2", "--models", "tiny", "124M", "--steps", "1", "--tokens", "16", "--out", out]
    run("compare.py", *flags, "--only", "plain", "fsdp2", "patrickstar")
    result = json.loads(out.read_text())
    by_cap = [[cell for cell in result["cells"] if (cell["cap_bytes"] > 1 << 30) is large] for large in (False, True)]
    assert [cell["why"] for cell in by_cap[0]] == ["passed the cap", "tiny did not train"] * 3
    assert all(cell["trained"] and 0 < cell["peak_bytes"] <= 2 << 30 for cell in by_cap[1] if cell["model"] == "tiny")
    assert [cell["contender"] for cell in by_cap[1] if cell["model"] == "124M" and cell["trained"]] == ["patrickstar"]
    assert len(table_of(result, tmp_path, monkeypatch)) == 1 + 3
