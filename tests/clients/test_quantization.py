"""torchao: int8 weights, alone and under a LoRA."""

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from support.client_cases import CASES, IDS, fit, greedy, load, logits
from torchao.quantization import Int8WeightOnlyConfig, quantize_
from transformers import TorchAoConfig


def quantized(folder):
    return load(folder, quantization_config=TorchAoConfig(Int8WeightOnlyConfig()))


def linear_layers(model) -> list[str]:
    return [
        name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) and name != "lm_head"
    ]


@pytest.mark.parametrize("activation, query", CASES)
def test_every_linear_layer_is_quantized_and_takes_an_adapter(activation, query, trained, tmp_path):
    """Those of `f` too, and nothing else changes."""
    folder = trained(activation, query)
    by_hand = load(folder)
    quantize_(by_hand, Int8WeightOnlyConfig(), filter_fn=lambda module, name: name in linear_layers(by_hand))
    model = quantized(folder)
    assert all(type(model.get_submodule(name).weight).__name__ == "Int8Tensor" for name in linear_layers(model))
    torch.testing.assert_close(logits(model), logits(by_hand), atol=0, rtol=0)
    assert 0 < (logits(model) - logits(load(folder))).abs().max() < 0.5
    out = model.generate(IDS[:1], max_new_tokens=6, do_sample=False)
    assert out[0, IDS.shape[1] :].tolist() == greedy(model, IDS[0], 6)
    model.save_pretrained(tmp_path)
    torch.testing.assert_close(logits(load(tmp_path)), logits(model), atol=0, rtol=0)
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"))
    fit(adapted)
    adapted.save_pretrained(tmp_path / "adapter")
    again = PeftModel.from_pretrained(quantized(folder), tmp_path / "adapter")
    torch.testing.assert_close(logits(again), logits(adapted), atol=0, rtol=0)
