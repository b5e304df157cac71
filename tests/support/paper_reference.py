"""Checkpoints in the format of the paper's training code, and their forward pass in float64, from nothing in
`modeling_nlq`.

The code is that of "Beyond Linearity in Attention Projections" (arXiv 2603.13381), which is nanoGPT with four kinds of
queries. Shapes: x is `(batch, length, d)`, a weight is `(output, input)` as in `torch.nn.Linear`.
"""

import math

import torch
from support.reference import FUNCTIONS, Parameters, layer_norm, linear, rms_norm


EPS = 1e-5

# What the paper's code takes for an argument that a checkpoint does not hold. The scale is always that of heads of 64
DEFAULTS = {"block_size": 1024, "vocab_size": 50304, "n_layer": 12, "num_heads": 12, "n_embd": 768, "bias": False}
DEFAULTS |= {"tie_weights": True, "dropout": 0.0, "scale": math.sqrt(1 / 64), "query_mode": "original"}
DEFAULTS["mlp_hidden_size"] = 3072
# Arguments of the training that its checkpoints hold beside the model's own
TRAINING_ARGUMENTS = {"batch_size": 8, "accumulation_size": 4, "learning_rate": 6e-4, "weight_decay": 0.1}
TRAINING_ARGUMENTS |= {"beta1": 0.9, "beta2": 0.95, "grad_clip": 1.0, "decay_lr": True, "warmup_iters": 10}
TRAINING_ARGUMENTS |= {"lr_decay_iters": 100, "min_lr": 6e-5, "save_checkpoint_steps": 50, "max_iters": 100}


def complete(model_args):
    if "n_head" in model_args:  # nanoGPT's own
        own = {"num_heads": model_args["n_head"], "scale": None, "mlp_hidden_size": 4 * model_args["n_embd"]}
        return {**DEFAULTS, **model_args, **own}
    return {**DEFAULTS, **model_args}


def shapes(model_args, bottleneck_size=None):
    """The shape of every tensor, by its name without prefix, of a checkpoint with these arguments."""
    arguments = complete(model_args)
    width, mode = arguments["n_embd"], arguments["query_mode"]
    found = {
        "transformer.wte.weight": (arguments["vocab_size"], width),
        "transformer.wpe.weight": (arguments["block_size"], width),
        "transformer.ln_f.weight": (width,),
        "lm_head.weight": (arguments["vocab_size"], width),
    }
    without_bias = set(found) - {"transformer.ln_f.weight"}
    for index in range(arguments["n_layer"]):
        layer = f"transformer.h.{index}."
        projections = 3 if mode in ("original", "residual") else 2
        found |= {
            f"{layer}ln_1.weight": (width,),
            f"{layer}ln_2.weight": (width,),
            f"{layer}attn.c_attn.weight": (projections * width, width),
            f"{layer}attn.c_proj.weight": (width, width),
            f"{layer}mlp.c_fc.weight": (arguments["mlp_hidden_size"], width),
            f"{layer}mlp.c_proj.weight": (width, arguments["mlp_hidden_size"]),
        }
        if mode == "residual_gelu":
            bottleneck = width // 2 if bottleneck_size is None else bottleneck_size
            found |= {
                f"{layer}attn.residual_rmsnorm_input.weight": (width,),
                f"{layer}attn.residual_in.weight": (bottleneck, width),
                f"{layer}attn.residual_out.weight": (width, bottleneck),
                f"{layer}attn.residual_layernorm_output.weight": (width,),
            }
            without_bias.add(f"{layer}attn.residual_rmsnorm_input.weight")
    if arguments["bias"]:
        weights = [name for name in found if name not in without_bias]
        found |= {f"{name.removesuffix('weight')}bias": found[name][:1] for name in weights}
    return found


def random_checkpoint(model_args, prefix="", dtype=torch.float32, seed=0, bottleneck_size=None):
    """A checkpoint as the training code saves it, with random weights, gains and biases, which all matter."""
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, shape in shapes(model_args, bottleneck_size).items():
        noise = torch.randn(shape, generator=generator, dtype=torch.float64)
        centre = 1.0 if name.endswith("weight") else 0.0
        state[name] = (centre + 0.3 * noise if len(shape) == 1 else noise / shape[-1] ** 0.5).to(dtype)
    if complete(model_args)["tie_weights"]:
        state["lm_head.weight"] = state["transformer.wte.weight"].clone()
    return {
        "model": {prefix + name: tensor for name, tensor in state.items()},
        "optimizer": {"state": {0: {"step": torch.tensor(3.0)}}, "param_groups": [{"lr": 6e-4, "params": [0]}]},
        "model_args": dict(model_args),
        "iter_num": 100,
        "best_val_loss": torch.tensor(3.2),
        "config": {"dataset": "openwebtext", "device": "cuda", "compile": True, **TRAINING_ARGUMENTS},
    }


def attention(weights, x, mode, num_heads, scale):
    width = x.shape[-1]
    projected = linear(x, weights.below("c_attn")).split(width, dim=-1)
    if mode == "original":
        query, key, value = projected
    elif mode == "residual":
        query, key, value = x + projected[0], *projected[1:]
    elif mode == "identity":
        query, (key, value) = x, projected
    else:
        hidden = linear(rms_norm(x, weights["residual_rmsnorm_input.weight"], EPS), weights.below("residual_in"))
        hidden = linear(FUNCTIONS["gelu"](hidden), weights.below("residual_out"))
        query, (key, value) = x + layer_norm(hidden, weights.below("residual_layernorm_output"), EPS), projected

    head_size = width // num_heads
    scale = 1 / math.sqrt(head_size) if scale is None else scale
    visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    heads = []
    for head in range(num_heads):
        part = slice(head * head_size, (head + 1) * head_size)
        scores = scale * query[..., part] @ key[..., part].transpose(1, 2)  # (batch, query, key)
        heads.append(scores.masked_fill(~visible, -math.inf).softmax(dim=-1) @ value[..., part])
    return linear(torch.cat(heads, dim=-1), weights.below("c_proj"))


def forward(checkpoint, input_ids):
    """`(batch, length)` token ids -> logits `(batch, length, vocabulary)`, float64."""
    arguments = complete(checkpoint["model_args"])
    weights = Parameters({name.removeprefix("_orig_mod."): tensor for name, tensor in checkpoint["model"].items()})
    x = weights["transformer.wte.weight"][input_ids] + weights["transformer.wpe.weight"][: input_ids.shape[1]]
    for index in range(arguments["n_layer"]):
        layer = weights.below(f"transformer.h.{index}")
        options = [arguments[name] for name in ("query_mode", "num_heads", "scale")]
        x = x + attention(layer.below("attn"), layer_norm(x, layer.below("ln_1"), EPS), *options)
        hidden = linear(layer_norm(x, layer.below("ln_2"), EPS), layer.below("mlp.c_fc"))
        x = x + linear(FUNCTIONS["gelu"](hidden), layer.below("mlp.c_proj"))
    return layer_norm(x, weights.below("transformer.ln_f"), EPS) @ weights["lm_head.weight"].T
