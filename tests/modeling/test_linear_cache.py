"""The cache of linear attention: its state, and the operations of Transformers' caches."""

import copy

import pytest
import torch
from support.linear_cases import (
    BOTH_CACHES,
    MODELS,
    all_models,
    both_caches,
    gradients,
    linear_layers,
    state_bytes,
)
from support.model_cases import VOCABULARY
from transformers import DynamicCache

from modeling_nlq import (
    cache_nlq,
)


@pytest.mark.usefixtures("small_chunks")
class TestCache:
    @staticmethod
    @torch.no_grad()
    def fill(model, make_cache, tokens):
        cache = make_cache(model)
        model(tokens, past_key_values=cache)
        return cache

    @all_models
    @both_caches
    def test_counts_tokens(self, make_model, switches, make_cache, tokens):
        model = make_model(**switches)
        cache = make_cache(model)
        assert cache.get_seq_length() == 0
        with torch.no_grad():
            for seen, part in zip((4, 5, 9), tokens.split([4, 1, 4], dim=1)):
                model(part, past_key_values=cache)
                assert [int(cache.get_seq_length(index)) for index in range(2)] == [seen, seen]
        sizes = {tuple(map(int, cache.get_mask_sizes(3, index))) for index in range(2)}
        assert sizes == {(24, 0)} if make_cache is BOTH_CACHES["static"] else sizes == {(12, 0)}
        assert cache.is_compileable == (make_cache is BOTH_CACHES["static"])
        assert cache.get_max_length() == (24 if make_cache is BOTH_CACHES["static"] else -1)
        assert cache.is_croppable is False

    @pytest.mark.parametrize("kind, cache_name", [(kind, name) for kind in MODELS for name in BOTH_CACHES])
    @pytest.mark.parametrize("operation", ["reorder", "repeat", "select", "select_one", "select_by_mask"])
    def test_rows(self, make_model, kind, cache_name, operation, tokens):
        """Rows moved in the cache go on as those rows do."""
        make_cache = BOTH_CACHES[cache_name]
        if operation != "reorder" and cache_name == "static" and kind in ("linear_first", "linear_last"):
            pytest.skip("Transformers' static keys and values know no such operation")
        model = make_model(implementation="nlq", **MODELS[kind])
        cache = self.fill(model, make_cache, tokens[:, :5])
        rows = {
            "reorder": [1, 0],
            "repeat": [0, 0, 0, 1, 1, 1],
            "select": [1, 1, 0],
            "select_one": [1],
            "select_by_mask": [1],
        }[operation]
        if operation == "reorder":
            cache.reorder_cache(torch.tensor(rows))
        elif operation == "repeat":
            cache.batch_repeat_interleave(3)
        elif operation == "select_by_mask":
            cache.batch_select_indices(torch.tensor([False, True]))
        else:
            cache.batch_select_indices(torch.tensor(rows))
        with torch.no_grad():
            actual = [model(part, past_key_values=cache).logits for part in tokens[rows, 5:].split([3, 1], dim=1)]
            expected = model(tokens[rows], use_cache=False).logits[:, 5:]
        torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-4, atol=1e-4)

    @both_caches
    def test_operations_on_an_empty_cache(self, make_model, make_cache, tokens):
        """Generation does them before the first pass."""
        model = make_model(**MODELS["linear"])
        cache = make_cache(model)
        cache.reset()
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0]))
        cache.reorder_cache(torch.tensor([0]))
        cache.crop(0)
        with torch.no_grad():
            torch.testing.assert_close(model(tokens, past_key_values=cache).logits, model(tokens, use_cache=False).logits)

    # Transformers' dynamic keys and values stay where they are after a reset, as zeros
    @pytest.mark.parametrize(
        "kind, cache_name", [*((kind, "static") for kind in MODELS), *((kind, "dynamic") for kind in ("linear", "learned"))]
    )
    def test_reset(self, make_model, kind, cache_name, tokens):
        model = make_model(implementation="nlq", **MODELS[kind])
        cache = self.fill(model, BOTH_CACHES[cache_name], tokens.flip(1))
        for _ in range(2):
            cache.reset()
            assert [int(cache.get_seq_length(index)) for index in range(2)] == [0, 0]
            with torch.no_grad():
                expected = model(tokens, use_cache=False).logits
                actual = [model(part, past_key_values=cache).logits for part in tokens.split([1, 8], dim=1)]
            torch.testing.assert_close(torch.cat(actual, dim=1), expected, rtol=1e-4, atol=1e-4)

    def test_reset_leaves_the_past_alone(self, make_model, tokens):
        """Gradients of what was computed before do not pass through what comes after."""
        model = make_model(**MODELS["learned"]).train()
        cache = DynamicCache(config=model.config)
        model(tokens[:, :8], past_key_values=cache)
        loss = model(tokens[:, 8:], past_key_values=cache).logits.square().sum()
        cache.reset()
        model(tokens, past_key_values=cache)
        assert all(gradient.isfinite().all() for gradient in gradients(model, loss))

    @all_models
    @both_caches
    def test_one_beginning_for_many(self, make_model, switches, make_cache, tokens):
        """A copied cache goes on by itself, and so does the original."""
        model = make_model(implementation="nlq", **switches)
        prefix = self.fill(model, make_cache, tokens[:, :5])
        for ending in (tokens[:, 5:], tokens[:, 5:].flip(1), tokens[:, 5:6]):
            cache = copy.deepcopy(prefix)
            with torch.no_grad():
                actual = model(ending, past_key_values=cache).logits
                expected = model(torch.cat([tokens[:, :5], ending], dim=1), use_cache=False).logits[:, 5:]
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert int(prefix.get_seq_length()) == 5

    @both_caches
    def test_memory_is_constant(self, make_model, make_cache):
        for switches in MODELS.values():
            model = make_model(implementation="nlq", **switches)
            cache, sizes = make_cache(model), []
            with torch.no_grad():
                for length in (1, 7, 1, 14):
                    model(torch.randint(VOCABULARY, (1, length)), past_key_values=cache)
                    sizes.append([state_bytes(layer) for layer in linear_layers(cache)])
            assert all(size == sizes[0] for size in sizes)
            heads = model.config.num_key_value_heads
            assert set(sizes[0]) == {heads * (4 * 4 + 4) * 4}  # a square and a row for each head, in float32
            assert all(layer.keys is None and layer.values is None for layer in linear_layers(cache))

    def test_keeps_nothing_else_alive(self, make_model):
        """No view of a longer tensor, and without gradients no graph."""
        model = make_model(**MODELS["learned"], max_position_embeddings=2000)
        with torch.no_grad():
            cache = model(torch.randint(VOCABULARY, (1, 2000))).past_key_values
        for layer in linear_layers(cache):
            assert state_bytes(layer) == 2 * (4 * 4 + 4) * 4
            assert all(part.grad_fn is None for part in layer.get_state())

    def test_takes_no_keys(self, make_model):
        cache = DynamicCache(config=make_model(**MODELS["linear"]).config)
        with pytest.raises(
            RuntimeError, match="attention_activation='linear_attention' keeps a state, and neither keys nor values"
        ):
            cache.update(torch.zeros(1, 1, 1, 4), torch.zeros(1, 1, 1, 4), 0)

    def test_layers(self, make_model):
        """One kind of layer for each; a model without linear layers is what it was."""
        config = make_model(**MODELS["linear_first"]).config
        assert config.layer_types == [cache_nlq.LAYER_TYPE, "full_attention"]
        assert len(linear_layers(DynamicCache(config=config))) == 1
        assert type(DynamicCache(config=config).layers[1]).__name__ == "DynamicLayer"
        # Absent, not `None`: Transformers asks whether a configuration has it
        assert not hasattr(make_model(attention_activation="sigmoid").config, "layer_types")
        assert "layer_types" not in config.to_dict()

    @all_models
    def test_conversation(self, make_model, switches):
        """`generate` goes on with the cache it returned, and takes a prompt in chunks."""
        model = make_model(implementation="nlq", vocab_size=31, attention_scaling=2.0, tie_word_embeddings=False, **switches)
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 4, "return_dict_in_generate": True}
        first = model.generate(torch.tensor([[3, 1, 4, 1, 5]]), **options)
        asked = torch.cat([first.sequences, torch.tensor([[9, 2, 6]])], dim=1)
        again = model.generate(asked, past_key_values=first.past_key_values, **options)
        expected = model.generate(asked, use_cache=False, **options)
        assert torch.equal(again.sequences, expected.sequences)
        chunks = model.generate(asked, prefill_chunk_size=4, **options)
        assert torch.equal(chunks.sequences, expected.sequences)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="Transformers offloads from CUDA only")
    @all_models
    def test_offloaded(self, make_model, switches, tokens):
        model = make_model(implementation="nlq", **switches).cuda()
        options = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": 6}
        expected = model.generate(tokens.cuda(), **options)
        assert torch.equal(model.generate(tokens.cuda(), cache_implementation="offloaded", **options), expected)
