"""The pool requests huge pages for its own memory only."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specmemo_kernels.cache.huge_pages import HUGE_PAGE, prefer_huge_pages
from specmemo_kernels.cache.page_order import empty_pages

MAPS = Path("/proc/self/smaps")
pytestmark = pytest.mark.skipif(
    not MAPS.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has none"
)


def _wished(address: int) -> bool:
    """Whether huge pages were requested (flag ``hg``) at this address."""
    inside = False
    for line in MAPS.read_text().splitlines():
        if bounds := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(bounds[1], 16) <= address < int(bounds[2], 16)
        elif inside and line.startswith("VmFlags"):
            return "hg" in line.split()
    raise AssertionError(f"no memory at {address:#x}")


def test_the_pool_asks() -> None:
    pages = empty_pages((2, 40, 16, 8), 128, torch.float32, torch.device("cpu"))
    start, end = pages.data_ptr(), pages.data_ptr() + pages.untyped_storage().nbytes()
    first = -(-start // HUGE_PAGE) * HUGE_PAGE
    assert first + HUGE_PAGE < end
    assert _wished(first)
    assert _wished(end // HUGE_PAGE * HUGE_PAGE - 1)
    assert not _wished(end - 1) or end % HUGE_PAGE == 0, "that huge page isn't the tensor's alone"


@pytest.mark.filterwarnings("error")
def test_small_and_other_tensors_are_left() -> None:
    """The address of a fake tensor can't be read without a warning."""
    with FakeTensorMode():
        fake = torch.empty(2**20)
    for tensor in (torch.empty(5), torch.empty(0), torch.empty(2**20, device="meta"), fake):
        prefer_huge_pages(tensor)
