"""torch.compile and torch.export give one graph with the model's numbers, also with an adapter."""

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.client_cases import CASES, IDS, load, logits, run_script


# Tracing linear attention takes half a minute, and tests/modeling/test_model.py does it
WITH_WEIGHTS = CASES[:3]


@pytest.fixture(autouse=True)
def forget_graphs():
    torch.compiler.reset()


@pytest.mark.parametrize("activation, query", WITH_WEIGHTS)
def test_compiled_losses_and_gradients_are_the_same(activation, query, trained):
    """Losses and gradients. `aot_eager` traces both passes as every compiler does, and generates no code."""
    gradients = []
    for compiled in (False, True):
        model = load(trained(activation, query)).train()  # the first time, `trained` draws random numbers
        torch.manual_seed(0)
        model = get_peft_model(model, LoraConfig(target_modules="all-linear", init_lora_weights=False))
        forward = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        forward(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
        gradients.append([value.grad for value in model.parameters() if value.requires_grad])
    assert len(gradients[0]) == len(gradients[1]) > 0
    for first, second in zip(*gradients):
        torch.testing.assert_close(second, first, atol=1e-5, rtol=1e-4)


REMOTE = """
import sys
import torch
from transformers import AutoModelForCausalLM

folder, root = sys.argv[1:]
ids = torch.load(f"{root}/ids.pt")
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)
with torch.no_grad():
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")(ids, use_cache=False).logits
    exported = torch.export.export(model, (), {"input_ids": ids, "use_cache": False})
    torch.save([compiled, exported.module()(input_ids=ids, use_cache=False).logits], f"{root}/logits.pt")
"""


def test_remote_code(trained, tmp_path):
    folder = trained("sigmoid", "nonlinear")
    torch.save(IDS, tmp_path / "ids.pt")
    run_script(REMOTE, folder, tmp_path, package=False)
    expected = logits(load(folder))
    for result in torch.load(tmp_path / "logits.pt"):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=1e-4)
