import json
import math

import pytest

from patrickstar.cli.event_log import EventLog, Predicted, StepRecord, Summary

STEP = StepRecord(
    step=3,
    loss=5.5,
    seconds=0.5,
    tokens_per_second=128.0,
    grad_norm=None,
    peak={"device": 0, "host": 7, "disk": 9},
    rss=11,
)
PREDICTED = Predicted(peak={"host": 1}, moved={"H>K": 2})
SUMMARY = Summary(
    steps=3,
    first_loss=6.0,
    last_loss=math.nan,
    first_validation_loss=None,
    validation_loss=5.75,
    peak={"host": 7},
    rss_peak_growth=8,
    moved={"H>K": 6},
    moved_per_step={"H>K": 2},
    predicted=PREDICTED,
    model_data_bytes=16,
    parameters=1,
    seconds=1.5,
    tokens_per_second=128.0,
)


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_step_has_its_fields_and_every_bit_of_its_loss():
    row = STEP.row()
    names = ["event", "step", "loss", "loss_hex", "seconds", "tokens_per_second", "grad_norm", "peak", "rss"]
    assert sorted(row) == sorted(names)
    assert float.fromhex(row["loss_hex"]) == row["loss"] == 5.5
    assert row["event"] == "step"


@pytest.mark.parametrize(("loss", "spelled"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")])
def test_a_loss_that_is_no_number_is_null_in_json_and_spelled_in_hex(loss, spelled, tmp_path):
    with EventLog(tmp_path / "log", append=False) as log:
        log.write(StepRecord(step=1, loss=loss, seconds=1, tokens_per_second=1, grad_norm=loss, peak={}, rss=1).row())
    (row,) = rows(tmp_path / "log")
    assert (row["loss"], row["loss_hex"], row["grad_norm"]) == (None, spelled, None)


def test_predicted_has_everywhere_the_same_keys():
    assert PREDICTED.row() == {"peak": {"host": 1}, "moved": {"H>K": 2}, "step_seconds": None}
    assert SUMMARY.row()["predicted"] == PREDICTED.row()


def test_a_summary_has_what_is_promised_and_survives_json():
    row = json.loads(json.dumps(SUMMARY.row(), allow_nan=False))
    losses = {"first_loss", "last_loss", "validation_loss"}
    memory = {"peak", "rss_peak_growth", "moved", "predicted", "model_data_bytes", "parameters"}
    assert {"event", "steps"} | losses | memory <= set(row)
    assert (row["last_loss"], row["moved"], row["moved_per_step"]) == (None, {"H>K": 6}, {"H>K": 2})


def test_a_row_is_on_disk_before_the_run_goes_on(tmp_path):
    with EventLog(tmp_path / "log", append=False) as log:
        log.write(STEP.row())
        assert rows(tmp_path / "log") == [STEP.row()]


def test_a_log_begins_anew_or_goes_on(tmp_path):
    for append, count in [(False, 1), (True, 2), (False, 1)]:
        with EventLog(tmp_path / "log", append=append) as log:
            log.write(STEP.row())
        assert len(rows(tmp_path / "log")) == count


def test_a_run_that_fails_before_its_first_row_destroys_no_log(tmp_path):
    (tmp_path / "log").write_text("an older run\n")
    with EventLog(tmp_path / "log", append=False):
        pass
    assert (tmp_path / "log").read_text() == "an older run\n"


def test_going_on_after_a_line_that_was_cut_short_loses_only_that_line(tmp_path):
    (tmp_path / "log").write_text('{"event": "step", "st')
    with EventLog(tmp_path / "log", append=True) as log:
        log.write(STEP.row())
    cut, whole = (tmp_path / "log").read_text().splitlines()
    assert cut == '{"event": "step", "st'
    assert json.loads(whole) == STEP.row()


def test_without_a_file_rows_go_nowhere(tmp_path):
    with EventLog(None, append=True) as log:
        log.write(STEP.row())
    assert list(tmp_path.iterdir()) == []
