import os

import pytest
from benchmarks.machine import describe_machine, usable_cores


@pytest.fixture(autouse=True)
def many_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))


def tree(root, own, limits):
    for name, text in {
        "proc/self/cgroup": own,
        **{f"sys/fs/cgroup/{at}": limit for at, limit in limits.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return usable_cores(root=str(root))


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 64),
        ({"job/part/cpu.max": "max 100000\n"}, 64),
        ({"job/part/cpu.max": "200000 100000\n"}, 2),
        ({"job/part/cpu.max": "150000 100000\n"}, 2),
        ({"job/part/cpu.max": "50000 100000\n"}, 1),
        ({"job/part/cpu.max": "max 100000\n", "job/cpu.max": "300000 100000\n"}, 3),
        ({"cpu.max": "400000 100000\n", "other/cpu.max": "100000 100000\n"}, 4),
        ({"job/part/cpu.max": "9900000 100000\n"}, 64),
    ],
)
def test_cores_are_those_that_control_groups_leave(tmp_path, limits, cores):
    assert tree(tmp_path, "0::/job/part\n", limits) == cores


def test_groups_of_the_first_version_are_passed_over(tmp_path):
    assert tree(tmp_path, "4:cpu,cpuacct:/job\n", {"job/cpu.max": "100000 100000\n"}) == 64


def test_a_system_without_control_groups_has_the_cores_it_has(tmp_path):
    assert usable_cores(root=str(tmp_path)) == 64


def test_a_result_says_where_it_comes_from():
    found = describe_machine()
    assert found["cores"] == usable_cores()
    assert found.keys() >= {"cpu", "memory_kib", "python", "torch", "threads", "commit"}
