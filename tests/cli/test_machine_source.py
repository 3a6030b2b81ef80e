"""Plans for machines that are not here, by name or from a file."""

import json
from dataclasses import FrozenInstanceError, asdict

import pytest

from patrickstar.cli.machines import MACHINES, MachineSource, write_machine
from patrickstar.cli.main import main
from patrickstar.cli.models import Shape
from patrickstar.config.arguments import check_arguments
from patrickstar.core.fixed_costs import GPU_WORKSPACE_PERCENT
from patrickstar.units import GIB, MIB, format_budget
from tests.sampling import only

# A 256th of an H200 with 128 GiB, for less than a 256th of the parameters that it is to hold: 2 MiB are more of its memory.
SMALL = {
    "device": "a 256th of an H200",
    "devices": 1,
    "device_bytes": 139 * GIB // 256,
    "context_bytes": GIB // 256,
    "host_bytes": 128 * GIB // 256,
    "disk_bytes": 0,
    "fast_16bit": ["bf16", "fp16"],
}
ON_CPU = {**SMALL, "device": "", "devices": 0, "device_bytes": 0, "context_bytes": 0, "threads": 4}


@pytest.fixture
def machine(tmp_path):
    def write(**changed):
        path = tmp_path / "machine.json"
        path.write_text(json.dumps({**SMALL, **changed}))
        return path

    return write


@pytest.fixture
def model(tmp_path):
    """Decoders that recompute their activations; matrices of whole granules, so that chunks are filled on this scale too."""

    def write(layers, **changed):
        path = tmp_path / f"model-{layers}.json"
        shape = {"num_hidden_layers": layers, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8}
        other = {"vocab_size": 4096, "max_position_embeddings": 512, "tie_word_embeddings": True}
        path.write_text(
            json.dumps({"model_type": "llama", "gradient_checkpointing": True, **shape, **other, **changed})
        )
        return path

    return write


def plan(capsys, *arguments):
    status = main(["plan", "--json", *map(str, arguments)])
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    return status, json.loads(captured.out) if captured.out else captured.err


NAMES = ["v100-yard", "a100-superpod", "h200", "gpu-24g", "laptop-8g", "cpu"]


def test_the_presets_are_there_and_listed(capsys):
    assert list(MACHINES) == NAMES
    assert main(["machines"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]] == NAMES


def test_platforms_have_what_the_paper_says_of_them():
    yard, superpod = MACHINES["v100-yard"], MACHINES["a100-superpod"]
    assert (yard.devices, yard.device_bytes, yard.host_bytes) == (8, 32 * GIB, 240 * 10**9)
    assert (superpod.devices, superpod.device_bytes, superpod.host_bytes) == (8, 40 * GIB, 10**12)


@pytest.mark.parametrize("name", NAMES)
def test_a_node_has_figures_for_what_it_has_and_none_for_what_it_has_not(name):
    machine = MACHINES[name]
    assert machine.host_bytes > machine.device_bytes / 2
    has_device = [bool(v) for v in (machine.devices, machine.device_bytes, machine.fast_16bit, machine.link)]
    assert len(set(has_device)) == 1
    assert (machine.disk_bytes > 0) == (machine.disk_read > 0)
    with pytest.raises(FrozenInstanceError):
        machine.link = 0


EXACT = {"in_backward": ("--step", "in_backward"), "deferred and clipped": ("--clip", 1)}


@pytest.mark.parametrize("step", ["in_backward", pytest.param("deferred and clipped", marks=pytest.mark.campaign)])
def test_model_data_fills_the_device_and_the_host_together(step, machine, model, capsys):
    common = ["--machine", machine(), "--batch-size", 1, "--seq-len", 64, *EXACT[step]]
    status, row = plan(capsys, *common, "--model", model(4))
    assert (status, row["fits"], row["precision"], row["device"]) == (0, True, "bf16", "cuda:0")
    assert row["budget"] == {
        "device": int((SMALL["device_bytes"] - SMALL["context_bytes"]) * 0.9),
        "host": int(SMALL["host_bytes"] * 0.8),
    }
    per_parameter = {"in_backward": 12, "deferred and clipped": 14}[step]
    assert row["model_data_bytes"] == per_parameter * row["parameters"] > 1.6 * row["budget"]["host"]
    peak = row["predicted"]["peak"]
    assert all(peak[tier] <= row["budget"][tier] for tier in ("device", "host"))
    assert peak["device"] + peak["host"] > row["model_data_bytes"]
    assert peak["device"] > 0.9 * row["budget"]["device"]
    # The smallest budgets, each with the other as it is, and a granule less.
    for tier, other in (("device", "host"), ("host", "device")):
        flags = [f"--{other}-memory", row["budget"][other], f"--{tier}-memory"]
        assert plan(capsys, *common, "--model", model(4), *flags, row["minimum"][tier])[0] == 0
        less = row["minimum"][tier] - (2 * MIB if tier == "device" else 64 * MIB)
        assert plan(capsys, *common, "--model", model(4), *flags, less)[0] == 3


def test_what_no_tiers_hold_together_is_refused_with_what_would_do(machine, model, capsys):
    status, row = plan(capsys, "--machine", machine(), "--model", model(6), "--step", "in_backward", "--seq-len", 64)
    assert (status, row["fits"]) == (3, False)
    assert row["budget"]["host"] < row["minimum"]["host"] < SMALL["host_bytes"] * 1.3
    assert "host memory is" in row["refusal"]
    assert f"fits with: host_memory >= {format_budget(row['minimum']['host'])}  |" in row["refusal"]


def test_updates_in_16_bits_are_done_where_a_gpu_computes(machine, model, capsys):
    """Their states cross the link; in fp32, which the host updates as fast, gradients and weights do."""
    has, down = machine(host_bytes=8 * GIB), {}
    for precision, itemsize in (("fp32", 4), ("bf16", 2)):
        flags = ["--precision", precision, "--device-memory", "500MiB"]
        _, row = plan(capsys, "--machine", has, "--model", model(6), "--seq-len", 64, *flags)
        down[precision] = row["predicted"]["moved"]["D>H"] / (itemsize * row["parameters"])
    assert down["fp32"] < 1.1
    assert down["bf16"] > 3


def test_slots_of_a_device_are_whole_granules(machine, model):
    from patrickstar.cli.models import ModelSource
    from patrickstar.cli.predict import predict

    built = ModelSource.find(str(model(2))).build_on_meta()
    for name, itemsize in (("bf16", 2), ("fp32", 4)):
        chosen = check_arguments(precision=name)
        for device, granule in ((None, 2 * MIB), ("emulated", 4096)):
            memory = check_arguments(precision=name, device=device)
            has = MachineSource.find(str(machine())).resources(memory)
            found = predict(built, batch_size=1, seq_len=32, clip=False, arguments=chosen, has=has)
            assert found.layout.chunk_numel * itemsize % granule == 0
            assert (found.layout.chunk_numel * itemsize % (2 * MIB) == 0) is (device is None)


@pytest.mark.parametrize("name", only(["h200", "cpu"], MACHINES))
def test_every_machine_of_the_table_is_planned_for(name, model, capsys):
    status, row = plan(capsys, "--machine", name, "--model", model(1), "--seq-len", 32)
    assert (status, row["machine"]) == (0, name)
    figures = MACHINES[name]
    assert row["device"] == ("cuda:0" if figures.devices else "cpu")
    assert row["precision"] == {"v100-yard": "fp16", "cpu": "fp32"}.get(name, "bf16")
    assert row["budget"]["host"] == int(figures.host_bytes * 0.8)
    assert main(["plan", "--machine", name, "--model", str(model(1)), "--seq-len", "32"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"machine {name}: ")
    assert "nothing of it was run there" in out
    alone = f"one rank, alone on the node: 1 of its {figures.devices} devices, and all of its host memory"
    assert (alone in out) is (figures.devices > 1)
    assert ("for the driver and CUDA's context" in out) is (figures.devices > 0)
    # What is left for workspaces is what a session there leaves.
    found = MachineSource.find(name)
    assert figures.workspace_percent == (GPU_WORKSPACE_PERCENT if figures.devices else 0)
    assert found.resources(check_arguments(device="emulated")).workspace_percent == 0
    flags = ["--machine", name, "--model", str(model(1)), "--seq-len", "32"]
    if figures.devices:
        assert main(["plan", *flags, "--device-memory", "4GiB"]) == 0
        assert "fixed costs (workspaces of kernels) 256.00 MiB, budget 4.00 GiB" in capsys.readouterr().out


def test_fp16_is_no_default_of_a_step_that_it_cannot_take(model, capsys):
    common = ["--machine", "v100-yard", "--model", model(1), "--seq-len", 32, "--step", "in_backward"]
    assert plan(capsys, *common)[1]["precision"] == "fp32"
    assert plan(capsys, *common, "--precision", "fp16")[0] == 2


def test_sizes_are_shares_of_that_machine(machine, model, capsys):
    flags = ["--device-memory", "50%", "--host-memory", "25%"]
    _, row = plan(capsys, "--machine", machine(), "--model", model(1), "--seq-len", 32, *flags)
    assert row["budget"] == {"device": SMALL["device_bytes"] // 2, "host": SMALL["host_bytes"] // 4}


def test_a_disk_is_that_machine_s(machine, model, capsys, tmp_path):
    has = machine(disk_bytes=10 * GIB)
    common = ["--machine", has, "--model", model(6), "--seq-len", 64, "--disk", tmp_path / "nowhere" / "scratch"]
    status, row = plan(capsys, *common)
    assert (status, row["budget"]["disk"]) == (0, 9 * GIB)
    assert row["predicted"]["peak"]["disk"] > 0
    assert plan(capsys, *common, "--disk-memory", "11GiB")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--device-memory", "150GiB"], "--device-memory 150.00 GiB with --machine h200: it has 139.00 GiB"),
        (["--host-memory", "129GiB"], "--host-memory 129.00 GiB with --machine h200: it has 128.00 GiB"),
        (["--device", "cuda:1"], "--device cuda:1 with --machine h200: it has 1 CUDA device"),
        (["--device", "cpu"], "do not say how many threads compute"),
        (["--machine", "cpu", "--device", "cuda"], "it has no CUDA device"),
        (["--machine", "cpu", "--device-memory", "1GiB"], "there is no device tier"),
        (["--machine", "v100-yard", "--disk", "scratch"], "its figures have no disk"),
        (["--machine", "h2000"], 'did you mean "h200"?'),
        (["--machine", "no/such/file"], "no such file"),
        (["--machine", "machine.json"], "no such file"),
    ],
)
def test_what_a_machine_has_not_is_refused(arguments, why, model, capsys):
    status, err = plan(capsys, "--machine", "h200", "--model", model(1), "--seq-len", 32, *arguments)
    assert status == 2
    assert why in err


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"devices": -1}, "devices=-1: expected a whole number of 0 or more"),
        ({"host_bytes": True}, "host_bytes=True"),
        ({"host_bytes": 0}, "every machine has host memory"),
        ({"link": "fast"}, "link='fast': expected a finite number of 0 or more"),
        ({"context_bytes": GIB}, "nothing is left of device_bytes"),
        ({"workspace_percent": 100}, "nothing is left of a device's budget"),
        ({"fast_16bit": ["fp8"]}, "expected a list of bf16 and fp16"),
        ({"device": 3}, "expected the name of the accelerator"),
        ({"host_byte": 3}, 'there is no such figure; did you mean "host_bytes"?'),
        ({"devices": 0, "device_bytes": 0, "context_bytes": 0}, "say on how many threads"),
        (b"{", "not JSON"),
        (b"[]", "expected a JSON object"),
        (b"\xff", "not JSON"),
    ],
)
def test_absurd_figures_and_other_files_are_refused_by_name(changed, why, machine, model, capsys):
    path = machine(**changed if isinstance(changed, dict) else {})
    if isinstance(changed, bytes):
        path.write_bytes(changed)
    status, err = plan(capsys, "--machine", path, "--model", model(1))
    assert status == 1
    assert err.startswith(f"patrickstar: MachineError: --machine {path}: ")
    assert why in err


def test_a_file_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "h200.json"
    write_machine(MACHINES["h200"], path)
    assert MachineSource.find(str(path)).figures == MACHINES["h200"]


def test_doctor_writes_the_figures_of_this_machine(tmp_path, model, capsys):
    path = tmp_path / "here.json"
    assert main(["doctor", "--measure", str(path)]) == 0
    assert "speeds are not measured yet" in capsys.readouterr().out
    figures = MachineSource.find(str(path)).figures
    assert figures.host_bytes > 0
    assert figures.threads > 0
    assert "matmul_16bit" not in json.loads(path.read_text())
    assert asdict(figures)["link"] == 0
    status, row = plan(capsys, "--machine", path, "--model", model(1), "--seq-len", 32, "--device", "cpu")
    assert (status, row["device"]) == (0, "cpu")
    assert main(["doctor", "--measure", str(tmp_path / "no" / "directory.json")]) == 1


def test_a_host_alone_has_the_fixed_costs_of_its_threads(machine, model, capsys):
    """The floor of a budget, below which fixed costs are not counted, is that machine's: 240 MiB and 8 MiB a thread."""
    path = machine(**ON_CPU)
    common = ["--machine", path, "--model", model(2), "--seq-len", 32, "--host-memory"]
    assert plan(capsys, *common, 280 * MIB)[1]["budget"] == {"host": 280 * MIB}
    few = [plan(capsys, *common, 272 * MIB)[1]["minimum"]["host"]]
    path.write_text(json.dumps({**ON_CPU, "threads": 1}))
    assert few[0] == plan(capsys, *common, 272 * MIB)[1]["minimum"]["host"]


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("shape", "batch_size", "step", "status"),
    [
        ((40, 6144, 16), 2, "in_backward", 0),
        ((90, 4096, 16), 1, "in_backward", 0),
        ((78, 4096, 16), 1, "deferred and clipped", 0),
        ((45, 6144, 16), 1, "in_backward", 3),
    ],
    ids=["18.5B", "18.3B in 90 layers", "15.9B", "20.7B"],
)
def test_an_h200_with_128_gib_holds_18b_exact_and_15b_clipped(shape, batch_size, step, status, tmp_path, capsys):
    model = tmp_path / "gpt.json"
    settings = Shape(*shape, positions=4096).settings()  # of the original's table, for longer sequences
    model.write_text(json.dumps({**settings, "gradient_checkpointing": True}))
    flags = ["--batch-size", batch_size, "--seq-len", 4096, *EXACT[step]]
    found, row = plan(capsys, "--machine", "h200", "--model", model, *flags)
    assert found == status, row.get("refusal")
    assert row["parameters"] > {0: 15e9 if step != "in_backward" else 18e9, 3: 20e9}[status]
    if status == 0:
        assert all(row["predicted"]["peak"][tier] <= row["budget"][tier] for tier in ("device", "host"))
        assert row["minimum"]["device"] <= row["budget"]["device"]
        assert row["minimum"]["host"] <= row["budget"]["host"]
    else:
        assert row["minimum"]["host"] > row["budget"]["host"]
