"""The page at ``/``: a chat, and the memory and the speculation behind it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import FileResponse

from specmemo_kernels.integrations.serve.answers import Model

_FOLDER = Path(__file__).parent / "page"
#: The page loads nothing from elsewhere, and isn't shown inside other pages.
_HEADERS = {
    "content-security-policy": "default-src 'self'; img-src data:; style-src 'self' 'unsafe-inline'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


def add_page(app: FastAPI, model: Model) -> None:
    """Add the page's files, and ``/stats``, which it reads twice a second."""

    def route(path: str, file: str) -> None:
        @app.get(path, include_in_schema=False)
        async def page() -> Response:
            return FileResponse(_FOLDER / file, headers=_HEADERS)

    for path, file in (("/", "index.html"), ("/page.css", "page.css"), ("/page.js", "page.js")):
        route(path, file)

    @app.get("/stats")
    async def stats() -> dict[str, Any]:
        return state_of(model)


def state_of(model: Model) -> dict[str, Any]:
    """Memory by part in bytes, pages, requests, and acceptance, as they are now."""
    engine, handle = model.engine, model.engine.handle
    pool, plan, stats = handle.pool, handle.plan, handle.stats
    return {
        "model": model.name,
        "device": f"{handle.facts.device}, {handle.backend} kernels",
        "planned": dict(plan.parts),
        "held": handle.bytes_by_part,
        "budget": plan.budget,
        "pressure": handle.memory_pressure.shrunk,
        "pages": 0 if pool is None else pool.num_pages,
        "pages_used": 0 if pool is None else pool.num_pages - pool.free_pages,
        "pages_cached": 0 if pool is None else pool.cached_pages,
        "running": engine.running,
        "waiting": engine.waiting,
        "tokens_per_step": stats.tokens_per_step,
        "accepted": stats.acceptance_by_depth,
    }
