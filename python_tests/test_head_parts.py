"""Parts of heads, as ranks hold them, add up to the whole."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmemo_kernels.drafting.load_heads import load_heads
from specmemo_kernels.drafting.medusa_heads import MedusaHeads, matrix_tensors
from specmemo_kernels.ops.weight_codes import packed_bytes

HIDDEN, VOCAB, HEADS = 70, 61, 3
CPU = torch.device("cpu")


def random_heads(own: bool, bits: int | None) -> MedusaHeads:
    torch.manual_seed(0)
    heads = MedusaHeads(HIDDEN, VOCAB, HEADS, num_layers=2, own_lm_head=own)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    return load_heads(heads, HIDDEN, VOCAB, head_bits=bits)


@given(st.sets(st.integers(1, VOCAB - 1), max_size=4), st.sampled_from([None, 4]))
@settings(max_examples=30, deadline=None)
def test_parts_are_the_whole(cuts: set[int], bits: int | None) -> None:
    """For any cut of the rows: matrices, or codes and scales, bit by bit; each part has all blocks."""
    whole = random_heads(True, bits)
    parts = [whole.part(first, last, CPU) for first, last in pairwise([0, *sorted(cuts), VOCAB])]
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(1))
    for head in range(HEADS):
        for index, kept in enumerate(whole.own_tensors(head)):
            if kept is not None:
                assert torch.equal(torch.cat([part.own_tensors(head)[index] for part in parts]), kept)
        assert all(torch.equal(part.features(hidden, head), whole.features(hidden, head)) for part in parts)
    if bits is None:
        blocks = HEADS * packed_bytes(2 * HIDDEN, HIDDEN)
        assert blocks + sum((part.coded_bytes() or 0) - blocks for part in parts) == whole.coded_bytes()


@pytest.mark.parametrize(("own", "bits"), [(True, None), (True, 4), (False, None), (False, 4)])
def test_a_part_leaves_the_whole_as_it_is(own: bool, bits: int | None) -> None:
    """Also on another device; truncating a part gives a part of the truncated heads."""
    whole = random_heads(own, bits)
    before = {name: tensor.clone() for name, tensor in whole.state_dict().items()}
    part = whole.part(10, 30, torch.device("meta"))
    assert {tensor.device.type for tensor in part.state_dict().values()} == {"meta"}
    matrix_tensors(whole.part(10, 30, CPU).linear(0, 0))[0].data.zero_()
    for name, tensor in whole.state_dict().items():
        assert tensor.device == CPU
        assert torch.equal(tensor, before[name])
    assert (part.num_heads, part.head_bits, part.own_lm_head) == (HEADS, bits, own)
    two = part.truncated(2)
    assert (two.num_heads, two.head_bits) == (2, bits)
    if own:
        assert two.own_tensors(1)[0].shape[0] == 20
