"""The loss, in slices and in C++, is Transformers' loss."""

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from modeling_nlq import loss_nlq
from modeling_nlq.loss_nlq import causal_lm_loss


CASES = {
    "plain": {},
    "number of items": {"num_items_in_batch": torch.tensor(31)},
    "integer number of items": {"num_items_in_batch": 31},
    "shifted labels": {"shift_labels": torch.arange(3 * 11).reshape(3, 11) % 17},
    "another ignored label": {"ignore_index": 5},
}


@pytest.fixture(params=["0", "1"], ids=["slices", "cpp"])
def cpp(request, monkeypatch):
    """Whether C++ code computes the loss."""
    monkeypatch.setenv("NLQ_CPP", request.param)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_transformers_loss_and_gradient(case, dtype, cpp, monkeypatch):
    monkeypatch.setattr(loss_nlq, "SLICE_ELEMENTS", 100)  # slices of five rows, the last one shorter
    some = torch.randint(17, (3, 11))
    some[1, 4:] = ignored = CASES[case].get("ignore_index", -100)
    # Theirs computes in float32, also for float64
    tolerance = {"rtol": 1e-2, "atol": 1e-4} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-7}
    for labels in (some, torch.full((3, 11), ignored)):  # the latter have no loss, and a gradient of 0
        results = []
        for function in (ForCausalLMLoss, causal_lm_loss):
            logits = 4 * torch.randn(3, 11, 17, generator=torch.Generator().manual_seed(0))
            logits = logits.to(dtype).requires_grad_()
            loss = function(logits, labels, 17, **CASES[case])
            loss.backward()
            results.append((loss.detach().float(), logits.grad))
        torch.testing.assert_close(*results, equal_nan=True, **tolerance)


def test_second_derivative_is_refused():
    logits = torch.randn(1, 4, 7, requires_grad=True)
    loss = causal_lm_loss(logits, torch.randint(7, (1, 4)), 7)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(RuntimeError, match="has no second derivative; set model"):
        (gradient.sum() + logits.sum()).backward()


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_logits_may_be_overwritten_before_backward(make_model, cpp, factor):
    """Training loops compute metrics in place, through NumPy too, where PyTorch cannot notice it."""
    model, tokens = make_model(), torch.randint(13, (2, 9))
    gradients = []
    for overwrite in (
        lambda logits: None,
        lambda logits: logits.detach().numpy().fill(0.0),
        lambda logits: logits.data.div_(7.0),
        lambda logits: logits.detach().zero_(),
    ):
        model.zero_grad()
        output = model(tokens, labels=tokens)
        overwrite(output.logits)
        for _ in range(2):
            (factor * output.loss).backward(retain_graph=True)
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


@pytest.mark.parametrize("shape", [(1,), (1, 9), (9, 2)])
def test_labels_of_another_shape_are_refused(shape):
    """The C++ code would read beyond them."""
    labels = torch.zeros(shape, dtype=torch.long)
    with pytest.raises(ValueError, match=r"must be \(batch, length\)=\(2, 9\)"):
        causal_lm_loss(torch.randn(2, 9, 7), None, 7, shift_labels=labels)


@pytest.mark.parametrize("size", [1, 6, 14, 63])
def test_logits_of_another_width_are_refused(size, make_model):
    """Reshaped to another width, they have more or fewer rows than labels, which the C++ code would read beyond."""
    with pytest.raises(ValueError, match=f"vocab_size={size} must be the number of logits of a token, 7"):
        causal_lm_loss(torch.randn(2, 9, 7), torch.zeros(2, 9, dtype=torch.long), size)
    model = make_model()
    model.set_output_embeddings(torch.nn.Linear(model.config.hidden_size, 2 * model.config.vocab_size))
    tokens = torch.zeros(2, 9, dtype=torch.long)
    with pytest.raises(ValueError, match="must be the number of logits"):
        model(tokens, labels=tokens)


@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_logits_that_are_not_finite_have_pytorchs_loss(number, monkeypatch):
    logits = torch.randn(3, 9)
    logits[0, 2], logits[1] = number, number
    losses = {}
    for cpp in ("0", "1"):
        monkeypatch.setenv("NLQ_CPP", cpp)
        losses[cpp] = loss_nlq.loss_and_gradient(logits, torch.tensor([1, 1, 1]), None)[0]
    torch.testing.assert_close(losses["1"], losses["0"], equal_nan=True)


def test_a_constant_added_to_all_logits_changes_nothing(cpp):
    labels = torch.randint(17, (2, 5))
    shifted = (2 * torch.randn(2, 5, 17) + 1e4).requires_grad_()
    exact = (shifted.detach().double() - 1e4).requires_grad_()
    losses = [causal_lm_loss(logits, labels, 17) for logits in (shifted, exact)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[0].double(), losses[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(shifted.grad.double(), exact.grad, rtol=1e-5, atol=1e-8)


def test_a_scaled_loss_in_float16_has_its_gradient():
    """A gradient that float16 rounds to 0 comes back with a scale, which may be too large for float16."""
    labels = torch.randint(600, (4, 64))
    logits = torch.randn(4, 64, 600).half().requires_grad_()
    exact = logits.detach().float().requires_grad_()
    for value in (logits, exact):
        (2.0**16 * causal_lm_loss(value, labels, 600)).backward()
    torch.testing.assert_close(logits.grad.float(), exact.grad, rtol=1e-2, atol=1e-2)
