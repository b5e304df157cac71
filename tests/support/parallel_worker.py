"""One of the processes that share a model. It compares the model with the whole one, case by case.

Run by `torch.distributed.run` with a file of cases, `{name: {"folder": ..., "sizes": {"tp_size": 2}}}`. The first
process writes the results to a second file, `{name: {check: number}}`: the largest difference of all processes,
relative to the largest number.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig
from transformers.distributed import DistributedConfig
from transformers.utils import logging

from modeling_nlq import NLQForCausalLM, NLQForConditionalGeneration


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).abs().max() / expected.abs().max().clamp(min=1e-30)).item()


def largest(differences: list[float]) -> float:
    """The largest number. A NaN counts as the largest, which Python's `max` may leave out."""
    return torch.tensor(differences, dtype=torch.float64).max().item()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compare(folder: str, sizes: dict[str, int]) -> dict[str, float]:
    """Returns the differences of logits, tokens, losses, gradients and saved weights from those of the whole model."""
    is_pair = AutoConfig.from_pretrained(folder).is_encoder_decoder
    model_class = NLQForConditionalGeneration if is_pair else NLQForCausalLM
    expected = model_class.from_pretrained(folder, dtype=torch.float64)
    found = model_class.from_pretrained(folder, dtype=torch.float64, distributed_config=DistributedConfig(**sizes))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(expected.config.vocab_size, (2, 9), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    source, name = (inputs, "decoder_input_ids") if is_pair else ({}, "input_ids")
    differences = {}
    with torch.no_grad():
        kept = torch.ones_like(mask).bool() if is_pair else mask.bool()
        whole_call = {**inputs, name: ids}
        differences["logits"] = relative(found(**whole_call).logits[kept], expected(**whole_call).logits[kept])
        caches = [(model, model(**source, **{name: ids[:, :5]}).past_key_values) for model in (found, expected)]
        step, whole_step = (
            model(**source, **{name: ids[:, 5:]}, past_key_values=cache).logits for model, cache in caches
        )
        differences["cached"] = relative(step, whole_step)
        for cache in ("dynamic", "static"):
            options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
            options["disable_compile"] = True
            tokens = found.generate(**inputs, **options)
            differences[f"tokens_{cache}"] = float((tokens != expected.generate(**inputs, **options)).sum())
    for _ in range(2):  # gradients accumulate
        losses = []
        for model in (found, expected):
            losses.append(model(**inputs, labels=ids.masked_fill(mask == 0, -100), use_cache=False).loss)
            losses[-1].backward()
        differences["loss"] = relative(*(loss.detach() for loss in losses))
    gradients = {name: parameter.grad for name, parameter in expected.named_parameters()}
    size = max(gradient.abs().max() for gradient in gradients.values())
    differences["gradients"] = largest(
        [
            ((whole(parameter.grad) - gradients[name]).abs().max() / size).item()
            for name, parameter in found.named_parameters()
        ]
    )
    saved = Path(folder).parent / f"{Path(folder).name}-saved"
    found.save_pretrained(saved)
    dist.barrier()
    again = model_class.from_pretrained(saved, dtype=torch.float64).state_dict()
    differences["saved"] = largest([relative(again[name], tensor) for name, tensor in expected.state_dict().items()])
    return differences


def main() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    dist.init_process_group("gloo")
    results = {}
    for name, case in json.loads(Path(sys.argv[1]).read_text()).items():
        found = compare(**case)
        everywhere = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, found)
        results[name] = {check: largest([each[check] for each in everywhere]) for check in found}
    if dist.get_rank() == 0:
        Path(sys.argv[2]).write_text(json.dumps(results))
    dist.barrier()
    with contextlib.redirect_stderr(open(os.devnull, "w")):
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
