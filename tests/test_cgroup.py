"""Limits of control groups, from trees of files such as the kernel shows them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain_ray.cgroup import Room, memory_room

GIB = 1 << 30


def member(root: Path, *lines: str) -> None:
    """The process is in these groups."""
    path = root / "proc" / "self" / "cgroup"
    path.parent.mkdir(parents=True)
    path.write_text("".join(f"{line}\n" for line in lines))


def group(root: Path, path: str, limit: int | str, usage: int, inactive_file: int = 0) -> None:
    """A group of version 2."""
    directory = root / "sys/fs/cgroup" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.max").write_text(f"{limit}\n")
    (directory / "memory.current").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"anon 1\nfile {usage}\ninactive_file {inactive_file}\nactive_file 7\n")


def group_v1(root: Path, path: str, limit: int, usage: int, inactive_file: int = 0) -> None:
    """A group of version 1, whose own figures leave out those of its children."""
    directory = root / "sys/fs/cgroup/memory" / path
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (directory / "memory.usage_in_bytes").write_text(f"{usage}\n")
    (directory / "memory.stat").write_text(f"inactive_file 5\ntotal_inactive_file {inactive_file}\n")


V1_UNLIMITED = 9223372036854771712


def test_the_level_that_leaves_least_counts(tmp_path: Path) -> None:
    member(tmp_path, "0::/batch.slice/job-7/task")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)  # the root of version 2 has no such files
    group(tmp_path, "batch.slice", 64 * GIB, 20 * GIB)
    group(tmp_path, "batch.slice/job-7", 16 * GIB, 10 * GIB)
    group(tmp_path, "batch.slice/job-7/task", 12 * GIB, 2 * GIB)
    group(tmp_path, "batch.slice/job-8", GIB, GIB)  # of others
    assert memory_room(tmp_path) == Room(6 * GIB, 16 * GIB)
    group(tmp_path, "batch.slice/job-7/task", 3 * GIB, 2 * GIB)
    assert memory_room(tmp_path) == Room(GIB, 3 * GIB)
    group(tmp_path, "batch.slice/job-7/task", 3 * GIB, 3 * GIB + 4096)
    assert memory_room(tmp_path) == Room(0, 3 * GIB)


def test_version_1(tmp_path: Path) -> None:
    member(tmp_path, "5:cpu,cpuacct:/elsewhere", "4:hugetlb,memory:/jobs/a:b", "1:name=systemd:/", "0::/")
    group_v1(tmp_path, "", V1_UNLIMITED, 30 * GIB)
    group_v1(tmp_path, "elsewhere", GIB, GIB)
    group_v1(tmp_path, "jobs", 8 * GIB, 5 * GIB, GIB)
    group_v1(tmp_path, "jobs/a:b", 6 * GIB, GIB)
    assert memory_room(tmp_path) == Room(4 * GIB, 8 * GIB)


def test_files_that_the_kernel_would_drop_are_not_used_memory(tmp_path: Path) -> None:
    member(tmp_path, "0::/job")
    group(tmp_path, "job", 8 * GIB, 7 * GIB, inactive_file=5 * GIB)
    assert memory_room(tmp_path) == Room(6 * GIB, 8 * GIB)
    (tmp_path / "sys/fs/cgroup/job/memory.stat").unlink()
    assert memory_room(tmp_path) == Room(GIB, 8 * GIB)


def test_no_limit(tmp_path: Path) -> None:
    assert memory_room(tmp_path) is None  # no control groups at all
    member(tmp_path, "4:memory:/job", "0::/job")
    assert memory_room(tmp_path) is None
    group(tmp_path, "job", "max", GIB)
    group_v1(tmp_path, "job", V1_UNLIMITED, GIB)
    assert memory_room(tmp_path) is None
    group(tmp_path, "", 4 * GIB, GIB)  # levels without a limit hide none
    assert memory_room(tmp_path) == Room(3 * GIB, 4 * GIB)


@pytest.mark.parametrize("path", ["/docker/0123abcd", "/../../user.slice"])
def test_a_container_may_see_its_own_group_at_the_root_only(tmp_path: Path, path: str) -> None:
    member(tmp_path, f"4:memory:{path}", f"0::{path}")
    group_v1(tmp_path, "", 2 * GIB, GIB, GIB // 2)
    assert memory_room(tmp_path) == Room(3 * GIB // 2, 2 * GIB)
    group(tmp_path, "", GIB, GIB // 2)
    assert memory_room(tmp_path) == Room(GIB // 2, GIB)
