"""The initial state of every kind of parameter, and the default scaling of scores."""

import math

import pytest
import torch

from modeling_nlq import NLQConfig, NLQForCausalLM


SIZES = {"vocab_size": 13, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}


class TestInitialState:
    def test_matrices_have_their_standard_deviations(self):
        sizes = {"vocab_size": 300, "hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 4}
        kinds = {"query": "upcycled", "key": "nonlinear", "value": "residual"}
        switches = {f"{role}_projection": kind for role, kind in kinds.items()}
        switches |= {"attention_gate": "elementwise", "tie_word_embeddings": False, "initializer_range": 0.03}
        model = NLQForCausalLM(NLQConfig(**sizes, **switches, max_position_embeddings=200))
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                is_last = name.endswith(("self_attn.o_proj.weight", "mlp.fc2.weight"))
                expected = 0.03 / math.sqrt(2 * 8) if is_last else 0.03
                assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
                assert abs(parameter.mean().item()) < 0.05 * expected, name

    def test_vectors_begin_at_0_or_1(self):
        switches = {
            "query_projection": "upcycled",
            "key_projection": "bottleneck",
            "value_projection": "upcycled",
            "use_bias": True,
            "attention_sink": "learned",
        }
        sizes = {"vocab_size": 13, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        for qk_norm in ("rms", "l2"):
            model = NLQForCausalLM(NLQConfig(**sizes, **switches, qk_norm=qk_norm, attention_gate="headwise"))
            vectors = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 1}
            for name, parameter in vectors.items():
                expected = 0.0 if "bias" in name else 1.0
                if name.endswith(("q_bottleneck.output_norm.weight", "v_bottleneck.output_norm.weight")):
                    expected = 0.0
                elif name.endswith("q_norm.scale"):
                    expected = math.sqrt(16)
                assert (parameter == expected).all(), name
            assert any(name.endswith("sink_bias") for name in vectors)
            assert any(name.endswith("q_norm.scale") for name in vectors) == (qk_norm == "l2")

    def test_vectors_missing_from_a_checkpoint_start_as_in_a_new_model(self, tmp_path):
        NLQForCausalLM(NLQConfig(**SIZES)).save_pretrained(tmp_path)
        switches = {"attention_sink": "learned", "qk_norm": "l2", "head_projection": True}
        for block in NLQForCausalLM.from_pretrained(tmp_path, **switches, attn_implementation="eager").model.layers:
            assert (block.self_attn.sink_bias == 0).all() and (block.self_attn.q_norm.scale == 2.0).all()
            assert torch.equal(block.self_attn.head_proj.weight, torch.eye(4).expand(4, -1, -1))
