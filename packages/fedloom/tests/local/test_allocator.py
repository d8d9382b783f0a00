"""Memory that is used again causes no page faults."""

from __future__ import annotations

import platform
import resource

import pytest
import torch

from fedloom.local.oracles.allocator import MAX_RETAINED_BYTES, keep_memory


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the setting")
def test_temporary_rows_of_a_chunk_are_not_fetched_anew() -> None:
    keep_memory()

    def faults() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        rows = [torch.ones(1 << 20) for _ in range(MAX_RETAINED_BYTES // 2 // (4 << 20))]
        del rows
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    assert min(faults() for _ in range(5)) < MAX_RETAINED_BYTES // 2 // 4096 / 10
