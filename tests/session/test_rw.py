import pytest
from collections import Counter
from hypothesis import HealthCheck, given, settings
from tests.session.test_random_programs import programs, compare
from dataclasses import replace
@pytest.mark.whole
def test_w():
    ends=Counter()
    @settings(max_examples=250, suppress_health_check=list(HealthCheck))
    @given(programs())
    def f(program):
        end=compare(replace(program, budget="roomy", in_backward=False))
        ends[end]+=1
    f()
    print(ends.most_common(60))
    assert 0
