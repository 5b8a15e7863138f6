"""A fixture for tests of the C++ kernels: every instruction set of this machine, one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specmemo_kernels.backends import _cpu


@pytest.fixture(name="isa", params=_cpu.isas())
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = _cpu.isa()
    _cpu.use_isa(request.param)
    yield request.param
    _cpu.use_isa(before)
