"""Workloads of the Pollux artifact, on tables in its layout of one model that is made up."""

import numpy as np
import pytest

from patrickstar.cluster.figures import seconds_with
from patrickstar.cluster.job_view import Cluster
from patrickstar.cluster.policies.greedy import pollux
from patrickstar.cluster.simulation import simulate
from patrickstar.cluster.workload import read_workload
from patrickstar.errors import ConfigError

HEADER = "name,time,application,num_replicas,batch_size"
LOCAL = (4, 8, 16)


def step_and_sync(nodes, replicas, local):
    sync = 0.0 if replicas == 1 else 0.01 * nodes
    return 0.02 + 0.01 * local + sync, sync


@pytest.fixture
def profiles(tmp_path):
    folder = tmp_path / "traces" / "toy"
    folder.mkdir(parents=True)
    rows = [(placement, local) for placement in ("1", "2", "4", "44") for local in LOCAL]
    lines = [f"{p},{local},{','.join(map(str, step_and_sync(len(p), sum(map(int, p)), local)))}" for p, local in rows]
    (folder / "placements.csv").write_text("\n".join(["placement,local_bsz,step_time,sync_time", *lines]))
    lines = [f"4,16,{local},{','.join(map(str, step_and_sync(4, 16, local)))}" for local in LOCAL]
    (folder / "scalability.csv").write_text("\n".join(["num_nodes,num_replicas,local_bsz,step_time,sync_time", *lines]))
    for batch in (8, 64):
        lines = [f"{100.0 * epoch},0,0,1.0,{noise}" for epoch, noise in ((1, 2.0), (2, 6.0))]
        (folder / f"validation-{batch}.csv").write_text(
            "\n".join(["progress,iteration,metric,grad_sqr,grad_var", *lines])
        )
    return tmp_path


def read(home, *rows, gpus=16):
    path = home / "workload.csv"
    path.write_text("\n".join([HEADER, *rows]))
    return read_workload(path, gpus=gpus, gpus_per_node=4, profiles=home)


def test_a_job_takes_the_steps_and_seconds_of_the_tables(profiles):
    (job,) = read(profiles, "a,5,toy,2,32")
    # A batch of 32 is four times the first one: an iteration is worth (2 + 1) / (2/4 + 1) = 2 in the first epoch, 7 / 2.5 in the second.
    step = 0.02 + 0.01 * 16 + 0.01
    first, second = 100 / 2 * step, 100 / (7 / 2.5) * step
    speed = job.course.at(0)
    assert (job.submit, job.gpus, job.max_gpus, job.course.work) == (5, 2, 16, 1600.0)
    assert speed.useful_per_s(2, batch=1.0) == pytest.approx(800 / first)
    assert speed.samples_per_s(2, batch=1.0) == pytest.approx(32 / step)
    assert job.course.change_after(0) == 800.0
    assert job.course.at(800.0).useful_per_s(2, batch=1.0) == pytest.approx(800 / second)
    assert [job.course.epochs(done) for done in (0, 799, 800, 1600)] == [0, 0, 1, 2]


def test_a_batch_that_a_gpu_cannot_take_at_once_is_accumulated(profiles):
    (job,) = read(profiles, "a,0,toy,1,32")
    # Two halves of 16 on one GPU, which exchanges nothing.
    assert job.course.at(0).samples_per_s(1, batch=1.0) == pytest.approx(32 / (2 * (0.02 + 0.16)))
    assert job.course.at(0).samples_per_s(16, batch=1.0) == pytest.approx(64 / sum(step_and_sync(4, 16, 4)[:1]))


def test_between_placements_of_the_tables_times_are_interpolated(profiles):
    (job,) = read(profiles, "a,0,toy,4,64")
    application = job.course.application
    three, on_three_nodes = (application.step_seconds(*where, np.array([48.0]))[0] for where in ((3, 1), (12, 3)))
    assert three == pytest.approx(0.02 + 0.16 + 0.01)
    assert on_three_nodes == pytest.approx(0.02 + 0.04 + 0.03)


def test_the_best_batch_is_better_than_others(profiles):
    (job,) = read(profiles, "a,0,toy,4,64")
    speed = job.course.at(0)
    for gpus in (1, 4, 16):
        best = speed.best_rates([gpus])[0]
        assert best == pytest.approx(speed.useful_per_s(gpus, batch=speed.best_batch(gpus)))
        assert all(best >= speed.useful_per_s(gpus, batch=k) * (1 - 1e-2) for k in np.geomspace(*speed.batches(), 20))


def test_a_simulation_goes_through_all_epochs(profiles):
    jobs = read(profiles, "a,0,toy,2,32", "b,9,toy,4,64")
    found = simulate(jobs, pollux, cluster=Cluster(gpus=16))
    for job in found.jobs:
        alone = seconds_with(job.submission.course, 16)
        assert job.finish - job.submission.submit >= alone + 30


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("a,0,tyo,2,32", "no tables for 'tyo' in {home}/traces: toy; did you mean \"toy\"?"),
        ("a,0,toy,2,128", "a batch of 128 is outside the tables of toy: 8 to 64"),
        ("a,0,toy,17,64", "17 GPUs, more than the 16"),
        ("a,0,toy,4,8", "4 GPUs are too many for a batch of 8"),
        ("a,-1,toy,2,32", "column time: -1 is out of range"),
    ],
)
def test_what_the_tables_have_not_is_named(profiles, row, says):
    with pytest.raises(ConfigError, match="line 2: column ") as error:
        read(profiles, row)
    assert says.format(home=profiles) in str(error.value)


def test_a_table_that_is_none_is_named(profiles):
    (profiles / "traces" / "toy" / "placements.csv").write_text("placement,step_time\n1,x\n")
    with pytest.raises(ConfigError, match=r"placements\.csv: not a table of the Pollux artifact"):
        read(profiles, "a,0,toy,2,32")
