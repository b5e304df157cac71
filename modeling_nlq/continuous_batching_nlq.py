"""Continuous batching: `generate_batch`, `init_continuous_batching` and Transformers' server, for every activation.

Transformers runs the requests. This file chooses the attention that it uses meanwhile, and refuses requests that do not fit
into the learned positions, because a single failing request would stop the thread that serves all of them.
"""

import functools
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager

from transformers.generation import GenerationMixin
from transformers.generation.continuous_batching import ContinuousBatchingManager
from transformers.utils import logging

from .backends_nlq import choose_paged_implementation
from .configuration_nlq import NLQConfig
from .part_table_nlq import parts_of


logger = logging.get_logger(__name__)


class NLQGenerationMixin(GenerationMixin):
    """Transformers' generation, whose continuous batching takes every attention activation with keys and values."""

    def _get_static_cache_init_shape(self):
        # diff with GenerationMixin: what parts keep beside the keys makes them wider, so the first keys say how wide
        has_states = any(part.has_hook("token_state") for layer in self.config.per_layer_config for part in parts_of(layer))
        return None if has_states else super()._get_static_cache_init_shape()

    def init_continuous_batching(self, *args, **kwargs) -> ContinuousBatchingManager:
        """Returns Transformers' manager of requests; `generate_batch` and the context manager call this too.

        Until the manager stops, `attn_implementation` is one that takes the paged cache. Then the manager sets the model's own
        again.

        Raises:
            ValueError: for linear attention, for windows that differ, for a pipeline stage, and if the model's
                `attn_implementation` has no continuous batching.
        """
        if hasattr(self, "_pp_stage"):
            raise ValueError("continuous batching is not supported with pipeline parallelism; use tp_size, or generate")
        original = self.config._attn_implementation
        paged = choose_paged_implementation(self.config)
        if paged != original:
            self.set_attn_implementation(paged)
        try:
            manager = super().init_continuous_batching(*args, **kwargs)
        except Exception:
            self.set_attn_implementation(original)
            raise
        if paged != original:
            manager._original_attn_impl = original
        is_new = "add_request" not in vars(manager)  # Transformers may return the manager of an earlier call
        if self.config.has_learned_positions and is_new:
            manager.add_request = _keep_within_positions(manager, self.config)
        return manager

    @contextmanager
    def continuous_batching_context_manager(self, *args, **kwargs) -> Generator[ContinuousBatchingManager]:
        """As in Transformers. The model's own `attn_implementation` returns also where the manager fails before it starts."""
        original = self.config._attn_implementation
        try:
            with super().continuous_batching_context_manager(*args, **kwargs) as manager:
                yield manager
        finally:
            if self.config._attn_implementation != original:
                self.set_attn_implementation(original)

    def generate_batch(self, inputs: Sequence[Sequence[int]], *args, **kwargs) -> dict:
        """As in Transformers, after a check of the prompts: there, a prompt that fails ends the generation of all others.

        Raises:
            ValueError: for a prompt that is no list of token ids or has none, one longer than the learned positions, and what
                `init_continuous_batching` refuses.
        """
        for prompt in inputs:
            _check_prompt(prompt, self.config)
        return super().generate_batch(inputs, *args, **kwargs)


def _check_prompt(prompt: Sequence[int], config: NLQConfig) -> None:
    if not isinstance(prompt, Sequence) or not all(isinstance(token, int) for token in prompt):
        raise ValueError("inputs: each prompt must be a list of token ids")
    if unknown := [token for token in prompt if not 0 <= token < config.vocab_size]:
        raise ValueError(f"inputs: token id {unknown[0]} is not in the vocabulary, vocab_size={config.vocab_size}")
    if len(prompt) == 0:
        raise ValueError("inputs: a prompt contains no tokens; give each prompt at least one")
    if config.has_learned_positions and len(prompt) > config.max_position_embeddings:
        raise ValueError(
            f"inputs: a prompt of {len(prompt)} tokens is longer than the learned positions, "
            f"max_position_embeddings={config.max_position_embeddings}"
        )


def _keep_within_positions(manager: ContinuousBatchingManager, config: NLQConfig) -> Callable[..., str | None]:
    """Returns the manager's `add_request`, which ends requests at the last learned position, with a warning.

    A longer request would fail in the thread that serves all requests, and Transformers offers no other place for a check.
    """
    add_request = manager.add_request

    @functools.wraps(add_request)
    def add_request_within_positions(input_ids, request_id=None, max_new_tokens=None, *args, **kwargs):
        _check_prompt(input_ids, config)
        wanted = manager.generation_config.max_new_tokens if max_new_tokens is None else max_new_tokens
        possible = config.max_position_embeddings - len(input_ids) + 1  # the last token needs no position
        if wanted is None or wanted > possible:
            logger.warning_once(
                f"max_new_tokens={wanted}: requests end at the last learned position, max_position_embeddings="
                f"{config.max_position_embeddings}"
            )
            wanted = possible
        return add_request(input_ids, request_id, wanted, *args, **kwargs)

    return add_request_within_positions
