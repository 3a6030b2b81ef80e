import os
import subprocess
import sys

import click
import pytest

from patrickstar.cli import models
from patrickstar.cli.main import VERBS, main
from patrickstar.cli.stop import Stopped
from patrickstar.errors import BudgetError, CheckpointError, ConfigError, DeviceError


def call(capsys, *arguments):
    status = main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def raise_from(monkeypatch, error):
    """`patrickstar models` ends with that error."""

    def fail():
        raise error

    monkeypatch.setattr(models, "models", click.Command("models", callback=fail))


@pytest.mark.parametrize("verb", [(), ("train",), ("plan",), ("models",), ("machines",), ("doctor",)])
def test_every_verb_explains_itself(capsys, verb):
    status, out, err = call(capsys, *verb, "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"Usage: patrickstar {' '.join(verb)}".rstrip())


def test_help_names_every_verb(capsys):
    _, out, _ = call(capsys, "--help")
    assert all(f"\n  {verb} " in out for verb in VERBS)


def test_without_a_verb_the_help_is_shown_and_the_arguments_are_wrong(capsys):
    status, out, err = call(capsys)
    assert (status, out) == (2, "")
    assert "train" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["trian"], 'did you mean "train"?'),
        (["train", "--batchsize", "2"], "--batch-size"),
        (["train", "--model", "gpt2", "--precision", "fp23"], 'did you mean "fp32"?'),
        (["train", "--model", "gpt2", "--device", "gpu"], 'did you mean "cuda"?'),
        (["train", "--model", "gpt-2"], 'did you mean "gpt2"?'),
        (["train"], "--model"),
        (["train", "--model", "gpt2", "--host-memory", "6GiBB"], "unknown unit 'GiBB'"),
        (["train", "--model", "gpt2", "--host-memory", "0"], "a budget is more than 0 bytes"),
        (["train", "--model", "gpt2", "--host-memory", "8"], "host_memory='8': 8 bytes; 8GiB?"),
        (["train", "--model", "gpt2", "--disk", "x", "--disk-memory", "4000"], "4000 bytes; 4000MiB?"),
        (["plan", "--model", "gpt2", "--device", "emulated", "--device-memory", "1048575"], "1048575MiB?"),
        (["train", "--model", "gpt2", "--steps", "0"], "--steps"),
        (["train", "--model", "gpt2", "--lr", "nan"], "--lr=nan: expected a finite number above 0"),
        (["train", "--model", "gpt2", "--device", "cpu", "--device-memory", "1GiB"], "host_memory"),
        (["train", "--model", "gpt2", "--step", "in_backward", "--accumulate", "2"], "one backward"),
        (["train", "--model", "gpt2", "--resume"], "--resume without --checkpoint-dir"),
        (["train", "--model", "gpt2", "--save-every", "5"], "--save-every without --checkpoint-dir"),
        (["train", "--model", "gpt2", "--checkpoint-dir", "x", "--resume", "--compare-plain"], "--compare-plain with"),
        (["plan", "--model", "gpt2", "--seq-len", "1025"], "this model has 1024 positions"),
        (["plan", "--model", "nowhere/config.json"], "no such file or directory"),
    ],
)
def test_wrong_arguments_exit_2_in_one_paragraph_that_says_which(capsys, arguments, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    status, out, err = call(capsys, *arguments)
    assert (status, out) == (2, "")
    assert says in err
    assert "Traceback" not in err
    assert "\n\n" not in err
    assert err.startswith("patrickstar: ")


@pytest.mark.parametrize(
    ("error", "status", "says"),
    [
        (ConfigError("no such key"), 2, "patrickstar: ConfigError: no such key"),
        (BudgetError("1 GiB short", tier="host"), 3, "patrickstar: BudgetError: 1 GiB short"),
        (DeviceError("disk full"), 1, "patrickstar: DeviceError: disk full"),
        (CheckpointError("damaged\n\n  at byte 3"), 1, "patrickstar: CheckpointError: damaged\n  at byte 3"),
        (OSError(28, "No space left on device", "a.log"), 1, "No space left on device: 'a.log'"),
        (ImportError("no name 'GPT2LMHeadModel'"), 1, "`patrickstar doctor` says what is wrong with the packages"),
        (RuntimeError("odd"), 1, "patrickstar: RuntimeError: odd\n(we did not expect this one"),
    ],
)
def test_an_error_on_the_way_has_its_exit_status_and_no_traceback(capsys, monkeypatch, error, status, says):
    raise_from(monkeypatch, error)
    found, out, err = call(capsys, "models")
    assert (found, out) == (status, "")
    assert says in err
    assert "Traceback" not in err


def test_debug_shows_where_an_error_came_from(capsys, monkeypatch):
    raise_from(monkeypatch, RuntimeError("odd"))
    status, _, err = call(capsys, "--debug", "models")
    assert status == 1
    assert "in fail\n" in err
    assert main(["train", "--debug", "--model", "gpt-2"]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_being_stopped_gives_the_signals_status_without_a_word(capsys, monkeypatch):
    raise_from(monkeypatch, Stopped(143))
    assert call(capsys, "models") == (143, "", "")


def test_help_and_listings_do_not_load_torch():
    code = "import sys; from patrickstar.cli.main import main; main(sys.argv[1:]); print('torch' in sys.modules)"
    for arguments in (["--help"], ["models"], ["train", "--help"]):
        shown = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert shown.stdout.splitlines()[-1] == "False", arguments


def test_the_module_is_the_same_as_the_command():
    shown = subprocess.run(
        [sys.executable, "-m", "patrickstar", "machine"], capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2
    assert 'did you mean "machines"?' in shown.stderr


def test_a_reader_that_has_gone_is_no_fault_of_ours():
    command = f"{sys.executable} -m patrickstar models | true; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    shown = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, env=environment)
    assert "Traceback" not in shown.stderr
    assert "BrokenPipe" not in shown.stderr
