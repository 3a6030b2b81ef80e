import json
import math

import pytest

from patrickstar.cli.event_log import EventLog

STEP = {"event": "step", "step": 3, "loss": 5.5, "peak": {"device": 0, "host": 7, "disk": 9}}


def rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_of_json_is_null(number, tmp_path):
    with EventLog(tmp_path / "log", append=False) as log:
        log.write({"loss": number, "loss_hex": number.hex(), "moved": {"H>D": number}})
    assert rows(tmp_path / "log") == [{"loss": None, "loss_hex": number.hex(), "moved": {"H>D": None}}]


def test_a_row_is_on_disk_before_the_run_goes_on(tmp_path):
    with EventLog(tmp_path / "log", append=False) as log:
        log.write(STEP)
        assert rows(tmp_path / "log") == [STEP]


def test_a_log_begins_anew_or_goes_on(tmp_path):
    for append, count in [(False, 1), (True, 2), (False, 1)]:
        with EventLog(tmp_path / "log", append=append) as log:
            log.write(STEP)
        assert len(rows(tmp_path / "log")) == count


def test_a_run_that_fails_before_its_first_row_destroys_no_log(tmp_path):
    (tmp_path / "log").write_text("an older run\n")
    with EventLog(tmp_path / "log", append=False):
        pass
    assert (tmp_path / "log").read_text() == "an older run\n"


def test_going_on_after_a_line_that_was_cut_short_loses_only_that_line(tmp_path):
    (tmp_path / "log").write_text('{"event": "step", "st')
    with EventLog(tmp_path / "log", append=True) as log:
        log.write(STEP)
    cut, whole = (tmp_path / "log").read_text().splitlines()
    assert cut == '{"event": "step", "st'
    assert json.loads(whole) == STEP


def test_without_a_file_rows_go_nowhere(tmp_path):
    with EventLog(None, append=True) as log:
        log.write(STEP)
    assert list(tmp_path.iterdir()) == []
