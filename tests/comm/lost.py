"""A program of which one rank stops inside a gather, and the other one ends with an error that nobody catches: `-m tests.comm.lost STORE RANK`."""

import sys

import torch
import torch.distributed as dist

from tests.comm.programs import all_there, ends_inside
from tests.ranks import stop_me

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
made = all_there(timeout_s=1.0)  # of ours: what torch has under way waits ten minutes
ends_inside(made, stop_me, is_me=rank == 1)
made.gather(torch.zeros(2), torch.zeros(1), "block 3").wait()
