"""Published configurations of well-known models, so that plans need no network.

``known_models.json`` has the fields of each ``config.json`` that :func:`read_sizes` reads. Vision towers are left out.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.cache
def known_models() -> Mapping[str, Mapping[str, Any]]:
    """Configurations by hub id."""
    entries = json.loads(Path(__file__).with_suffix(".json").read_text())
    return {name: entry["config"] for entry in entries for name in entry["names"]}


def known_model(name: str) -> Mapping[str, Any] | None:
    """The configuration of a hub id or of its last part, case ignored; ``None``: not in the table."""
    wanted = name.casefold()
    for known, config in known_models().items():
        if wanted in (known.casefold(), known.casefold().rpartition("/")[2]):
            return config
    return None
