"""Jobs that share the GPUs of one machine: policies decide over jobs that run, whose speeds are measured. No torch.

JOBS.yaml ──> Dispatcher ── policy ──> JobRunner ──> processes
"""
