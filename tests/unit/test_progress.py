"""The light list of how a run went, and a process's age."""

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from extractor.run.meter import Timeline
from extractor.run.provenance import process_age


@settings(deadline=None)
@given(st.integers(0, 3000), st.floats(0.001, 100))
def test_a_timeline_stays_light_and_keeps_the_end(steps: int, pace: float):
    timeline = Timeline(most=50)
    for i in range(steps):
        timeline.note(i * pace, i, 2 * i, 0.0, 0.0, i * pace)
    points = timeline.points
    assert len(points) <= 51
    assert [p[1] for p in points] == sorted({p[1] for p in points})
    if steps:
        assert points[-1][1] == steps - 1 and points[0][1] == 0
    if steps > 200:  # evenly: no gap is much longer than the others
        gaps = [b[1] - a[1] for a, b in itertools.pairwise(points[:-1])]
        assert max(gaps) <= 4 * max(min(gaps), 1)


def test_a_process_knows_its_age() -> None:
    psutil = pytest.importorskip("psutil")
    by_psutil = time.time() - psutil.Process().create_time()
    assert process_age() == pytest.approx(by_psutil, abs=0.5)
