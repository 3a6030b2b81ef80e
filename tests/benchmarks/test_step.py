"""`benchmarks/step.py`: which variants run, how rounds go and what is made of them; and from beginning to end on the smallest model of the table."""

import json
from argparse import Namespace

import pytest

from tests.benchmarks.scripts import run, script


@pytest.fixture(scope="module")
def step():
    return script("benchmarks", "step")


@pytest.fixture
def fast(monkeypatch, step):
    """Makes the processor fast in some types."""

    def make(*types):
        monkeypatch.setattr(step, "computes_bf16", lambda: "bf16" in types)
        monkeypatch.setattr(step, "computes_fp16", lambda: "fp16" in types)

    return make


def variants_of(step, *texts):
    return [step.Variant.parse(text) for text in texts]


# which run


def chosen(step, *, every=False, texts=None):
    asked = texts and variants_of(step, *texts)
    variants, refused = step.chosen(Namespace(variant=asked, all=every))
    return [str(variant) for variant in variants], {str(variant): why for variant, why in refused.items()}


def test_a_processor_that_is_fast_in_every_type_runs_the_lists_as_they_stand(step, fast):
    fast("bf16", "fp16")
    assert chosen(step) == ([str(variant) for variant in step.DEFAULT], {})
    assert chosen(step, every=True) == ([str(variant) for variant in step.ALL], {})


def test_a_processor_that_is_slow_in_16_bits_runs_them_widened_and_no_autocast(step, fast):
    fast()
    variants, refused = chosen(step, every=True)
    assert "managed precision=bf16 compute=fp32" in variants
    assert "managed precision=bf16" not in variants
    # It stands in the list by itself as well.
    assert len(variants) == len(set(variants)) == len(step.ALL) - 2
    assert refused.keys() == {"plain precision=bf16"}
    assert "no instructions" in refused["plain precision=bf16"]


# rounds


class Answers:
    """In place of a process: gives its answers in turn."""

    def __init__(self, name, answers, log):
        self.name, self.answers, self.log = name, iter(answers), log

    def ask(self, number):
        self.log.append((number, self.name))
        return next(self.answers)

    def dismiss(self):
        self.log.append("dismissed")

    def join(self):
        self.log.append("joined")


@pytest.fixture
def peaks(monkeypatch, step):
    """Every product as fast as the round's number, from 1."""
    asked = []

    def peak(dtype):
        asked.append(dtype)
        return float(asked.count(dtype))

    monkeypatch.setattr(step, "matmul_peak", peak)
    return asked


def row(loss, seconds=1.0):
    return {"loss": loss, "seconds": seconds}


def measure(step, answers, rounds=1):
    """With answers by variant; also what was done to the processes."""
    log = []
    runs = {variant: Answers(str(variant), answers[str(variant)], log) for variant in variants_of(step, *answers)}
    refused = {}
    return *step.measure(runs, refused, rounds), refused, log


def test_every_round_asks_each_once_and_turns_the_order_around(step, peaks, capsys):
    rows, found, different, refused, log = measure(step, {"plain": [row("a")] * 4, "managed": [row("a")] * 4}, rounds=2)
    asked = [("managed", "plain"), ("plain", "managed")] * 2
    assert log[:8] == [(number, name) for number, pair in enumerate(asked) for name in pair]
    # All of them end at the same time, which takes a second each.
    assert log[8:] == ["dismissed", "dismissed", "joined", "joined"]
    assert [len(of) for of in rows.values()] == [4, 4]
    assert (found, different, refused) == ({"fp32": 4.0}, "", {})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_what_does_not_fit_at_its_first_step_is_left_out(step, peaks, capsys):
    rows, _, different, refused, _ = measure(step, {"plain": [row("a")] * 3, "managed step=in_backward": ["too small"]})
    assert [str(variant) for variant in rows] == ["plain"]
    assert not different
    assert {str(variant): why for variant, why in refused.items()} == {"managed step=in_backward": "too small"}


def test_a_loss_that_differs_ends_the_run(step, peaks, capsys):
    answers = {"plain": [row("a"), row("a")], "managed": [row("a"), row("b")]}
    _, _, different, _, log = measure(step, answers, rounds=5)
    assert different == "round 2: {'plain': 'a', 'managed': 'b'}"
    assert len(log) == 4


@pytest.mark.parametrize(
    ("losses", "differ"),
    [
        ({"plain": "a", "plain checkpointing=on": "a", "managed budget=half disk=on": "a"}, []),
        ({"plain": "a", "plain checkpointing=on": "b"}, ["plain", "plain checkpointing=on"]),
        # Autocast rounds at other places than masters do.
        ({"plain": "a", "plain precision=bf16": "b", "managed precision=bf16": "c"}, []),
        ({"managed precision=bf16": "a", "managed precision=bf16 compute=fp32": "b"}, []),
        ({"managed precision=bf16 compute=fp32": "a", "managed precision=fp16 compute=fp32": "b"}, []),
        ({"managed": "a", "managed tile_rows=1024": "b"}, []),
        ({"managed tile_rows=64": "a", "managed tile_rows=64 budget=half disk=on": "b"}, ["budget=half"]),
        ({"managed precision=bf16 compute=bf16": "a", "managed precision=bf16": "b"}, ["compute=bf16"]),
        ({"managed precision=fp16": "a", "managed step=in_backward precision=fp16": "b"}, ["step=in_backward"]),
    ],
)
def test_variants_of_the_same_arithmetic_have_one_loss(step, losses, differ):
    rows = {step.Variant.parse(text): [row("old"), row(loss)] for text, loss in losses.items()}
    found = step.differing(rows)
    assert bool(found) == bool(differ)
    assert all(name in found for name in differ)


# figures


def test_ratios_are_taken_round_by_round_to_the_first_and_to_the_base_line(step):
    seconds = {
        "plain": [9, 9, 1, 2, 4],
        "managed budget=half disk=on": [9, 9, 2, 2, 2],
        "managed budget=half disk=on eviction=lru": [9, 9, 3, 8, 4],
    }
    rows = {
        step.Variant.parse(text): [{"seconds": s, "moved": {"K>H": 30, "H>K": 10}, "grew": 7, "bound": {}} for s in of]
        for text, of in seconds.items()
    }
    machine = {"matmul_flops_per_second": {"fp32": 50.0}, "disk_bytes_per_second": {"read": 30.0, "write": 5.0}}
    lru = step.summary(list(rows)[2], rows, step.StepFlops(model=100, executed=120), machine, tokens=12)
    assert lru["ratios"] == [1.0, 3.0, 4.0]
    assert lru["base_line"] == "managed budget=half disk=on"
    assert lru["base_line_ratios"] == [1.5, 2.0, 4.0]
    assert lru["median_seconds"] == 4
    assert (lru["model_tflops"], lru["executed_tflops"]) == (25e-12, 30e-12)
    assert lru["tokens_per_second"] == 3
    # The disk takes 3 s, products 2.4 s.
    assert (lru["roofline_seconds"], lru["share_of_roofline"]) == (3.0, 0.75)
    first = step.summary(next(iter(rows)), rows, step.StepFlops(model=100, executed=120), machine, tokens=12)
    assert (first["base_line"], first["base_line_ratios"], first["ratios"]) == (None, [], [1.0, 1.0, 1.0])


def test_the_roofline_is_in_the_type_that_is_computed_in(step):
    machine = {"matmul_flops_per_second": {"fp32": 10.0, "bf16": 40.0}, "disk_bytes_per_second": None}
    texts = {"managed precision=bf16": 3.0, "managed precision=bf16 compute=fp32": 12.0, "plain precision=bf16": 3.0}
    rows = {step.Variant.parse(text): [{"seconds": 1.0, "grew": 0, "bound": {}}] * 3 for text in texts}
    flops = step.StepFlops(model=100, executed=120)
    assert {str(v): step.summary(v, rows, flops, machine, 1)["roofline_seconds"] for v in rows} == texts


# from beginning to end


@pytest.mark.campaign
@pytest.mark.slow
def test_a_round_gives_every_figure(tmp_path, monkeypatch):
    out = tmp_path / "step.json"
    sizes = ["--model", "gpt2-120m", "--layers", 1, "--batch-size", 1, "--seq-len", 16, "--rounds", 1]
    variants = ["--variant", "plain", "--variant", "managed budget=half disk=on"]
    variants += ["--variant", "managed precision=bf16 compute=fp32"]
    # No machine has the memory for this share.
    variants += ["--variant", "managed budget=1e6 disk=on"]
    shown = run("step.py", *sizes, *variants, "--disk", tmp_path, "--out", out)
    result = json.loads(out.read_text())
    plain, half, widened = result["rows"]
    assert [row["variant"] for row in result["rows"]] == [variants[1], variants[3], variants[5]]
    assert plain["ratios"] == [1.0]
    assert half["ratios"][0] == half["seconds"][0] / plain["seconds"][0]
    assert (half["base_line"], half["base_line_ratios"]) == ("plain", half["ratios"])
    assert plain["moved"] == {}
    assert half["moved"]["K>H"] > 0
    assert half["grew_bytes"] > 0
    assert (plain["bound_bytes"], half["bound_bytes"]) == ({}, {"host_memory": 8 * result["parameters"]})
    assert half["executed_tflops"] > half["model_tflops"] > 0
    assert half["tokens_per_second"] == pytest.approx(16 / half["median_seconds"])
    assert 0 < half["share_of_roofline"] < 1
    assert widened["base_line"] == "managed budget=half disk=on"
    assert set(result["machine"]) >= {"cpu", "commit", "matmul_flops_per_second", "disk_bytes_per_second"}
    assert result["machine"]["matmul_flops_per_second"].keys() == {"fp32"}
    (why,) = result["refused"].values()
    assert "are available" in why
    assert "managed budget=half disk=on: " in shown
    assert "round 3 of 3: " in shown
    # The page's table.
    tables = script("docs", "make_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    rows = [line for line in tables.steps().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + 3
    assert {line.count("|") for line in rows} == {11}
    assert "- `managed budget=1e6 disk=on` did not run: needs " in tables.steps()
