"""Draft trees against brute force: ancestors by walking up, paths by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specmemo_kernels.forward.batch import chunk_batch, tree_batch
from specmemo_kernels.tree.draft_tree import DraftTree


@st.composite
def trees(draw: st.DrawFn, largest: int = 130) -> DraftTree:
    """Random parents; siblings have different ranks, in any order."""
    size = draw(st.integers(1, largest))
    reach = draw(st.sampled_from([1, 3, 200]))
    parents, ranks, taken = [-1], [0], set()
    for node in range(1, size):
        parent = draw(st.integers(max(0, node - reach), node - 1))
        rank = draw(st.integers(0, 3))
        while (parent, rank) in taken:
            rank += 1
        taken.add((parent, rank))
        parents.append(parent)
        ranks.append(rank)
    return DraftTree(tuple(parents), tuple(ranks))


def ancestors(tree: DraftTree, node: int) -> set[int]:
    found = set()
    while node >= 0:
        found.add(node)
        node = tree.parents[node]
    return found


@settings(max_examples=60, deadline=None)
@given(trees())
def test_mask_is_the_ancestors(tree: DraftTree) -> None:
    """Bit j of row i (also beyond bit 63) is set if j is i or an ancestor of i; depth counts the ancestors."""
    assert tree.mask.shape == (tree.size, (tree.size + 63) // 64)
    assert tree.mask.dtype == torch.int64
    for node, row in enumerate(tree.mask.tolist()):
        number = sum((word % 2**64) << (64 * place) for place, word in enumerate(row))
        assert {j for j in range(number.bit_length()) if number >> j & 1} == ancestors(tree, node)
        assert tree.depths[node] == len(ancestors(tree, node)) - 1
    assert tree.max_depth == max(tree.depths)
    assert tree.width == max(tree.ranks) + 1


@pytest.mark.parametrize("size", [63, 64, 65, 128, 129])
def test_chain_at_word_edges(size: int) -> None:
    """Each node of a chain sees everything before it: full words of ones, the sign bit included."""
    mask = DraftTree.chain(size - 1).mask
    seen = [[(word >> bit) & 1 for word in row for bit in range(64)] for row in mask.tolist()]
    assert seen == [[int(j <= i) for j in range(64 * mask.shape[1])] for i in range(size)]


@settings(max_examples=60, deadline=None)
@given(trees(largest=40))
def test_paths_go_round(tree: DraftTree) -> None:
    """A tree equals the tree of its rank paths, and each path extends its parent's by one rank."""
    assert DraftTree.from_paths(tree.paths) == tree
    for node in range(1, tree.size):
        parent = tree.parents[node]
        above = tree.paths[parent - 1] if parent else ()
        assert tree.paths[node - 1] == (*above, tree.ranks[node])


@settings(max_examples=60, deadline=None)
@given(trees(largest=40), st.data())
def test_pruned_is_the_first_nodes(tree: DraftTree, data: st.DataObject) -> None:
    """Every prefix is a tree; its nodes keep their ancestors."""
    size = data.draw(st.integers(1, tree.size))
    small = tree.pruned(size)
    assert (small.size, small.paths) == (size, tree.paths[: size - 1])
    assert torch.equal(small.mask, tree.mask[:size, : small.mask.shape[1]])


@settings(max_examples=60, deadline=None)
@given(trees(largest=40), st.integers(0, 12))
def test_truncated_keeps_shallow_nodes(tree: DraftTree, depth: int) -> None:
    """Exactly the paths of at most ``depth``, in order."""
    assert tree.truncated(depth).paths == tuple(path for path in tree.paths if len(path) <= depth)


def test_medusa_paths() -> None:
    """``[0, 2]`` is head 1's third guess under head 0's best."""
    tree = DraftTree.from_paths([[0], [1], [0, 2], [1, 0], [0, 2, 1]])
    assert tree.parents == (-1, 0, 0, 1, 2, 3)
    assert tree.ranks == (0, 0, 1, 2, 0, 1)
    assert tree.depths == (0, 1, 1, 2, 2, 3)
    assert tree.mask.flatten().tolist() == [0b1, 0b11, 0b101, 0b1011, 0b10101, 0b101011]


def test_chain_of_nothing_is_decoding() -> None:
    tree = DraftTree.chain(0)
    assert (tree.size, tree.max_depth, tree.parents, tree.paths) == (1, 0, (-1,), ())


def test_refusals() -> None:
    """Each message has the wrong node or path."""
    with pytest.raises(ValueError, match="got 0 parents, 0 ranks"):
        DraftTree((), ())
    with pytest.raises(ValueError, match="got 2 parents, 1 ranks"):
        DraftTree((-1, 0), (0,))
    with pytest.raises(ValueError, match="node 0 has parent 0"):
        DraftTree((0, 0), (0, 0))
    for parent in (-1, 1, 2):
        with pytest.raises(ValueError, match=f"node 1 has parent {parent}"):
            DraftTree((-1, parent, 0), (0, 0, 0))
    with pytest.raises(ValueError, match="node 2 has rank -1"):
        DraftTree((-1, 0, 0), (0, 0, -1))
    with pytest.raises(ValueError, match=r"path \[0, 1\] must come after its parent \[0\]"):
        DraftTree.from_paths([[0, 1], [0]])
    with pytest.raises(ValueError, match=r"path \[1\] is given twice"):
        DraftTree.from_paths([[0], [1], [1]])
    for size in (0, 4):
        with pytest.raises(ValueError, match=f"can't prune a tree of 3 nodes to {size}; size must be from 1 to 3"):
            DraftTree.chain(2).pruned(size)


@settings(max_examples=30, deadline=None)
@given(trees(largest=70), st.lists(st.integers(0, 90), min_size=1, max_size=4))
def test_tree_batch_packs_sequences(tree: DraftTree, lengths: list[int]) -> None:
    """Positions are length + depth; each sequence's rows are its whole tree; drafts keep their order."""
    drafts = torch.arange(len(lengths) * tree.size).reshape(len(lengths), tree.size)
    table = torch.zeros(len(lengths), 3, dtype=torch.int32)
    batch = tree_batch(tree, drafts, torch.tensor(lengths, dtype=torch.int32), table, max(lengths))
    assert batch.tokens.tolist() == list(range(drafts.numel()))
    assert batch.positions.tolist() == [length + depth for length in lengths for depth in tree.depths]
    assert batch.parents.tolist() == list(tree.parents) * len(lengths)
    assert batch.qo_indptr.tolist() == [tree.size * i for i in range(len(lengths) + 1)]
    assert batch.tree_mask.tolist() == tree.mask.tolist() * len(lengths)
    assert (batch.max_qo_len, batch.max_seq_len, batch.max_depth) == (tree.size, max(lengths), tree.max_depth)
    assert len(batch.seq_lens) == len(lengths)
    assert batch.tree_mask.is_contiguous()
    assert batch.parents.dtype == batch.qo_indptr.dtype == torch.int32


def test_chunk_batch_continues_sequences() -> None:
    chunks = [torch.tensor([7, 8, 9]), torch.tensor([5])]
    batch = chunk_batch(chunks, [4, 0], torch.zeros(2, 3, dtype=torch.int32))
    assert batch.tokens.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.qo_indptr.tolist() == [0, 3, 4]
    assert batch.seq_lens.tolist() == [4, 0]
    assert batch.parents is None
    assert batch.tree_mask is None
    assert (batch.max_qo_len, batch.max_seq_len, batch.max_depth) == (3, 4, 0)
    assert batch.qo_indptr.dtype == batch.seq_lens.dtype == torch.int32


def test_batch_moves_once() -> None:
    """Layers of one model on several devices share one copy of the metadata per device."""
    batch = chunk_batch([torch.tensor([1, 2])], [0], torch.zeros(1, 3, dtype=torch.int32))
    assert batch.to(torch.device("cpu")) is batch
    moved = batch.to(torch.device("meta"))
    assert moved is batch.to(torch.device("meta"))
    assert moved.max_qo_len == 2
    assert moved.tree_mask is None
    assert {x.device.type for x in vars(moved).values() if isinstance(x, torch.Tensor)} == {"meta"}
