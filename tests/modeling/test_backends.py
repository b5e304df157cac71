"""The choice of a backend for each activation, and the errors of backends that cannot compute it."""

import pytest
import torch
from support.attention_cases import NON_NEGATIVE

from modeling_nlq.activations_nlq import get_attention_activation
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, AttentionRequest, find_backend
from modeling_nlq.kernels.cpu.cpu_ops import ACTIVATIONS as IN_CPP


class TestChoice:
    """The backends that compute each activation, and the errors of the others."""

    # By activation, "zero" being softmax with a sink
    CAN = {
        "softmax": {
            *(
                "eager",
                "sdpa",
                "flash_attention_2",
                "flash_attention_3",
                "flash_attention_4",
                "flex_attention",
                "nlq_cpp",
            )
        },
        "zero": {"eager", "sdpa", "flex_attention"},
        **{name: {"eager", "nlq_tiled", "flex_attention"} for name in NON_NEGATIVE},
        **{name: {"eager", "nlq_tiled"} for name in ("tanh", "identity", "gelu", "silu", "leaky_relu", "relu6")},
        "sparsemax": {"eager"},
        "entmax15": {"eager"},
        "softpick": {"eager"},
        "stick_breaking": {"eager"},
    }
    for name in IN_CPP:
        CAN[name] |= {"nlq_cpp", *({"nlq_triton"} & set(ATTENTION_BACKENDS))}  # where there is a Triton
    for names in CAN.values():
        names.add("nlq_rows")
    # The others: nlq_tiled
    AUTOMATIC = {"softmax": "sdpa", "zero": "sdpa"}
    AUTOMATIC |= dict.fromkeys(("sparsemax", "entmax15", "softpick", "stick_breaking"), "nlq_rows")

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

    def test_flex_attention_refuses_dropout(self):
        with pytest.raises(ValueError) as error:
            find_backend("flex_attention", [0, 3], self.asked("relu", dropout=0.1))
        assert str(error.value) == (
            "attn_implementation='flex_attention' cannot compute attention_dropout=0.1 (layer 0, 3); "
            "use one of nlq, eager, nlq_tiled, nlq_rows"
        )

    @pytest.mark.parametrize("backend", ["nlq_tiled", "flex_attention"])
    def test_backends_without_weights_are_refused(self, backend):
        with pytest.raises(
            ValueError, match=r"the weights that output_attentions=True asks for .* use one of nlq, eager$"
        ):
            find_backend(backend, [0], self.asked("relu", weights=True))
