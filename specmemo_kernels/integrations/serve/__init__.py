"""An OpenAI-compatible endpoint over :class:`specmemo_kernels.Engine`."""
