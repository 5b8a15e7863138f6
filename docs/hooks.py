"""mkdocs hooks: docstrings use Sphinx roles, which Markdown doesn't know."""

from __future__ import annotations

import re
from typing import Any

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):<code>~?([^<]*)</code>")


def on_page_content(html: str, **_: Any) -> str:
    """Show ``:class:`X``` as the code ``X``."""
    return ROLE.sub(r"<code>\1</code>", html)
