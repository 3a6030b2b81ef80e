import json
import math

import pytest

from patrickstar.cli.display import EventLog

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
    with EventLog(None, append=True) as log:  # without a file rows go nowhere
        log.write(STEP)


@pytest.mark.parametrize(
    ("before", "append", "written", "kept"),
    [
        ("an older run\n", False, 1, ""),
        ("an older run\n", True, 1, "an older run\n"),
        # A run that fails before its first row destroys no log.
        ("an older run\n", False, 0, "an older run\n"),
        # Of a line that was cut short only that line is lost.
        ('{"event": "step", "st', True, 1, '{"event": "step", "st\n'),
    ],
)
def test_a_log_begins_anew_with_its_first_row_or_goes_on(tmp_path, before, append, written, kept):
    (tmp_path / "log").write_text(before)
    with EventLog(tmp_path / "log", append=append) as log:
        for _ in range(written):
            log.write(STEP)
    assert (tmp_path / "log").read_text() == kept + (json.dumps(STEP) + "\n") * written
