"""Every switch against the formulas of `reference.py`, against GPT-2, and against its own initial state."""

import itertools
import math
from types import SimpleNamespace

import entmax
import pytest
import torch
from support import reference
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS, LIBRARY_ACTIVATIONS, get_attention_activation
from modeling_nlq.attention_nlq import attention_weights, eager_attention_forward


PROJECTIONS = ("linear", "identity", "residual", "nonlinear", "bottleneck", "upcycled")

# Every allowed normaliser of every activation; None is the activation's own.
NORMALIZATIONS = {
    "softmax": (None, "sum"),
    "sigmoid": (None, "none", "length", "sum"),
    "relu": (None, "length", "sum", "none"),
    "relu_squared": (None, "length", "sum", "none"),
    "squared": (None, "sum", "length", "none"),
    "softplus": (None, "sum", "length", "none"),
    "tanh": (None, "length", "none"),
    "identity": (None, "length", "none"),
    "gelu": (None, "length", "none"),
    "gelu_new": (None,),
    "hardswish": (None,),
    "laplace": (None,),
    "leaky_relu": (None,),
    "mish": (None,),
    "quick_gelu": (None,),
    "relu6": (None,),
    "silu": (None, "length", "none"),
    "sparsemax": (None, "sum"),
    "entmax15": (None, "sum"),
}
ACTIVATION_AND_NORMALIZATION = [
    pytest.param(name, normalization, id=f"{name}-{normalization}")
    for name, normalizations in NORMALIZATIONS.items()
    for normalization in normalizations
]
ROW_BY_ROW = ("softmax", "sparsemax", "entmax15")
ELEMENTWISE_AND_NORMALIZATION = [case for case in ACTIVATION_AND_NORMALIZATION if case.values[0] not in ROW_BY_ROW]
NEVER_NEGATIVE = ("sigmoid", "relu", "relu_squared", "squared", "softplus")

# Source text 000 proposes A, a ReLU after each Add/Norm, and B, a ReLU before each sub-layer.
BLOCKS = {
    "pre": {},
    "post": {"norm_position": "post"},
    "design_a": {"norm_position": "post", "residual_activation": "relu"},
    "design_b": {"norm_position": "post", "sublayer_activation": "relu"},
    "pre_both_functions": {"sublayer_activation": "tanh", "residual_activation": "mish"},
    "post_both_functions": {"norm_position": "post", "sublayer_activation": "silu", "residual_activation": "leaky_relu"},
    "hidden_relu": {"hidden_act": "relu"},
    "hidden_relu2": {"hidden_act": "relu2"},
    "hidden_gelu_new": {"hidden_act": "gelu_new"},
}

SWITCHES = {
    "defaults": {},
    "attention_scaling": {"attention_scaling": 0.7},
    "sink_zero": {"attention_sink": "zero"},
    "sink_learned": {"attention_sink": "learned"},
    "qk_norm_rms": {"qk_norm": "rms"},
    "qk_norm_l2": {"qk_norm": "l2"},
    "qk_norm_l2_and_attention_scaling": {"qk_norm": "l2", "attention_scaling": 0.7},
    "gate_headwise": {"attention_gate": "headwise"},
    "gate_elementwise": {"attention_gate": "elementwise"},
    "head_projection": {"head_projection": True},
    "output_scaling": {"attention_output_scaling": 0.3},
    "output_activation": {"attention_output_activation": "gelu"},
    "output_activation_linear": {"attention_output_activation": "linear"},
    "everything_after_the_heads": {
        "head_projection": True,
        "attention_output_scaling": 3.0,
        "attention_output_activation": "tanh",
        "attention_gate": "elementwise",
    },
    "positions_none": {"position_embedding": "none"},
    "grouped_queries": {"num_key_value_heads": 2},
    "one_key_value_head": {"num_key_value_heads": 1, "attention_sink": "learned", "qk_norm": "l2", "head_projection": True},
    "narrow_heads": {"head_dim": 2, "query_projection": "bottleneck", "attention_gate": "elementwise"},
    "wide_heads": {"head_dim": 6, "query_projection": "upcycled", "attention_gate": "headwise"},
    "large_epsilon": {"layer_norm_eps": 0.1, "qk_norm": "rms"},
    "untied_embeddings": {"tie_word_embeddings": False},
    "bottleneck": {"projection_bottleneck_size": 5},
    "projection_activation": {"projection_activation": "tanh"},
    "projection_without_activation": {"projection_activation": "linear"},
    "layers_differ": {
        "query_projection": "linear",
        "per_layer_config": {
            1: {
                "query_projection": "nonlinear",
                "key_projection": "bottleneck",
                "projection_activation": "silu",
                "attention_activation": "squared",
                "attention_normalization": "length",
                "attention_scaling": 0.4,
                "qk_norm": "rms",
                "attention_gate": "headwise",
                "attention_output_activation": "silu",
                "attention_output_scaling": 1.5,
                "head_projection": True,
            }
        },
    },
    "only_one_layer_has_sinks": {"per_layer_config": {0: {"attention_sink": "learned"}}},
}

LINEAR = {
    "plain": {},
    "fixed_decay": {"linear_attention_decay": "fixed"},
    "learned_decay": {"linear_attention_decay": "learned"},
    "attention_scaling": {"attention_scaling": 1.7},
    "qk_norm_rms": {"qk_norm": "rms", "linear_attention_decay": "learned"},
    "qk_norm_l2": {"qk_norm": "l2", "linear_attention_decay": "fixed"},
    "grouped_queries": {"num_key_value_heads": 2, "linear_attention_decay": "learned"},
    "one_key_value_head": {"num_key_value_heads": 1, "linear_attention_decay": "fixed"},
    "wide_heads": {"head_dim": 6, "query_projection": "upcycled", "linear_attention_decay": "learned"},
    "everything_after_the_heads": SWITCHES["everything_after_the_heads"],
    "layers_differ": {
        "linear_attention_decay": "learned",
        "per_layer_config": {0: {"attention_activation": "softmax", "linear_attention_decay": None}},
    },
}

# Rotary angles are computed in float32 by Transformers, so these agree to about 1e-7 only.
ROTARY = {
    "default": {},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
        }
    },
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "qk_norm_rms": {"qk_norm": "rms"},
    "qk_norm_l2": {"qk_norm": "l2", "num_key_value_heads": 2},
    "squared": {"attention_activation": "squared"},
}


def parametrize_switches(cases):
    return pytest.mark.parametrize("switches", [pytest.param(switches, id=name) for name, switches in cases.items()])


def random_tokens(batch_size, length, vocab_size=13):
    return torch.randint(vocab_size, (batch_size, length))


def mask_of(*rows):
    """`mask_of("0111")` is the attention mask of one row with one padding token before three real ones."""
    return torch.tensor([[int(digit) for digit in row] for row in rows])


def check_against_reference(model, input_ids, tolerance=1e-10, visible=None, **inputs):
    """Logits and attention weights of `model` are those of the formulas, wherever a token is not padding.

    Linear attention shows no weights: of a model with such layers the logits alone are compared.
    """
    has_weights = all(layer.attention_activation != "linear_attention" for layer in model.config.per_layer_config)
    with torch.no_grad():
        output = model(input_ids, output_attentions=has_weights, **inputs)
    inputs.pop("use_cache", None)
    if visible is not None:
        inputs["attention_mask"] = None
    logits, weights = reference.forward(model.config, model.state_dict(), input_ids, visible=visible, **inputs)
    is_real = torch.ones_like(input_ids).bool() if inputs.get("attention_mask") is None else inputs["attention_mask"].bool()
    tolerances = {"rtol": tolerance, "atol": tolerance}
    torch.testing.assert_close(output.logits[is_real], logits[is_real], **tolerances)
    if not has_weights:
        return
    assert len(output.attentions) == len(weights)
    for actual, expected in zip(output.attentions, weights):
        torch.testing.assert_close(actual.transpose(1, 2)[is_real], expected.transpose(1, 2)[is_real], **tolerances)


class TestReference:
    """Logits and attention weights in float64."""

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @pytest.mark.parametrize("kind", PROJECTIONS)
    @pytest.mark.parametrize("role", ["query", "key", "value"])
    def test_projection(self, make_model, role, kind, use_bias):
        switches = {"query_projection": "linear", f"{role}_projection": kind}
        model = make_model(torch.float64, use_bias=use_bias, **switches)
        check_against_reference(model, random_tokens(2, 6))

    @pytest.mark.parametrize("kind", PROJECTIONS)
    def test_same_projection_everywhere(self, make_model, kind):
        switches = {f"{role}_projection": kind for role in ("query", "key", "value")}
        model = make_model(torch.float64, use_bias=True, projection_bottleneck_size=5, **switches)
        check_against_reference(model, random_tokens(2, 6))

    @pytest.mark.parametrize("activation, normalization", ACTIVATION_AND_NORMALIZATION)
    def test_activation(self, make_model, activation, normalization):
        model = make_model(
            torch.float64,
            attention_activation=activation,
            attention_normalization=normalization,
            attention_scaling=1.5,  # large enough for scores beyond the kinks of hardswish and relu6
        )
        check_against_reference(model, random_tokens(2, 7), attention_mask=mask_of("0001111", "1111111"))

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @parametrize_switches(BLOCKS)
    def test_block(self, make_model, switches, use_bias):
        model = make_model(torch.float64, use_bias=use_bias, **switches)
        check_against_reference(model, random_tokens(2, 6))

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @parametrize_switches(SWITCHES)
    def test_switch(self, make_model, switches, use_bias):
        model = make_model(torch.float64, use_bias=use_bias, **switches)
        check_against_reference(model, random_tokens(2, 6), attention_mask=mask_of("001111", "111110"))

    @parametrize_switches(ROTARY)
    def test_rotary_positions(self, make_model, switches):
        model = make_model(torch.float64, position_embedding="rope", **switches)
        check_against_reference(model, random_tokens(2, 9), 1e-5, attention_mask=mask_of("001111111", "111111111"))

    @pytest.mark.parametrize("use_cache", [False, True], ids=["parallel_form", "chunked_form"])
    @parametrize_switches(LINEAR)
    def test_linear_attention(self, make_model, switches, use_cache):
        """The rows of padding decay nothing, and the longest takes more than one chunk."""
        model = make_model(torch.float64, use_bias=True, **{"attention_activation": "linear_attention", **switches})
        inputs = {"attention_mask": mask_of("0011111", "1111110", "1101101"), "use_cache": use_cache}
        check_against_reference(model, random_tokens(3, 7), **inputs)
        if model.config.head_dim % 2 == 0:
            model = make_model(
                torch.float64, position_embedding="rope", **{"attention_activation": "linear_attention", **switches}
            )
            check_against_reference(model, random_tokens(3, 7), 1e-5, **inputs)

    @pytest.mark.parametrize(
        "activation", ["softmax", "sigmoid", "relu", "squared", "sparsemax", "entmax15", "linear_attention"]
    )
    @pytest.mark.parametrize("positions", ["learned", "none"])
    def test_packed_documents(self, make_model, activation, positions):
        model = make_model(torch.float64, attention_activation=activation, position_embedding=positions)
        position_ids = torch.tensor([[0, 1, 2, 0, 0, 1, 2], [4, 5, 6, 7, 2, 3, 4]])
        check_against_reference(model, random_tokens(2, 7), position_ids=position_ids)

    @pytest.mark.parametrize("activation", ["softmax", "sigmoid", "relu", "squared", "gelu", "sparsemax", "entmax15"])
    def test_mask_for_each_head(self, make_model, activation):
        model = make_model(torch.float64, attention_activation=activation)
        visible = (torch.rand(2, 4, 7, 7) < 0.6).tril()
        check_against_reference(model, random_tokens(2, 7), attention_mask=visible, visible=visible)


# Two queries with five and three visible keys of six. Scores away from 0, 3 and 6, where some functions have a kink.
SCORES = [[-2.5, 0.7, 1.9, 0.4, -0.3, 9.0], [1.3, 9.0, -0.8, 9.0, 3.7, 9.0]]
VISIBLE = mask_of("111110", "101010").bool()[None, None]


def attention_module(activation, normalization, sink=None):
    """What the eager backend reads of an attention layer."""
    return SimpleNamespace(
        activation=get_attention_activation(activation),
        normalization=normalization or get_attention_activation(activation).normalization,
        sink=sink,
        num_key_value_groups=1,
        training=False,
    )


ALL_ACTIVATION_AND_NORMALIZATION = [
    *ACTIVATION_AND_NORMALIZATION,
    *(pytest.param(name, None, id=f"{name}-None") for name in LIBRARY_ACTIVATIONS if name not in NORMALIZATIONS),
]


class TestSparse:
    """Projections onto the simplex: those that the package `entmax` computes by bisection, in float64."""

    SOLVERS = {
        "sparsemax": lambda scores: entmax.sparsemax_bisect(scores, dim=-1, n_iter=100),
        "entmax15": lambda scores: entmax.entmax_bisect(scores, alpha=1.5, dim=-1, n_iter=100),
    }

    @pytest.mark.parametrize("activation", SOLVERS)
    @pytest.mark.parametrize("magnitude", [0.01, 1.0, 30.0])
    def test_bisection(self, activation, magnitude):
        """Of the scores that a query sees: weights, their gradient, and exact zeros where the solver has them."""
        generator = torch.Generator().manual_seed(0)
        scores = magnitude * torch.randn(2, 3, 9, 9, generator=generator, dtype=torch.float64)
        scores.requires_grad_()
        visible = (torch.rand(2, 1, 9, 9, generator=generator) < 0.7).tril()
        count = visible.sum(dim=-1)
        row = get_attention_activation(activation)
        weights = attention_weights(scores, visible, count, row, "sum")
        direction = torch.randn(weights.shape, generator=generator, dtype=torch.float64)
        gradient = torch.autograd.grad((weights * direction).sum(), scores)[0]
        assert ((weights == 0) | visible).all() and ((gradient == 0) | visible).all()
        number_of_zeros = 0
        for place in itertools.product(range(2), range(3), range(9)):
            seen = visible[place[0], 0, place[2]]
            if not seen.any():
                assert (weights[place] == 0).all() and (gradient[place] == 0).all()
                continue
            given = scores[place][seen].detach().requires_grad_()
            expected = self.SOLVERS[activation](given)
            torch.testing.assert_close(weights[place][seen], expected, rtol=1e-9, atol=1e-9)
            number_of_zeros += (weights[place][seen] == 0).sum()
            slope = torch.autograd.grad((expected * direction[place][seen]).sum(), given)[0]
            torch.testing.assert_close(gradient[place][seen], slope, rtol=1e-6, atol=1e-6)
        assert (number_of_zeros > 0) == (magnitude >= 1)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("activation", SOLVERS)
    def test_large_scores(self, activation, dtype):
        """Only differences count, and a hidden key gets nothing, however low the others are."""
        module = attention_module(activation, None)
        for shift in (-3e4, 0.0, 3e4):
            scores = torch.tensor([[[[0.0, -0.5, -1e5, -3e4, 0.25, 9.0]]]]) + shift
            visible = torch.tensor([True, True, True, True, False, False]).expand(1, 1, 1, 6)
            weights = attention_weights(scores.to(dtype), visible, visible.sum(-1)[:, 0], module.activation, "sum")
            expected = self.SOLVERS[activation](scores.to(dtype)[0, 0, 0, :4].double())
            torch.testing.assert_close(weights[0, 0, 0, :4].double(), expected, rtol=1e-5, atol=1e-5)
            assert (weights[..., 2:] == 0).all()

    @pytest.mark.parametrize("activation", SOLVERS)
    def test_sums_to_one(self, activation):
        scores = 3 * torch.randn(2, 3, 50, 50)
        visible = torch.ones(1, 1, 50, 50).tril().bool()
        weights = attention_weights(scores, visible, visible.sum(-1)[:, 0], get_attention_activation(activation), "sum")
        torch.testing.assert_close(weights.sum(dim=-1), torch.ones(2, 3, 50))
        assert (weights >= 0).all()


class TestGradients:
    """Automatic differentiation against finite differences, in float64."""

    def test_every_activation_is_tested(self):
        """Linear attention, which has no scores, in `test_linear.py`."""
        assert set(NORMALIZATIONS) >= set(ATTENTION_ACTIVATIONS) - {"linear_attention"}

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_weights(self, activation, normalization):
        module = attention_module(activation, normalization)
        scores = torch.tensor([[SCORES]], dtype=torch.float64, requires_grad=True)

        def weights(scores):
            count = VISIBLE.sum(dim=-1)[:, 0]
            return attention_weights(scores, VISIBLE, count, module.activation, module.normalization)

        assert torch.autograd.gradcheck(weights, scores)

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_attention(self, activation, normalization):
        module = attention_module(activation, normalization)
        # Unit keys make the queries' entries the scores, so that this too is away from the kinks.
        query = torch.tensor([[[[1.3, -0.8, 0.6], [-2.5, 0.7, 1.9], [0.4, 3.7, -0.3]]]], dtype=torch.float64)
        key = torch.eye(3, dtype=torch.float64)[None, None].clone()
        value = torch.randn(1, 1, 3, 3, dtype=torch.float64)

        def output(*states):
            return eager_attention_forward(module, *states, attention_mask=None, scaling=1.0)[0]

        assert torch.autograd.gradcheck(output, [states.requires_grad_() for states in (query, key, value)])

    def test_sink(self):
        scores = torch.tensor([[SCORES]], dtype=torch.float64, requires_grad=True)
        sink = torch.tensor([0.4], dtype=torch.float64, requires_grad=True)

        def weights(scores, sink):
            return attention_weights(scores, VISIBLE, VISIBLE.sum(-1)[:, 0], get_attention_activation("softmax"), "sum", sink)

        assert torch.autograd.gradcheck(weights, (scores, sink))


def gpt2_pair(implementation, hidden_size, num_heads, num_layers, intermediate_size, vocab_size=29, max_length=24):
    """A GPT-2 with random weights, biases and gains, and an NLQ model with the same ones."""
    gpt2 = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocab_size,
            n_positions=max_length,
            n_embd=hidden_size,
            n_head=num_heads,
            n_layer=num_layers,
            n_inner=intermediate_size,
            attn_implementation=implementation,
        )
    ).eval()
    with torch.no_grad():
        for parameter in gpt2.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    config = NLQConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_length,
        query_projection="linear",
        attention_activation="softmax",
        use_bias=True,
        hidden_act="gelu_new",
        attn_implementation=implementation,
    )
    nlq = NLQForCausalLM(config).eval()
    source = gpt2.transformer.state_dict()
    target = {"model.embed_tokens.weight": source["wte.weight"], "model.embed_positions.weight": source["wpe.weight"]}
    names = {
        "ln_1": "self_attn_norm",
        "ln_2": "mlp_norm",
        "attn.c_proj": "self_attn.o_proj",
        "mlp.c_fc": "mlp.fc1",
        "mlp.c_proj": "mlp.fc2",
    }
    for index in range(num_layers):
        ours, theirs = f"model.layers.{index}", f"h.{index}"
        for kind in ("weight", "bias"):
            for their_name, our_name in names.items():
                tensor = source[f"{theirs}.{their_name}.{kind}"]
                target[f"{ours}.{our_name}.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
            # GPT-2 stores the transpose of `nn.Linear`, query, key and value side by side
            for name, tensor in zip("qkv", source[f"{theirs}.attn.c_attn.{kind}"].chunk(3, dim=-1)):
                target[f"{ours}.self_attn.{name}_proj.{kind}"] = tensor.T if tensor.ndim == 2 else tensor
    for kind in ("weight", "bias"):
        target[f"model.norm.{kind}"] = source[f"ln_f.{kind}"]
    target["lm_head.weight"] = source["wte.weight"]
    nlq.load_state_dict(target)
    return gpt2, nlq


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "hidden_size, num_heads, num_layers, intermediate_size, length",
    [(32, 4, 2, None, 11), (48, 3, 3, 20, 24), (8, 1, 1, 64, 1)],
    ids=["small", "deep", "one_token"],
)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_gpt2(implementation, hidden_size, num_heads, num_layers, intermediate_size, length, padding):
    gpt2, nlq = gpt2_pair(implementation, hidden_size, num_heads, num_layers, intermediate_size)
    input_ids = random_tokens(3, length, 29)
    attention_mask = torch.ones_like(input_ids)
    padding_length = min(4, length - 1)
    if padding == "left":
        attention_mask[1, :padding_length] = 0
    elif padding == "right":
        attention_mask[1, length - padding_length :] = 0
    # GPT-2 does not find the positions by itself.
    position_ids = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    inputs = {} if padding == "none" else {"attention_mask": attention_mask}
    with torch.no_grad():
        expected = gpt2(input_ids, attention_mask=attention_mask, position_ids=position_ids).logits
        actual = nlq(input_ids, **inputs).logits
    is_real = attention_mask.bool()
    torch.testing.assert_close(actual[is_real], expected[is_real], rtol=1e-5, atol=1e-5)


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


def parametrize_inputs(cases):
    return pytest.mark.parametrize("inputs", [pytest.param(inputs, id=name) for name, inputs in cases.items()])


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
SUMS = {name: {"attention_activation": name, "attention_normalization": "sum"} for name in NEVER_NEGATIVE}
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

    @pytest.mark.parametrize("implementation", ["sdpa", "nlq"])
    @parametrize_inputs({**MASKS, **DENSE_MASKS})
    @parametrize_switches({**BACKEND_SWITCHES, **SINKS})
    def test_softmax(self, make_model, switches, inputs, implementation):
        self.check(make_model, implementation, inputs, **switches)

    @parametrize_inputs({**MASKS, **DENSE_MASKS})
    @pytest.mark.parametrize("activation, normalization", ELEMENTWISE_AND_NORMALIZATION)
    def test_elementwise(self, make_model, activation, normalization, inputs):
        switches = {"attention_activation": activation, "attention_normalization": normalization}
        self.check(make_model, "nlq_tiled", inputs, num_hidden_layers=1, **switches)

    @pytest.mark.parametrize("activation", ["sigmoid", "squared", "tanh"])
    @pytest.mark.parametrize("implementation", ["nlq_tiled", "nlq"])
    @parametrize_inputs({**MASKS, **DENSE_MASKS})
    @parametrize_switches(BACKEND_SWITCHES)
    def test_elementwise_with_switches(self, make_model, switches, inputs, implementation, activation):
        self.check(make_model, implementation, inputs, attention_activation=activation, **switches)

    @parametrize_inputs({**MASKS, **DENSE_MASKS})
    @parametrize_switches({**HYBRIDS, **ELEMENTWISE_HYBRIDS})
    def test_layers_differ(self, make_model, switches, inputs):
        self.check(make_model, "nlq", inputs, num_hidden_layers=3, **switches)

    @parametrize_inputs(MASKS)
    @parametrize_switches(LINEAR_HYBRIDS)
    def test_linear_layers(self, make_model, switches, inputs):
        """The parallel form is eager's, the chunked form the automatic choice's."""
        self.check(make_model, "nlq", inputs, num_hidden_layers=3, **switches)

    @parametrize_inputs({**MASKS, **DENSE_MASKS})
    @parametrize_switches(ELEMENTWISE_HYBRIDS)
    def test_elementwise_layers_differ(self, make_model, switches, inputs):
        self.check(make_model, "nlq_tiled", inputs, num_hidden_layers=3, **switches)

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:_compile flag")
    @parametrize_inputs(MASKS)
    @parametrize_switches({**BACKEND_SWITCHES, **SUMS, **SUM_HYBRIDS})
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
    @parametrize_inputs(MASKS)
    @parametrize_switches(ON_GPU)
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


# Transformers passes over a custom module without parameters of its own, so `_init_weights` never sees these two.


class TestInitialState:
    def test_standard_deviations(self):
        config = NLQConfig(
            vocab_size=300,
            hidden_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            max_position_embeddings=200,
            initializer_range=0.03,
            query_projection="upcycled",
            key_projection="nonlinear",
            value_projection="residual",
            attention_gate="elementwise",
            tie_word_embeddings=False,
        )
        for name, parameter in NLQForCausalLM(config).named_parameters():
            if parameter.ndim != 2:
                continue
            expected = 0.03
            if name.endswith(("self_attn.o_proj.weight", "mlp.fc2.weight")):
                expected = 0.03 / math.sqrt(2 * 8)
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.05 * expected, name

    def test_vectors(self):
        switches = {
            "query_projection": "upcycled",
            "key_projection": "bottleneck",
            "use_bias": True,
            "attention_sink": "learned",
        }
        sizes = {"vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        for qk_norm in ("rms", "l2"):
            model = NLQForCausalLM(NLQConfig(**sizes, **switches, qk_norm=qk_norm, attention_gate="headwise"))
            vectors = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 1}
            for name, parameter in vectors.items():
                expected = 0.0 if "bias" in name else 1.0
                if name.endswith("q_proj.bottleneck.output_norm.weight"):
                    expected = 0.0
                elif name.endswith("q_norm.scale"):
                    expected = math.sqrt(16)
                assert (parameter == expected).all(), name
            assert any(name.endswith("sink_bias") for name in vectors)
            assert any(name.endswith("q_norm.scale") for name in vectors) == (qk_norm == "l2")

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @pytest.mark.parametrize("role", ["query", "key", "value"])
    def test_upcycled_is_linear(self, role, use_bias):
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "use_bias": use_bias}
        switches = {"query_projection": "linear"}
        upcycled = NLQForCausalLM(NLQConfig(**sizes, **{**switches, f"{role}_projection": "upcycled"})).eval()
        linear = NLQForCausalLM(NLQConfig(**sizes, **switches)).eval()
        state = {name.replace("proj.linear.", "proj."): tensor for name, tensor in upcycled.state_dict().items()}
        linear.load_state_dict({name: state[name] for name in linear.state_dict()})
        input_ids = random_tokens(2, 7)
        assert torch.equal(upcycled(input_ids).logits, linear(input_ids).logits)

    def test_upcycled_learns(self):
        """The output gain has a gradient at step 0, the two matrices from step 1 on."""
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
        model = NLQForCausalLM(NLQConfig(**sizes, query_projection="upcycled"))
        projection = model.model.layers[0].self_attn.q_proj
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        input_ids = random_tokens(2, 7)
        for step in range(2):
            optimizer.zero_grad()
            model(input_ids, labels=input_ids).loss.backward()
            assert projection.bottleneck.output_norm.weight.grad.abs().max() > 0
            for matrix in (projection.bottleneck.fc1.weight, projection.bottleneck.fc2.weight):
                assert (matrix.grad.abs().max() > 0) == (step == 1)
            optimizer.step()

    def test_head_projection_is_identity(self):
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        with_projection = NLQForCausalLM(NLQConfig(**sizes, head_projection=True)).eval()
        without = NLQForCausalLM(NLQConfig(**sizes)).eval()
        missing, unexpected = without.load_state_dict(with_projection.state_dict(), strict=False)
        assert not missing
        assert unexpected == [f"model.layers.{index}.self_attn.head_proj.weight" for index in range(2)]
        input_ids = random_tokens(2, 7)
        assert torch.equal(with_projection(input_ids).logits, without(input_ids).logits)

    def test_parameters_missing_from_a_checkpoint(self, tmp_path):
        """Switches turned on while loading start as they do in a new model."""
        sizes = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        saved = NLQForCausalLM(NLQConfig(**sizes))
        saved.save_pretrained(tmp_path)
        input_ids = random_tokens(2, 7)
        loaded = NLQForCausalLM.from_pretrained(tmp_path, head_projection=True)
        assert torch.equal(loaded(input_ids).logits, saved(input_ids).logits)
        loaded = NLQForCausalLM.from_pretrained(tmp_path, attention_sink="learned", qk_norm="l2", attn_implementation="eager")
        for layer in loaded.model.layers:
            assert (layer.self_attn.sink_bias == 0).all()
            assert (layer.self_attn.q_norm.scale == 2.0).all()

    @pytest.mark.parametrize("head_dim", [None, 16], ids=["head_dim_default", "head_dim_given"])
    @pytest.mark.parametrize("kind", PROJECTIONS)
    def test_default_scaling(self, make_model, kind, head_dim):
        # Two heads of 16 fill the width of 32, whether that is said or not.
        switches = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": head_dim, "query_projection": kind}
        scaling = {
            "linear": 1 / math.sqrt(16),
            "identity": 1 / (2 * math.sqrt(16)),
            "residual": 1 / (2 * math.sqrt(16)),
            "nonlinear": 1 / (2 * math.sqrt(16)),
            "bottleneck": 1 / math.sqrt(16),
            "upcycled": 1 / math.sqrt(16),
        }[kind]
        input_ids = random_tokens(2, 7)
        given = make_model(**switches, attention_scaling=scaling)
        assert torch.equal(make_model(**switches)(input_ids).logits, given(input_ids).logits)


class TestNothingVisible:
    """A query that sees no key gets exactly 0, and nothing becomes infinite or NaN."""

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["float32", "bfloat16", "float16"])
    def test_attention(self, activation, normalization, dtype):
        module = attention_module(activation, normalization)
        states = [torch.randn(2, 3, 5, 4, dtype=dtype, requires_grad=True) for _ in range(3)]
        visible = torch.ones(2, 1, 5, 5).tril().bool()
        visible[0, 0, 0] = False
        visible[1] = False
        output, weights = eager_attention_forward(module, *states, attention_mask=visible, scaling=1.0)
        assert (weights[0, :, 0] == 0).all()
        assert (weights[1] == 0).all()
        assert (output[0, 0] == 0).all()
        assert (output[1] == 0).all()
        assert (weights[0, :, 1:].abs().sum(dim=-1) > 0).any()  # the others see something
        for gradient in torch.autograd.grad(output.float().square().sum(), states):
            assert gradient.isfinite().all()
            assert (gradient[1] == 0).all()

    @pytest.mark.parametrize("sink", [-3.0, 0.0], ids=["sink_-3", "sink_0"])
    def test_sink(self, sink):
        sink = torch.full((3,), sink, requires_grad=True)
        module = attention_module("softmax", "sum", sink)
        states = [torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3)]
        visible = torch.ones(2, 1, 5, 5).tril().bool()
        visible[1] = False
        output, weights = eager_attention_forward(module, *states, attention_mask=visible, scaling=1.0)
        assert (weights[1] == 0).all()
        assert (output[1] == 0).all()
        for gradient in torch.autograd.grad(output.square().sum(), [*states, sink]):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("activation, normalization", ALL_ACTIVATION_AND_NORMALIZATION)
    def test_all_scores_zero(self, activation, normalization):
        module = attention_module(activation, normalization)
        query = torch.zeros(1, 1, 4, 3, requires_grad=True)
        key, value = (torch.randn(1, 1, 4, 3, requires_grad=True) for _ in range(2))
        output, weights = eager_attention_forward(module, query, key, value, attention_mask=None, scaling=1.0)
        if activation in ("relu", "relu_squared", "squared"):
            assert (weights == 0).all()
            assert (output == 0).all()
        for gradient in torch.autograd.grad(output.sum(), [query, key, value]):
            assert gradient.isfinite().all()

    @pytest.mark.parametrize("activation", ["relu", "relu_squared"])
    def test_sum_of_nothing_positive(self, activation):
        scores = (-torch.rand(1, 1, 3, 5) - 0.1).requires_grad_()
        visible, count = torch.ones(1, 1, 3, 5).bool(), torch.full((1, 3), 5)
        weights = attention_weights(scores, visible, count, get_attention_activation(activation), "sum")
        assert (weights == 0).all()
        assert (torch.autograd.grad(weights.sum(), scores)[0] == 0).all()

    @pytest.mark.parametrize(
        "activation, score",
        [("relu", 1e-40), ("relu_squared", 1e-21), ("squared", 1e-21), ("softplus", -95.0)],
    )
    def test_sum_of_almost_nothing(self, activation, score):
        scores = torch.full((1, 1, 1, 3), score, requires_grad=True)
        visible, count = torch.ones(1, 1, 1, 3).bool(), torch.full((1, 1), 3)
        weights = attention_weights(scores, visible, count, get_attention_activation(activation), "sum")
        assert weights.isfinite().all()
        assert torch.autograd.grad(weights.square().sum(), scores)[0].isfinite().all()

    @pytest.mark.parametrize(
        "implementation, activation",
        [
            *(pytest.param("eager", name, id=f"eager-{name}") for name in (*NORMALIZATIONS, "linear_attention")),
            pytest.param("nlq", "linear_attention", id="nlq-linear_attention"),
            pytest.param("sdpa", "softmax", id="sdpa-softmax"),
        ],
    )
    def test_model(self, make_model, implementation, activation):
        model = make_model(implementation=implementation, attention_activation=activation, use_bias=True)
        heads = []
        for layer in model.model.layers:
            layer.self_attn.o_proj.register_forward_pre_hook(lambda module, inputs: heads.append(inputs[0]))
        logits = model(random_tokens(3, 6), attention_mask=mask_of("000000", "000111", "111111")).logits
        assert logits.isfinite().all()
        for output in heads:
            assert (output[0] == 0).all()
            assert (output[1, :3] == 0).all()
            assert (output[1:, 3:] != 0).any()
        logits.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
