"""Native histograms: the same values as the classic ones, read back from the text that a scraper gets."""

from __future__ import annotations

import math
import random
import re
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.samples import BucketSpan, NativeHistogram

from toque.monitor.metrics import CONTENT_TYPE, Metrics
from toque.monitor.native_histogram import native
from toque.monitor.series import PER_DOUBLING, Distribution

ACCEPT = "application/openmetrics-text;version=2.0.0;q=0.9, text/plain;version=0.0.4;q=0.3"


def buckets(histogram: NativeHistogram) -> dict[int, int]:
    """Counts by bucket, as the format's description says to read them."""
    found: dict[int, int] = {}
    deltas = iter(histogram.pos_deltas or ())
    bucket = count = 0
    for offset, length in histogram.pos_spans or ():
        bucket += offset
        for _ in range(length):
            count += next(deltas)
            found[bucket] = count
            bucket += 1
    assert not list(deltas)
    return found


@given(st.lists(st.tuples(st.floats(1e-6, 1e4), st.integers(1, 5)), max_size=40))
def test_spans_and_deltas_say_which_buckets_hold_what(values: list[tuple[float, int]]) -> None:
    distribution = Distribution((1.0,))
    slowly: Counter[int] = Counter()
    for value, times in values:
        distribution.add(value, times)
        slowly[next(i for i in range(-200, 200) if value <= 2 ** (i / PER_DOUBLING) * (1 + 1e-12))] += times
    told = native(distribution)
    found = buckets(told)
    assert sum(found.values()) == told.count_value == sum(times for _, times in values)
    for bucket in set(found) | set(slowly):  # a value on the very edge may be told in either
        near = sum(found.get(b, 0) - slowly.get(b, 0) for b in range(bucket - 1, bucket + 2))
        assert found.get(bucket, 0) == slowly.get(bucket, 0) or near == 0


def test_zero_has_a_bucket_of_its_own() -> None:
    distribution = Distribution((1.0,))
    distribution.add(0.0, 3)
    distribution.add(0.5)
    told = native(distribution)
    assert (told.zero_count, told.count_value, buckets(told)) == (3, 4, {-PER_DOUBLING: 1})


def test_nothing_has_no_buckets() -> None:
    assert native(Distribution((1.0,))).pos_spans is None


def _list(line: str, name: str) -> str:
    return line.partition(f"{name}:[")[2].partition("]")[0]


def _number(line: str, name: str) -> str:
    found = re.search(rf"[{{,]{name}:([^,}}]+)", line)
    assert found
    return found[1]


@pytest.fixture
def metrics() -> Metrics:
    made = Metrics(lambda: {})
    record = made.record("m", 0.0)
    rng = random.Random(1)
    for _ in range(500):
        record.tokens(1, rng.lognormvariate(-4, 1), 1.0)
    return made


def test_a_scraper_that_asks_gets_both_kinds_and_a_quantile_from_the_native_one(metrics: Metrics) -> None:
    text, content_type = metrics.negotiated(ACCEPT)
    assert content_type.startswith("application/openmetrics-text; version=2.0.0")
    assert "toque_inter_token_latency_seconds_bucket{" in text.decode()
    # The library's own parser does not read a negative offset, which small values have.
    (line,) = re.findall(
        r'^toque_inter_token_latency_seconds\{model="m"\} (\{.*\})$', text.decode(), re.MULTILINE
    )
    spans = [BucketSpan(*map(int, span.split(":"))) for span in _list(line, "positive_spans").split(",")]
    told = NativeHistogram(
        count_value=float(_number(line, "count")),
        sum_value=float(_number(line, "sum")),
        schema=int(_number(line, "schema")),
        zero_threshold=0,
        zero_count=float(_number(line, "zero_count")),
        pos_spans=spans,
        pos_deltas=[int(delta) for delta in _list(line, "positive_deltas").split(",")],
    )
    assert 2**told.schema == PER_DOUBLING
    rng = random.Random(1)
    exact = sorted(rng.lognormvariate(-4, 1) for _ in range(500))
    seen, median = 0, 0.0
    for bucket, count in sorted(buckets(told).items()):
        seen += count
        if seen >= 250:
            median = 2 ** (bucket / PER_DOUBLING)
            break
    assert told.count_value == 500
    assert math.isclose(told.sum_value, sum(exact), rel_tol=1e-9)
    assert exact[249] <= median <= exact[249] * 2 ** (1 / PER_DOUBLING)


@pytest.mark.parametrize("accept", ["", "text/plain", "application/openmetrics-text;version=1.0.0", "*/*"])
def test_everybody_else_gets_what_they_always_got(metrics: Metrics, accept: str) -> None:
    text, content_type = metrics.negotiated(accept)
    assert content_type == CONTENT_TYPE
    assert text == metrics.exposition()
    assert b"schema" not in text
