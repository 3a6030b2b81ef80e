"""memory/cgroup.py: the limits that hold this process, in both versions, from trees written to a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.memory.cgroup import MemoryGroup, memory_groups
from patrickstar.units import GIB, MIB

V2 = "31 1 0:30 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 1 0:32 {root} /sys/fs/cgroup/memory rw shared:9 - cgroup cgroup rw,memory\n"
OTHERS = (
    "22 1 8:1 / / rw - ext4 /dev/sda1 rw\n"
    "34 1 0:31 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    "40 1 0:40 / /tmp rw - tmpfs tmpfs rw\n"
)


def groups(tmp_path: Path, own: str, mounts: str, files: dict[str, object]) -> list[tuple[str, int, int]]:
    """(directory below the mounts, limit, used) of the groups found."""
    everything = {"proc/self/cgroup": own, "proc/self/mountinfo": OTHERS + mounts, **files}
    for name, text in everything.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}".rstrip("\n") + "\n")
    found = memory_groups(root=str(tmp_path))
    return [(str(group.directory.relative_to(tmp_path)), group.limit_bytes, group.used_bytes) for group in found]


def test_version_2_from_the_own_group_up(tmp_path):
    tree = "sys/fs/cgroup"
    assert groups(
        tmp_path,
        "0::/pods/pod7/main",
        V2.format(root="/"),
        {
            f"{tree}/pods/memory.max": 8 * GIB,
            f"{tree}/pods/memory.current": 5 * GIB,
            f"{tree}/pods/pod7/memory.max": "max",
            f"{tree}/pods/pod7/memory.high": 3 * GIB,
            f"{tree}/pods/pod7/memory.current": 2 * GIB,
            f"{tree}/pods/pod7/main/memory.max": "max",
            f"{tree}/pods/pod7/main/memory.high": "max",
            f"{tree}/pods/pod7/main/memory.current": GIB,
        },
    ) == [(f"{tree}/pods/pod7", 3 * GIB, 2 * GIB), (f"{tree}/pods", 8 * GIB, 5 * GIB)]


def test_version_1_with_its_own_spelling_of_no_limit(tmp_path):
    tree = "sys/fs/cgroup/memory"
    assert groups(
        tmp_path,
        "9:name=systemd:/a\n4:cpu,memory:/docker/abc\n0::/\n",
        V1.format(root="/"),
        {
            f"{tree}/memory.limit_in_bytes": 9223372036854771712,
            f"{tree}/memory.usage_in_bytes": 20 * GIB,
            f"{tree}/docker/memory.limit_in_bytes": 6 * GIB,
            f"{tree}/docker/memory.usage_in_bytes": 4 * GIB,
            f"{tree}/docker/abc/memory.limit_in_bytes": 2 * GIB,
            f"{tree}/docker/abc/memory.usage_in_bytes": GIB,
        },
    ) == [(f"{tree}/docker/abc", 2 * GIB, GIB), (f"{tree}/docker", 6 * GIB, 4 * GIB)]


@pytest.mark.parametrize("version", [2, 1])
@pytest.mark.parametrize(
    ("source", "own"),
    [
        ("/docker/abc", "/docker/abc"),  # the mount starts at the group
        ("/docker/abc", "/"),  # a namespace that names the group its root
        ("/docker/abc", "/../other"),  # named from outside the namespace
        ("/", "/docker/abc"),  # the path is the host's, and not to be seen from here
    ],
)
def test_in_a_container_the_mount_itself_is_the_group(tmp_path, version, source, own):
    if version == 2:
        mounts, tree, stem, limit, used = V2, "sys/fs/cgroup", "0::", "memory.max", "memory.current"
    else:
        mounts, tree, stem = V1, "sys/fs/cgroup/memory", "4:memory:"
        limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
    found = groups(
        tmp_path, stem + own, mounts.format(root=source), {f"{tree}/{limit}": GIB, f"{tree}/{used}": 300 * MIB}
    )
    assert found == [(tree, GIB, 300 * MIB)]


def test_file_pages_that_can_be_dropped_do_not_count_as_used(tmp_path):
    assert groups(
        tmp_path,
        "0::/job",
        V2.format(root="/"),
        {
            "sys/fs/cgroup/job/memory.max": GIB,
            "sys/fs/cgroup/job/memory.current": 900 * MIB,
            "sys/fs/cgroup/job/memory.stat": f"anon 1\nactive_file 5\ninactive_file {600 * MIB}\n",
        },
    ) == [("sys/fs/cgroup/job", GIB, 300 * MIB)]


def test_a_mount_point_with_a_space_in_its_name(tmp_path):
    mounts = V2.format(root="/").replace("/sys/fs/cgroup", "/my\\040groups")
    files = {"my groups/job/memory.max": GIB, "my groups/job/memory.current": 0}
    assert groups(tmp_path, "0::/job", mounts, files) == [("my groups/job", GIB, 0)]


def test_a_hybrid_system_accounts_memory_in_version_1_only(tmp_path):
    mounts = V1.format(root="/") + V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified")
    tree = "sys/fs/cgroup/memory/job"
    files = {
        f"{tree}/memory.limit_in_bytes": GIB,
        f"{tree}/memory.usage_in_bytes": 0,
        "sys/fs/cgroup/unified/cgroup.procs": "",
    }
    assert groups(tmp_path, "4:memory:/job\n0::/", mounts, files) == [(tree, GIB, 0)]


def test_no_control_groups_no_limits(tmp_path):
    assert memory_groups(root=str(tmp_path)) == []


def test_a_group_over_its_limit_has_nothing_left():
    assert MemoryGroup(Path("job"), limit_bytes=5, used_bytes=9).available_bytes == 0
