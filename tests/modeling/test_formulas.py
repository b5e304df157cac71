"""Every switch against the formulas of `reference.py`, and against GPT-2."""

import pytest
import torch
from support import reference
from support.attention_cases import mask_of
from support.model_cases import (
    ACTIVATION_AND_NORMALIZATION,
    BLOCKS,
    LINEAR_SWITCHES,
    PART_SWITCHES,
    PROJECTIONS,
    ROTARY,
    SWITCHES,
    parametrize_switches,
    random_tokens,
)
from transformers import GPT2Config, GPT2LMHeadModel

from modeling_nlq import NLQConfig, NLQForCausalLM


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
    @parametrize_switches(SWITCHES | PART_SWITCHES)
    def test_switch(self, make_model, switches, use_bias):
        model = make_model(torch.float64, use_bias=use_bias, **switches)
        check_against_reference(model, random_tokens(2, 6), attention_mask=mask_of("001111", "111110"))

    @parametrize_switches(ROTARY)
    def test_rotary_positions(self, make_model, switches):
        model = make_model(torch.float64, position_embedding="rope", **switches)
        check_against_reference(model, random_tokens(2, 9), 1e-5, attention_mask=mask_of("001111111", "111111111"))

    @pytest.mark.parametrize("use_cache", [False, True], ids=["parallel_form", "chunked_form"])
    @parametrize_switches(LINEAR_SWITCHES)
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
