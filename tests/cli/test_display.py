import io
import logging
import math

from rich.console import Console

from patrickstar.cli.display import Display, step_text
from patrickstar.units import MIB


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


STEP = {"loss": 6.5, "tokens_per_second": 64.0}
SUMMARY = {"steps": 3, "seconds": 1.5, "tokens_per_second": 128.0, "parameters": 1, "model_data_bytes": 16}
SUMMARY |= {"first_loss": 6.0, "last_loss": math.nan, "first_validation_loss": None, "validation_loss": 5.75}
SUMMARY |= {"peak": {"host": 7}, "rss_peak_growth": 8, "moved_per_step": {"H>K": 2}}
SUMMARY["predicted"] = {"peak": {"host": 1}, "moved": {"H>K": 2}}


def display(**given):
    out, clock = io.StringIO(), Clock()
    return Display(Console(file=out, width=100, highlight=False, **given), clock=clock), out, clock


def test_a_line_says_what_a_step_costs():
    held = {"device": 0, "host": 80 * MIB, "disk": MIB}
    said = "loss 6.5000  64 tokens/s  host 80.00 MiB of 100.00 MiB  disk 1.00 MiB"
    assert step_text(STEP, held, {"host": 100 * MIB}) == said


def test_plain_lines_come_now_and_then_and_at_both_ends():
    shown, out, clock = display()
    with shown.progress("step", 50, done=10) as advance:
        for step in range(11, 51):
            clock.now += 1.0
            advance(1, f"loss [{step}]")
    assert out.getvalue().splitlines() == [
        "step 11/50  loss [11]",
        "step 21/50, 1/s, 0:00:29 left  loss [21]",
        "step 31/50, 1/s, 0:00:19 left  loss [31]",
        "step 41/50, 1/s, 0:00:09 left  loss [41]",
        "step 50/50, 1/s, 0:00:00 left  loss [50]",
    ]
    shown, out, clock = display()  # short work without a word to say is silent
    with shown.progress("encoding", 100) as advance:
        for _ in range(100):
            clock.now += 0.05
            advance(1)
    assert out.getvalue() == ""


def test_a_terminal_shows_progress_and_what_it_has_come_to():
    shown, out, _ = display(force_terminal=True)
    with shown.progress("step", 4) as advance:
        advance(1, "loss [1]")
        shown.note("saved")
        advance(1, "loss [2]")
    assert all(part in out.getvalue() for part in ("step", "2/4", "loss [2]", "saved"))


def test_the_summary_sets_predicted_beside_measured():
    shown, out, _ = display()
    shown.summary(SUMMARY, budgets={"host": 100 * MIB})
    rows = [line.split() for line in out.getvalue().splitlines()]
    table = {row[1] + row[2]: row for row in rows if len(row) > 6 and row[0] == "│"}
    assert table["hostpeak"][4:] == ["1", "B", "│", "7", "B", "│", "100.00", "MiB", "│"]
    assert table["peakRSS"][5:10] == ["1", "B", "│", "8", "B"]
    assert table["H>Kper"][5:10] == ["2", "B", "│", "2", "B"]
    assert "loss 6.0000 -> nan, validation - -> 5.7500" in out.getvalue()


def test_the_librarys_messages_are_said_with_their_weight():
    shown, out, _ = display()
    logger = logging.Logger("patrickstar-test")
    logger.addHandler(shown)
    logger.info("precision %s", "fp32")
    logger.warning("falls [back]")
    logger.debug("nobody reads this")
    assert out.getvalue() == "precision fp32\nwarning: falls [back]\n"
