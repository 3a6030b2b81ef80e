import io
import logging
import math

from rich.console import Console

from patrickstar.cli.display import Display, NoteHandler, TrainingView, sparkline
from patrickstar.cli.event_log import StepRecord
from patrickstar.units import MIB
from tests.cli.test_event_log import SUMMARY


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def record(step, *, loss=5.0, seconds=2.0):
    return StepRecord(
        step=step, loss=loss, seconds=seconds, tokens_per_second=64.0, grad_norm=None, peak={"host": 90 * MIB}, rss=1
    )


def view(steps=100, **given):
    return TrainingView(done=0, steps=steps, budgets={"host": 100 * MIB}, **given)


def display(**given):
    out = io.StringIO()
    return Display(Console(file=out, width=100, highlight=False, **given)), out


def test_the_time_left_is_that_of_the_latest_steps():
    shown = view()
    shown.step(record(1, seconds=500), held={})
    for step in range(2, 12):
        shown.step(record(step, seconds=2), held={})
    assert shown.left_s() == 89 * 2


def test_a_line_says_where_it_is_what_it_costs_and_how_long_it_takes():
    shown = view()
    shown.step(record(40, seconds=2), held={"device": 0, "host": 80 * MIB})
    assert shown.line() == "step 40/100  loss 5.0000  64 tokens/s  2:00 left  host 80.00 MiB of 100.00 MiB"


def test_plain_lines_come_now_and_then_and_at_both_ends():
    clock = Clock()
    shown = view(steps=40, clock=clock)
    due = []
    for step in range(1, 41):
        clock.now += 1.0
        shown.step(record(step), held={})
        if shown.line_due():
            due.append(step)
    assert due == [1, 11, 21, 31, 40]


def test_elsewhere_than_in_a_terminal_lines_are_printed():
    shown, out = display()
    with shown.training(v := view(steps=2)) as show:
        for step in (1, 2):
            v.step(record(step), held={"host": MIB})
            show()
    assert [line[:9] for line in out.getvalue().splitlines()] == ["step 1/2 ", "step 2/2 "]


def test_a_terminal_shows_progress_loss_speed_and_memory_against_budget():
    shown, out = display(force_terminal=True)
    with shown.training(v := view(steps=4, validation=9.0)) as show:
        v.step(record(1, loss=8.0), held={"host": 50 * MIB, "disk": MIB})
        v.step(record(2, loss=6.5), held={"host": 50 * MIB, "disk": MIB})
        show()
    text = out.getvalue()
    for part in (
        *("2/4", "0:04 left", "█▁", "6.5000", "held-out text 9.0000", "64 tokens/s"),
        *("50.00 MiB of 100.00 MiB", "peak 90.00 MiB", "1.00 MiB"),
    ):
        assert part in text, part


def test_a_stage_in_a_log_is_silent_where_it_is_short():
    shown, out = display()
    with shown.stage("encoding", 100) as advance:
        for _ in range(100):
            advance(1)
    assert out.getvalue() == ""


def test_the_summary_sets_predicted_beside_measured():
    shown, out = display()
    shown.summary(SUMMARY, budgets={"host": 100 * MIB})
    rows = [line.split() for line in out.getvalue().splitlines()]
    table = {row[1] + row[2]: row for row in rows if len(row) > 6 and row[0] == "│"}
    assert table["hostpeak"][4:] == ["1", "B", "│", "7", "B", "│", "100.00", "MiB", "│"]
    assert table["processgrowth"][4:9] == ["1", "B", "│", "8", "B"]
    assert table["H>Ka"][5:10] == ["2", "B", "│", "2", "B"]
    assert "loss 6.0000 -> nan, validation - -> 5.7500" in out.getvalue()


def test_the_librarys_messages_are_said_with_their_weight():
    shown, out = display()
    logger = logging.Logger("patrickstar-test")
    logger.addHandler(NoteHandler(shown))
    logger.info("precision %s", "fp32")
    logger.warning("falls [back]")
    logger.debug("nobody reads this")
    assert out.getvalue() == "precision fp32\nwarning: falls [back]\n"


def test_a_sparkline_has_the_shape_of_its_values():
    assert sparkline([], width=8) == ""
    assert sparkline([1.0], width=8) == "▁"
    assert sparkline([3.0, 2.0, 1.0], width=8) == "█▅▁"
    assert sparkline([8.0] * 50 + [1.0] * 50, width=4) == "██▁▁"
    assert sparkline([2.0, math.nan, 1.0, math.inf], width=4) == "█ ▁ "
    assert sparkline([math.nan], width=4) == " "
