import os
import signal

import pytest

from patrickstar.cli.stop import Stopped, StopSignals


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_at_once_or_while_deferring_after_the_step_and_the_second_at_once(number, status):
    said = []
    with StopSignals() as signals:
        with pytest.raises(Stopped) as stopped:
            send(number)
        assert (stopped.value.status, signals.requested) == (status, None)
        with signals.deferring(said.append):
            send(number)
            assert signals.requested == status
            assert said == ["stopping after this step; once more stops at once"]
            with pytest.raises(Stopped):
                send(signal.SIGINT)
    with StopSignals() as signals:
        with signals.deferring(print):
            pass
        with pytest.raises(Stopped):
            send(number)


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_being_stopped_is_no_error_that_code_may_swallow():
    assert not issubclass(Stopped, Exception)
