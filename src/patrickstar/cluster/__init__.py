"""Scheduling of elastic jobs: policies as pure functions, and a simulation that asks them. Neither torch nor a clock.

    workload, Cluster ── simulate(policy) ──> Outcome ──> figures, report

A policy sees jobs as `JobView`s and says what each holds as `Allocation`s; the same functions decide over jobs that run.
"""

from patrickstar.cluster.job_view import Allocation, Cluster, JobView, Policy, Speed

__all__ = ["Allocation", "Cluster", "JobView", "Policy", "Speed"]
