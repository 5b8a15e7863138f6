"""The name of a model's cache argument, which differs between versions of transformers."""

import inspect

from transformers.masking_utils import create_causal_mask

#: All names; the first that a module's ``forward`` has is its own.
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")
#: The name in ``generate`` and in its output: ``cache`` from transformers 5.24 on.
CACHE_ARGUMENT = next(name for name in CACHE_ARGUMENTS if name in inspect.signature(create_causal_mask).parameters)
