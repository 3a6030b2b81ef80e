"""memory/process.py: the limits that hold this process, in both versions, from trees written to a directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from patrickstar.memory.process import MemoryGroup, memory_groups
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


TREE, OLD = "sys/fs/cgroup", "sys/fs/cgroup/memory"
SYSTEMS: dict[str, tuple[str, str, dict[str, object], list[tuple[str, int, int]]]] = {
    "version 2, from the own group up": (
        "0::/pods/pod7/main",
        V2.format(root="/"),
        {
            f"{TREE}/pods/memory.max": 8 * GIB,
            f"{TREE}/pods/memory.current": 5 * GIB,
            f"{TREE}/pods/pod7/memory.max": "max",
            f"{TREE}/pods/pod7/memory.high": 3 * GIB,
            f"{TREE}/pods/pod7/memory.current": 2 * GIB,
            f"{TREE}/pods/pod7/main/memory.max": "max",
            f"{TREE}/pods/pod7/main/memory.high": "max",
            f"{TREE}/pods/pod7/main/memory.current": GIB,
        },
        [(f"{TREE}/pods/pod7", 3 * GIB, 2 * GIB), (f"{TREE}/pods", 8 * GIB, 5 * GIB)],
    ),
    "version 1, with its own spelling of no limit": (
        "9:name=systemd:/a\n4:cpu,memory:/docker/abc\n0::/\n",
        V1.format(root="/"),
        {
            f"{OLD}/memory.limit_in_bytes": 9223372036854771712,
            f"{OLD}/memory.usage_in_bytes": 20 * GIB,
            f"{OLD}/docker/memory.limit_in_bytes": 6 * GIB,
            f"{OLD}/docker/memory.usage_in_bytes": 4 * GIB,
            f"{OLD}/docker/abc/memory.limit_in_bytes": 2 * GIB,
            f"{OLD}/docker/abc/memory.usage_in_bytes": GIB,
        },
        [(f"{OLD}/docker/abc", 2 * GIB, GIB), (f"{OLD}/docker", 6 * GIB, 4 * GIB)],
    ),
    "file pages that can be dropped do not count as used": (
        "0::/job",
        V2.format(root="/"),
        {
            f"{TREE}/job/memory.max": GIB,
            f"{TREE}/job/memory.current": 900 * MIB,
            f"{TREE}/job/memory.stat": f"anon 1\nactive_file 5\ninactive_file {600 * MIB}\n",
        },
        [(f"{TREE}/job", GIB, 300 * MIB)],
    ),
    "a mount point with a space in its name": (
        "0::/job",
        V2.format(root="/").replace("/sys/fs/cgroup", "/my\\040groups"),
        {"my groups/job/memory.max": GIB, "my groups/job/memory.current": 0},
        [("my groups/job", GIB, 0)],
    ),
    "a hybrid system accounts memory in version 1 only": (
        "4:memory:/job\n0::/",
        V1.format(root="/") + V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
        {
            f"{OLD}/job/memory.limit_in_bytes": GIB,
            f"{OLD}/job/memory.usage_in_bytes": 0,
            f"{TREE}/unified/cgroup.procs": "",
        },
        [(f"{OLD}/job", GIB, 0)],
    ),
}


@pytest.mark.parametrize(("own", "mounts", "files", "want"), SYSTEMS.values(), ids=SYSTEMS)
def test_the_groups_with_a_limit_are_found(tmp_path, own, mounts, files, want):
    assert groups(tmp_path, own, mounts, files) == want


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


def test_no_control_groups_no_limits(tmp_path):
    assert memory_groups(root=str(tmp_path)) == []


def test_a_group_over_its_limit_has_nothing_left():
    assert MemoryGroup(Path("job"), limit_bytes=5, used_bytes=9).available_bytes == 0
