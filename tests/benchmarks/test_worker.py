"""Processes that answer, from a script of their own: they belong to whoever is the main module."""

import importlib.util
import subprocess
import sys

import pytest

from benchmarks import worker
from tests.docs.pages import ROOT

SCRIPT = """
import sys, threading
from benchmarks.worker import Worker, WorkerError

def twice(pipe, word):
    pipe.send([word, "transformers.modeling_utils" in sys.modules])
    while (question := pipe.recv()) is not None:
        pipe.send(2 * question)

def dies(pipe, when):
    if when == "at once":
        raise SystemExit(3)
    pipe.send(None)
    pipe.recv()
    if when == "when asked":
        raise SystemExit(4)
    raise SystemExit(5)

def said(act, *arguments):
    try:
        return act(*arguments)
    except WorkerError as error:
        return f"WorkerError: {error}"

if __name__ == "__main__":
    first = Worker(twice, "ready")
    print(first.hear(), first.ask(21), first.ask("ab"))
    first.dismiss()
    print(said(first.join), said(first.hear))
    print(said(Worker(dies, "at once").hear))
    second = Worker(dies, "when asked")
    print(second.hear(), said(second.ask, 1), said(second.ask, 2), sep="; ")
    third = Worker(dies, "when dismissed")
    third.hear()
    third.dismiss()
    print(said(third.join))
    Worker(twice, "nobody waits for this one").hear()
"""

SAID = """
['ready', True] 42 abab
None WorkerError: its process ended with status 0 before it answered
WorkerError: its process ended with status 3 before it answered
None; WorkerError: its process ended with status 4 before it answered; WorkerError: its process ended with status 4 before it answered
WorkerError: its process ended with status 5 after its last answer
"""


@pytest.mark.slow
def test_a_process_answers_or_says_how_it_ended(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=path, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == SAID.strip()
    assert done.stderr == ""


def test_what_is_imported_once_exists():
    # What cannot be imported there is passed over in silence, and imported in every process instead.
    assert [name for name in worker._IMPORTED_ONCE if importlib.util.find_spec(name) is None] == []
