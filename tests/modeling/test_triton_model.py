"""Whole models on `nlq_triton` and on `eager`, compiled too."""

import contextlib
import functools
import itertools

import pytest
import torch
from support.attention_cases import (
    LAYOUTS,
    SCALING,
    layer_for,
    mask_of,
    random_booleans,
)
from support.grids import parametrize_grid, slow_except
from support.triton_cases import (
    DEVICE,
    MARKS,
)
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache, StaticCache

from modeling_nlq.kernels.triton import attention as triton_attention
from modeling_nlq.kernels.triton.attention import triton_attention_forward


pytestmark = MARKS


@pytest.mark.usefixtures("small_tiles", "fresh_compiler")
class TestCompiler:
    """Models on `nlq_triton` under `torch.compile`. Exporting models use another backend: `test_export.py`."""

    @pytest.mark.parametrize("is_training", [pytest.param(False, marks=pytest.mark.slow), True], ids=["inference", "training"])
    def test_no_graph_break(self, make_model, is_training):
        switches = {"attention_activation": "squared", "num_key_value_heads": 2, "query_projection": "linear"}
        model = make_model(implementation="nlq_triton", attention_dropout=0.1, **switches).to(DEVICE).train(is_training)
        input_ids = torch.randint(13, (2, 7), device=DEVICE)
        with torch.set_grad_enabled(is_training):
            explanation = torch._dynamo.explain(model)(input_ids, labels=input_ids, use_cache=False)
        assert explanation.graph_break_count == 0, explanation.break_reasons
        assert explanation.graph_count == 1

    @pytest.mark.slow
    def test_compiled_model(self, make_model):
        """Loss and gradients of a training step, bit by bit."""
        model = make_model(implementation="nlq_triton", attention_activation="softplus").to(DEVICE).train()
        input_ids = torch.randint(13, (2, 7), device=DEVICE)
        losses, gradients = [], []
        for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
            model.zero_grad()
            loss = call(input_ids, labels=input_ids, use_cache=False).loss
            loss.backward()
            losses.append(loss.detach())
            gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        torch.testing.assert_close(*losses)
        torch.testing.assert_close(*gradients)

    @pytest.mark.parametrize("normalization", ["sum", "length"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
    def test_shapes_without_data(self, dtype, normalization):
        """Fake tensors have the shapes, strides and dtypes of the real results."""
        layout = LAYOUTS["chunk_after_cache"]
        module, states = layer_for(layout, "softplus", normalization), layout.states(dtype)
        found = []
        for mode in (contextlib.nullcontext(), FakeTensorMode()):
            with mode:
                inputs = [torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=DEVICE) for tensor in states]
                inputs = [tensor.requires_grad_() for tensor in inputs]
                output, _ = triton_attention_forward(module, *inputs, None, scaling=SCALING)
                tensors = [output, *torch.autograd.grad(output, inputs, torch.empty_like(output))]
                found.append([(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors])
        assert found[0] == found[1]


@pytest.fixture(scope="module")
def model_pair(make_model):
    """A function from switches to a model on `nlq_triton` and the same on `eager`."""

    def make(**switches):
        sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "query_projection": "linear", "num_key_value_heads": 1}
        return [make_model(implementation=name, **{**sizes, **switches}).to(DEVICE) for name in ("nlq_triton", "eager")]

    return make


def test_precision_of_float32(monkeypatch):
    """Products in float32 are as exact as PyTorch's setting says."""
    monkeypatch.setattr(torch.version, "hip", None)
    try:
        torch.set_float32_matmul_precision("high")
        assert triton_attention._float32_precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert triton_attention._float32_precision() == "tf32x3"


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="torch 2.9 brought this setting")
def test_newer_setting_of_the_precision(monkeypatch):
    """The newer setting and the older function may follow each other."""
    monkeypatch.setattr(torch.version, "hip", None)
    given = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        assert triton_attention._float32_precision() == "tf32x3"
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert triton_attention._float32_precision() == "tf32"
        torch.set_float32_matmul_precision("highest")
        assert triton_attention._float32_precision() == "tf32x3"
        torch.set_float32_matmul_precision("high")
        assert triton_attention._float32_precision() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.backends.cuda.matmul.fp32_precision = given


@pytest.mark.usefixtures("small_tiles")
class TestModel:
    """Whole models on `nlq_triton` and on `eager`."""

    close = staticmethod(functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5))
    INPUTS = {
        "plain": {},
        "left_padding": {"attention_mask": mask_of("111111111", "000111111")},
        "right_padding": {"attention_mask": mask_of("111111111", "111110000")},
        "packed": {
            "position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 4, 5, 0, 1]]),
            "use_cache": False,
        },
        "4d_mask": {"attention_mask": random_booleans(2, 1, 9, 9) | torch.eye(9).bool(), "use_cache": False},
    }

    @pytest.mark.parametrize(
        "activation, name",
        slow_except(
            tuple(itertools.product(("sigmoid", "squared"), INPUTS)), (("sigmoid", "left_padding"), ("squared", "packed"))
        ),
    )
    def test_loss_and_gradients(self, model_pair, activation, name):
        inputs = self.INPUTS[name]
        input_ids = torch.randint(13, (2, 9))
        is_padding = "attention_mask" in inputs and inputs["attention_mask"].ndim == 2
        labels = torch.where(inputs["attention_mask"] == 1, input_ids, -100) if is_padding else input_ids
        found = []
        for model in model_pair(attention_activation=activation, position_embedding="rope"):
            given = {name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}
            loss = model(input_ids.to(DEVICE), labels=labels.to(DEVICE), **given).loss
            found.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)])
        self.close(*found)

    def test_positions_for_the_whole_batch(self, model_pair):
        """One row of positions counts for every text of the batch, as in eager."""
        inputs = {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]], device=DEVICE), "use_cache": False}
        input_ids = torch.randint(13, (3, 9), device=DEVICE)
        kernels, eager = (model(input_ids, **inputs).logits for model in model_pair(attention_activation="relu"))
        self.close(kernels, eager)

    @torch.no_grad()
    @parametrize_grid(
        {
            "padding": {"": False, "padding": True},
            "cache": ("dynamic", "static"),
            "split": {"": False, "split": True},
        },
        strength=1,
    )
    def test_cached_decoding(self, monkeypatch, model_pair, padding, cache, split):
        if split:
            monkeypatch.setattr(triton_attention, "MIN_SPLIT_KEYS", 1)
        model, eager = model_pair(attention_activation="softplus", position_embedding="learned")
        input_ids = torch.randint(13, (2, 9), device=DEVICE)
        mask = (mask_of("111111111", "000111111") if padding else torch.ones(2, 9).long()).to(DEVICE)
        expected = eager(input_ids, attention_mask=mask, use_cache=False).logits
        options = {"config": model.config}
        past = DynamicCache(**options) if cache == "dynamic" else StaticCache(**options, max_cache_len=16)
        found, seen = [], 0
        for size in (4, 1, 3, 1):
            chunk, seen = input_ids[:, seen : seen + size], seen + size
            found.append(model(chunk, attention_mask=mask[:, :seen], past_key_values=past).logits)
        visible = mask.bool()
        self.close(torch.cat(found, dim=1)[visible], expected[visible])

    @pytest.mark.parametrize("cache", slow_except((None, "static"), ("static",)))
    def test_generation(self, model_pair, cache):
        prompts = {"input_ids": torch.tensor([[7, 7, 3, 1], [5, 9, 2, 6]]), "attention_mask": mask_of("0011", "1111")}
        prompts = {name: tensor.to(DEVICE) for name, tensor in prompts.items()}
        options = {
            "max_new_tokens": 5,
            "min_new_tokens": 5,
            "do_sample": False,
            "pad_token_id": 0,
            "cache_implementation": cache,
        }
        tokens = [
            model.generate(**prompts, **options, **({"disable_compile": True} if cache else {}))
            for model in model_pair(attention_activation="tanh", attention_scaling=2.0, norm_position="post")
        ]
        assert torch.equal(*tokens)

    def test_layers_of_several_kinds(self, model_pair):
        switches = {"attention_activation": "relu", "per_layer_config": {1: {"attention_activation": "gelu"}}}
        kernels, eager = model_pair(**switches, attention_normalization="none", qk_norm="l2", attention_gate="headwise")
        input_ids = torch.randint(13, (2, 9), device=DEVICE)
        self.close(kernels(input_ids).logits, eager(input_ids).logits)

    @pytest.mark.parametrize("activation", ["softmax", "entmax15"])
    def test_other_activations(self, make_model, activation):
        with pytest.raises(
            ValueError, match=rf"'nlq_triton' cannot compute attention_activation='{activation}' \(layer 0, 1\)"
        ):
            make_model(implementation="nlq_triton", attention_activation=activation)

    def test_weights_are_refused(self, make_model):
        model = make_model(implementation="nlq_triton", attention_activation="relu").to(DEVICE)
        with pytest.raises(ValueError, match="the weights that output_attentions=True asks for"):
            model(torch.randint(13, (1, 3), device=DEVICE), output_attentions=True)
