"""vLLM's CPU platform ignores ``--attention-backend``; this makes it accept ``CUSTOM``."""

from __future__ import annotations

from typing import Any


def accept_custom_backend() -> None:
    """Put ``CUSTOM`` in front of the platform's choice, with GPU platforms' checks. May be called again."""
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    choose = CpuPlatform.get_attn_backend_cls
    if getattr(choose, "accepts_custom", False):
        return

    def get_attn_backend_cls(cls: type, selected_backend: Any, attn_selector_config: Any, *args: Any, **kw: Any) -> str:
        if selected_backend is AttentionBackendEnum.CUSTOM:
            backend = AttentionBackendEnum.CUSTOM.get_class()
            reasons = backend.validate_configuration(device_capability=None, **attn_selector_config._asdict())
            if reasons:
                raise ValueError(
                    f"attention backend CUSTOM (specmemo) doesn't fit this model and its options: "
                    f"{'; '.join(reasons)}; use vLLM's own backend"
                )
            return str(AttentionBackendEnum.CUSTOM.get_path())
        return str(choose.__func__(cls, selected_backend, attn_selector_config, *args, **kw))

    get_attn_backend_cls.accepts_custom = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(get_attn_backend_cls)
