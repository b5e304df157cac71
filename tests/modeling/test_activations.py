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
    def test_every_activation_has_its_row(self):
        assert set(ATTENTION_ACTIVATIONS) == set(CANONICAL_NORMALIZATION)
        assert set(LIBRARY_ACTIVATIONS) == set(ACT2FN) - set(CANONICAL_NORMALIZATION) - {"prelu", "xielu", "linear"}
        for name, row in (ATTENTION_ACTIVATIONS | LIBRARY_ACTIVATIONS).items():
            assert row.name == name and row.formula and row.source
            assert row.normalization == CANONICAL_NORMALIZATION.get(name, "length")
            assert row.non_negative == (name in (*NON_NEGATIVE, "softmax", *OF_A_ROW, "linear_attention"))
            assert row.is_elementwise == (name not in (*OF_A_ROW, "softmax", "linear_attention"))
            assert row.subtract_log_count == (name == "sigmoid")
        with pytest.raises(ValueError, match="'linear_attention' is not a function of the scores"):
            get_attention_activation("linear_attention").function(SCORES)

    @pytest.mark.parametrize("name", OF_A_ROW)
    def test_function_of_a_row_and_its_gradient_are_the_formula(self, name):
        row = get_attention_activation(name)
        assert (row.kind, row.derivative) == ("simplex" if name in PROJECTED else "row", None)
        scores = torch.stack([SCORES, SCORES.flip(0).sin()]).requires_grad_()
        weights = row.function(scores)
        assert weights.min() >= 0
        expected = torch.stack([OF_A_ROW[name](scores_of_row) for scores_of_row in scores])
        torch.testing.assert_close(weights, expected, rtol=1e-9, atol=1e-9)
        slopes = [torch.autograd.grad((tensor * SCORES.cos()).sum(), scores)[0] for tensor in (weights, expected)]
        torch.testing.assert_close(*slopes, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize("name", [*OF_ONE_SCORE, *LIBRARY_ACTIVATIONS])
    def test_function_and_derivative_are_the_formula(self, name):
        row, scores = get_attention_activation(name), SCORES.clone().requires_grad_()
        expected = FORMULAS[name](scores) if name in FORMULAS else ACT2FN[name](scores)
        slope = torch.autograd.grad(expected.sum(), scores)[0]
        weights = row.function(SCORES)
        assert weights.min() >= 0 or not row.non_negative
        tolerance = {"rtol": 1e-9, "atol": 1e-12}
        torch.testing.assert_close(weights, expected.detach(), **tolerance)
        if row.derivative is not None:
            torch.testing.assert_close(row.derivative(SCORES, weights), slope, **tolerance)
        for actual, other in zip(row.weights_and_gradient(SCORES, SCORES.cos()), (expected, slope * SCORES.cos())):
            torch.testing.assert_close(actual, other.detach(), **tolerance)

    @pytest.mark.parametrize("name, near", {"prelu": "relu", "xielu": "silu", "softmaxx": "softmax"}.items())
    def test_unknown_name_is_refused_with_a_suggestion(self, name, near):
        with pytest.raises(ValueError) as error:
            get_attention_activation(name)
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
    registered = {}
    monkeypatch.setattr(activations_nlq, "_REGISTERED", registered)
    return registered


class TestRegistration:
    @pytest.mark.parametrize("derivative", [None, cauchy_derivative], ids=["differentiated", "derivative_given"])
    @pytest.mark.parametrize("normalization", ["sum", "length", "none"])
    def test_backends_compute_a_registered_function(self, monkeypatch, derivative, normalization):
        monkeypatch.setitem(PHI, "cauchy", cauchy)
        options = {"derivative": derivative, "non_negative": True, "normalization": normalization}
        register_attention_activation("cauchy", cauchy, **options)
        row = get_attention_activation("cauchy")
        assert (row.function, row.derivative, row.normalization) == (cauchy, derivative, normalization)
        layout = LAYOUTS["one_key_value_head"]
        module, states = layer_for(layout, "cauchy"), layout.states()
        expected = expected_of(layout, "cauchy", normalization, states)
        for backend in ("eager", "nlq_tiled"):
            check(run(backend, layout, module, states), expected, 1e-5)

    def test_a_model_accepts_a_name_once_it_is_registered(self, make_model, tmp_path):
        with pytest.raises(StrictDataclassError, match=r"'cauchy' is unknown; .* call register_attention_activation"):
            NLQConfig(attention_activation="cauchy")
        register_attention_activation("cauchy", cauchy)
        with pytest.raises(StrictDataclassError, match=r"'couchy' is unknown; did you mean 'cauchy'\? "):
            NLQConfig(attention_activation="couchy")
        with pytest.raises(StrictDataclassError, match="='sum' needs weights that are never negative"):
            NLQConfig(attention_activation="cauchy", attention_normalization="sum")
        register_attention_activation("cauchy", cauchy, non_negative=True, exist_ok=True)
        switches = {"attention_activation": "cauchy", "attention_normalization": "sum"}
        model, tokens = make_model(implementation="nlq", **switches), torch.arange(9)[None]
        model.save_pretrained(tmp_path)
        assert torch.equal(NLQForCausalLM.from_pretrained(tmp_path)(tokens).logits, model(tokens).logits)

    def test_a_registered_name_is_replaced_only_on_request(self):
        register_attention_activation("mine", torch.tanh)
        with pytest.raises(ValueError, match=r"name='mine' is registered already; .*exist_ok=True"):
            register_attention_activation("mine", torch.sin)
        assert get_attention_activation("mine").function is torch.tanh
        register_attention_activation("mine", torch.sin, exist_ok=True)
        assert get_attention_activation("mine").function is torch.sin

    @pytest.mark.parametrize("name", ["softmax", "relu_squared", "relu6", "linear_attention", "my function", "1st"])
    def test_names_that_are_refused(self, name):
        message = "is an attention activation already" if name.isidentifier() else "must be a Python identifier"
        with pytest.raises(ValueError, match=f"name='{name}' {message}"):
            register_attention_activation(name, torch.tanh, exist_ok=True)

    ELEMENT = "function of 'mine' must work element by element and keep the shape"
    REFUSED = {
        "normalization": (torch.tanh, {"normalization": "max"}, "='max' must be one of sum, length, none"),
        "sum": (cauchy, {"normalization": "sum"}, "needs weights that are never negative: give non_negative=True"),
        "negative": (torch.tanh, {"non_negative": True}, "function of 'mine' is -1 somewhere, but non_negative=True"),
        "logarithm": (torch.log, {}, "is not finite"),
        "derivative": (torch.tanh, {"derivative": lambda s, w: w}, "is not the derivative of its function"),
        "infinite_slope": (lambda s: (0 * s).sqrt(), {}, "or its derivative, is not finite"),
        "softmax": (lambda s: torch.softmax(s, dim=-1), {}, ELEMENT),
        "mean": (lambda s: s.mean(dim=-1), {}, ELEMENT),
        "new_axis": (lambda s: s[..., None], {}, ELEMENT),
        "module": (torch.nn.PReLU().double(), {}, "must have no parameters, .* write an AttentionPart"),
        "in_place": (torch.tanh_, {}, "return a new tensor"),
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
