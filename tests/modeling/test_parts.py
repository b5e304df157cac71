"""What is special to attention parts. Formulas, caches and backends are tested for every configuration."""

import functools
import math
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.grids import parametrize_grid
from support.model_cases import PART_SWITCHES, SIZES, SWITCHES, parametrize_switches, random_tokens
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from transformers import Cache, DynamicCache, StaticCache, Trainer
from transformers.cache_utils import DynamicLayer

from modeling_nlq import NLQConfig, NLQForCausalLM, NLQModel
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS
from modeling_nlq.cache_nlq import CACHE_NAME
from modeling_nlq.modeling_nlq import NLQAttention
from modeling_nlq.parts_base_nlq import AttentionPart, from_columns, to_columns
from modeling_nlq.parts_builtin_nlq import ATTENTION_PARTS


pytestmark = pytest.mark.thin(3)


@pytest.mark.parametrize("name", ATTENTION_PARTS)
def test_every_part_has_a_field_a_formula_and_a_case(name):
    """The tests of formulas, gradients, caches and exports take their parts from the cases."""
    part = ATTENTION_PARTS[name]
    assert part.name == name and part.formula and issubclass(part, AttentionPart)
    assert name in NLQConfig.__dataclass_fields__
    assert any(switches.get(name) for switches in SWITCHES.values())


def checkpoint_attention(model):
    """Reentrant checkpointing differentiates no tensor that is inside of a tuple."""
    wrapper = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT)
    is_attention = lambda module: isinstance(module, NLQAttention)  # noqa: E731
    apply_activation_checkpointing(model, checkpoint_wrapper_fn=wrapper, check_fn=is_attention)
    model.enable_input_require_grads()


def checkpoint_reentrant(model):
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()


CHECKPOINTINGS = (
    checkpoint_attention,
    checkpoint_reentrant,
    lambda model: model.gradient_checkpointing_enable({"use_reentrant": False}),
)


@parametrize_switches(
    {
        **PART_SWITCHES,
        **{f"{name}_everywhere": {"attention_activation": name} for name in ATTENTION_ACTIVATIONS},
        "window": {"sliding_window": 3},
        "hybrid": {"num_hidden_layers": 3, "per_layer_config": {1: {"attention_activation": "linear_attention"}}},
        "pair": {"decoder": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}},
    }
)
def test_gradient_checkpointing_changes_no_gradient(make_model, switches):
    """A layer that is computed again finds no cache that has grown. Values of the first layer, and of an encoder,
    reach all others.
    """
    tokens, gradients = random_tokens(2, 6), []
    for enable in (None, *CHECKPOINTINGS):
        model = make_model(torch.float64, implementation="nlq", **switches).train()
        if enable is not None:
            enable(model)
        outputs = model(tokens, labels=tokens)
        assert outputs.get(CACHE_NAME) is None
        outputs.loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for other in gradients[1:]:
        torch.testing.assert_close(other, gradients[0], rtol=1e-9, atol=1e-9)


def test_half_precision_keeps_the_gate(make_model):
    """Columns in bfloat16 hold what a forget gate keeps as two numbers: decoding stays near a full pass."""
    model = make_model(torch.bfloat16, implementation="eager", **PART_SWITCHES["forget_gate_learned"])
    tokens = random_tokens(1, 30)
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        for cache in (DynamicCache(config=model.config), DynamicCache()):  # any cache of keys can hold the gate
            logits = torch.cat([model(token, past_key_values=cache).logits for token in tokens.split(1, dim=1)], dim=1)
            assert (logits - expected).abs().max() < 4 * 2**-8 * expected.abs().max()


@parametrize_grid(
    {
        "how": ("eager", "nlq", "autocast"),
        "part": ("fixed", "learned"),
        "switches": {
            "softmax": {"attention_sink": "learned"},
            **{name: {"attention_activation": name} for name in ("sigmoid", "relu", "linear_attention")},
        },
    }
)
def test_what_is_left_of_exclusive_attention_in_bfloat16(how, part, switches):
    """A norm follows, and the first token sees only its own value, nearly all of which is taken out."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = NLQForCausalLM(NLQConfig(**sizes, norm_position="sandwich", exclusive_attention=part, **switches)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("alpha"):
            torch.nn.init.constant_(parameter, 4.0)
    model.set_attn_implementation("eager" if how == "eager" else "nlq")
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
            model = model if how == "autocast" else model.bfloat16()
            cache = DynamicCache(config=model.config)
            chunks = tokens.split([1, 29], dim=1)
            logits = torch.cat([model(chunk, past_key_values=cache).logits for chunk in chunks], dim=1)
        expected = model.double()(tokens).logits
    assert (logits - expected).abs().max() < 0.1 * expected.std()


@pytest.mark.parametrize(
    "message, switches",
    {
        "forget_gate='learned' needs attention_activation='softmax' or": {
            "forget_gate": "learned",
            "attention_activation": "squared",
        },
        "cancels a factor of the scores": {"attention_length_scaling": "log", "attention_activation": "squared"},
        "needs attention_activation='softmax'": {"differential_attention": "v2", "attention_activation": "relu"},
        "num_key_value_heads=1 must be even": {"differential_attention": "v1", "num_key_value_heads": 1},
        "adds its input of hidden_size=16": {"differential_attention": "v2", "query_projection": "identity"},
        "excludes differential_attention='v1'": {"differential_attention": "v1", "exclusive_attention": "fixed"},
        "value_residual": {"value_residual": "some"},
        "depth_attention needs norm_position='pre'": {"depth_attention": True, "norm_position": "post"},
        "changes a sum that depth_attention": {"depth_attention": True, "residual_activation": "relu"},
        "gate_rank=2 needs an attention_gate; set 'headwise'": {"gate_rank": 2},
        "excludes gate_source='output'": {"attention_gate": "value", "gate_source": "output"},
        "excludes gate_rank=2": {"attention_gate": "value", "gate_rank": 2},
        "gate_rank=0 must be a positive integer": {"attention_gate": "headwise", "gate_rank": 0},
        "key_projection='key' is unknown": {"key_projection": "key"},
        "canon='BA' must be letters out of 'ABCD'": {"canon": "BA"},
        "canon='AE' must be letters out of 'ABCD'": {"per_layer_config": {0: {"canon": "AE"}}},
        "selective_attention=True excludes sliding_window=3": {"selective_attention": True, "sliding_window": 3},
        "parallax=True excludes differential": {"parallax": True, "differential_attention": "v2"},
        "changes scores or weights": {"parallax": True, "attention_activation": "linear_attention"},
        "has the normaliser 'none' only": {
            "attention_activation": "stick_breaking",
            "attention_normalization": "sum",
        },
        "'unknown_part' is unknown; known parts": {"attention_parts": ["unknown_part"]},
    }.items(),
)
def test_configurations_are_refused_by_name(message, switches):
    with pytest.raises(StrictDataclassError, match=message):
        NLQConfig(**{"query_projection": "linear", "num_attention_heads": 4, "hidden_size": 16, **switches})


def test_models_with_parts_refuse_by_name(make_model):
    for name in ("forget_gate_learned", "differential_v1", "canon", "selective", "stick_breaking"):
        with pytest.raises(ValueError, match="has no continuous batching"):
            make_model(**PART_SWITCHES[name]).generate_batch([[1, 2, 3]])
    message = r"flash_attention_2' cannot .* with a bias .* use one of nlq, eager, sdpa"
    with pytest.raises(ValueError, match=message):
        make_model(implementation="flash_attention_2", **PART_SWITCHES["forget_gate_learned"])
    with pytest.raises(ValueError, match="canon takes no 4-D attention_mask"):
        mask = torch.ones(1, 1, 3, 3).tril().bool()
        make_model(**PART_SWITCHES["canon"])(random_tokens(1, 3), attention_mask=mask)


@pytest.mark.parametrize("norm_position", ["pre", "sandwich"])
def test_parts_of_the_stream_begin_without_effect(make_model, norm_position):
    """The mean of all outputs is their sum up to a factor, which a norm without an epsilon removes."""
    switches, tokens = {"norm_position": norm_position, "layer_norm_eps": 1e-30}, random_tokens(2, 9)
    plain = make_model(torch.float64, **switches)
    for name in ("depth_attention", "input_skip"):
        model = NLQForCausalLM(NLQConfig(**SIZES, **switches, **{name: True})).double().eval()
        missing, _ = model.load_state_dict(plain.state_dict(), strict=False)
        assert all(f".parts.{name}." in key for key in missing)
        assert not set(missing) & set(Trainer.get_decay_parameter_names(None, model))
        torch.testing.assert_close(model(tokens).logits, plain(tokens).logits, rtol=1e-10, atol=1e-10)


def test_layers_after_a_changed_stream_need_all_that_was_added(make_model):
    model, states = make_model(depth_attention=True), torch.randn(2, 3, 16)
    states, *added = model.model.layers[0](states, None, None, states)
    with pytest.raises(ValueError, match=r"earlier \(layer 1\): give the embeddings and what all layers"):
        model.model.layers[1](states, None, None, *added)


@pytest.mark.parametrize("switches", [{"forget_gate": "learned"}, {"selective_attention": True}], ids=str)
def test_prefill_in_chunks_generates_the_same_tokens(make_model, switches):
    """Transformers makes keys in advance then, as wide as a head."""
    model, tokens = make_model(query_projection="linear", **switches), random_tokens(2, 9)
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static", "prefill_chunk_size": 4, "disable_compile": True, **options}
    assert torch.equal(model.generate(tokens, **static), model.generate(tokens, use_cache=False, **options))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_states_come_back_from_columns_of_the_keys(dtype):
    """Also numbers above 65504, the largest of float16."""
    states = [torch.tensor([[[[0.0, 1e-3, -12345.678, 3e6]]]]), torch.randn(1, 1, 1, 1) * 1e5]
    parts = [SimpleNamespace(name=str(index), state_size=state.shape[-1]) for index, state in enumerate(states)]
    columns = to_columns([state.requires_grad_() for state in states], dtype)
    assert columns.dtype == dtype
    for state, back in zip(states, from_columns(columns, parts).values()):
        torch.testing.assert_close(back, state, rtol=2.0**-15, atol=1e-6)
        (gradient,) = torch.autograd.grad(back, state, torch.full_like(back, 2.0**15), retain_graph=True)
        assert (gradient == 2.0**15).all()


@pytest.mark.parametrize("switches, most", [({}, 32), ({"sliding_window": 5}, 5), ({"sliding_window": 40}, 32)])
@pytest.mark.parametrize("is_causal", [True, False])
def test_length_scaling_starts_at_1_for_a_query_with_the_most_keys(switches, most, is_causal):
    config = NLQConfig(**SIZES, attention_length_scaling="log", is_causal=is_causal, **switches)
    if not is_causal and "sliding_window" in switches:
        most = min(2 * switches["sliding_window"] + 1, 32)
    part = NLQModel(config).layers[0].self_attn.parts["attention_length_scaling"]
    torch.testing.assert_close(part.scale_bias * math.log(most), torch.ones(len(part.scale_bias)))


def test_length_scaling_with_a_bias_is_that_of_mistral_large_4(make_model):
    theirs = pytest.importorskip("transformers.models.mistral_large4.modeling_mistral_large4")
    theirs = theirs.MistralLarge4TextSoftmaxScaling(4)
    part = make_model(attention_length_scaling="log_bias").model.layers[0].self_attn.parts["attention_length_scaling"]
    theirs.load_state_dict({"scale": part.scale_bias, "bias": part.shift_bias})
    query, positions = torch.randn(2, 7, 4, 5), torch.arange(7)[None]
    call = SimpleNamespace(token_context=SimpleNamespace(visible_count=positions[:, None] + 1), tp_mesh=None)
    torch.testing.assert_close(part.change_qkv(call, query, None, None)[0], theirs(query, positions, False))


# Switches, and the width of what a cache has beside keys in float32 and in bfloat16: positions in columns, or values
CACHES = {
    "rope": ({"position_embedding": "rope", "qk_norm": "rms"}, 1, 3),
    "other_queries": ({"attention_length_scaling": "log_bias", "parallax": True}, 0, 0),
    "other_values": ({"value_residual": "learned"}, 4, 4),
}


@pytest.mark.thin(1)
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_holds_keys_that_are_values_once(make_model, name):
    switches, *widths = CACHES[name]
    options = {"query_projection": "linear", "num_key_value_heads": 2, "value_projection": "key", **switches}
    for dtype, width in zip((torch.float32, torch.bfloat16), widths):
        model = make_model(dtype, **options)
        for cache in (DynamicCache(config=model.config), StaticCache(config=model.config, max_cache_len=7)):
            model(random_tokens(3, 7), past_key_values=cache)
            layer = cache.layers[1]
            assert (layer.keys.numel(), layer.values.numel()) == (3 * 2 * 7 * 4, 3 * 2 * 7 * width)


def test_every_cache_of_keys_that_are_values_knows_the_callers_positions(make_model):
    """A cache that rounds what it holds, or was made in advance, has keys and values as for other models."""
    model = make_model(torch.float64, value_projection="key", position_embedding="rope", query_projection="linear")
    tokens, mask = random_tokens(2, 6), torch.ones(2, 6).long()  # with a mask they are no packed documents
    positions = torch.tensor([[0, 2, 3, 7, 8, 20], [5, 6, 9, 10, 11, 12]])
    expected = model(tokens, mask, positions, use_cache=False).logits
    in_advance = StaticCache(config=model.config, max_cache_len=9)
    in_advance.early_initialization(batch_size=2, num_heads=4, head_dim=4, dtype=torch.float64, device="cpu")
    rounds = Cache(layer_class_to_replicate=type("Rounds", (DynamicLayer,), {"_quantize": None}))
    for cache, width in ((DynamicCache(), 1), (in_advance, 4), (rounds, 4)):
        for start, end in ((0, 2), (2, 3), (3, 6)):
            logits = model(tokens[:, start:end], mask[:, :end], positions[:, start:end], cache).logits
            torch.testing.assert_close(logits, expected[:, start:end], rtol=1e-6, atol=1e-6)
        assert cache.layers[0].values.shape[-1] == width


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_keys_that_are_values_in_a_cache(make_model, dtype):
    """In half precision, a rotary position takes three numbers, as a head of three elements does."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.67}
    options = {"position_embedding": "rope", "rope_parameters": rope, "query_projection": "linear"}
    model = make_model(dtype, value_projection="key", head_dim=3, **options)
    tokens, cache = random_tokens(2, 6), DynamicCache(config=model.config)
    logits = [model(part, past_key_values=cache).logits for part in tokens.split([2, 1, 3], dim=1)]
    expected = model(tokens, use_cache=False).logits
    torch.testing.assert_close(torch.cat(logits, dim=1), expected, rtol=0.02, atol=0.02)
