"""One forward pass of recurrent and convolution layers over packed rows: accepted rows, trees, prompt chunks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from specmemo_kernels.cache.state_pool import StatePool
from specmemo_kernels.forward.batch import TreeBatch
from specmemo_kernels.forward.tree_paths import TreePaths, chain_paths, tree_paths
from specmemo_kernels.integrations.hf.mixers import Mixer, Mixers, arguments_of_rows

Tensor = torch.Tensor


class MixerPass:
    """The mixers' part of one forward pass.

    Args:
        states: the pool of states. trees: slots of the verified trees. chunks: of each chunk, its slot, its rows
            (first and end), and the end of those that are the prompt's; the others are behind it, after a preemption.
        paths: of the trees; ``None``: trees of one node, whose token is part of the text already.
    """

    def __init__(
        self,
        states: StatePool,
        trees: Sequence[int],
        chunks: Sequence[tuple[int, int, int, int]] = (),
        paths: TreePaths | None = None,
    ) -> None:
        self.states, self.trees, self.chunks, self.paths = states, list(trees), chunks, paths

    @classmethod
    def of_batch(cls, states: StatePool, batch: TreeBatch) -> MixerPass:
        """The pass over a batch of the sequences ``states.slots``."""
        count, slots, ends = batch.num_trees, states.slots, batch.qo_indptr.tolist()
        chunks = [
            (slot, ends[i], ends[i + 1], min(ends[i + 1], ends[i] + prompt))
            for i, (slot, prompt) in enumerate(zip(slots[count:], states.prompt_rows, strict=True), start=count)
        ]
        return cls(states, slots[:count], chunks, tree_paths(batch) if count and batch.max_depth else None)

    def run(self, mixer: Mixer, hidden: Tensor, others: Mapping[str, Any]) -> Tensor:
        """The result ``[1, N, ...]`` of packed rows ``hidden`` ``[1, N, hidden_size]``."""
        rows, count = hidden[0], hidden.shape[1]
        take = partial(arguments_of_rows, others, count)
        parts: list[tuple[Any, Tensor]] = []
        missing = self.states.missing(mixer.index)
        joined = self._joined(mixer, missing)
        self._include_accepted(mixer, {s: r for s, r in missing.items() if s not in joined}, take)
        if self.paths is not None:
            nodes = len(self.paths.path)
            parts.append((slice(0, nodes), self._verify(mixer, rows, take, joined)))
            self.states.rows[mixer.index][:nodes] = rows[:nodes]
        elif self.trees:
            index = torch.arange(len(self.trees), device=rows.device)[:, None]
            parts.append((slice(0, len(self.trees)), self._advance(mixer, self.trees, rows, index, take)[:, 0]))
        for slot, start, end, prompt_end in self.chunks:
            new = not self.states.started(slot)
            for first, last, alone in ((start, prompt_end, mixer.prompts_alone), (prompt_end, end, mixer.steps_alone)):
                if first < last:
                    index = torch.arange(first, last, device=rows.device)[None]
                    output = self._advance(mixer, [slot], rows, index, take, new=new, alone=alone and not new)
                    parts.append((slice(first, last), output[0]))
                    new = False
        if len(parts) == 1:
            return parts[0][1][None]
        output = parts[0][1].new_empty(count, *parts[0][1].shape[1:])
        for place, part in parts:
            output[place] = part
        return output[None]

    def _joined(self, mixer: Mixer, missing: Mapping[int, list[int]]) -> dict[int, list[int]]:
        """The accepted rows that the mixer gets in one call with their sequence's new tree."""
        if self.paths is None:
            return {}
        deepest = self.paths.rows.shape[1]
        accepted = {slot: missing[slot] for slot in self.trees if slot in missing}
        return {slot: rows for slot, rows in accepted.items() if mixer.divides(len(rows) + deepest)}

    def _include_accepted(
        self, mixer: Mixer, missing: Mapping[int, list[int]], take: Callable[[Tensor], dict[str, Any]]
    ) -> None:
        """Feed the rows that the last pass accepted to the mixer; sequences with as many rows are a batch."""
        groups: dict[int, list[int]] = defaultdict(list)
        for slot, rows in missing.items():
            groups[len(rows)].append(slot)
        for slots in groups.values():
            kept = self.states.rows[mixer.index]
            index = torch.tensor([missing[slot] for slot in slots], device=kept.device)
            # Positions and the like are of other rows: mixers that read them are refused.
            first = torch.zeros_like(index)
            _, states = mixer.call(kept[index], self._read(mixer, slots), take(first), alone=mixer.steps_alone)
            with self.states.including(mixer.index, slots):
                self._write(mixer, slots, states)

    def _verify(
        self,
        mixer: Mixer,
        rows: Tensor,
        take: Callable[[Tensor], dict[str, Any]],
        joined: Mapping[int, list[int]],
    ) -> Tensor:
        """The results of all trees' nodes, from copies of the states.

        ``joined``: accepted rows of some sequences, which become part of their states in the same call.
        """
        assert self.paths is not None
        paths = self.paths.to(rows.device)
        if mixer.steps_alone:
            return self._verify_levels(mixer, rows, take, paths)
        groups: dict[int, list[int]] = defaultdict(list)
        for tree, slot in enumerate(self.trees):
            groups[len(joined.get(slot, ()))].append(tree)
        kept, results = self.states.rows[mixer.index], None
        for count, trees in groups.items():
            spans = [range(*paths.starts[tree : tree + 2]) for tree in trees]
            places, slots = [path for span in spans for path in span], [self.trees[tree] for tree in trees]
            each = [slot for slot, span in zip(slots, spans, strict=True) for _ in span]
            index = paths.rows if len(groups) == 1 else paths.rows[places]
            x, states = rows[index], self._read(mixer, each)
            if count:
                before = torch.tensor([joined[slot] for slot in each], device=rows.device)
                # Positions and the like are of other rows: mixers that read them are refused.
                others = take(torch.cat([torch.zeros_like(before), index], dim=1))
                output, after = mixer.divided(torch.cat([kept[before], x], dim=1), states, others, count)
                firsts = [*accumulate(map(len, spans[:-1]), initial=0)]
                with self.states.including(mixer.index, slots):
                    self._write(mixer, slots, [state[firsts] for state in after])
                output = output[:, count:]
            else:
                output, _ = mixer.call(x, states, take(index))
            if len(groups) == 1:
                return output[paths.path, paths.depth]
            if results is None:
                results = output.new_empty(paths.starts[-1], *output.shape[1:])
            results[places] = output
        assert results is not None, "there are trees"
        return results[paths.path, paths.depth]

    def _verify_levels(
        self, mixer: Mixer, rows: Tensor, take: Callable[[Tensor], dict[str, Any]], paths: TreePaths
    ) -> Tensor:
        """:meth:`_verify`, the nodes of one depth after the other."""
        parts, states = [], self._read(mixer, self.trees)
        for nodes, above in paths.levels:
            states = [state[above] for state in states]
            part, states = mixer.call(rows[nodes[:, None]], states, take(nodes[:, None]))
            parts.append(part[:, 0])
        order = torch.cat([nodes for nodes, _ in paths.levels])
        return torch.cat(parts)[order.argsort()]

    def _advance(
        self,
        mixer: Mixer,
        slots: list[int],
        rows: Tensor,
        index: Tensor,
        take: Callable[[Tensor], dict[str, Any]],
        *,
        new: bool = False,
        alone: bool = False,
    ) -> Tensor:
        """The results of rows ``index`` ``[B, L]``, which become part of the states; ``new``: they are the first."""
        before = () if new else self._read(mixer, slots)
        output, states = mixer.call(rows[index], before, take(index), alone=alone)
        self.states.change(slots)
        self._write(mixer, slots, states)
        return output

    def _read(self, mixer: Mixer, slots: list[int]) -> list[Tensor]:
        return [state[slots] for state in self.states.states[mixer.index]]

    def _write(self, mixer: Mixer, slots: list[int], states: Sequence[Tensor]) -> None:
        for state, new in zip(self.states.states[mixer.index], states, strict=True):
            state[slots] = new


def tree_pass(mixers: Mixers, rows: Tensor) -> MixerPass | None:
    """A pass that verifies a chain of packed ``rows`` ``[N]``, for checks and measurements; ``None`` without mixers."""
    if not mixers.mixers:
        return None
    states = StatePool.with_text(mixers.specs, len(rows))
    return MixerPass(states, [0], (), chain_paths(rows) if len(rows) > 1 else None)


def chunk_pass(mixers: Mixers, rows: int, first: bool) -> MixerPass | None:
    """A pass over a prompt's ``first`` or another chunk, for measurements; ``None`` without mixers."""
    if not mixers.mixers:
        return None
    states = StatePool(mixers.specs, 1, 0) if first else StatePool.with_text(mixers.specs, 0)
    return MixerPass(states, [], [(0, 0, rows, rows)])
