from __future__ import annotations

import os

import pytest

from toque.backends.cpu.machine import cpu_quota, usable_cpus


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"cpu.max": "max 100000"}, 0.0),
        ({"cpu.max": "150000 100000"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, 0.0),
        ({"cpu/cpu.cfs_quota_us": "400000", "cpu/cpu.cfs_period_us": "100000"}, 4.0),
        ({"cpu.max": "garbage"}, 0.0),
        ({}, 0.0),
    ],
)
def test_the_control_groups_quota_is_read_from_either_version(tmp_path, files, quota):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert cpu_quota(tmp_path) == quota


def test_usable_cpus_never_exceed_the_affinity_mask():
    assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
