"""Measures the cost of recording the stability of attention, in training steps.

    python benchmarks/stability.py
    python benchmarks/stability.py --model gpt3-small-linear --length 1024 --device cuda

A step is forward, backward and fused AdamW on a batch of random tokens. A record is `attention_statistics` of two
sequences. They take turns, so that a busy machine slows both alike. The last column is the additional training time
with a record every `Recipe.stability_steps` steps.
"""

import argparse
import statistics

import torch
from measure import describe, quartiles, seconds
from training_step import make_step, transformers_loss

from modeling_nlq import NLQConfig, NLQForCausalLM
from modeling_nlq.configuration import find
from modeling_nlq.training.run.recipe import Recipe
from modeling_nlq.training.run.stability import attention_statistics


def gate_on_weights(model: NLQForCausalLM, tokens: torch.Tensor) -> None:
    """Raises `SystemExit` if the recorded entropies are not those of the weights of `output_attentions=True`."""
    model.eval()
    recorded = [layer["entropy"] for layer in attention_statistics(model, tokens)]
    with torch.no_grad():
        weights = model(tokens, output_attentions=True, use_cache=False).attentions
    # The first query sees one key; the record leaves it out
    expected = [torch.special.entr(layer).sum(dim=-1)[:, :, 1:].mean().item() for layer in weights]
    if max(abs(one - other) for one, other in zip(recorded, expected)) > 1e-4:
        raise SystemExit(f"correctness gate: entropies {recorded} recorded, {expected} expected; nothing is timed")


def measure(activation: str, arguments: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Returns the seconds of each step and of each record."""
    config = NLQConfig.from_json_file(find("models", arguments.model))
    config = NLQConfig(**{**config.to_diff_dict(), "attention_activation": activation})
    model = NLQForCausalLM._from_config(config, attn_implementation="nlq").to(arguments.device)
    tokens = torch.randint(config.vocab_size, (arguments.batch, arguments.length), device=arguments.device)
    gate_on_weights(model, tokens[:2])
    options = argparse.Namespace(device=arguments.device, dtype="float32", compile=False)
    step = make_step(model, transformers_loss(model), options)
    times = ([], [])
    for round_number in range(arguments.rounds + 2):  # the first two warm up
        for rows, function in zip(times, (lambda: step(tokens), lambda: attention_statistics(model, tokens[:2]))):
            elapsed = seconds(function, arguments.device)
            if round_number >= 2:
                rows.append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="tiny-nonlinear", help="a shipped model configuration, or a file")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, default=16, help="sequences of a training step")
    parser.add_argument("--length", type=int, default=256, help="tokens of a sequence")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    print(f"{describe(arguments.device)}; {arguments.model}, {arguments.batch} x {arguments.length} tokens a step")
    print(f"           step (ms)  record (ms)  record/step (quartiles)    every {Recipe.stability_steps} steps")
    for activation in ("softmax", "squared"):
        steps, records = measure(activation, arguments)
        low, middle, high = quartiles(records, steps)
        step, record = (1000 * statistics.median(times) for times in (steps, records))
        share = f"{middle / Recipe.stability_steps:.2%}"
        print(f"{activation:9}  {step:9.1f}  {record:11.1f}  {middle:.3f} ({low:.3f} to {high:.3f})  {share:>14}")


if __name__ == "__main__":
    main()
