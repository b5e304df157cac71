"""The choice of a backend for each activation, and the errors of backends that cannot compute it."""

import re

import pytest
import torch
from support.reference import NON_NEGATIVE, OF_A_ROW

from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, AttentionRequest, find_backend
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS as IN_CPP


class TestChoice:
    # By activation, "zero" being softmax with a sink
    FLASH = {f"flash_attention_{version}" for version in (2, 3, 4)}
    CAN = {
        "softmax": {"eager", "sdpa", "flex_attention", "nlq_cpp", *FLASH},
        "zero": {"eager", "sdpa", "flex_attention"},
        **{name: {"eager", "nlq_tiled", "flex_attention"} for name in NON_NEGATIVE},
        **{name: {"eager", "nlq_tiled"} for name in ("tanh", "identity", "gelu", "silu", "leaky_relu", "relu6")},
        **{name: {"eager"} for name in OF_A_ROW},
    }
    for name in IN_CPP:
        CAN[name] |= {"nlq_cpp", *({"nlq_triton"} & set(ATTENTION_BACKENDS))}  # where there is a Triton
    for names in CAN.values():
        names.add("nlq_rows")
    AUTOMATIC = {"softmax": "sdpa", "zero": "sdpa"}
    AUTOMATIC |= dict.fromkeys(OF_A_ROW, "nlq_rows")

    @staticmethod
    def asked(name, **options):
        activation, sink = ("softmax", "zero") if name == "zero" else (name, None)
        return AttentionRequest(get_attention_activation(activation), sink, **options)

    @pytest.mark.parametrize("backend", [*ATTENTION_BACKENDS, "owner/kernel"])
    @pytest.mark.parametrize("name", CAN)
    def test_a_backend_by_name_computes_the_activation_or_is_refused(self, name, backend):
        # Messages do not offer the name that continuous batching sets
        can = self.CAN[name] | {"paged|eager"} | ({"owner/kernel"} if name == "softmax" else set())
        if backend in can:
            assert find_backend(backend, [0], self.asked(name)) == backend
            return
        with pytest.raises(ValueError) as error:
            find_backend(backend, [0, 3], self.asked(name))
        message, choices = str(error.value).split("; use one of ")
        activation = "'softmax' with attention_sink='zero'" if name == "zero" else repr(name)
        assert (
            message == f"attn_implementation={backend!r} cannot compute attention_activation={activation} (layer 0, 3)"
        )
        assert set(choices.split(", ")) == {"nlq", *self.CAN[name]}

    @pytest.mark.parametrize("name", CAN)
    def test_automatic_choice_on_a_gpu(self, name):
        automatic = self.AUTOMATIC.get(name, "nlq_tiled")
        call = {"device": torch.device("cuda"), "dtype": torch.float32, "queries": 9, "head_dim": 8}
        assert find_backend("nlq", [0], self.asked(name, **call)) == automatic
        assert find_backend(None, [0], self.asked(name, **call)) == "eager"
        assert find_backend("nlq", [0], self.asked(name, **call, dropout=0.1)) == automatic
        assert find_backend("nlq", [0], self.asked(name, **call, weights=True)) == "eager"

    @pytest.mark.parametrize("name", CAN)
    def test_automatic_on_the_cpu(self, cpp_passes, name):
        """C++ code comes first, but for a single query, dropout and other types."""
        automatic = self.AUTOMATIC.get(name, "nlq_tiled")
        call = {"device": torch.device("cpu"), "dtype": torch.float32, "queries": 9, "head_dim": 8}
        assert find_backend("nlq", [0], self.asked(name, **call)) == (
            "nlq_cpp" if "nlq_cpp" in self.CAN[name] else automatic
        )
        for other in ({"queries": 1}, {"dtype": torch.float16}, {"dtype": torch.bfloat16, "head_dim": 7}):
            assert find_backend("nlq", [0], self.asked(name, **{**call, **other})) == automatic
        assert find_backend("nlq", [0], self.asked(name, **call, dropout=0.1)) == automatic

    def test_requests_that_a_backend_lacks_are_refused(self):
        for backend, request, message in (
            (
                "flex_attention",
                {"dropout": 0.1},
                "attention_dropout=0.1 (layer 0, 3)",
            ),
            ("nlq_tiled", {"weights": True}, "the weights that output_attentions=True asks for"),
            ("flex_attention", {"weights": True}, "the weights that output_attentions=True asks for"),
        ):
            message = f"attn_implementation={backend!r} cannot compute {message}"
            with pytest.raises(ValueError, match=f"^{re.escape(message)}.*use one of nlq, eager"):
                find_backend(backend, [0, 3], self.asked("relu", **request))
