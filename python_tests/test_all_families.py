"""Every causal language model type in transformers: equal token for token, refused, or not buildable, as recorded."""

from __future__ import annotations

import pytest
import transformers
from family_models import NAMES
from family_outcomes import PAGE, outcome, page, recorded
from selection import sample

#: Tried in everyday runs: a mask computed from data, a window of the mask only, a window of the cache only, sinks,
#: a bidirectional mask for images, errors of the model's own.
_SAMPLE = ("doge", "phimoe", "moshi", "gpt_oss", "gemma3", "xlm")
_SAME_VERSION = recorded()["transformers"] == transformers.__version__


@pytest.mark.parametrize("name", sample(NAMES, _SAMPLE))
@pytest.mark.filterwarnings("ignore")
def test_family(name: str) -> None:
    """Each type has one of the three outcomes; with the recorded version of transformers, the recorded one."""
    found = outcome(name)
    assert found.kind in ("equal", "refused", "unbuildable"), found
    assert found.kind == "equal" or found.reason
    if _SAME_VERSION:
        assert found == recorded()["outcomes"][name]


@pytest.mark.skipif(not _SAME_VERSION, reason="other versions of transformers have other model types")
def test_no_family_is_missing() -> None:
    assert sorted(recorded()["outcomes"]) == NAMES


def test_the_page_is_the_record() -> None:
    """After a change run ``make models``."""
    assert PAGE.read_text() == page(recorded())


def test_most_families_are_supported() -> None:
    kinds = [found.kind for found in recorded()["outcomes"].values()]
    assert kinds.count("equal") >= 106
    assert kinds.count("unbuildable") <= 6
