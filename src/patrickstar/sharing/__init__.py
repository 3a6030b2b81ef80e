"""Jobs that share the GPUs of a machine, or of a Ray cluster: policies decide over jobs that run, whose speeds are measured. No torch.

JOBS.yaml ──> Dispatcher ── policy ──> ElasticRuns ──> processes
"""
