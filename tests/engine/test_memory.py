"""Which memory counts, on file systems made for the purpose."""

from __future__ import annotations

from pathlib import Path

import pytest

from toque.engine.memory import available_bytes, total_bytes

GIB = 1 << 30


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {64 * GIB // 1024} kB\nMemAvailable: {32 * GIB // 1024} kB\n"}


def test_without_limits_the_host_decides(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, MEMINFO)) == 32 * GIB
    assert total_bytes(tmp_path) == 64 * GIB


def test_the_smallest_enclosing_cgroup_decides(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/memory.max": f"{8 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 1\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/app/memory.current": f"{2 * GIB}\n",
        },
    )
    assert available_bytes(root) == 6 * GIB  # 8 - 3, and the page cache can be dropped
    assert total_bytes(root) == 8 * GIB


def test_in_a_container_only_the_root_is_mounted(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "0::/kubepods/burstable/pod1234\n",
            "sys/fs/cgroup/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        },
    )
    assert available_bytes(root) == GIB
    assert total_bytes(root) == 2 * GIB


def test_version_one_cgroups(tmp_path: Path) -> None:
    root = machine(
        tmp_path,
        MEMINFO
        | {
            "proc/self/cgroup": "12:cpu,cpuacct:/x\n5:memory:/docker/abc\n1:name=systemd:/x\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes": f"{4 * GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.usage_in_bytes": f"{GIB}\n",
            "sys/fs/cgroup/memory/docker/abc/memory.stat": f"total_inactive_file {GIB // 2}\n",
        },
    )
    assert available_bytes(root) == 3 * GIB + GIB // 2
    assert total_bytes(root) == 4 * GIB


def test_a_limit_above_the_machine_is_none(tmp_path: Path) -> None:
    files = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{128 * GIB}\n"}
    assert total_bytes(machine(tmp_path, MEMINFO | files)) == 64 * GIB


def test_a_used_up_limit_leaves_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert available_bytes(machine(tmp_path, MEMINFO | files)) == 0


def test_a_machine_that_says_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    assert total_bytes(tmp_path) is None


def test_this_machine_has_memory() -> None:
    if not Path("/proc/meminfo").exists():
        pytest.skip("only Linux tells")
    available = available_bytes()
    assert available is not None
    assert available > 16 << 20
    total = total_bytes()
    assert total is not None
    assert total >= available
