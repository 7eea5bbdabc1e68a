"""The parts of ``make bench-comm`` that measure nothing: what it reads, compares and demands."""

from __future__ import annotations

import pytest

from benches.communication import figures, ucx_perftest
from benches.communication.figures import KIB, MIB, Bar, Measured
from benches.communication.idle import idle_share

PRINTED = """\
[1795304341.839689] [vm:20742:0]          ucp_ep.c:636  UCX  WARN a warning of eight words is no line of it
+--------------+--------------+------------------------------+---------------------+-----------------------+
|              |              |        latency (usec)        |   bandwidth (MB/s)  |  message rate (msg/s) |
|     Test     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
+--------------+--------------+----------+---------+---------+----------+----------+-----------+-----------+
tag_latency                      10000      0.401     0.790     0.810       77.24      76.00     1265517     1265517
am_stream                          200      0.150  2556.931  2557.000     1000.00    2000.00         391         391
"""


def test_lines_of_ucx_perftest_are_read_and_its_headings_and_warnings_are_not() -> None:
    found = ucx_perftest.parse(PRINTED)
    assert set(found) == {"tag_latency", "am_stream"}
    assert found["tag_latency"].microseconds == 0.401  # the median
    assert found["am_stream"].gigabytes_per_second == pytest.approx(2000 * 2**20 / 1e9)  # the whole test's


def test_the_median_of_the_spinning_ping_pong_is_read() -> None:
    printed = """\
 spinning        64 B one way  best    0.70 us, median    0.90 us
 spinning      4096 B one way  best    1.20 us, median    1.90 us
   asleep      4096 B one way  best   21.20 us, median   25.90 us
"""
    assert ucx_perftest.parse_ping_pong(printed, 4096) == 1.9
    assert ucx_perftest.parse_ping_pong(printed, 256) is None


def test_a_batch_has_every_way_as_round_trip_and_as_stream() -> None:
    for size in figures.SIZES:
        lines = ucx_perftest.batch(size, 0.1).splitlines()
        assert [line.split()[0] for line in lines] == ["tag_latency", "tag_stream", "am_latency", "am_stream"]
        assert all(f"-s {size} " in line for line in lines)


def test_medians_are_taken_over_rounds_and_the_best_setting_of_each_size_counts() -> None:
    bandwidth = Measured()
    for round_figures in ((1.0, 9.0), (100.0, 8.0), (2.0, 7.0)):
        bandwidth.add("ucx_perftest, tag, posix", 4 * MIB, round_figures[0])
        bandwidth.add("ucx_perftest, am, posix", 4 * MIB, round_figures[1])
    bandwidth.add("ucx_perftest, tag, posix", 64 * MIB, 5.0)
    bandwidth.add_best(figures.UCX_BEST, "ucx_perftest, ", "max")
    assert bandwidth.median("ucx_perftest, tag, posix", 4 * MIB) == 2.0
    assert bandwidth.median(figures.UCX_BEST, 4 * MIB) == 8.0
    assert bandwidth.median(figures.UCX_BEST, 64 * MIB) == 5.0
    assert bandwidth.median(figures.UCX_BEST, 64) is None


def measured_run() -> tuple[Measured, Measured]:
    latency, bandwidth = Measured(), Measured()
    for size in (4 * MIB, 64 * MIB):
        for path, figure in ((figures.OURS, 12.0), (figures.GLOO, 4.0), (figures.UCX_BEST, 16.0)):
            bandwidth.add(path, size, figure)
    latency.add(figures.OURS_ASLEEP, 4 * KIB, 30.0)
    latency.add(figures.GLOO_ASLEEP, 4 * KIB, 50.0)
    latency.add(figures.IN_RUST, 4 * KIB, 5.0)
    return latency, bandwidth


def test_a_run_that_reaches_its_bars_exactly_misses_none() -> None:
    compared = figures.compare(*measured_run())
    assert compared == {
        "stream64m_vs_ucx": 0.75,
        "stream4m_vs_ucx": 0.75,
        "stream64m_vs_gloo": 3.0,
        "stream4m_vs_gloo": 3.0,
        "lat4k_vs_gloo": 0.6,
        "lat4k_spin_us": 5.0,
    }
    assert figures.missed(compared, figures.BARS) == []


def test_missed_bars_are_named_and_what_was_not_measured_misses_its_bar() -> None:
    latency, bandwidth = measured_run()
    del latency.rounds[figures.IN_RUST], bandwidth.rounds[figures.UCX_BEST][4 * MIB]
    bandwidth.rounds[figures.GLOO][64 * MIB] = [8.0]
    assert figures.missed(figures.compare(latency, bandwidth), figures.BARS) == [
        "missed: stream4m_vs_ucx could not be measured, the bar is >= 0.5",
        "missed: stream64m_vs_gloo is 1.5, the bar is >= 2",
        "missed: lat4k_spin_us could not be measured, the bar is < 8",
    ]


@pytest.mark.parametrize(
    ("bar", "figure", "met"),
    [
        (Bar(">=", 2.0), 2.0, True),
        (Bar("<=", 2.0), 2.0, True),
        (Bar("<", 2.0), 2.0, False),
        (Bar(">=", 2.0), 1.9, False),
    ],
)
def test_a_bar_says_whether_its_limit_is_allowed(bar: Bar, figure: float, met: bool) -> None:
    assert bar.is_met(figure) is met


def test_a_table_shows_a_dash_where_nothing_was_measured() -> None:
    latency, _ = measured_run()
    lines = figures.table("us", latency, [figures.MEMCPY, figures.IN_RUST], [64, 4 * KIB]).splitlines()
    assert len(lines) == 2  # a path without any figure has no row
    assert lines[1].split()[-2:] == ["-", "5.00"]


def test_the_idle_share_counts_the_communication_threads_of_the_worse_rank() -> None:
    ranks = [{"python": 0.99, "sw-read-1": 0.001, "sw-write-1": 0.002}, {"python": 0.98, "sw-read-0": 0.001}]
    assert idle_share(ranks) == pytest.approx(0.003)
