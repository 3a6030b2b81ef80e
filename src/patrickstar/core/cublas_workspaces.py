"""Workspaces of cuBLAS: memory of a CUDA device that torch gives it for each thread and stream that multiplies, and that it keeps."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from patrickstar.core.cuda_blocks import cuda_block_bytes
from patrickstar.units import KIB, MIB

__all__ = ["workspace_bytes"]

_MULTIPLYING_THREADS: Final = 2  # of forward and of backward


def workspace_bytes(environment: Mapping[str, str], *, is_hopper: bool) -> int:
    """Bytes of the blocks that cuBLAS and cuBLASLt keep for the threads of forward and backward. `environment`: of the process.

    Torch's rules (`CublasHandlePool.cpp`). cuBLAS has what `CUBLAS_WORKSPACE_CONFIG` says, eight of 4096 KiB by `:4096:8`; where it says
    nothing that can be read, 32 MiB from Hopper on, and 8 MiB and 128 KiB before. cuBLASLt has the KiB of `CUBLASLT_WORKSPACE_SIZE`, else
    1 MiB: in torch 2.11 beside the others, and in later ones a part of them, unless they are asked for apart. They count as if apart.
    """
    parts = re.findall(r":(\d+):(\d+)", environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    default = 32 * MIB if is_hopper else (2 * 4096 + 8 * 16) * KIB
    of_cublas = sum(int(size) * int(count) for size, count in parts) * KIB if parts else default
    number = re.match(r"\s*\+?(\d+)", environment.get("CUBLASLT_WORKSPACE_SIZE", ""))
    of_cublaslt = int(number[1]) * KIB if number else MIB
    return _MULTIPLYING_THREADS * (cuda_block_bytes(of_cublas) + cuda_block_bytes(of_cublaslt))
