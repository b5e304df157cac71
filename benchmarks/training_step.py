"""Measures tokens per second of a training step, and compares them with other implementations of the same shape.

    python benchmarks/training_step.py
    python benchmarks/training_step.py --device cuda   # gpt3-small in bfloat16, compiled
    python benchmarks/training_step.py --encoders      # beside EuroBertForMaskedLM

A step is forward, backward and fused AdamW on random tokens. The implementations take turns, so that a busy machine
slows all of them alike. Before anything is timed, NLQ's model must reproduce GPT-2's loss from its weights. litgpt is
measured if it is installed: `pip install --no-deps litgpt lightning lightning-utilities torchmetrics jsonargparse`,
because it requires an older NumPy than `datasets`.

bfloat16 means the same as `bf16: true` for `Trainer`: the forward pass runs under `torch.autocast`. All candidates are
in memory at once: 1.5 GB each of weights and optimizer at the size of gpt3-small.

Model FLOPs utilisation (MFU) is the share of the device's FLOPs that the model needs. `nlq params` gives the FLOPs of
a token, by Chowdhery et al. 2022 (arXiv 2204.02311, appendix B); the causal half of attention is not discounted. The
device's rate is `--peak`. On CUDA it defaults to that of a large product of matrices in the same dtype.
"""

import argparse
import contextlib
import statistics
from collections.abc import Callable

import torch
import transformers
from measure import attempt, compiled_without_fallback, describe, matmul_rate, quartiles, seconds
from transformers import (
    EuroBertConfig,
    EuroBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
)

import modeling_nlq
from modeling_nlq import ATTENTION_ACTIVATIONS, NLQConfig, NLQForCausalLM, NLQForMaskedLM
from modeling_nlq.training.conversion.families import FAMILIES
from modeling_nlq.training.size import size_of


SHAPES = {
    # Six layers, context 256, the vocabulary of the demo
    "small": {
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "vocab_size": 8192,
        "context": 256,
        "batch": 16,
    },
    "gpt3-small": {
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "vocab_size": 50304,
        "context": 1024,
        "batch": 12,
    },
}
BASELINE = "gpt2 (sdpa)"
LITGPT, LIKE_LITGPT = "litgpt (rotary)", "nlq linear/softmax"  # both have the same matrices
DEFAULTS = {
    "cpu": {"dtype": "float32", "preset": "small", "compile": False},
    "cuda": {"dtype": "bfloat16", "preset": "gpt3-small", "compile": True},
}
SWITCHES = {
    "nlq linear/softmax": {"query_projection": "linear"},
    "nlq nonlinear/softmax": {"query_projection": "nonlinear"},
    **{
        f"nlq linear/{name}": {"query_projection": "linear", "attention_activation": name}
        for name, activation in ATTENTION_ACTIVATIONS.items()
        if activation.is_elementwise
    },
}


def activation_of(switches: dict[str, str]) -> str:
    return switches.get("attention_activation", "softmax")


def nlq_config(shape: dict, **switches) -> NLQConfig:
    sizes = {name: value for name, value in shape.items() if name not in ("context", "batch")}
    return NLQConfig(**sizes, max_position_embeddings=shape["context"], use_cache=False, **switches)


def gpt2_config(shape: dict) -> GPT2Config:
    return GPT2Config(
        vocab_size=shape["vocab_size"],
        n_embd=shape["hidden_size"],
        n_layer=shape["num_hidden_layers"],
        n_head=shape["num_attention_heads"],
        n_positions=shape["context"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )


def gate_on_gpt2(shape: dict) -> None:
    """Raises `SystemExit` if NLQ's model does not give GPT-2's loss with GPT-2's weights."""
    theirs = GPT2LMHeadModel(gpt2_config(shape)).eval()
    ours = NLQForCausalLM(nlq_config(shape, query_projection="linear", use_bias=True, hidden_act="gelu_new")).eval()
    weights = {
        "model.embed_tokens.weight": theirs.transformer.wte.weight,
        "model.embed_positions.weight": theirs.transformer.wpe.weight,
    }
    weights |= {f"model.norm.{kind}": getattr(theirs.transformer.ln_f, kind) for kind in ("weight", "bias")}
    for index, block in enumerate(theirs.transformer.h):
        layer = f"model.layers.{index}"
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(block.attn.c_attn, kind).chunk(3, dim=-1)):
                weights[f"{layer}.self_attn.{name}_proj.{kind}"] = part.t()
            weights[f"{layer}.self_attn.o_proj.{kind}"] = getattr(block.attn.c_proj, kind).t()
            weights[f"{layer}.mlp.fc1.{kind}"] = getattr(block.mlp.c_fc, kind).t()
            weights[f"{layer}.mlp.fc2.{kind}"] = getattr(block.mlp.c_proj, kind).t()
            weights[f"{layer}.self_attn_norm.{kind}"] = getattr(block.ln_1, kind)
            weights[f"{layer}.mlp_norm.{kind}"] = getattr(block.ln_2, kind)
    ours.load_state_dict({"lm_head.weight": theirs.lm_head.weight, **weights})
    tokens = torch.randint(shape["vocab_size"], (2, 64))
    with torch.no_grad():
        losses = [model(tokens, labels=tokens).loss.item() for model in (theirs, ours)]
    if abs(losses[0] - losses[1]) > 1e-4:
        raise SystemExit(f"correctness gate: GPT-2's loss is {losses[0]:.6f}, ours {losses[1]:.6f}; nothing is timed")


def make_decoders(shape: dict, activations: list[str] | None, attention: str = "nlq") -> dict[str, PreTrainedModel]:
    candidates = {BASELINE: GPT2LMHeadModel._from_config(gpt2_config(shape), attn_implementation="sdpa")}
    for name, switches in SWITCHES.items():
        activation = activation_of(switches)
        if activations is None or activation in activations:
            implementation = "nlq" if activation == "softmax" else attention
            config = nlq_config(shape, **switches)
            candidates[name] = NLQForCausalLM._from_config(config, attn_implementation=implementation)
    softmax = nlq_config(shape, **SWITCHES[LIKE_LITGPT])
    return {**candidates, f"{LIKE_LITGPT}, sdpa": NLQForCausalLM._from_config(softmax, attn_implementation="sdpa")}


def make_encoders(shape: dict) -> dict[str, PreTrainedModel]:
    sizes = {name: value for name, value in shape.items() if name not in ("context", "batch")}
    sizes |= {"intermediate_size": 4 * shape["hidden_size"], "num_key_value_heads": shape["num_attention_heads"]}
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "mask_token_id", "pad_token_id"), 0)
    theirs = EuroBertConfig(**sizes, max_position_embeddings=shape["context"], **tokens)
    candidates = {"eurobert (sdpa)": EuroBertForMaskedLM._from_config(theirs, attn_implementation="sdpa")}
    for activation in ("softmax", "sigmoid", "relu"):
        config = NLQConfig.from_dict(
            {**FAMILIES["eurobert"].read(theirs).to_dict(), "attention_activation": activation}
        )
        candidates[f"nlq linear/{activation}"] = NLQForMaskedLM._from_config(config, attn_implementation="nlq")
    return candidates


def transformers_loss(model: torch.nn.Module) -> Callable:
    return lambda tokens: model(tokens, labels=tokens).loss


def litgpt_candidate(shape: dict) -> tuple[torch.nn.Module, Callable] | None:
    """Makes litgpt's GPT with LayerNorm, a two-layer GELU MLP, no biases, and rotary positions, its only kind."""
    try:
        from litgpt import GPT, Config
    except ImportError:
        return None
    model = GPT(
        Config(
            block_size=shape["context"],
            vocab_size=shape["vocab_size"],
            padded_vocab_size=shape["vocab_size"],
            n_layer=shape["num_hidden_layers"],
            n_head=shape["num_attention_heads"],
            n_embd=shape["hidden_size"],
            rotary_percentage=1.0,
            parallel_residual=False,
            bias=False,
            norm_class_name="LayerNorm",
            mlp_class_name="GptNeoxMLP",
            gelu_approximate="none",
            intermediate_size=4 * shape["hidden_size"],
        )
    )
    model.lm_head.weight = model.transformer.wte.weight

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens)[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())

    return model, loss


def make_step(model: torch.nn.Module, loss: Callable, arguments: argparse.Namespace) -> Callable[[torch.Tensor], None]:
    model.to(arguments.device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    loss = torch.compile(loss) if arguments.compile else loss
    dtype = getattr(torch, arguments.dtype)
    precision = torch.autocast(arguments.device, dtype) if dtype != torch.float32 else contextlib.nullcontext()

    def step(tokens: torch.Tensor) -> None:
        with precision:
            value = loss(tokens)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def report(
    rows: dict[str, list[float]], baseline: str, tokens: int, utilization: dict[str, float] | None = None
) -> None:
    """Prints a row for each candidate, from the seconds of its rounds and the tokens of a step.

    `utilization`, the share of the peak that a token per second takes, adds a column of the MFU.
    """
    width = max(map(len, rows))
    column = "" if utilization is None else "    MFU"
    print(f"{'':{width}}  tokens/s{column}  ratio to {baseline} (median of the rounds' ratios, quartiles)")
    for name, times in rows.items():
        low, middle, high = quartiles(rows[baseline], times)
        speed = tokens / statistics.median(times)
        column = "" if utilization is None else f"  {speed * utilization[name]:5.1%}"
        print(f"{name:{width}}  {speed:8,.0f}{column}  {middle:.3f}  ({low:.3f} to {high:.3f})")
    print(f"{baseline}: {statistics.median(rows[baseline]):.3f} s a step of {tokens:,} tokens")


def time_steps(
    steps: dict[str, Callable], tokens: torch.Tensor, rounds: int, device: str
) -> tuple[dict, dict[str, str]]:
    """Returns the seconds of each candidate's steps, in turns, and the reasons of failures on a GPU."""
    failures = {}
    for _ in range(2):  # to compile and to warm up
        for name, step in steps.items():
            if device == "cuda" and name not in failures and (reason := attempt(name, lambda step=step: step(tokens))):
                failures[name] = reason
                torch.cuda.empty_cache()
            elif device != "cuda":
                step(tokens)
    alive = {name: step for name, step in steps.items() if name not in failures}
    rows = {name: [] for name in alive}
    for _ in range(rounds):
        for name, step in alive.items():
            rows[name].append(seconds(lambda step=step: step(tokens), device))
    return rows, failures


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=list(DEFAULTS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="[float32; CUDA: bfloat16]")
    parser.add_argument("--preset", choices=list(SHAPES), help="[small; CUDA: gpt3-small]")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="torch.compile every candidate [no; CUDA: yes] (needs a C++ compiler on the CPU)",
    )
    parser.add_argument("--batch", type=int, help="sequences in a step [that of the preset]")
    parser.add_argument("--context", type=int, help="tokens of a sequence [that of the preset]")
    parser.add_argument("--attention", default="nlq", help="attn_implementation of elementwise activations [nlq]")
    parser.add_argument(
        "--peak", type=float, metavar="TFLOPS", help="of the device, for the model FLOPs utilisation [measured]"
    )
    parser.add_argument(
        "--activations",
        nargs="+",
        choices=sorted({activation_of(switches) for switches in SWITCHES.values()}),
        help="only models with these [all]",
    )
    parser.add_argument(
        "--encoders", action="store_true", help="encoders beside EuroBERT, instead of decoders beside GPT-2"
    )
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args(words)
    for name, default in DEFAULTS[arguments.device].items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, default)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: PyTorch sees no CUDA device here")
    return arguments


def main(words: list[str] | None = None) -> int:
    arguments = parse_arguments(words)
    shape = dict(SHAPES[arguments.preset])
    shape["batch"] = arguments.batch or shape["batch"]
    shape["context"] = arguments.context or shape["context"]

    torch.manual_seed(0)
    if not arguments.encoders:
        gate_on_gpt2({**shape, "num_hidden_layers": 2})
    is_cuda, peak = arguments.device == "cuda", None
    if arguments.peak is not None:
        peak, source = 1e12 * arguments.peak, "as given"
    elif is_cuda:
        peak, source = (
            matmul_rate(arguments.device, getattr(torch, arguments.dtype)),
            "a product of matrices, measured now",
        )

    candidates = (
        make_encoders(shape)
        if arguments.encoders
        else make_decoders(shape, arguments.activations, arguments.attention)
    )
    baseline = next(iter(candidates))
    flops = {name: size_of(model, shape["context"]).flops_per_token for name, model in candidates.items()}
    steps = {name: make_step(model, transformers_loss(model), arguments) for name, model in candidates.items()}
    if not arguments.encoders and (litgpt := litgpt_candidate(shape)) is not None:
        steps[LITGPT] = make_step(*litgpt, arguments)
        flops[LITGPT] = flops[f"{LIKE_LITGPT}, sdpa"]

    tokens = torch.randint(shape["vocab_size"], (shape["batch"], shape["context"]), device=arguments.device)
    with compiled_without_fallback():  # the compiler counts all candidates as one function
        rows, failures = time_steps(steps, tokens, arguments.rounds, arguments.device)

    if baseline in failures:
        raise SystemExit(f"{baseline} failed, which all others are compared with: {failures[baseline]}")
    device = describe(arguments.device)
    print(f"{device}, {arguments.dtype}{', compiled' if arguments.compile else ''}; {arguments.preset}: {shape}")
    print(f"nlq {modeling_nlq.__version__}, torch {torch.__version__}, transformers {transformers.__version__}")
    if peak is not None:
        print(f"peak {peak / 1e12:.4g} TFLOP/s ({source}); {flops[LIKE_LITGPT]:,} FLOPs a token with linear queries")
    if is_cuda:
        print(
            f"peak memory {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB, all candidates' weights and optimizers "
            "in it"
        )
    report(rows, baseline, tokens.numel(), None if peak is None else {name: flops[name] / peak for name in rows})
    for name, reason in failures.items():
        print(f"{name}: no figure, {reason}")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
