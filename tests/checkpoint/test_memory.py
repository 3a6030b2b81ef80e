"""A checkpoint passes through a few MiB, in both directions, however large it is."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import sys, torch
from pathlib import Path
from patrickstar.checkpoint.tensors import TensorEntry
from patrickstar.checkpoint.reader import open_step
from patrickstar.checkpoint import storage

def high_water():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) << 10

def reset():
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()

MiB = 1 << 20
numel = 8 * MiB
storage.SHARD_BYTES = 50 * MiB
slot = torch.zeros(MiB)

def read(name):
    for number in range(numel // slot.numel()):
        yield slot.fill_(number)

directory = Path(sys.argv[1])
for size in (1024, numel):  # the small one first: imports and threads are not what is measured
    entries = [TensorEntry(name, torch.float32, (size,)) for name in ("a", "b")]
    before = reset()
    storage.write_step(directory, 1, entries=entries, read=read if size == numel else lambda name: [torch.zeros(size)],
                       parameters={"a": (size,), "b": (size,)})
    written = high_water() - before
    before = reset()
    with open_step(directory) as reader:
        reader.verify()
        verified = high_water() - before
        before = reset()
        for name in reader.spans:
            for number, piece in enumerate(reader.pieces(name, MiB)):
                assert piece[0] == number and piece[-1] == number
        read_back = high_water() - before
print(written, verified, read_back)
"""


def test_64_mib_are_written_verified_and_read_in_a_few(tmp_path):
    # Every block goes back to the system when it is freed: what glibc keeps on its heap differs by chance, by 4 MiB and more.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    written, verified, read_back = map(int, done.stdout.split())
    # Two blocks of 4 MiB; two blocks of 4 MiB; two pieces of 4 MiB. And what is smaller.
    assert max(written, verified, read_back) < 10 << 20, done.stdout
