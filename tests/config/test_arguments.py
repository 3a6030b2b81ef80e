import dataclasses
from pathlib import Path
from unittest import mock

import pytest

from patrickstar.config.arguments import MemoryOptions, check_arguments
from patrickstar.config.kinds import unknown_argument
from patrickstar.config.options import Options
from patrickstar.errors import ConfigError


def test_the_defaults_are_those_of_the_surface():
    assert dataclasses.asdict(check_arguments()) == {
        "device": None,
        "precision": None,
        "device_memory": None,
        "host_memory": None,
        "disk": None,
        "disk_memory": None,
        "states": "exact",
        "step": "deferred",
        "max_grad_norm": None,
        "weights": None,
        "activations": "model",
        "mesh": None,
        "options": dataclasses.asdict(Options()),
    }
    assert check_arguments(options=None) == check_arguments() == MemoryOptions()


@pytest.mark.parametrize(
    "good",
    [
        *({"device": device} for device in ("cpu", "emulated", "cuda", "cuda:0", "cuda:11", None)),
        {"precision": "fp32"},
        {"device_memory": "6GiB", "host_memory": "24GiB"},
        {"device": "emulated", "device_memory": 1 << 20},
        {"device": "cpu", "host_memory": "70%"},
        {"host_memory": 4096, "device_memory": "1048576", "device": "emulated"},
        {"disk": Path("spill"), "disk_memory": "1.5GB"},
        {"step": "in_backward", "options": Options(accumulate=1)},
        {"max_grad_norm": 1.0},
        {"max_grad_norm": 0},
        {"options": Options(eviction="lru")},
    ],
)
def test_what_this_version_knows_is_taken_as_given(good):
    checked = check_arguments(**good)
    assert {name: getattr(checked, name) for name in good} == good


def test_a_directory_may_be_a_string():
    assert check_arguments(disk="/spill").disk == Path("/spill")


def test_a_torch_device_is_taken_by_its_name():
    torch = pytest.importorskip("torch")
    assert check_arguments(device=torch.device("cuda", 1)).device == "cuda:1"


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"device": "tpu"}, 'device=\'tpu\': expected "cpu", "emulated", "cuda", "cuda:1" or None'),
        ({"device": "gpu:1"}, 'did you mean "cuda"?'),
        ({"device": "emulate"}, 'did you mean "emulated"?'),
        ({"device": "cuda:"}, "device='cuda:'"),
        ({"device": "CPU"}, "device='CPU'"),
        ({"device": "cuda:01"}, "device='cuda:01'"),
        ({"device": 0}, "device=0"),
        ({"precision": "fp8"}, "precision='fp8': expected None or 'fp32' or 'bf16' or 'fp16'"),
        ({"precision": "float32"}, 'did you mean "fp32"?'),
        ({"device_memory": "6 gigs"}, "device_memory='6 gigs'"),
        ({"host_memory": "8"}, "host_memory='8': 8 bytes; 8GiB? Give the unit"),
        ({"host_memory": 0}, "host_memory=0: a budget is more than 0 bytes"),
        ({"host_memory": "101%"}, "host_memory='101%': more than the whole tier"),
        ({"disk": ""}, "disk='': expected the path of a directory"),
        ({"states": "compact"}, "states='compact': expected 'exact' ('compact' arrives in a later version)"),
        ({"states": "exakt"}, 'did you mean "exact"?'),
        ({"step": "in-backward"}, 'did you mean "in_backward"?'),
        ({"step": None}, "step=None"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0: expected a finite norm, a number of 0 or more"),
        ({"max_grad_norm": float("nan")}, "max_grad_norm=nan"),
        ({"max_grad_norm": "1"}, "max_grad_norm='1': expected a finite norm, a number"),
        ({"weights": 7}, "weights=7: expected the path of a safetensors file, or of a directory"),
        ({"activations": "recompute"}, "expected 'model' ('recompute' or 'plan' arrives in a later version)"),
        ({"activations": "modle"}, 'did you mean "model"?'),
        (
            {"mesh": mock.ANY},
            'expected a torch.distributed.DeviceMesh with the dimension "dp", or None',
        ),  # equal to everything, as arrays are to nothing
        ({"options": {"chunk_size": 1024}}, "options={'chunk_size': 1024}: expected patrickstar.Options(...)"),
        ({"devcie": "cpu"}, "no argument 'devcie'; did you mean \"device\"?"),
    ],
)
def test_a_value_that_is_not_taken_is_told_with_what_is(bad, why):
    with pytest.raises(ConfigError) as refusal:
        check_arguments(**bad)
    assert why in str(refusal.value)
    assert len(refusal.value.problems) == 1


@pytest.mark.parametrize(
    ("together", "instead"),
    [
        ({"device": "cpu", "device_memory": "6GiB"}, "give host_memory='6GiB'"),
        ({"disk_memory": "6GiB"}, "give disk, a directory"),
        ({"step": "in_backward", "max_grad_norm": 1.0}, 'use step="deferred"'),
        ({"step": "in_backward", "options": Options(accumulate=4)}, "promises one backward per step"),
        ({"device": "cpu", "options": Options(emulated_link=1)}, 'only the link of device="emulated" has a speed'),
        ({"options": Options(emulated_link=1)}, "leave it out"),
    ],
)
def test_arguments_that_do_not_go_together_are_told_with_what_to_do_instead(together, instead):
    with pytest.raises(ConfigError) as refusal:
        check_arguments(**together)
    assert instead in str(refusal.value)
    assert len(refusal.value.problems) == 1


def test_all_problems_are_told_at_once_unknown_arguments_too():
    with pytest.raises(ConfigError) as refusal:
        check_arguments(devcie="cpu", hostmemory=1, precision="fp8", disk_memory="x", step="now", options=3)
    assert "7 problems" in str(refusal.value)
    assert len(refusal.value.problems) == 7
    assert all(problem in str(refusal.value) for problem in refusal.value.problems)


def test_the_device_that_the_runtime_finds_is_checked_against_the_rest():
    asked = check_arguments(device_memory="6GiB")
    with pytest.raises(ConfigError, match="give host_memory"):
        dataclasses.replace(asked, device="cpu")


def test_an_unknown_argument_names_the_nearest_and_all_there_are():
    message = unknown_argument("hots_memory", ["host_memory", "disk"])
    assert message == (
        "there is no argument 'hots_memory'; did you mean \"host_memory\"? The arguments are disk, host_memory"
    )
    assert unknown_argument("q", ["disk"]) == "there is no argument 'q'; the arguments are disk"
