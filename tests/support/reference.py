"""The whole model in float64, one vector at a time, written from the formulas and from nothing in `modeling_nlq`.

Shapes: a sequence is `(length, width)`, a head of it `(length, head_dim)`; everything works on one sequence at a time.
"""

import functools
import math
import types

import entmax
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def gelu(x):
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gelu_new(x):
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def relu(x):
    return torch.where(x > 0, x, 0.0)


# The functions that a switch can name.
FUNCTIONS = {
    "gelu": gelu,
    "gelu_new": gelu_new,
    "hardswish": lambda x: x * torch.clip(x + 3, 0, 6) / 6,
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "linear": lambda x: x,
    "mish": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": relu,
    "relu2": lambda x: relu(x) ** 2,
    "relu6": lambda x: torch.clip(x, 0, 6),
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "tanh": lambda x: (torch.exp(x) - torch.exp(-x)) / (torch.exp(x) + torch.exp(-x)),
    None: lambda x: x,
}

# The attention activations of one score: the function, the default normaliser, and whether it is never negative. The
# last rows are functions of Transformers that the tests use as such, without a row in the table of activations.
ELEMENTWISE = {
    "sigmoid": (lambda s: 1 / (1 + torch.exp(-s)), "none", True),
    "relu": (lambda s: torch.where(s > 0, s, 0.0), "length", True),
    "relu_squared": (lambda s: torch.where(s > 0, s * s, 0.0), "length", True),
    "squared": (lambda s: s * s, "sum", True),
    "softplus": (lambda s: torch.logaddexp(s, torch.zeros_like(s)), "sum", True),
    "tanh": (lambda s: 2 / (1 + torch.exp(-2 * s)) - 1, "length", False),
    "identity": (lambda s: s, "length", False),
    "gelu": (lambda s: s * (1 + torch.erf(s / math.sqrt(2))) / 2, None, False),
    "silu": (lambda s: s / (1 + torch.exp(-s)), None, False),
    "leaky_relu": (lambda s: torch.where(s > 0, s, 0.01 * s), None, False),
}
PHI = {name: function for name, (function, *_) in ELEMENTWISE.items()}
NON_NEGATIVE = tuple(name for name, (*_, is_non_negative) in ELEMENTWISE.items() if is_non_negative)

# Projections of a row onto the simplex, by the bisection of another package than computes them in the model.
PROJECTED = {
    "sparsemax": lambda scores: entmax.sparsemax_bisect(scores, dim=-1),
    "entmax15": lambda scores: entmax.entmax_bisect(scores, alpha=1.5, dim=-1, n_iter=100),
}


def softpick(scores):
    values = torch.exp(scores) - 1
    total = values.abs().sum()
    return torch.zeros_like(values) if total == 0 else relu(values) / total


def stick_breaking(scores):
    """The weights of keys in order: the last takes its share of a stick first."""
    rest, weights = 1.0, []
    for share in sigmoid(scores).flip(0):
        weights.insert(0, share * rest)
        rest = rest * (1 - share)
    return torch.stack(weights)


OF_A_ROW = {**PROJECTED, "softpick": softpick, "stick_breaking": stick_breaking}
# The default normaliser of each row of the table. Softmax is apart, because its sum needs a maximum
CANONICAL_NORMALIZATION = {
    **{name: normalization for name, (_, normalization, _) in ELEMENTWISE.items() if normalization},
    **dict.fromkeys(("softmax", *OF_A_ROW, "linear_attention"), "sum"),
    "stick_breaking": "none",
}


def phi(name, normalization, scores, count):
    """The activation of the scores of one query, which sees `count` keys."""
    if name == "softmax":
        return torch.exp(scores)
    if name == "sigmoid" and normalization == "none":
        return sigmoid(scores - math.log(count))
    return PHI[name](scores) if name in PHI else FUNCTIONS[name](scores)


def weights_of_query(layer, scores, sink=None):
    """The weights of one query, given its scores with the keys it sees and, with a sink, that head's logit."""
    name = layer.attention_activation
    normalization = layer.attention_normalization or CANONICAL_NORMALIZATION.get(name, "length")
    count = len(scores)
    if count == 0:
        return scores
    if name in OF_A_ROW:
        return OF_A_ROW[name](scores)
    values = phi(name, normalization, scores, count)
    if normalization == "sum":
        total = values.sum() + (0.0 if sink is None else torch.exp(sink))
        return torch.zeros_like(values) if total == 0 else values / total
    return values / count if normalization == "length" else values


class Parameters:
    """The float64 tensors of a state dict below a prefix."""

    def __init__(self, state_dict, prefix=""):
        self.state_dict = state_dict
        self.prefix = prefix

    def below(self, name):
        return Parameters(self.state_dict, f"{self.prefix}{name}.")

    def get(self, name):
        tensor = self.state_dict.get(f"{self.prefix}{name}")
        return None if tensor is None else tensor.double()

    def __getitem__(self, name):
        return self.state_dict[f"{self.prefix}{name}"].double()


def linear(x, parameters):
    # `nn.Linear` stores the transpose of the formulas' matrix.
    output = x @ parameters["weight"].T
    bias = parameters.get("bias")
    return output if bias is None else output + bias


def rms_norm(x, gain, eps):
    output = x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps)
    return output if gain is None else output * gain


def unit(x):
    length = torch.sqrt((x**2).sum(dim=-1, keepdim=True))
    return torch.where(length > 0, x / length, 0.0)


def layer_norm(x, parameters, eps):
    centred = x - x.mean(dim=-1, keepdim=True)
    output = centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + eps)
    gain = parameters.get("weight")
    output = output if gain is None else output * gain
    bias = parameters.get("bias")
    return output if bias is None else output + bias


def projection(kind, name, x, parameters, activation, eps):
    def f(x):
        bottleneck = parameters.below(f"{name}_bottleneck")
        hidden = linear(rms_norm(x, bottleneck["input_norm.weight"], eps), bottleneck.below("fc1"))
        hidden = linear(FUNCTIONS[activation](hidden), bottleneck.below("fc2"))
        return layer_norm(hidden, bottleneck.below("output_norm"), eps)

    if kind == "linear":
        return linear(x, parameters.below(f"{name}_proj"))
    if kind == "identity":
        return x
    if kind == "residual":
        return x + linear(x, parameters.below(f"{name}_proj"))
    if kind == "nonlinear":
        return x + f(x)
    if kind == "bottleneck":
        return f(x)
    if kind == "upcycled":
        return linear(x, parameters.below(f"{name}_proj")) + f(x)
    raise ValueError(kind)


def default_scaling(layer):
    if layer.qk_norm == "l2":
        return 1.0  # the learned scale replaces it
    scaling = 1 / math.sqrt(layer.head_dim)
    return scaling / 2 if layer.query_projection in ("identity", "residual", "nonlinear") else scaling


def rotate(x, positions, config):
    """Rotary positions of one head: `position * theta ** (-2 i / width)` turns the coordinates `i`, `i + width / 2`.

    The width is that of the head, or the part of it that is rotated.
    """
    rope = config.rope_parameters
    part = 1.0 if rope["rope_type"] == "proportional" else rope.get("partial_rotary_factor", 1.0)
    half = int(config.head_dim * part) // 2
    x, rest = x[:, : 2 * half], x[:, 2 * half :]
    if rope["rope_type"] in ("default", "linear"):
        frequencies = rope["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half) / rope.get("factor", 1.0)
        magnitude = 1.0
    else:
        frequencies, magnitude = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    angles = positions[:, None] * frequencies.double()
    first, second = x[:, :half], x[:, half:]
    turned_first = first * torch.cos(angles) - second * torch.sin(angles)
    turned_second = second * torch.cos(angles) + first * torch.sin(angles)
    return torch.cat([turned_first * magnitude, turned_second * magnitude, rest], dim=-1)


def psi(x):
    return torch.where(x > 0, x + 1, torch.exp(x))


def fixed_decay(index):
    """RetNet's rate of a key and value head."""
    return 1 - 2 ** (-5 - index)


def linear_attention(query, key, value, visible, scaling, decay=1.0, turn=None):
    """One head of linear attention.

    Args:
        query, key, value: `(length, head_dim)`.
        visible: `(length, length)`, true where a query sees a key.
        scaling: `attention_scaling`.
        decay: what is kept of a key's weight with each later key that the query sees.
        turn: rotary positions, a function of `(length, head_dim)`.

    Returns:
        The output `(length, head_dim)`, and the weights before any rotation `(length, length)`.
    """
    query, key = psi(scaling * math.sqrt(query.shape[-1]) * query), psi(key)
    turned_query, turned_key = (query, key) if turn is None else (turn(query), turn(key))
    outputs, all_weights = [], []
    for i in range(len(query)):
        seen = visible[i].nonzero()[:, 0].tolist()
        weights, output, total = [torch.zeros((), dtype=query.dtype)] * len(key), torch.zeros_like(value[0]), 0.0
        for age, j in enumerate(reversed(seen)):
            kept = decay**age
            weights[j] = kept * (query[i] * key[j]).sum()
            total = total + weights[j]
            output = output + kept * (turned_query[i] * turned_key[j]).sum() * value[j]
        outputs.append(output / total if seen else output)
        all_weights.append(torch.stack(weights) / total if seen else torch.stack(weights))
    return torch.stack(outputs), torch.stack(all_weights)


def convolve(name, x, parameters, texts):
    """A canon layer: `x_t + sum_k w_k x_{t-k}` over the tokens of one text; `x` itself where there is none of this
    name.

    Args:
        x: `(length, width)`.
        texts: `(length, length)`, true for the tokens of a token's own text up to itself.
    """
    weight = parameters.below("parts.canon.convolutions").get(f"{name}.weight")
    if weight is None:
        return x
    output = x.clone()
    for token in range(len(x)):
        for back, place in enumerate(texts[token].nonzero()[:, 0].flip(0)[:4]):
            output[token] += weight[:, 3 - back] * x[place]
    return output


def selections(scores, visible, is_token):
    """Selective attention: what the score of a query with a key loses, `(length, length)`.

    Args:
        scores: `(length, length)`, those of the first head.
        visible: `(length, length)`, true where a query sees a key.
        is_token: `(length,)`, false for padding.
    """
    loss = torch.zeros_like(scores)
    for i in range(len(scores)):
        for j in range(i):
            if visible[j].sum() > 1:  # a text's first token loses nothing
                between = [k for k in range(j + 1, i) if visible[k, j] and is_token[k]]
                loss[i, j] = sum(relu(scores[k, j]) for k in between)
    return loss


def after_the_weights(layer, head, output, parameters, gates, own, value):
    """The steps after a head's weighted sum; `own` is the head's slice of columns, `value` the tokens' values."""
    if layer.head_projection:
        output = output @ parameters["head_proj.weight"][head]
    if layer.attention_output_scaling is not None:
        output = output * layer.attention_output_scaling
    output = FUNCTIONS[layer.attention_output_activation](output)
    if layer.attention_gate == "headwise":
        return output * gates[:, head : head + 1]
    if layer.attention_gate == "value":
        return output * sigmoid(linear(value, parameters.below("value_gate_proj")))
    return output * gates[:, own] if layer.attention_gate == "elementwise" else output


def forget_rates(config, layer, x, parameters, head, heads):
    """The logarithm of what is kept at each token, `(length,)`, for a head of the queries."""
    if layer.forget_gate == "learned":
        return torch.log(sigmoid(linear(x, parameters.below("parts.forget_gate.proj"))[:, head]))
    exponent = head / (heads - 1) if heads > 1 else 0.0
    return torch.full(
        (len(x),), -1.0 / (2.0 * (config.max_position_embeddings / 2.0) ** exponent), dtype=torch.float64
    )


def differences(config, layer, x, parameters, maps, index):
    """Differential attention: pairs of the maps `(length, ...)` of all query heads; those of outputs are also
    normalised.
    """
    own = parameters.below("parts.differential_attention")
    if layer.differential_attention == "v2":
        factors = sigmoid(linear(x, own.below("proj")))
        return [maps[2 * head] - factors[:, head : head + 1] * maps[2 * head + 1] for head in range(len(maps) // 2)]
    factor = torch.exp((own["lambda_q1"] * own["lambda_k1"]).sum()) - torch.exp(
        (own["lambda_q2"] * own["lambda_k2"]).sum()
    )
    factor = factor + 0.8 - 0.6 * math.exp(-0.3 * index)
    half = len(maps) // 2
    return [maps[pair] - factor * maps[pair + half] for pair in range(half)]


def normalised_pairs(config, pairs, index):
    """The two heads of each pair of the first version of differential attention, one after the other."""
    share = 1 - (0.8 - 0.6 * math.exp(-0.3 * index))
    normed = [share * rms_norm(pair, 1.0, config.layer_norm_eps) for pair in pairs]
    return [half for pair in normed for half in pair.chunk(2, dim=-1)]


def without_own_value(output, value, share):
    """Exclusive attention: what the output loses along the token's own value."""
    direction = unit(value)
    return output - share * (output * direction).sum(dim=-1, keepdim=True) * direction


# What cross-attention has not, whatever the layer has
ABSENT = {"position_embedding": "none", "attention_gate": None, "selective_attention": False} | dict.fromkeys(
    ("sliding_window", "linear_attention_decay", "exclusive_attention", "value_residual", "forget_gate", "canon")
)


def cross_layer(layer):
    """The switches of a layer's cross-attention, or `None` if there is none."""
    if not layer.add_cross_attention or layer.cross_attention is False:
        return None
    absent = {**ABSENT, "attention_gate": None if layer.attention_gate == "value" else layer.attention_gate}
    return types.SimpleNamespace(**{**vars(layer), **absent, **(layer.cross_attention or {})})


def attention(
    config, layer, x, parameters, positions, visible, is_token, texts, index=0, first_values=None, source=None
):
    """One sequence through the attention sub-layer.

    Args:
        visible: `(1 or heads, length, length)`, true where a query sees a key.
        source: `(source length, width)`, the tokens of an encoder, in cross-attention.
        is_token: `(length,)`, false for padding.
        texts: as in `convolve`.
        index: the number of the layer.
        first_values: `(length, width)`, the values of the first layer.

    Returns:
        The output, the weights of each head, and the values of the layer.
    """
    eps, head_dim = config.layer_norm_eps, config.head_dim
    options = {"activation": layer.projection_activation, "eps": eps}
    x = convolve("attention_input", x, parameters, texts)
    queries = convolve("query", projection(layer.query_projection, "q", x, parameters, **options), parameters, texts)
    source = x if source is None else source
    keys = convolve("key", projection(layer.key_projection, "k", source, parameters, **options), parameters, texts)
    values = convolve(
        "value", projection(layer.value_projection, "v", source, parameters, **options), parameters, texts
    )
    second_queries = linear(x, parameters.below("parts.parallax.proj")) if layer.parallax else queries
    if layer.qk_norm == "rms_all_heads":
        queries = rms_norm(queries, parameters.get("q_norm.weight"), eps)
        keys = rms_norm(keys, parameters.get("k_norm.weight"), eps)
    if layer.value_residual is not None and index > 0:
        first, own = 0.5, 0.5
        if layer.value_residual == "learned":
            first, own = parameters["parts.value_residual.mixing_bias"]
        values = first * first_values + own * values
    has_gates = layer.attention_gate in ("headwise", "elementwise")
    gates = sigmoid(linear(x, parameters.below("gate_proj"))) if has_gates else None
    scaling = default_scaling(layer) if layer.attention_scaling is None else layer.attention_scaling
    groups, version = config.num_key_value_heads, layer.differential_attention
    query_heads = config.num_attention_heads * (2 if version == "v2" else 1)
    visible = visible.expand(query_heads, -1, -1)

    def of_group(states, group):
        return states[:, group * head_dim : (group + 1) * head_dim]

    outputs, all_weights, loss = [], [], torch.zeros(len(x), len(source), dtype=torch.float64)
    for head in range(query_heads):
        second = second_queries[:, head * head_dim : (head + 1) * head_dim]
        group = head // (query_heads // groups)
        query, key, value = (
            queries[:, head * head_dim : (head + 1) * head_dim],
            of_group(keys, group),
            of_group(values, group),
        )
        if version == "v1":
            value = torch.cat([of_group(values, group % (groups // 2) + side) for side in (0, groups // 2)], dim=-1)
        if layer.qk_norm == "rms":
            query = rms_norm(query, parameters.get("q_norm.weight"), eps)
            key = rms_norm(key, parameters.get("k_norm.weight"), eps)
        elif layer.qk_norm == "l2":
            query = unit(query) * parameters["q_norm.scale"][head]
            key = unit(key)
        if layer.attention_activation == "linear_attention":
            decay = 1.0 if layer.linear_attention_decay is None else fixed_decay(group)
            if layer.linear_attention_decay == "learned":
                decay = sigmoid(parameters["decay_bias"][group])
            turn = None
            if layer.position_embedding == "rope":
                turn = functools.partial(rotate, positions=positions, config=config)
            output, weights = linear_attention(query, key, value, visible[head], scaling, decay, turn)
            outputs.append(output)
            all_weights.append(weights)
            continue
        if layer.position_embedding == "rope":
            query, key, second = (rotate(states, positions, config) for states in (query, key, second))
        if layer.selective_attention and head == 0:
            factors = torch.full((len(x),), scaling, dtype=torch.float64)
            if layer.attention_length_scaling is not None:
                learned = parameters["parts.attention_length_scaling.scale_bias"][0]
                factors = scaling * learned * visible[0].sum(dim=-1).clamp(min=1).double().log()
            loss = selections(factors[:, None] * (query @ key.T), visible[0], is_token)
        sink = {None: None, "zero": torch.zeros(()).double(), "learned": parameters.get("sink_bias")}[
            layer.attention_sink
        ]
        if layer.attention_sink == "learned":
            sink = sink[head]
        kept = torch.zeros(len(source), dtype=torch.float64)
        if layer.forget_gate is not None:
            kept = forget_rates(config, layer, x, parameters, head, query_heads)
            kept = torch.where(is_token, kept, 0.0)

        output, weights = (
            value.new_zeros(len(x), value.shape[-1]),
            torch.zeros(len(x), len(source), dtype=torch.float64),
        )
        for i in range(len(x)):
            seen = visible[head, i].nonzero()[:, 0]
            if layer.sliding_window is not None:
                near = (
                    i - seen < layer.sliding_window if config.is_causal else (i - seen).abs() <= layer.sliding_window
                )
                seen = seen[near]
            if layer.attention_activation == "stick_breaking":
                seen = seen[seen != i]
            factor = scaling
            if layer.attention_length_scaling is not None and len(seen):
                factor = scaling * parameters["parts.attention_length_scaling.scale_bias"][head] * math.log(len(seen))
            scores = [factor * (query[i] * key[j]).sum() - loss[i, j] + kept[j + 1 : i + 1].sum() for j in seen]
            scores = torch.stack(scores) if scores else torch.zeros(0)
            weights[i, seen] = weights_of_query(layer, scores.double(), sink)
            if layer.parallax:
                change = key[seen] @ second[i]
                weights[i, seen] *= 1 + (weights[i, seen] * change).sum() - change
            for j in seen:
                output[i] += weights[i, j] * value[j]
        outputs.append(output)
        all_weights.append(weights)
    if version is not None:
        outputs = differences(config, layer, x, parameters, outputs, index)
        all_weights = differences(config, layer, x, parameters, all_weights, index)
        outputs = outputs if version == "v2" else normalised_pairs(config, outputs, index)
    if layer.exclusive_attention is not None:
        for head, output in enumerate(outputs):
            own = of_group(values, head // (config.num_attention_heads // groups))
            is_learned = layer.exclusive_attention == "learned"
            share = torch.tanh(parameters["parts.exclusive_attention.alpha"][head]) if is_learned else 1.0
            outputs[head] = without_own_value(output, own, share)
    per_group = config.num_attention_heads // groups
    outputs = [
        after_the_weights(
            *(layer, head, output, parameters, gates),
            slice(head * head_dim, (head + 1) * head_dim),
            of_group(values, head // per_group),
        )
        for head, output in enumerate(outputs)
    ]
    return linear(torch.cat(outputs, dim=-1), parameters.below("o_proj")), torch.stack(all_weights), values


def mlp(config, x, block, texts):
    parameters, attention_parameters = block.below("mlp"), block.below("self_attn")
    x = convolve("mlp_input", x, attention_parameters, texts)
    if config.mlp_type == "gated":
        gate = convolve("mlp_gate", linear(x, parameters.below("gate_proj")), attention_parameters, texts)
        factor = convolve("mlp_inner", linear(x, parameters.below("up_proj")), attention_parameters, texts)
        return linear(FUNCTIONS[config.hidden_act](gate) * factor, parameters.below("down_proj"))
    inner = convolve("mlp_inner", linear(x, parameters.below("fc1")), attention_parameters, texts)
    return linear(FUNCTIONS[config.hidden_act](inner), parameters.below("fc2"))


def visible_keys(attention_mask, position_ids, is_causal=True):
    """The keys that each query of one sequence sees: its own document, or in causal order the past of it, without
    padding.
    """
    length = len(position_ids)
    if not is_causal:
        past = visible_keys(
            torch.ones_like(attention_mask), position_ids if attention_mask.all() else torch.arange(length)
        )
        return (past | past.T) & attention_mask.bool()
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i, -1, -1):
            visible[i, j] = attention_mask[j]
            if attention_mask.all() and j > 0 and position_ids[j] != position_ids[j - 1] + 1:
                break  # a document begins at key j
    return visible


def forward_sequence(config, parameters, tokens, positions, visible, is_token, texts, source=None, is_source=None):
    """The logits `(length, vocabulary)` and each layer's weights for one sequence, then those of its cross-attention.

    Weights are `(heads, length, length)`; `source` is `(source length, width)`, and `is_source` false for its padding.
    """
    eps = config.layer_norm_eps
    before, after = FUNCTIONS[config.sublayer_activation], FUNCTIONS[config.residual_activation]
    is_rms = config.norm_type == "rmsnorm"
    model = parameters.below("model")

    x = model["embed_tokens.weight"][tokens]
    if config.per_layer_config[0].position_embedding == "learned":
        x = x + model["embed_positions.weight"][positions]

    def norm_of_body(name, x):
        return rms_norm(x, model.get(f"{name}.weight"), eps) if is_rms else layer_norm(x, model.below(name), eps)

    x = norm_of_body("embed_norm", x) if config.embedding_norm else x
    weights, cross_weights, first_values = [], [], []
    for index in range(config.num_hidden_layers):
        layer = config.per_layer_config[index]
        block = model.below(f"layers.{index}")

        def attend(x, index=index, layer=layer, block=block):
            first = first_values[0] if first_values else None
            own = block.below("self_attn")
            inputs = (config, layer, x, own, positions, visible, is_token, texts, index, first)
            output, layer_weights, values = attention(*inputs)
            weights.append(layer_weights)
            first_values.append(values)
            return output

        cross = cross_layer(layer)

        def attend_to_source(x, index=index, cross=cross, block=block):
            seen = is_source.expand(1, len(x), -1)
            inputs = (config, cross, x, block.below("cross_attn"), positions, seen, is_token, texts, index)
            output, layer_weights, _ = attention(*inputs, source=source)
            cross_weights.append(layer_weights)
            return output

        def feed_forward(x, block=block):
            return mlp(config, x, block, texts)

        def norm(name, x, block=block):
            return rms_norm(x, block.get(f"{name}.weight"), eps) if is_rms else layer_norm(x, block.below(name), eps)

        def output_of(sub_layer, x, name, norm=norm):
            if config.norm_position == "pre":
                return sub_layer(before(norm(f"{name}_norm", x)))
            if config.norm_position == "post":
                return sub_layer(before(x))
            if config.norm_position == "output":
                return norm(f"{name}_output_norm", sub_layer(before(x)))
            return norm(f"{name}_output_norm", sub_layer(before(norm(f"{name}_norm", x))))

        def end(name, x, norm=norm):
            return after(norm(f"{name}_norm", x) if config.norm_position == "post" else x)

        if config.parallel_residual:
            of_source = 0.0 if cross is None else output_of(attend_to_source, x, "cross_attn")
            x = end("mlp", x + output_of(attend, x, "self_attn") + of_source + output_of(feed_forward, x, "mlp"))
        else:
            x = end("self_attn", x + output_of(attend, x, "self_attn"))
            if cross is not None:
                x = end("cross_attn", x + output_of(attend_to_source, x, "cross_attn"))
            x = end("mlp", x + output_of(feed_forward, x, "mlp"))
    if config.norm_position != "post":
        x = norm_of_body("norm", x)
    head = model["embed_tokens.weight"] if config.tie_word_embeddings else parameters["lm_head.weight"]
    logits, cap = x @ head.T, config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap), weights + cross_weights


def forward(
    config,
    state_dict,
    input_ids,
    attention_mask=None,
    position_ids=None,
    visible=None,
    encoder_hidden_states=None,
    encoder_attention_mask=None,
):
    """The logits and attention weights of a batch.

    Args:
        config: an object whose attributes are the switches, with every size given.
        state_dict: the model's parameters.
        input_ids: `(batch, length)`.
        attention_mask: `(batch, length)`, 0 for padding.
        position_ids: `(batch, length)`; by default a token's place among those that are not padding.
        visible: `(batch, 1 or heads, length, length)` booleans, in place of what mask and positions say.
        encoder_hidden_states, encoder_attention_mask: `(batch, source length, width)` and `(batch, source length)`.

    Returns:
        Logits `(batch, length, vocabulary)` and a list of `(batch, heads, length, length)`, one for each layer, then
        one for the cross-attention of each.
    """
    if attention_mask is None:
        attention_mask = torch.ones_like(input_ids)
    if position_ids is None:
        position_ids = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    rows = []
    for row in range(len(input_ids)):
        texts = visible_keys(attention_mask[row], position_ids[row], getattr(config, "is_causal", True))
        seen = texts[None] if visible is None else visible[row]
        inputs = [input_ids[row], position_ids[row], seen, attention_mask[row].bool(), texts]
        if encoder_hidden_states is not None:
            length = encoder_hidden_states.shape[1]
            is_source = torch.ones(length) if encoder_attention_mask is None else encoder_attention_mask[row]
            inputs += [encoder_hidden_states[row], is_source.bool()]
        rows.append(forward_sequence(config, Parameters(state_dict), *inputs))
    logits = torch.stack([row[0] for row in rows])
    weights = [torch.stack(layer) for layer in zip(*(row[1] for row in rows))]
    return logits, weights


def check(model, tolerance=1e-10, visible=None, **inputs):
    """Asserts that a float64 model equals the formulas in logits and weights, except at padding.

    Weights are compared where the model returns them, which no linear attention does. `visible` is what a 4-D mask of
    the inputs shows.
    """
    layers = [each for layer in model.config.per_layer_config for each in (layer, cross_layer(layer)) if each]
    has_weights = model.config._attn_implementation in ("eager", "nlq") and all(
        layer.attention_activation != "linear_attention" for layer in layers
    )
    with torch.no_grad():
        output = model(**inputs, output_attentions=has_weights)
    inputs.pop("use_cache", None)
    if visible is not None:
        inputs["attention_mask"] = None
    logits, weights = forward(model.config, model.state_dict(), **inputs, visible=visible)
    mask = inputs.get("attention_mask")
    is_token = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
    torch.testing.assert_close(output.logits[is_token], logits[is_token], rtol=tolerance, atol=tolerance)
    if has_weights:
        for actual, expected in zip((*output.attentions, *output.get("cross_attentions", ())), weights, strict=True):
            actual, expected = (each.transpose(1, 2)[is_token] for each in (actual, expected))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
