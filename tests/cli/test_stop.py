import os
import signal

import pytest

from patrickstar.cli.stop import Stopped, StopSignals


def send(number):
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_nothing_is_at_stake_a_signal_stops_at_once(number, status):
    with StopSignals() as signals:
        with pytest.raises(Stopped) as stopped:
            send(number)
        assert stopped.value.status == status
        assert signals.requested is None


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_while_deferring_the_first_is_noted_and_the_second_stops_at_once(number, status):
    said = []
    with StopSignals() as signals, signals.deferring(said.append):
        send(number)
        assert signals.requested == status
        assert said == ["stopping after this step; once more stops at once"]
        with pytest.raises(Stopped):
            send(signal.SIGINT)


def test_after_deferring_a_signal_stops_at_once_again():
    with StopSignals() as signals:
        with signals.deferring(print):
            pass
        with pytest.raises(Stopped):
            send(signal.SIGTERM)


def test_the_handlers_of_before_are_back_afterwards():
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) not in before
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_being_stopped_is_no_error_that_code_may_swallow():
    assert not issubclass(Stopped, Exception)
