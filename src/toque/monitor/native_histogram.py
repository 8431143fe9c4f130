"""A distribution as Prometheus' native histograms have it: counts in buckets of a fixed growth, only those in use."""

from __future__ import annotations

from prometheus_client.samples import BucketSpan, NativeHistogram

from toque.monitor.series import SCHEMA, Distribution


def native(values: Distribution) -> NativeHistogram:
    spans: list[BucketSpan] = []
    deltas: list[int] = []
    last, before = None, 0
    for bucket in sorted(values.sparse):
        count = values.sparse[bucket]
        deltas.append(count - before)
        before = count
        if last is not None and bucket == last + 1:
            spans[-1] = BucketSpan(spans[-1].offset, spans[-1].length + 1)
        else:  # after a gap; the first span's offset counts from bucket 0
            spans.append(BucketSpan(bucket - (0 if last is None else last + 1), 1))
        last = bucket
    return NativeHistogram(
        count_value=sum(values.counts),
        sum_value=values.sum,
        schema=SCHEMA,
        zero_threshold=0.0,
        zero_count=values.zeros,
        pos_spans=spans or None,
        pos_deltas=deltas or None,
    )
