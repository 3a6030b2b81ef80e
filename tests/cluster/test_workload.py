"""Traces as they are read, and what is said of those that cannot be."""

import pytest

from patrickstar.cluster.workload import read_workload
from patrickstar.errors import ConfigError

HEADER = "job,submit,gpus,duration"
GOOD = "a,0,2,100"


def read(tmp_path, *lines, gpus=8, profiles=None):
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(lines) + "\n" if lines else "")
    return read_workload(path, gpus=gpus, gpus_per_node=4, profiles=profiles)


def test_columns_may_come_in_any_order_and_optional_ones_have_defaults(tmp_path):
    (job,) = read(tmp_path, "duration,user,job,gpus,submit", "100,ada,a,2,7.5")
    speed = job.course
    assert (job.name, job.submit, job.gpus, job.min_gpus, job.max_gpus) == ("a", 7.5, 2, 1, 8)
    assert (speed.duration, speed.serial, speed.noise, speed.grow) == (100, 0.05, 0, 1)
    assert (job.course.n_epochs, job.user, job.priority) == (10, "ada", 0)


def test_empty_cells_and_blank_lines_are_as_if_they_were_not_there(tmp_path):
    (job,) = read(tmp_path, HEADER + ",max_gpus,priority", "", GOOD + ",,", "")
    assert (job.max_gpus, job.priority) == (8, 0)
    (job,) = read(tmp_path, HEADER + ",max_gpus,priority", GOOD + ",100,-3")
    assert (job.max_gpus, job.priority) == (8, -3)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], "line 1: empty"),
        ([HEADER], "line 2: no job"),
        (["job,submit,gpus", "a,0,2"], "line 1: no column 'duration'"),
        (
            ["job,submit,gpus,dutation", GOOD],
            "line 1: no column 'duration'; 'dutation' is there: did you mean \"duration\"?",
        ),
        ([HEADER + ",nois", GOOD + ",1"], "line 1: column 'nois' is none of"),
        ([HEADER + ",nois", GOOD + ",1"], 'did you mean "noise"?'),
        ([HEADER + ",job", GOOD + ",b"], "line 1: column 'job' is there twice"),
        ([HEADER, GOOD, "b,0,two,100"], "line 3: column gpus: 'two' is no number"),
        ([HEADER, "a,0,2.5,100"], "line 2: column gpus: '2.5' is no whole number"),
        ([HEADER, "a,0,2,nan"], "line 2: column duration: 'nan' is no finite number"),
        ([HEADER, "a,0,2,1e13"], "line 2: column duration: '1e13' is no finite number up to 1e+12"),
        ([HEADER, "a,0,2,1e9"], "line 2: column duration: 1e9 is out of range: above 0, at most 1e+08"),
        ([HEADER, "a,0,2,inf"], "line 2: column duration: 'inf' is no finite number"),
        ([HEADER, "a,-1,2,100"], "line 2: column submit: -1 is out of range: at least 0"),
        ([HEADER, "a,0,2,0"], "line 2: column duration: 0 is out of range: above 0"),
        ([HEADER, "a,0,0,100"], "line 2: column gpus: 0 is out of range: at least 1"),
        ([HEADER, "a,0,,100"], "line 2: column gpus: nothing there"),
        ([HEADER, ",0,1,100"], "line 2: column job: a job without a name"),
        ([HEADER, GOOD, "", "a,5,1,100"], "line 4: column job: 'a' is there twice, first in line 2"),
        ([HEADER, "a,0,9,100"], "line 2: column gpus: 9 GPUs, more than the 8 that there are (--gpus)"),
        ([HEADER, "a,0,2"], "line 2: 3 cells under 4 columns"),
        ([HEADER + ",min_gpus", GOOD + ",3"], "line 2: column gpus: 2 is not between min_gpus 3 and max_gpus 8"),
        ([HEADER + ",min_gpus,max_gpus", GOOD + ",2,1"], "line 2: column max_gpus: 1 is out of range: at least 2"),
        ([HEADER + ",serial", GOOD + ",1.5"], "line 2: column serial: 1.5 is out of range: at least 0, at most 1"),
        ([HEADER + ",grow", GOOD + ",0.5"], "line 2: column grow: 0.5 is out of range: at least 1"),
        ([HEADER + ",epochs", GOOD + ",0"], "line 2: column epochs: 0 is out of range"),
        (["name,time,application,num_replicas,batch_size", "a,0,bert,1,12"], "give its tables by --profiles DIR"),
    ],
)
def test_what_cannot_be_read_is_named_with_its_line_and_column(tmp_path, lines, says):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, *lines)
    assert f"{tmp_path / 'trace.csv'}: line " in str(error.value)
    assert says in str(error.value)


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "trace.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(ConfigError, match="cannot be read as a CSV"):
        read_workload(tmp_path / "trace.csv", gpus=8, gpus_per_node=4)
    with pytest.raises(ConfigError, match="cannot be read as a CSV"):
        read_workload(tmp_path / "none.csv", gpus=8, gpus_per_node=4)
