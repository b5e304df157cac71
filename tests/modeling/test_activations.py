"""The table of attention activations, and activations that users register."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from support.attention_cases import LAYOUTS, NON_NEGATIVE, PHI, check, expected_of, layer_for, run
from support.reference import CANONICAL_NORMALIZATION, OF_A_ROW, PROJECTED
from transformers.activations import ACT2FN

from modeling_nlq import NLQConfig, NLQForCausalLM, activations_nlq
from modeling_nlq.activations_nlq import (
    ATTENTION_ACTIVATIONS,
    LIBRARY_ACTIVATIONS,
    exp_,
    get_attention_activation,
    register_attention_activation,
    zero_limit,
)


# Those whose weights are a function of one score, and not of a row, as they are in `OF_A_ROW`
OF_ONE_SCORE = tuple(name for name in CANONICAL_NORMALIZATION if name not in (*OF_A_ROW, "linear_attention"))
FORMULAS = {"softmax": torch.exp, **{name: PHI[name] for name in OF_ONE_SCORE if name != "softmax"}}
# Off 0, where some have a kink
SCORES = torch.linspace(-8.1, 8.0, 60, dtype=torch.float64)


class TestTable:
    def test_names(self):
        assert set(ATTENTION_ACTIVATIONS) == set(CANONICAL_NORMALIZATION)
        assert set(LIBRARY_ACTIVATIONS) == set(ACT2FN) - set(CANONICAL_NORMALIZATION) - {"prelu", "xielu", "linear"}

    @pytest.mark.parametrize("name", CANONICAL_NORMALIZATION)
    def test_row(self, name):
        row = get_attention_activation(name)
        assert row.name == name
        assert row.normalization == CANONICAL_NORMALIZATION[name]
        assert row.non_negative == (name in (*NON_NEGATIVE, "softmax", *OF_A_ROW, "linear_attention"))
        assert row.is_elementwise == (name in OF_ONE_SCORE and name != "softmax")
        assert row.subtract_log_count == (name == "sigmoid")
        assert row.formula
        assert row.source
        if name != "linear_attention":
            assert (row.function(SCORES).min() >= 0) == row.non_negative

    def test_linear_is_no_function(self):
        """Transformers has a function named `linear`, the identity, which is another thing."""
        with pytest.raises(
            ValueError, match="attention_activation='linear_attention' is not a function of the scores"
        ):
            get_attention_activation("linear_attention").function(SCORES)

    @pytest.mark.parametrize("name", OF_A_ROW)
    def test_function_of_a_row(self, name):
        row = get_attention_activation(name)
        assert (row.kind, row.derivative) == ("simplex" if name in PROJECTED else "row", None)
        scores = torch.stack([SCORES, SCORES.flip(0).sin()]).requires_grad_()
        weights = row.function(scores)
        expected = torch.stack([OF_A_ROW[name](own) for own in scores])
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        slopes = [torch.autograd.grad((tensor * SCORES.cos()).sum(), scores)[0] for tensor in (weights, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("name", OF_ONE_SCORE)
    def test_function_and_derivative(self, name):
        row = get_attention_activation(name)
        scores = SCORES.clone().requires_grad_()
        expected = FORMULAS[name](scores)
        slope = torch.autograd.grad(expected.sum(), scores)[0]
        weights = row.function(SCORES)
        torch.testing.assert_close(weights, expected.detach(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(row.derivative(SCORES, weights), slope, rtol=1e-9, atol=1e-12)
        for actual, other in zip(row.weights_and_gradient(SCORES, SCORES.cos()), (expected, slope * SCORES.cos())):
            torch.testing.assert_close(actual, other.detach(), rtol=1e-9, atol=1e-12)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
    @pytest.mark.parametrize("name", [name for name in OF_ONE_SCORE if name != "softmax"])
    def test_derivative_is_finite(self, name, dtype):
        row = get_attention_activation(name)
        scores = torch.tensor([-1e4, -90.0, -1.0, 0.0, 1e-30, 1.0, 90.0, 1e4], dtype=dtype)
        for tensor in row.weights_and_gradient(scores, torch.ones_like(scores)):
            assert tensor.dtype == dtype
            assert tensor.shape == scores.shape
            assert tensor.isfinite().all()

    @pytest.mark.parametrize("name", LIBRARY_ACTIVATIONS)
    def test_functions_of_transformers(self, name):
        row = get_attention_activation(name)
        assert (row.name, row.normalization, row.non_negative, row.subtract_log_count) == (
            name,
            "length",
            False,
            False,
        )
        scores = SCORES.clone().requires_grad_()
        expected = ACT2FN[name](scores)
        slope = torch.autograd.grad(expected.sum(), scores)[0]
        weights, gradient = row.weights_and_gradient(SCORES, SCORES.cos())
        torch.testing.assert_close(weights, expected.detach())
        torch.testing.assert_close(gradient, slope * SCORES.cos())

    @pytest.mark.parametrize("name", ["prelu", "xielu", "softmaxx"])
    def test_unknown(self, name):
        with pytest.raises(ValueError) as error:
            get_attention_activation(name)
        near = {"prelu": "relu", "xielu": "silu", "softmaxx": "softmax"}[name]
        message = f"attention_activation={name!r} is unknown; did you mean {near!r}? choose one of softmax, sigmoid, "
        assert str(error.value).startswith(message)
        assert ", identity, sparsemax, entmax15, softpick, stick_breaking, linear_attention" in str(error.value)
        assert f"register_attention_activation({name!r}, function)" in str(error.value)


def cauchy(scores):
    return 1 / (1 + scores.square())


def cauchy_derivative(scores, weights):
    return -2 * scores * weights.square()


@pytest.fixture(autouse=True)
def registry(monkeypatch):
    """A table of registered activations for this test only."""
    registered = {}
    monkeypatch.setattr(activations_nlq, "_REGISTERED", registered)
    return registered


class TestRegistration:
    @pytest.mark.parametrize("derivative", [None, cauchy_derivative], ids=["differentiated", "derivative_given"])
    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_function(self, monkeypatch, derivative, normalization):
        monkeypatch.setitem(PHI, "cauchy", lambda s: 1 / (1 + s * s))
        register_attention_activation(
            "cauchy", cauchy, derivative=derivative, non_negative=True, normalization=normalization
        )
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, "cauchy"), layout.states()
        assert module.normalization == normalization
        expected = expected_of(layout, "cauchy", normalization, states)
        for backend in ("eager", "nlq_tiled"):
            check(run(backend, layout, module, states), expected, 1e-5)

    def test_row(self):
        register_attention_activation("cauchy", cauchy, formula="1 / (1 + s^2)", source="Cauchy")
        row = get_attention_activation("cauchy")
        assert row.function is cauchy
        assert (row.derivative, row.normalization, row.non_negative) == (None, "length", False)
        assert (row.formula, row.source, row.subtract_log_count) == ("1 / (1 + s^2)", "Cauchy", False)

    def test_configuration(self):
        with pytest.raises(StrictDataclassError, match=r"'cauchy' is unknown; .* call register_attention_activation"):
            NLQConfig(attention_activation="cauchy")
        register_attention_activation("cauchy", cauchy)
        assert NLQConfig(attention_activation="cauchy").activation.function is cauchy
        with pytest.raises(
            StrictDataclassError, match=r"'couchy' is unknown; did you mean 'cauchy'\? .* linear_attention, cauchy, "
        ):
            NLQConfig(attention_activation="couchy")
        with pytest.raises(
            StrictDataclassError, match="attention_normalization='sum' needs weights that are never negative"
        ):
            NLQConfig(attention_activation="cauchy", attention_normalization="sum")
        activations_nlq._REGISTERED.clear()
        register_attention_activation("cauchy", cauchy, non_negative=True)
        NLQConfig(attention_activation="cauchy", attention_normalization="sum")

    def test_model(self, make_model, tmp_path):
        calls = []

        def derivative(scores, weights):
            calls.append(scores.shape)
            return -2 * scores * weights.square()

        register_attention_activation("cauchy", cauchy, derivative=derivative)
        calls.clear()
        input_ids = torch.randint(13, (2, 9))
        tiled, eager = (make_model(attention_activation="cauchy", implementation=name) for name in ("nlq", "eager"))
        gradients = []
        for model in (tiled, eager):
            model(input_ids, labels=input_ids).loss.backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
        torch.testing.assert_close(tiled(input_ids).logits, eager(input_ids).logits)
        torch.testing.assert_close(*gradients)
        assert calls
        tiled.save_pretrained(tmp_path)
        assert torch.equal(NLQForCausalLM.from_pretrained(tmp_path)(input_ids).logits, tiled(input_ids).logits)

    def test_replacement(self):
        register_attention_activation("mine", torch.tanh)
        with pytest.raises(ValueError, match=r"name='mine' is registered already; .*exist_ok=True"):
            register_attention_activation("mine", torch.sin)
        assert get_attention_activation("mine").function is torch.tanh
        register_attention_activation("mine", torch.sin, exist_ok=True)
        assert get_attention_activation("mine").function is torch.sin

    @pytest.mark.parametrize("exist_ok", [False, True])
    @pytest.mark.parametrize("name", ["softmax", "relu_squared", "relu6", "linear_attention", "entmax15"])
    def test_name_is_taken(self, name, exist_ok):
        with pytest.raises(ValueError, match=f"name='{name}' is an attention activation already; choose another name"):
            register_attention_activation(name, torch.tanh, exist_ok=exist_ok)
        assert get_attention_activation(name).function is not torch.tanh

    @pytest.mark.parametrize("name", ["", "my function", "1st"])
    def test_name_is_none(self, name):
        with pytest.raises(ValueError, match="must be a Python identifier"):
            register_attention_activation(name, torch.tanh)

    ELEMENT = "function of 'mine' must work element by element and keep the shape"
    REFUSED = {
        "normalization": (
            torch.tanh,
            {"normalization": "max"},
            "normalization='max' must be one of sum, length, none",
        ),
        "sum": (cauchy, {"normalization": "sum"}, "needs weights that are never negative: give non_negative=True"),
        "negative": (torch.tanh, {"non_negative": True}, "function of 'mine' is -1 somewhere, but non_negative=True"),
        "logarithm": (lambda s: s.log(), {}, "is not finite"),
        "derivative": (
            torch.tanh,
            {"derivative": lambda s, w: w - w.square()},
            "is not the derivative of its function",
        ),
        "infinite_slope": (lambda s: (0 * s).sqrt(), {}, "or its derivative, is not finite"),
        "softmax": (lambda s: torch.softmax(s, dim=-1), {}, ELEMENT),
        "mean": (lambda s: s.mean(dim=-1), {}, ELEMENT),
        "new_axis": (lambda s: s[..., None], {}, ELEMENT),
        "module": (torch.nn.PReLU().double(), {}, "must have no parameters, .* write an AttentionPart"),
        "in_place": (lambda s: s.tanh_(), {}, "return a new tensor"),
        "zero": (lambda s: s.abs().sqrt(), {}, "is not finite"),
    }

    @pytest.mark.parametrize("function, options, message", REFUSED.values(), ids=REFUSED)
    def test_functions_that_are_refused(self, registry, function, options, message):
        with pytest.raises(ValueError, match=message):
            register_attention_activation("mine", function, **options)
        assert not registry


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exp_makes_no_denormal_numbers(dtype):
    scores = torch.cat(
        [torch.linspace(-1000.0, 5.0, 2000, dtype=dtype), torch.tensor([-torch.inf, torch.nan], dtype=dtype)]
    )
    expected = scores.exp()
    expected = expected.where(~(expected < zero_limit(dtype)), 0.0)
    torch.testing.assert_close(exp_(scores), expected, rtol=0, atol=0, equal_nan=True)
