"""Attention in linear memory: skipped tiles, memory, `torch.compile`, autocast and checkpointing."""

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    THREE,
    attend,
    chunk,
    dense,
    layer,
    layer_for,
    packed,
    padded,
    random_factors,
    results,
    run,
    set_rows,
    set_tiles,
)
from support.grids import parametrize_grid
from support.live_memory import LiveMemory
from torch.utils.checkpoint import checkpoint

from modeling_nlq import activations_nlq, tiled_nlq
from modeling_nlq.masking_nlq import Visibility, read_mask
from modeling_nlq.ops_nlq import AttentionInputs


pytestmark = pytest.mark.thin(2)


class TestWork:
    # With the number of tiles of 4 x 4 that hold a visible pair
    SPARSE = {
        "causal": (chunk(16, 16, 0, batch=1), 10),
        "static_cache": (chunk(4, 16, 4, batch=1), 2),
        "packed": (packed("aaaabbbbccccdddd"), 4),
        "packed_differently": (packed("aaaabbbbccccdddd", "aaaaaaaabbbbbbbb"), 6),
        "left_padding": (padded("0000000011111111", "0000111111111111"), 6),
        "dense_mask": (dense(torch.eye(16).bool()[None, None]), 4),
        "window": (chunk(16, 16, 0, batch=1, window=4), 7),
    }

    @pytest.mark.parametrize("layout, pairs", SPARSE.values(), ids=SPARSE)
    def test_hidden_tiles_are_skipped(self, monkeypatch, layout, pairs):
        set_tiles(monkeypatch, 4, 4, 0)
        sizes = []

        def function(scores):
            sizes.append(tuple(scores.shape[1:]))
            return scores.tanh()

        monkeypatch.setattr(activations_nlq, "_REGISTERED", {})
        activations_nlq.register_attention_activation("counted", function)
        sizes.clear()
        output = attend("nlq_tiled", layer_for(layout, "counted"), *layout.states(), mask=layout.mask())
        assert sizes == [(4, 4)] * pairs
        output.sum().backward()
        assert sizes == [(4, 4)] * pairs * 2

    @staticmethod
    def memory_of_tiles(pair, length):
        states = [torch.randn(1, 2, length, 8) for _ in range(3)]
        # Of softmax, `nlq_tiled` computes what has a bias
        total = torch.rand(1, 2, length, dtype=torch.float64)
        biases = [total, total] if pair[0] == "softmax" else [None, None]
        mask = padded("0" * 5 + "1" * (length - 5), window=length // 2).mask()
        masks = (mask.visible_count[:, None], mask.last_key, mask.key_is_valid, mask.first_key, None)
        inputs = AttentionInputs(*states, *biases, *masks, None, *pair, SCALING, 0.0)
        with LiveMemory() as memory:
            # The functions behind the operators, which a dispatch mode cannot look into
            outputs = tiled_nlq._tiled_attention(inputs)
            tiled_nlq._tiled_attention_backward(torch.ones_like(outputs[0]), inputs, outputs)
        return memory

    @staticmethod
    def memory_of(backend, activation, length):
        states = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(3)]
        with LiveMemory() as memory:
            results(attend(backend, layer(activation), *states, mask=chunk(length, length, 0, batch=1).mask()), states)
        return memory.peak

    def test_tiles_on_cuda(self):
        """Sizes by arithmetic, on a device without data: causal tiles are found without reading."""
        for length, memory, tile, pairs in ((1024, 2**37, 1024, 1), (4096, 2**37, 1024, 10), (300, 2**27, 128, 6)):
            layout = chunk(length, length, 0, batch=1)
            states = torch.empty(4, 16, length, 64, device="meta")
            assert tiled_nlq._tile_size(states, memory) == tile
            mask = layout.mask()
            masks = (mask.visible_count[:, None].to("meta"), mask.last_key.to("meta"), None, None, None)
            inputs = AttentionInputs(*[states] * 3, None, None, *masks, None, *THREE[0], 1.0, 0.0, None, 0)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(tiled_nlq, "_tile_size", lambda query: tile)  # noqa: B023
                tiles = tiled_nlq._TiledCall(inputs)
            assert sum(len(tiles.key_tiles_of(i)) for i in range(len(tiles.query_tiles))) == pairs

    @pytest.mark.slow
    @pytest.mark.parametrize("pair", [*THREE, ("softmax", "sum")], ids="-".join)
    def test_memory_of_tiles_is_linear(self, monkeypatch, pair):
        set_tiles(monkeypatch, 16, 16, 0)
        first, second, third = (self.memory_of_tiles(pair, length) for length in (128, 256, 512))
        for name in ("peak", "largest"):
            assert getattr(second, name) <= 2.05 * getattr(first, name)
            assert getattr(third, name) <= 2.05 * getattr(second, name)
        assert third.largest <= 2 * 512 * 8 * 4  # (heads, length, head_dim) in float32: the inputs' size

    @pytest.mark.parametrize("activation", ["softpick", "stick_breaking", "sparsemax"])
    def test_memory_of_rows_is_linear(self, monkeypatch, activation):
        set_rows(monkeypatch, 16)
        first, second, third = (self.memory_of("nlq_rows", activation, length) for length in (128, 256, 512))
        assert second <= 2.2 * first and third <= 2.2 * second
        assert self.memory_of("eager", activation, 256) > 3 * self.memory_of("eager", activation, 128)


@pytest.mark.usefixtures("small_tiles", "fresh_compiler")
class TestPyTorch:
    @staticmethod
    def function(layout, activation, **options):
        module, mask = layer_for(layout, activation, training=bool(options)), layout.mask()
        return lambda *states: attend("nlq_tiled", module, *states, mask=mask, **options)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
    def test_autocast_rounds_the_inputs(self, dtype):
        layout = LAYOUTS["left_padding"]
        states = layout.states()
        with torch.autocast("cpu", dtype):
            output = self.function(layout, "softplus")(*states)
        actual = results(output, states)
        assert [tensor.dtype for tensor in actual] == [dtype, *[torch.float32] * 3]
        rounded = [tensor.detach().to(dtype).requires_grad_() for tensor in states]
        expected = run("nlq_tiled", layout, layer_for(layout, "softplus"), rounded)
        assert all(torch.equal(one, other.to(one.dtype)) for one, other in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("use_reentrant", [False, True], ids=["not_reentrant", "reentrant"])
    def test_checkpointing_drops_the_same_weights(self, use_reentrant):
        states = LAYOUTS["causal"].states()
        function = self.function(LAYOUTS["causal"], "relu", dropout=0.3)
        torch.manual_seed(1)
        expected = results(function(*states), states)
        torch.manual_seed(1)
        output = checkpoint(function, *states, use_reentrant=use_reentrant)
        torch.rand(3)  # between the two passes others draw random numbers too
        output.backward(random_factors(output))
        assert all(map(torch.equal, [output.detach(), *(tensor.grad for tensor in states)], expected))

    @parametrize_grid(
        {
            "name": ("causal", "one_key_value_head", "packed", "mask_per_head"),
            "dropout": {"": 0.0, "dropout": 0.3},
            "dtype": ("float32", "bfloat16"),
        },
        strength=1,
    )
    def test_operators_pass_opcheck(self, name, dropout, dtype):
        layout = LAYOUTS[name]
        states = [tensor.detach() for tensor in layout.states(getattr(torch, dtype))]
        mask, count = read_mask(layout.mask(), *states[:2])
        masks = (None, None, None, mask)
        if isinstance(mask, Visibility):
            masks = (mask.last_key, mask.key_is_valid, mask.first_key, None)
        rest = (count, *masks, torch.tensor(5) if dropout else None, "softplus", "sum", SCALING, dropout, None, None)
        biases = [torch.rand(*tensor.shape[:1], states[0].shape[1], tensor.shape[2]).double() for tensor in states[:2]]
        states += biases if name == "packed" else [None, None]
        torch.library.opcheck(tiled_nlq.FORWARD, (*states, *rest))
        outputs = tiled_nlq.FORWARD(*states, *rest)
        torch.library.opcheck(tiled_nlq.BACKWARD, (torch.randn_like(outputs[0]), *states, *rest, *outputs))
