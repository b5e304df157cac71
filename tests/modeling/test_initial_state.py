"""The initial state of every kind of parameter, and the default scaling of scores."""

import math

import pytest
import torch
from support.model_cases import PROJECTIONS, random_tokens

from modeling_nlq import NLQConfig, NLQForCausalLM


SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


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

    def test_vectors_begin_at_0_or_1(self):
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
                if name.endswith("q_bottleneck.output_norm.weight"):
                    expected = 0.0
                elif name.endswith("q_norm.scale"):
                    expected = math.sqrt(16)
                assert (parameter == expected).all(), name
            assert any(name.endswith("sink_bias") for name in vectors)
            assert any(name.endswith("q_norm.scale") for name in vectors) == (qk_norm == "l2")

    @pytest.mark.parametrize("use_bias", [False, True], ids=["no_bias", "bias"])
    @pytest.mark.parametrize("role", ["query", "key", "value"])
    def test_upcycled_is_linear(self, role, use_bias):
        sizes = {**SIZES, "use_bias": use_bias}
        switches = {"query_projection": "linear"}
        upcycled = NLQForCausalLM(NLQConfig(**sizes, **{**switches, f"{role}_projection": "upcycled"})).eval()
        linear = NLQForCausalLM(NLQConfig(**sizes, **switches)).eval()
        state = {name.replace("proj.linear.", "proj."): tensor for name, tensor in upcycled.state_dict().items()}
        linear.load_state_dict({name: state[name] for name in linear.state_dict()})
        input_ids = random_tokens(2, 7)
        assert torch.equal(upcycled(input_ids).logits, linear(input_ids).logits)

    def test_head_projection_is_identity(self):
        with_projection = NLQForCausalLM(NLQConfig(**SIZES, head_projection=True)).eval()
        without = NLQForCausalLM(NLQConfig(**SIZES)).eval()
        missing, unexpected = without.load_state_dict(with_projection.state_dict(), strict=False)
        assert not missing
        assert unexpected == [f"model.layers.{index}.self_attn.head_proj.weight" for index in range(2)]
        input_ids = random_tokens(2, 7)
        assert torch.equal(with_projection(input_ids).logits, without(input_ids).logits)

    def test_parameters_missing_from_a_checkpoint(self, tmp_path):
        """Switches turned on while loading start as they do in a new model."""
        saved = NLQForCausalLM(NLQConfig(**SIZES))
        saved.save_pretrained(tmp_path)
        input_ids = random_tokens(2, 7)
        loaded = NLQForCausalLM.from_pretrained(tmp_path, head_projection=True)
        assert torch.equal(loaded(input_ids).logits, saved(input_ids).logits)
        loaded = NLQForCausalLM.from_pretrained(
            tmp_path, attention_sink="learned", qk_norm="l2", attn_implementation="eager"
        )
        for block in loaded.model.layers:
            assert (block.self_attn.sink_bias == 0).all()
            assert (block.self_attn.q_norm.scale == 2.0).all()

    @pytest.mark.parametrize("head_dim", [None, 16], ids=["head_dim_default", "head_dim_given"])
    @pytest.mark.parametrize("kind", PROJECTIONS)
    def test_default_scaling(self, make_model, kind, head_dim):
        # Two heads of 16 fill the width of 32, whether that is said or not.
        switches = {"hidden_size": 32, "num_attention_heads": 2, "head_dim": head_dim, "query_projection": kind}
        scaling = 1 / math.sqrt(16) / (2 if kind in ("identity", "residual", "nonlinear") else 1)
        input_ids = random_tokens(2, 7)
        given = make_model(**switches, attention_scaling=scaling)
        assert torch.equal(make_model(**switches)(input_ids).logits, given(input_ids).logits)
