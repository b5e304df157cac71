"""ExecuTorch: programs of Transformers' exporter, lowered to XNNPACK and run by ExecuTorch, against the model in
PyTorch.
"""

import torch
from support.client_cases import trained_model
from transformers.exporters.exporter_executorch import ExecutorchConfig, ExecutorchExporter

from modeling_nlq import NLQForCausalLM


def padded(length: int, padding: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, length, dtype=torch.long)
    mask[0, :padding] = 0
    return {"input_ids": torch.randint(1, 300, (2, length)), "attention_mask": mask}


def export(model, dynamic_shapes=None):
    config = ExecutorchConfig(dynamic=dynamic_shapes is not None, dynamic_shapes=dynamic_shapes)
    return ExecutorchExporter().export(model, {**padded(8, 2), "use_cache": False}, config)


def check(program, model, inputs) -> None:
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
    kept = inputs["attention_mask"].bool()
    torch.testing.assert_close(program(**inputs).logits[kept], expected[kept], rtol=0.0, atol=1e-4)


def model_of(folder, *activations: str) -> NLQForCausalLM:
    layers = {index: {"attention_activation": activation} for index, activation in enumerate(activations)}
    switches = {"query_projection": "nonlinear", "num_hidden_layers": len(activations), "per_layer_config": layers}
    return NLQForCausalLM.from_pretrained(trained_model(folder, **switches))


def test_programs_compute_the_same_at_any_length(tmp_path):
    model = model_of(tmp_path, "softmax", "squared")
    length = torch.export.Dim("length", max=64)
    program = export(model, {"input_ids": {1: length}, "attention_mask": {1: length}})
    for inputs in (padded(5, 3), padded(40, 7)):
        check(program, model, inputs)
    # XNNPACK refuses the number of visible keys, which changes with the length, for a length that is dynamic
    model = model_of(tmp_path, "sigmoid")
    check(export(model), model, padded(8, 5))
