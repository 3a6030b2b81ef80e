import errno
import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from patrickstar.cli.main import main
from patrickstar.cli.together import Tried, largest
from patrickstar.memory.process import resident_bytes
from patrickstar.parallel import costs
from patrickstar.units import MIB
from tests.faults import Fails, FaultyIO

COMMON = {
    "vocab_size": 512,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
LLAMA = {**COMMON, "model_type": "llama", "num_key_value_heads": 1, "max_position_embeddings": 64}
BERT = {**COMMON, "model_type": "bert", "is_decoder": True, "max_position_embeddings": 64}


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


def test_what_does_not_fit_is_reported_with_the_smallest_budget_and_exits_3(runs, capsys):
    arguments = ["--model", runs.model, "--device", "emulated", "--device-memory", "4KiB", "--seq-len", 16]
    status, out = plan(capsys, *arguments, "--json")
    row = json.loads(out)
    assert (status, row["fits"]) == (3, False)
    assert row["minimum"]["device"] > 4096
    status, out = plan(capsys, *arguments)
    assert status == 3
    assert "does not fit" in out
    assert "smallest that fits" in out
    for share, status in ((1.0, 0), (0.9, 3)):
        budget = f"{int(share * row['minimum']['device'])}B"
        assert plan(capsys, *arguments, "--device-memory", budget)[0] == status


SMALL_BERT = {**BERT, "vocab_size": 1000, "hidden_size": 96, "num_hidden_layers": 2}


@pytest.mark.sampled
@pytest.mark.parametrize("settings", [None, LLAMA, SMALL_BERT], ids=["gpt2", "llama", "bert"])
@pytest.mark.parametrize(
    "short",
    [
        {"device": "cpu", "host-memory": "8KiB", "disk": "disk"},
        {"device": "cpu", "host-memory": "8KiB"},
        {"device": "emulated", "device-memory": "8KiB"},
        {"device": "emulated", "device-memory": "100KiB", "host-memory": "8KiB", "disk": "disk"},
    ],
    ids=["host", "host alone", "device", "both"],
)
def test_the_budget_that_a_refusal_names_is_the_smallest_and_fits(runs, capsys, monkeypatch, settings, short):
    monkeypatch.chdir(runs.home)
    if settings:
        runs.model.write_text(json.dumps(settings))
    arguments = ["--model", runs.model, "--seq-len", 16, "--precision", "fp32"]

    def ask(flags):
        return plan(capsys, *arguments, *(word for name, value in flags.items() for word in (f"--{name}", value)))

    status, out = ask(short)
    assert status == 3
    advised = re.search(r"fits with: (.*?)(?:  \||\n)", out)[1]
    enough = dict(re.findall(r"(\w+)_memory >= (\S+ \S+)", advised))
    for tier, budget in enough.items():
        assert re.search(rf"  {tier} .* smallest that fits {re.escape(budget)}\n", out), out
    status, out = ask({**short, **{f"{tier}-memory": budget for tier, budget in enough.items()}})
    assert status == 0, out


def test_a_name_is_planned_without_its_weights(capsys):
    before = resident_bytes()
    status, out = plan(capsys, "--model", "gpt2", "--device", "emulated", "--device-memory", "1GiB", "--seq-len", 8)
    assert "gpt2: 124.4M parameters, model states 1.85 GiB (16 bytes per parameter)" in out
    assert status == 0
    assert resident_bytes() - before < 300 * MIB  # its weights alone are 475 MiB


@pytest.fixture
def read_only(tmp_path, monkeypatch):
    """A directory in which nothing can be made, and where, as there as a rule, nothing is free."""
    monkeypatch.setattr("patrickstar.memory.disk.FileIO", lambda: FaultyIO(Fails("open", errno.EROFS, times=99)))
    full = SimpleNamespace(f_bavail=0, f_frsize=4096)
    monkeypatch.setattr("patrickstar.memory.disk.os.statvfs", lambda _: full)
    return tmp_path / "read-only"


def test_a_plan_needs_no_directory_that_can_be_written(runs, capsys, read_only):
    arguments = ["--model", runs.model, "--device", "cpu", "--seq-len", 16, "--disk", read_only]
    arguments += ["--host-memory", "1200KiB"]
    status, out = plan(capsys, *arguments, "--disk-memory", "1GiB")
    assert status == 0, out
    assert "disk    peak" in out
    status, out = plan(capsys, *arguments)
    assert status == 3
    assert f"nothing is free in disk='{read_only}' (0 bytes): free space there" in " ".join(out.split())
    assert not read_only.exists()


def test_a_run_says_that_a_directory_cannot_be_written(runs, capsys, read_only):
    assert runs.train("--host-memory", "1MiB", "--disk", read_only) == 1
    err = " ".join(capsys.readouterr().err.split())
    assert err.startswith(f"patrickstar: DeviceError: disk='{read_only}': files cannot be made in {read_only.parent}: ")
    assert "Read-only file system; mount it for writing, or name another directory" in err
    assert not read_only.exists()


def test_a_step_of_several_ranks_is_planned_as_one_of_them_takes_it(runs, capsys):
    arguments = ["--model", runs.model, "--device", "cpu", "--precision", "fp32", "--seq-len", 16, "--batch-size", 6]
    status, out = plan(capsys, *arguments, "--world", 3)
    assert status == 0
    assert "3 ranks, 3 on a machine: peaks and transfers are one rank's, budgets those of a machine" in out
    assert re.search(r"  transferred per step  to other ranks [\d.]+ KiB\n", out), out
    alone, shared = (json.loads(plan(capsys, *arguments, "--json", "--world", world)[1]) for world in (1, 3))
    assert alone["model_data_by_rank"] == [alone["model_data_bytes"]]
    assert len(shared["model_data_by_rank"]) == 3
    assert sum(shared["model_data_by_rank"]) == shared["model_data_bytes"] == alone["model_data_bytes"]
    assert shared["predicted"]["peak"]["host"] < alone["predicted"]["peak"]["host"]
    assert shared["predicted"]["moved"]["ranks"] > 0
    assert alone["predicted"]["moved"]["ranks"] == 0
    assert main(["plan", *map(str, arguments), "--world", "4"]) == 2
    assert "--batch-size 6 over 4 ranks: it is of all of them together; give a multiple of 4" in capsys.readouterr().err


def test_ranks_share_the_budgets_of_as_many_machines_as_they_need(runs, capsys):
    arguments = ["--model", runs.model, "--precision", "fp32", "--machine", "v100-yard", "--batch-size", 16]
    status, out = plan(capsys, *arguments, "--seq-len", 16, "--world", 16)
    assert status == 0
    assert "16 ranks, 8 on a machine" in out
    assert "alone on the node" not in out
    status, out = plan(
        capsys, *arguments, "--seq-len", 16, "--world", 16, "--host-memory", "1MiB", "--device-memory", "300MiB"
    )
    enough = dict(re.findall(r"(\w+)_memory >= (\d+(?:\.\d+)? \w+)", out))
    assert status == 3
    budgets = [word for tier, budget in enough.items() for word in (f"--{tier}-memory", budget)]
    rest = [] if "host" in enough else ["--host-memory", "1GiB"]
    assert plan(capsys, *arguments, "--seq-len", 16, "--world", 16, *budgets, *rest)[0] == 0


def test_ranks_that_share_sequences_are_planned_without_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What they send is the formula's, and the loss; the longest sequence fits, and one a tenth longer does not."""
    model = tmp_path / "llama.json"
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    model.write_text(json.dumps({"model_type": "llama", **sizes, "num_attention_heads": 4, "num_key_value_heads": 2}))
    memory = ["--device", "emulated", "--device-memory", "500KiB", "--host-memory", "64MiB", "--precision", "fp32"]
    flags = ["plan", "--model", str(model), "--world", "4", "--context-parallel", "2", "--batch-size", "4", *memory]
    assert main([*flags, "--seq-len", "32", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    attention = costs.attention("ring", 2, 2, 4, 2, 32, 8, element=4)
    assert row["sent"] == {"cp": 2 * int(attention.forward + attention.backward) + 2 * 8}
    longest = row["largest_sequence"]
    assert longest > 32
    assert longest % 4 == row["largest_batch"] % 2 == 0
    assert main([*flags, "--seq-len", str(longest)]) == 0
    assert "  sent in a forward and backward  cp " in capsys.readouterr().out
    assert main([*flags, "--seq-len", str(longest * 11 // 10)]) == 3


LOADS: list[Callable[[int], float]] = [lambda n: 0.2 + n / 100, lambda n: 0.1 + (n / 1000) ** 2, lambda n: n // 50 / 4]
WHERE = list(
    itertools.product((1, 32, 5000), (1, 4), (None, 48, 2048))
)  # the first that is tried, what divides it, and the most


@pytest.mark.parametrize("limit", [1.0, 1.3, 0.05])
@pytest.mark.parametrize("load", LOADS)
def test_the_largest_size_is_found_to_within_a_sixty_fourth(load: Callable[[int], float], limit: float) -> None:
    """Also where what needs more than the budget fits all the same, and where nothing does."""
    for start, of, most in WHERE:
        tries: list[int] = []
        found = largest(lambda n: Tried(tries.append(n) or n, load(n) <= limit, load(n)), start, of=of, most=most)
        true = max((n for n in range(of, (most or 20_000) + 1, of) if load(n) <= limit), default=0)
        assert 0 <= true - found <= max(of, found // 64)
        assert len(set(tries)) == len(tries)
        assert all(size % of == 0 < size <= (most or size) for size in tries)


def test_a_size_that_needs_in_proportion_is_found_in_four_tries() -> None:
    sizes = iter((500, 1000, 5000, 5078))
    assert largest(lambda n: Tried(next(sizes), n <= 5000, 0.5 + n / 10_000), 500, of=2) == 5000
    assert not list(sizes)
