"""The arguments of `forward`: the names that Transformers gives to the cache, and the arguments that a model may ignore."""

import functools
from collections.abc import Callable
from dataclasses import fields

from transformers.cache_utils import Cache
from transformers.generation.continuous_batching import PagedAttentionCache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.utils.deprecation import deprecate_kwarg


# Transformers 5.24 renamed `past_key_values` to `cache` in outputs, mask functions and `generate`.
CACHE_NAME = "cache" if "cache" in {field.name for field in fields(BaseModelOutputWithPast)} else "past_key_values"

# The tensors and objects that a call may pass and no file of the model reads by name, and why that changes no result.
IGNORED_ARGUMENTS = {
    "cache_position": "the places of the new tokens, which the cache knows",
    "num_items_in_batch": "Trainer's number of labels; the loss of the language model reads it",
    "shift_labels": "labels of sequence parallelism; the loss of the language model reads them",
    "tokenizer": "what `transformers serve` hands to `generate`, which reads it for stop strings",
    "token_type_ids": "tokenizers of other models; NLQ models have one type of token",
}
# By `masking_nlq.read_sequences`, and by Transformers' `capture_outputs`, which takes lists of layers too
_READ_ARGUMENTS = {"cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "output_attentions", "output_hidden_states"}


def accept_old_names(forward: Callable) -> Callable:
    """Decorates a `forward`, which then takes the cache by its old names with Transformers' warning, where they are old."""
    if CACHE_NAME != "cache":
        return forward
    old, renaming = ("past_key_values", "cache_params"), forward
    for name in old:
        renaming = deprecate_kwarg(name, "5.40.0", new_name="cache")(renaming)

    @functools.wraps(forward)
    def accepting(self, *args, **kwargs):
        given = {name: value for name, value in kwargs.items() if value is not None or name not in ("cache", *old)}
        # Given two names, Transformers' decorator would ignore one of them
        return (forward if "cache" in given else renaming)(self, *args, **given)

    return accepting


def choose_cache(
    cache: Cache | PagedAttentionCache | None, past_key_values: Cache | PagedAttentionCache | None
) -> Cache | PagedAttentionCache | None:
    """Returns the cache, under whichever name it was given.

    Raises:
        ValueError: if both are given and are not the same object.
    """
    if cache is None:
        return past_key_values
    if past_key_values is not None and past_key_values is not cache:
        raise ValueError("cache and past_key_values are two names for one argument; give one of them")
    return cache


def check_arguments(arguments: dict) -> None:
    """Checks the arguments of a call that `forward` does not name.

    A renamed cache or mask would otherwise be lost, and the model would compute something else in silence. Switches and numbers
    are let through, and so is everything that continuous batching passes beside its paged cache.

    Raises:
        ValueError: if one of them holds a cache, a mask or a tensor and is not in `IGNORED_ARGUMENTS`.
    """
    for name, value in arguments.items():
        if name in IGNORED_ARGUMENTS or name in _READ_ARGUMENTS or value is None:
            continue
        if not isinstance(value, (bool, int, float, str)):
            raise ValueError(
                f"{name}: NLQ models do not know this argument, and must not ignore what it holds, a {type(value).__name__}. "
                "Leave it out. If Transformers passed it, this version of Transformers is too new: see docs/versions.md"
            )
