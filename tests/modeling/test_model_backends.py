"""Every backend equals eager, in outputs and gradients of a whole model."""

import pytest
import torch
from support.attention_cases import NON_NEGATIVE, mask_of
from support.grids import parametrize_grid
from support.model_cases import ELEMENTWISE_AND_NORMALIZATION, random_tokens


MASKS = {
    "no_mask": {},
    "left_padding": {"attention_mask": mask_of("0001111", "1111111", "0111111")},
    "right_padding": {"attention_mask": mask_of("1111000", "1111111", "1111110")},
    "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5, 6], [0, 0, 1, 0, 1, 2, 3]])},
    "empty_row": {"attention_mask": mask_of("0000000", "1111111", "0111110")},
}
# A caller's own mask, of one kind for all heads or one for each; some queries see nothing.
DENSE_MASKS = {
    "dense_mask": {"attention_mask": (torch.arange(147) % 5 > 1).reshape(3, 1, 7, 7).tril()},
    "dense_mask_for_each_head": {"attention_mask": (torch.arange(588) % 5 > 1).reshape(3, 4, 7, 7).tril()},
}
BACKEND_SWITCHES = {
    "defaults": {},
    "grouped_queries": {"num_key_value_heads": 2, "qk_norm": "rms", "position_embedding": "rope"},
    "one_key_value_head": {"num_key_value_heads": 1, "qk_norm": "l2", "attention_scaling": 0.3, "attention_gate": "headwise"},
}


def logits_and_gradients(model, input_ids, inputs):
    """The logits of real tokens, and the gradients of a random function of them."""
    attention_mask = inputs.get("attention_mask")
    is_padded = attention_mask is not None and attention_mask.ndim == 2
    is_real = attention_mask.bool() if is_padded else torch.ones_like(input_ids).bool()
    # With a cache, linear layers would take the chunked form under every backend
    logits = model(input_ids, **inputs, use_cache=False).logits[is_real]
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(logits)
    gradients = torch.autograd.grad((logits * direction).sum(), list(model.parameters()))
    return logits.detach(), gradients


SINKS = {
    "sink_zero": {"attention_sink": "zero"},
    "sink_learned": {"attention_sink": "learned", "num_key_value_heads": 2},
}
# Models whose layers differ, which `nlq` hands to several backends, or one backend calls with several functions.
HYBRIDS = {
    "softmax_first": {
        "attention_sink": "learned",
        "per_layer_config": {
            1: {"attention_activation": "relu", "attention_sink": None},
            2: {"attention_activation": "sigmoid", "attention_sink": None},
        },
    },
    "softmax_last": {
        "attention_activation": "tanh",
        "num_key_value_heads": 2,
        "per_layer_config": {
            1: {"attention_activation": "squared", "attention_normalization": "length"},
            2: {"attention_activation": "softmax", "attention_sink": "zero"},
        },
    },
    "softmax_between": {
        "attention_activation": "softplus",
        "position_embedding": "rope",
        "per_layer_config": {1: {"attention_activation": "softmax"}},
    },
}
# Without masks of pairs, which linear layers refuse.
LINEAR_HYBRIDS = {
    "linear": {"attention_activation": "linear_attention"},
    "fixed_decay": {"attention_activation": "linear_attention", "linear_attention_decay": "fixed", "num_key_value_heads": 2},
    "learned_decay": {
        "attention_activation": "linear_attention",
        "linear_attention_decay": "learned",
        "position_embedding": "rope",
    },
    "linear_first": {
        "attention_activation": "sigmoid",
        "per_layer_config": {
            0: {"attention_activation": "linear_attention", "linear_attention_decay": "learned"},
            2: {"attention_activation": "softmax"},
        },
    },
    "linear_between": {
        "position_embedding": "rope",
        "num_key_value_heads": 2,
        "attention_activation": "entmax15",
        "per_layer_config": {1: {"attention_activation": "linear_attention", "qk_norm": "l2"}},
    },
}
ELEMENTWISE_HYBRIDS = {
    "relu_sigmoid_tanh": {
        "attention_activation": "relu",
        "num_key_value_heads": 2,
        "per_layer_config": {
            1: {"attention_activation": "sigmoid"},
            2: {"attention_activation": "tanh", "attention_normalization": "none", "qk_norm": "rms"},
        },
    },
}
# What flex_attention computes on the CPU: what is never negative, normalised by its sum.
SUMS = {name: {"attention_activation": name, "attention_normalization": "sum"} for name in NON_NEGATIVE}
SUM_HYBRIDS = {
    "softmax_and_sums": {"per_layer_config": {1: SUMS["squared"], 2: SUMS["relu"]}},
}
ON_GPU = {
    "softmax": {},
    **SINKS,
    "sigmoid_none": {"attention_activation": "sigmoid"},
    "sigmoid_sum": SUMS["sigmoid"],
    "relu_length": {"attention_activation": "relu"},
    "relu_squared_sum": SUMS["relu_squared"],
    "squared_sum": SUMS["squared"],
    "softplus_none": {"attention_activation": "softplus", "attention_normalization": "none"},
}


class TestBackends:
    """Every backend equals eager, in outputs and gradients of a whole model."""

    @pytest.fixture(autouse=True)
    def tiny_tiles(self, tiny_tiles):
        """So small that seven queries and keys take several."""

    @staticmethod
    def check(make_model, implementation, inputs, **switches):
        input_ids = random_tokens(3, 7)
        expected = logits_and_gradients(make_model(torch.float64, "eager", **switches), input_ids, inputs)
        actual = logits_and_gradients(make_model(torch.float64, implementation, **switches), input_ids, inputs)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)

    @parametrize_grid({"implementation": ("sdpa", "nlq"), "inputs": MASKS | DENSE_MASKS, "switches": BACKEND_SWITCHES | SINKS})
    def test_softmax(self, make_model, switches, inputs, implementation):
        self.check(make_model, implementation, inputs, **switches)

    @parametrize_grid({"activation, normalization": ELEMENTWISE_AND_NORMALIZATION, "inputs": MASKS | DENSE_MASKS}, strength=1)
    def test_elementwise(self, make_model, activation, normalization, inputs):
        switches = {"attention_activation": activation, "attention_normalization": normalization}
        self.check(make_model, "nlq_tiled", inputs, num_hidden_layers=1, **switches)

    @parametrize_grid(
        {
            "activation": ("sigmoid", "squared", "tanh"),
            "implementation": ("nlq_tiled", "nlq"),
            "inputs": MASKS | DENSE_MASKS,
            "switches": BACKEND_SWITCHES,
        }
    )
    def test_elementwise_with_switches(self, make_model, switches, inputs, implementation, activation):
        self.check(make_model, implementation, inputs, attention_activation=activation, **switches)

    @parametrize_grid({"inputs": MASKS | DENSE_MASKS, "switches": HYBRIDS | ELEMENTWISE_HYBRIDS}, strength=1)
    def test_layers_differ(self, make_model, switches, inputs):
        self.check(make_model, "nlq", inputs, num_hidden_layers=3, **switches)

    @parametrize_grid({"inputs": MASKS, "switches": LINEAR_HYBRIDS}, strength=1)
    def test_linear_layers(self, make_model, switches, inputs):
        """The parallel form is eager's, the chunked form the automatic choice's."""
        self.check(make_model, "nlq", inputs, num_hidden_layers=3, **switches)

    @parametrize_grid({"inputs": MASKS | DENSE_MASKS, "switches": ELEMENTWISE_HYBRIDS}, strength=1)
    def test_elementwise_layers_differ(self, make_model, switches, inputs):
        self.check(make_model, "nlq_tiled", inputs, num_hidden_layers=3, **switches)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag")
    @parametrize_grid({"inputs": MASKS, "switches": BACKEND_SWITCHES | SUMS | SUM_HYBRIDS}, strength=1)
    def test_flex_attention(self, make_model, switches, inputs):
        """Outputs only, for flex_attention has no backward on the CPU."""
        input_ids = random_tokens(3, 7)
        is_real = inputs.get("attention_mask", torch.ones_like(input_ids)).bool()
        switches = {"num_hidden_layers": 3, **switches}
        with torch.no_grad():
            expected = make_model(implementation="eager", **switches)(input_ids, **inputs).logits
            # Uncompiled, since a compiler may be missing: the same function and mask without the fused kernel.
            with torch.compiler.set_stance("force_eager"):
                actual = make_model(implementation="flex_attention", **switches)(input_ids, **inputs).logits
        torch.testing.assert_close(actual[is_real], expected[is_real], rtol=1e-5, atol=1e-5)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has no backward on the CPU: needs CUDA")
    @parametrize_grid({"inputs": MASKS, "switches": ON_GPU}, strength=1)
    def test_flex_attention_gradients(self, make_model, switches, inputs):
        # Heads of 16: the kernels take no smaller ones.
        switches = {"hidden_size": 64, "num_key_value_heads": 2, **switches}
        input_ids, inputs = random_tokens(3, 7).cuda(), {name: tensor.cuda() for name, tensor in inputs.items()}
        expected = logits_and_gradients(make_model(implementation="eager", **switches).cuda(), input_ids, inputs)
        actual = logits_and_gradients(make_model(implementation="flex_attention", **switches).cuda(), input_ids, inputs)
        torch.testing.assert_close(actual, expected, rtol=2e-3, atol=2e-3)

    @pytest.mark.parametrize("implementation", ["sdpa", "flash_attention_2"])
    def test_no_silent_softmax(self, make_model, implementation):
        model = make_model(attention_activation="relu")
        with pytest.raises(ValueError, match=r"relu.*eager"):
            model.set_attn_implementation(implementation)
        model.config._attn_implementation = implementation  # past that check
        with torch.compiler.set_stance("force_eager"), pytest.raises(ValueError, match=r"relu.*eager"):
            model(random_tokens(1, 4))
