"""ONNX programs that Transformers exports, run by ONNX Runtime."""

import onnxruntime
import torch
from transformers.exporters.exporter_onnx import OnnxConfig, OnnxExporter


def run(session: onnxruntime.InferenceSession, inputs: dict) -> dict:
    """Runs a program. Names that are inputs and outputs at once carry a prefix."""
    feed = {value.name: inputs[value.name.removeprefix("input.")] for value in session.get_inputs()}
    names = [value.name.removeprefix("output.") for value in session.get_outputs()]
    return dict(zip(names, session.run(None, feed)))


def open_session(model) -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])


def left_padded(prompts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    longest = max(map(len, prompts))
    pad = torch.nn.functional.pad
    ids = torch.stack([pad(prompt, (longest - len(prompt), 0)) for prompt in prompts])
    mask = torch.stack([pad(torch.ones_like(prompt), (longest - len(prompt), 0)) for prompt in prompts])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}


def export(model, sample: dict[str, torch.Tensor], folder) -> list[onnxruntime.InferenceSession]:
    """Returns the programs of the prompt and of one more token, exported by Transformers with a mask."""
    inputs = {name: sample[name] for name in ("input_ids", "attention_mask")}
    exported = OnnxExporter().export_for_generation(model, inputs, OnnxConfig(dynamic=True))
    exported.save_pretrained(folder)
    return [open_session(str(folder / f"{name}.onnx")) for name in ("prefill", "decode")]


def decode_greedily(model, prefill, decode, prompts: list[torch.Tensor], steps: int) -> tuple[float, torch.Tensor]:
    """Runs both programs on a padded batch; returns the largest error of a logit, and the tokens `(batch, steps)`."""
    inputs = left_padded(prompts)
    texts, mask, found = inputs["input_ids"], inputs["attention_mask"], []
    outputs = run(prefill, {name: value.numpy() for name, value in inputs.items()})
    with torch.no_grad():
        expected = model(**inputs).logits
    error = (torch.from_numpy(outputs["logits"]) - expected)[mask.bool()].abs().max().item()
    for _ in range(steps):
        new = torch.from_numpy(outputs["logits"])[:, -1:].argmax(-1)
        found.append(new)
        texts, mask = torch.cat([texts, new], dim=1), torch.cat([mask, torch.ones_like(new)], dim=1)
        step = {"input_ids": new, "attention_mask": mask, "position_ids": mask.sum(-1, keepdim=True) - 1}
        outputs = run(decode, {**outputs, **{name: value.numpy() for name, value in step.items()}})
        with torch.no_grad():
            expected = model(texts, attention_mask=mask, use_cache=False).logits[:, -1]
        error = max(error, (torch.from_numpy(outputs["logits"])[:, -1] - expected).abs().max().item())
    return error, torch.cat(found, dim=1)
