"""`nlq_triton` in Triton's interpreter, or compiled where there is a GPU, against the formulas in float64."""

import dataclasses
import os

import pytest
import torch
from support.attention_cases import (
    SCALING,
    Layout,
    attend,
    causal,
    check,
    chunk,
    dense,
    expected_of,
    layer_for,
    packed,
    padded,
    poisoned_memory,
    random_booleans,
    run,
)
from support.grids import parametrize_grid
from support.reference import NON_NEGATIVE, PHI
from torch.utils.flop_counter import FlopCounterMode

from modeling_nlq import NLQConfig, NLQForCausalLM, kernels
from modeling_nlq.activations_nlq import ATTENTION_ACTIVATIONS
from modeling_nlq.backends_nlq import ATTENTION_BACKENDS, PREFERENCE
from modeling_nlq.masking_nlq import make_visibility
from modeling_nlq.ops_nlq import AttentionInputs


HAS_GPU = torch.cuda.is_available()
if "nlq_triton" not in ATTENTION_BACKENDS or not (HAS_GPU or os.environ.get("TRITON_INTERPRET") == "1"):
    pytest.skip("needs triton, and a GPU or its interpreter: make test-triton", allow_module_level=True)

import triton  # noqa: E402
import triton.language as tl  # noqa: E402

from modeling_nlq.kernels.gpu import attention as triton_attention  # noqa: E402


DEVICE = "cuda" if HAS_GPU else "cpu"
pytestmark = [pytest.mark.gpu] if HAS_GPU else []
# The interpreter cuts numbers off to bfloat16; tensor cores multiply float32 as three products of TF32
TOLERANCES = {"float32": 2e-5 if HAS_GPU else 3e-6, "bfloat16": 2e-2, "float16": 3e-3}
NAMES = [name for name, row in ATTENTION_ACTIVATIONS.items() if row.is_elementwise]
PAIRS = {
    f"{name}-{normalization}": (name, normalization)
    for name in NAMES
    for normalization in ("sum", "length", "none")
    if normalization != "sum" or name in NON_NEGATIVE
}
ONE, GROUP = {"batch": 1, "heads": 1, "key_value_heads": 1}, {"batch": 1, "heads": 2, "key_value_heads": 1}
SINGLE = {"heads": 1, "key_value_heads": 1}


def bidirectional(length, window=None):
    def sees(batch, head, query, key):
        return window is None or abs(query - key) <= window

    def mask():
        device = torch.device("cpu")
        return make_visibility(length, length, 0, device, sliding_window=window, is_causal=False)

    return Layout(sees, mask, length, length, **ONE)


# Longer than tiles of 32 queries and 16 keys: some tiles need a mask, some do not
LAYOUTS = {
    "causal": chunk(70, 70, 0, **ONE),
    "without_mask": Layout(causal, query_length=33, key_length=33, **GROUP),
    "window": chunk(60, 60, 0, window=40, **ONE),
    "left_padding_and_holes": padded("0" * 9 + "1" * 24, "1" * 7 + "0110" + "1" * 22, **SINGLE),
    "padded_window": padded("0" * 5 + "1" * 35 + "00", window=17, **SINGLE),
    "nothing_visible": padded("0" * 20, "1" * 20, **SINGLE),
    "packed": packed("a" * 10 + "b" * 50, "a" * 33 + "b" * 26 + "c", **SINGLE),
    "packed_window": packed("a" * 30 + "b" * 9, window=12, **SINGLE),
    "after_cache": chunk(20, 75, 55, **GROUP),
    "static_cache": chunk(18, 64, torch.tensor(20), **ONE),
    "bidirectional": bidirectional(50),
    "bidirectional_window": bidirectional(70, window=9),
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    if not HAS_GPU:
        monkeypatch.setattr(triton_attention, "SHAPES", {key: [(32, 16, 4, 1)] for key in triton_attention.SHAPES})


def on_device(layout, dtype, head_dim):
    """The layout and its states, on the device."""
    mask = layout.mask()
    moved = dataclasses.replace(layout, mask=lambda: None if mask is None else mask.to(DEVICE))
    states = [tensor.detach().to(DEVICE).requires_grad_() for tensor in layout.states(dtype, head_dim)]
    return moved, states


def operator_inputs(name="softplus", length=20, **options):
    layout, states = on_device(chunk(length, length, 0, **GROUP), torch.float32, 16)
    mask = layout.mask()
    masks = (mask.visible_count[:, None], mask.last_key, None, None, None, None)
    normalization = ATTENTION_ACTIVATIONS[name].normalization
    states = [tensor.detach() for tensor in states]
    return AttentionInputs(*states, None, None, *masks, name, normalization, SCALING, 0.0)


class TestFormulas:
    @parametrize_grid(
        {"activation, normalization": PAIRS, "layout": LAYOUTS, "dtype": list(TOLERANCES), "head_dim": (16, 24, 32)}
    )
    def test_output_and_gradients(self, activation, normalization, layout, dtype, head_dim):
        layout, states = on_device(layout, getattr(torch, dtype), head_dim)
        module = layer_for(layout, activation, normalization)
        with poisoned_memory():
            actual = run("nlq_triton", layout, module, states)
        assert all(tensor.dtype == states[0].dtype for tensor in actual)
        expected = expected_of(layout, activation, normalization, [tensor.cpu() for tensor in states])
        check([tensor.cpu() for tensor in actual], expected, TOLERANCES[dtype])

    @pytest.mark.skipif(not HAS_GPU, reason="minutes in the interpreter")
    @pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
    @pytest.mark.parametrize("dtype", TOLERANCES)
    @pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
    def test_long_texts(self, activation, dtype, head_dim):
        layout, states = on_device(chunk(700, 700, 0, **GROUP), getattr(torch, dtype), head_dim)
        module = layer_for(layout, activation)
        first, second = (run("nlq_triton", layout, module, states) for _ in range(2))
        assert all(map(torch.equal, first, second))
        expected = expected_of(layout, activation, module.normalization, [tensor.cpu() for tensor in states])
        check([tensor.cpu() for tensor in first], expected, TOLERANCES[dtype])

    @pytest.mark.parametrize("name", NAMES)
    def test_activations_of_all_scores(self, name):
        """Values and slopes of small, large, positive and negative scores, with a small relative error."""

        @triton.jit
        def apply(scores, weights, slopes, ACTIVATION: tl.constexpr, SIZE: tl.constexpr):
            index = tl.arange(0, SIZE)
            weight, slope = triton_attention.activate(tl.load(scores + index), ACTIVATION)
            tl.store(weights + index, weight)
            tl.store(slopes + index, slope)

        size = torch.logspace(-12, 4.3, 64, base=2)  # up to 20
        scores = torch.cat([size, -size]).to(DEVICE)
        weights, slopes = torch.empty_like(scores), torch.empty_like(scores)
        apply[(1,)](scores, weights, slopes, ACTIVATION=name, SIZE=128)
        exact = scores.double().requires_grad_()
        expected = PHI[name](exact)
        gradient = torch.autograd.grad(expected.sum(), exact)[0]
        torch.testing.assert_close(weights.double(), expected.detach(), rtol=2e-6, atol=0.0)
        torch.testing.assert_close(slopes.double(), gradient, rtol=2e-6, atol=5e-7)


class TestOperators:
    def test_schema_and_fakes(self):
        inputs = operator_inputs()
        torch.library.opcheck(triton_attention.FORWARD, tuple(inputs))
        output, inverse_normalizer = triton_attention.FORWARD(*inputs)
        gradients = (torch.ones_like(output), *inputs, output, inverse_normalizer)
        torch.library.opcheck(triton_attention.BACKWARD, gradients)

    def test_floating_point_operations(self):
        inputs = operator_inputs()
        with FlopCounterMode(display=False) as counter:
            output, inverse_normalizer = triton_attention.FORWARD(*inputs)
        product = 2 * 2 * 20 * 20 * 16  # two heads
        assert counter.get_total_flops() == 2 * product
        with FlopCounterMode(display=False) as counter:
            triton_attention.BACKWARD(torch.ones_like(output), *inputs, output, inverse_normalizer)
        assert counter.get_total_flops() == 5 * product

    def test_a_compiled_model(self):
        """Loss and gradients of a compiled model are those of `nlq_tiled`."""
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 31}
        tokens = torch.randint(31, (1, 20), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        losses, gradients = [], []
        for backend in ("nlq_tiled", "nlq_triton"):
            config = NLQConfig(**sizes, attention_activation="sigmoid", attn_implementation=backend)
            torch.manual_seed(0)
            model = NLQForCausalLM(config).to(DEVICE)
            function = torch.compile(model, backend="aot_eager", fullgraph=True)
            loss = function(input_ids=tokens, labels=tokens).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(losses[1], losses[0], rtol=1e-5, atol=1e-6)
        for actual, expected in zip(gradients[1], gradients[0]):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-6)


class TestChoice:
    def test_only_by_name(self):
        assert "nlq_triton" not in PREFERENCE

    def test_a_mask_of_the_callers_is_for_nlq_tiled(self):
        layout, states = on_device(dense(random_booleans(1, 1, 9, 9), **ONE), torch.float32, 16)
        module, mask = layer_for(layout, "relu"), layout.visible.to(DEVICE)
        outputs = [attend(name, module, *states, mask=mask) for name in ("nlq_triton", "nlq_tiled")]
        assert torch.equal(*outputs)

    @pytest.mark.parametrize("dtype, head_dim", [(torch.float64, 16), (torch.float32, 257)])
    def test_others_are_refused(self, dtype, head_dim):
        layout, states = on_device(chunk(5, 5, 0, **ONE), dtype, head_dim)
        with pytest.raises(ValueError, match=r"attn_implementation='nlq_triton' \(layer 0\) computes float32"):
            run("nlq_triton", layout, layer_for(layout, "relu"), states)

    @pytest.mark.parametrize("version, is_right", [("3.3.1", False), ("3.4.0", True), ("3.10.0+git1", True)])
    def test_an_old_triton_counts_as_none(self, monkeypatch, version, is_right):
        monkeypatch.setattr(kernels.gpu.importlib.metadata, "version", lambda name: version)
        assert kernels.gpu.has_triton() == is_right
