"""memory/allocator.py: which allocator serves the process, and what it gives back."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from patrickstar.memory.allocator import allocator, identify, set_tcmalloc_decommit, tcmalloc_library
from tests.memory.light import run

MAPS = """\
55d0c8400000-55d0c8600000 r-xp 00000000 08:01 10 /usr/bin/python3.11
7f0000000000-7f0000100000 r-xp 00000000 08:01 11                         /usr/lib/x86_64-linux-gnu/libjemalloc.so.2
7f0000200000-7f0000300000 r-xp 00000000 08:01 12                         /usr/lib/x86_64-linux-gnu/libc.so.6
7f0000300000-7f0000400000 rw-p 00000000 00:00 0
7f0000500000-7f0000600000 r-xp 00000000 08:01 13                         /opt/my libs/libtcmalloc_minimal.so.4.5.10
7f0000700000-7f0000800000 r-xp 00000000 08:01 14                         /lib/libmimalloc.so.2.0
7f0000900000-7f0000a00000 r-xp 00000000 08:01 15                         /lib/libc-2.27.so
""".splitlines(keepends=True)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (0x7F0000000000, ("jemalloc", "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2")),
        (0x7F00002FFFFF, ("glibc", "/usr/lib/x86_64-linux-gnu/libc.so.6")),
        (0x7F0000500010, ("tcmalloc", "/opt/my libs/libtcmalloc_minimal.so.4.5.10")),
        (0x7F0000700000, ("mimalloc", "/lib/libmimalloc.so.2.0")),
        (0x7F0000900000, ("glibc", "/lib/libc-2.27.so")),
        (0x55D0C8400000, ("unknown", "/usr/bin/python3.11")),  # linked into the interpreter
        (0x7F0000300000, ("unknown", "")),
        (0x7F0000100000, ("unknown", "")),
    ],
)
def test_the_allocator_is_the_library_that_the_call_is_bound_to_not_one_that_is_mapped(address, expected):
    assert identify(MAPS, address=address) == expected


FREED = """
import ctypes, json
from patrickstar.memory import allocator as a
from patrickstar.memory.process import resident_bytes
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
library.free.argtypes = [ctypes.c_void_p]

def kept(then):
    "MiB that stay resident of 256 MiB in blocks of 256 KiB, all but a few of which are freed."
    before = resident_bytes()
    blocks = [library.malloc(ctypes.c_size_t(256 << 10)) for _ in range(1024)]
    for block in blocks:
        ctypes.memset(block, 1, 256 << 10)
    for i, block in enumerate(blocks):
        if i % 128:  # those that stay keep the heap's end where it is
            library.free(block)
    then()
    return (resident_bytes() - before) >> 20

"""


def test_a_plain_process_is_served_by_glibc_and_can_be_made_to_give_back():
    # Thresholds first: what the heap has free already is used again before the system is asked for a block.
    code = FREED + (
        "taken, returned = a.set_glibc_thresholds(), kept(lambda: None)\n"
        "library.mallopt(-3, 32 << 20)\n"  # as glibc sets it by itself once a large block was freed
        "as_is, released = kept(lambda: None), kept(a.release_free_memory)\n"
        "print(json.dumps([a.allocator().name, taken, returned, as_is, released]))"
    )
    name, taken, returned, as_is, released = json.loads(run(code, LD_PRELOAD=""))
    assert (name, taken) == ("glibc", True)
    assert returned < 16
    assert as_is > 200
    assert released < 16


def test_a_heap_with_holes_returns_what_comes_after_they_are_filled():
    code = FREED + (
        "library.mallopt(-3, 32 << 20)\n"  # blocks come from the heap, and leave holes there
        "holes = kept(lambda: None)\n"
        "a.set_glibc_thresholds()\n"
        "before = resident_bytes()\n"
        "taken = a.fill_holes() >> 20\n"
        "filled = resident_bytes() - before >> 20\n"
        "print(json.dumps([holes, taken, filled, kept(lambda: None)]))"
    )
    holes, taken, filled, returned = json.loads(run(code, LD_PRELOAD=""))
    assert min(holes, taken) > 200
    assert filled < -200
    assert returned < 16


@pytest.mark.skipif(tcmalloc_library() is None, reason="tcmalloc is not installed (Debian: libtcmalloc-minimal4)")
def test_tcmalloc_is_named_releases_and_can_be_made_to_give_back():
    library = str(tcmalloc_library())
    code = FREED + (
        "found = a.allocator()\n"
        "as_is, released, glibc = kept(lambda: None), kept(a.release_free_memory), a.set_glibc_thresholds()\n"
        "taken, returned = a.set_tcmalloc_decommit(), kept(lambda: None)\n"
        "expected = [found.retains, a.allocator().retains]\n"
        "print(json.dumps([found.name, found.library, as_is, released, glibc, taken, returned, expected]))"
    )
    name, file, as_is, released, glibc, taken, returned, expected = json.loads(run(code, LD_PRELOAD=library))
    assert (name, glibc, taken) == ("tcmalloc", False, True)
    assert Path(file).samefile(library)
    assert as_is > 128
    assert released < 16
    assert returned < 16
    assert expected[0] > expected[1] == 1


def test_what_is_expected_of_glibc_depends_on_its_thresholds():
    found = allocator()
    if found.name != "glibc":
        pytest.skip(f"runs under {found.name}")
    assert not set_tcmalloc_decommit()
    assert allocator(returning=True).retains < found.retains


def test_the_minimal_tcmalloc_is_preferred_and_the_first_directory_wins(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for file in (one / "libtcmalloc.so.4", other / "libtcmalloc_minimal.so.4", other / "libtcmalloc.so.4"):
        file.parent.mkdir(exist_ok=True)
        file.touch()
    assert tcmalloc_library([tmp_path]) is None
    assert tcmalloc_library([other]) == other / "libtcmalloc_minimal.so.4"
    assert tcmalloc_library([tmp_path, one, other]) == one / "libtcmalloc.so.4"
