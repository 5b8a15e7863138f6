"""MKL keeps one packing buffer in passes whose experts get varying numbers of rows."""

from __future__ import annotations

import random
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from specmemo_kernels.integrations.hf.library_buffers import LibraryBuffers, packed_matrices
from specmemo_kernels.planning.host_allocator import free_library_buffers, library_bytes


def facts(leaves: Any = None) -> Any:
    leaves = leaves or SimpleNamespace(max_rows=None, modules=frozenset())
    return SimpleNamespace(device=torch.device("cpu"), exact_lm_head=True, leaves=leaves)


def with_experts() -> Any:
    model = tiny_model("llama")
    model.gate_up = nn.Parameter(torch.randn(3, 2048, 512))
    model.down = nn.Parameter(torch.randn(3, 512, 1024))
    return model


def multiply(model: Any, counts: Any) -> None:
    with torch.no_grad():
        for rows in counts:
            for experts in (model.gate_up, model.down):
                nn.functional.linear(torch.ones(rows, experts.shape[-1]), experts[1])


@pytest.fixture(autouse=True)
def mkl() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    multiply(with_experts(), [32])
    if not library_bytes():
        pytest.skip("this torch has no MKL, or its products keep no buffers")
    yield
    torch.set_num_threads(threads)
    free_library_buffers()


def test_products_of_any_rows_keep_one_buffer() -> None:
    """Without the product of all rows first, each larger number of rows would add a buffer."""
    model, counts = with_experts(), range(1, 65)
    free_library_buffers()
    multiply(model, counts)
    unbounded = library_bytes()
    buffers = LibraryBuffers(model, facts())
    buffers.prepare(64)
    kept = library_bytes()
    assert 0 < kept < unbounded / 2
    for _ in range(2):
        multiply(model, random.Random(0).choices(counts, k=100))
        assert library_bytes() == kept
        free_library_buffers()  # by others
        buffers.prepare(8)
        assert library_bytes() == kept


def test_more_rows_and_other_threads_replace_it() -> None:
    buffers = LibraryBuffers(with_experts(), facts())
    buffers.prepare(16)
    few = library_bytes()
    buffers.prepare(256)
    many = library_bytes()
    assert few < many
    thread = threading.Thread(target=buffers.prepare, args=(16,))
    thread.start()
    thread.join()
    assert library_bytes() == many


def test_only_passes_with_experts_multiply_first() -> None:
    """Other matrices get all rows of a pass. Experts that operators compute aren't multiplied."""
    free_library_buffers()
    model = with_experts()
    LibraryBuffers(tiny_model("llama"), facts()).prepare(64)
    fused = SimpleNamespace(max_rows=64, modules=frozenset([model]))
    buffers = LibraryBuffers(model, facts(fused))
    buffers.prepare(64)
    assert not library_bytes()
    buffers.prepare(65)  # by torch
    assert library_bytes()


def test_the_largest_matrix_comes_first() -> None:
    """Of each shape one, without the embedding and the lm_head, which operators compute."""
    model = with_experts()
    model.convolution = nn.Conv1d(4096, 4096, 4, groups=4096)
    found = packed_matrices(model, facts(), frozenset())
    assert found[0] is model.gate_up
    assert found[1] is model.down
    assert all(matrix is not model.convolution.weight for matrix in found)
    assert len({tuple(matrix.shape) for matrix in found}) == len(found)
    assert not {id(model.lm_head.weight), id(model.model.embed_tokens.weight)} & set(map(id, found))
