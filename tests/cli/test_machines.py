from dataclasses import FrozenInstanceError

import pytest

from patrickstar.cli.machines import MACHINES
from patrickstar.cli.main import main
from patrickstar.units import GIB

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
