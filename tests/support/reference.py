"""The whole model in float64, one vector at a time, written from the formulas and from nothing in `modeling_nlq`.

Shapes: a sequence is `(length, width)`, a head of it `(length, head_dim)`; everything works on one sequence at a time.
"""

import functools
import math
import types
from dataclasses import dataclass, replace

import entmax
import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def relu(x):
    return torch.where(x > 0, x, 0.0)


# The functions that a switch can name, and attention activations of one score
FUNCTIONS = {
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2))),
    "gelu_new": lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "hardswish": lambda x: x * torch.clip(x + 3, 0, 6) / 6,
    "identity": lambda x: x,
    "laplace": lambda x: 0.5 * (1 + torch.erf((x - 0.707107) / (0.282095 * math.sqrt(2)))),
    "leaky_relu": lambda x: torch.where(x > 0, x, 0.01 * x),
    "linear": lambda x: x,
    "mish": lambda x: x * torch.tanh(torch.log(1 + torch.exp(x))),
    "quick_gelu": lambda x: x * sigmoid(1.702 * x),
    "relu": relu,
    "relu2": lambda x: relu(x) ** 2,
    "relu6": lambda x: torch.clip(x, 0, 6),
    "relu_squared": lambda x: relu(x) ** 2,
    "sigmoid": sigmoid,
    "silu": lambda x: x * sigmoid(x),
    "softplus": lambda x: torch.logaddexp(x, torch.zeros_like(x)),
    "squared": lambda x: x * x,
    "tanh": lambda x: 2 / (1 + torch.exp(-2 * x)) - 1,
    None: lambda x: x,
}
# Attention activations of one score: the default normaliser, and whether it is never negative. The last three are
# functions of Transformers that the tests use as such, without a row in the table of activations.
ELEMENTWISE = {
    "sigmoid": ("none", True),
    "relu": ("length", True),
    "relu_squared": ("length", True),
    "squared": ("sum", True),
    "softplus": ("sum", True),
    "tanh": ("length", False),
    "identity": ("length", False),
    **dict.fromkeys(("gelu", "silu", "leaky_relu"), (None, False)),
}
PHI = {name: FUNCTIONS[name] for name in ELEMENTWISE}
NON_NEGATIVE = tuple(name for name, (_, is_non_negative) in ELEMENTWISE.items() if is_non_negative)

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
    **{name: normalization for name, (normalization, _) in ELEMENTWISE.items() if normalization},
    **dict.fromkeys(("softmax", *OF_A_ROW, "linear_attention"), "sum"),
    "stick_breaking": "none",
}


def weights_of_query(layer, scores, sink=None):
    """The weights of one query, given its scores with the keys it sees and, with a sink, that head's logit."""
    name, count = layer.attention_activation, len(scores)
    normalization = layer.attention_normalization or CANONICAL_NORMALIZATION.get(name, "length")
    if count == 0:
        return scores
    if name in OF_A_ROW:
        return OF_A_ROW[name](scores)
    if name == "sigmoid" and normalization == "none":
        scores = scores - math.log(count)
    values = torch.exp(scores) if name == "softmax" else FUNCTIONS[name](scores)
    if normalization == "sum":
        total = values.sum() + (0.0 if sink is None else torch.exp(sink))
        return torch.zeros_like(values) if total == 0 else values / total
    return values / count if normalization == "length" else values


class Parameters:
    def __init__(self, state_dict, prefix=""):
        self.state_dict, self.prefix = state_dict, prefix

    def below(self, name):
        return Parameters(self.state_dict, f"{self.prefix}{name}.")

    def get(self, name, default=None):
        tensor = self.state_dict.get(f"{self.prefix}{name}")
        return default if tensor is None else tensor.double()

    def __getitem__(self, name):
        return self.state_dict[f"{self.prefix}{name}"].double()


def linear(x, parameters):
    return x @ parameters["weight"].T + parameters.get("bias", 0.0)


def rms_norm(x, gain, eps):
    return x / torch.sqrt((x**2).mean(dim=-1, keepdim=True) + eps) * gain


def unit(x):
    length = torch.sqrt((x**2).sum(dim=-1, keepdim=True))
    return torch.where(length > 0, x / length, 0.0)


def layer_norm(x, parameters, eps):
    centred = x - x.mean(dim=-1, keepdim=True)
    normed = centred / torch.sqrt((centred**2).mean(dim=-1, keepdim=True) + eps)
    return normed * parameters.get("weight", 1.0) + parameters.get("bias", 0.0)


def norm_of(config, x, parameters):
    eps = config.layer_norm_eps
    if config.norm_type == "rmsnorm":
        return rms_norm(x, parameters.get("weight", 1.0), eps)
    return layer_norm(x, parameters, eps)


def projection(layer, role, x, parameters, eps):
    kind = getattr(layer, {"q": "query_projection", "k": "key_projection", "v": "value_projection"}[role])

    def product():
        return linear(x, parameters.below(f"{role}_proj"))

    def f():
        bottleneck = parameters.below(f"{role}_bottleneck")
        hidden = linear(rms_norm(x, bottleneck["input_norm.weight"], eps), bottleneck.below("fc1"))
        hidden = linear(FUNCTIONS[layer.projection_activation](hidden), bottleneck.below("fc2"))
        return layer_norm(hidden, bottleneck.below("output_norm"), eps)

    formulas = {
        "key": lambda: projection(layer, "k", x, parameters, eps),
        "linear": product,
        "identity": lambda: x,
        "residual": lambda: x + product(),
        "nonlinear": lambda: x + f(),
        "bottleneck": f,
        "upcycled": lambda: product() + f(),
    }
    return formulas[kind]()


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
    return 1 - 2 ** (-5 - index)


def linear_attention(query, key, value, visible, scaling, decay=1.0, turn=None):
    """One head of linear attention: its output `(length, head_dim)`, and its weights before rotation.

    Of a key's weight, `decay` is kept with each later key that the query sees. `turn` applies rotary positions.
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


def delta_rule(query, key, value, visible, scaling, beta, decay):
    """One head of the delta rule, `(length, head_dim)`, where `beta` and `decay` are `(length,)`."""
    query, key = (states * torch.rsqrt(states.square().sum(dim=-1, keepdim=True) + 1e-6) for states in (query, key))
    outputs = []
    for i in range(len(query)):
        state = value.new_zeros(value.shape[1], key.shape[1])
        for j in visible[i].nonzero()[:, 0].tolist():
            kept = torch.eye(key.shape[1], dtype=key.dtype) - beta[j] * torch.outer(key[j], key[j])
            state = decay[j] * state @ kept + beta[j] * torch.outer(value[j], key[j])
        outputs.append(scaling * state @ query[i])
    return torch.stack(outputs)


@dataclass
class Text:
    """One sequence, perhaps of packed documents."""

    positions: torch.Tensor  # (length,)
    visible: torch.Tensor  # (1 or heads, length, length), true where a query sees a key
    is_token: torch.Tensor  # (length,), false for padding
    own: torch.Tensor  # (length, length), true for the tokens of a token's own document up to itself


def convolve(name, x, parameters, text):
    """A canon layer: `x_t + sum_k w_k x_{t-k}` over a document; `x` itself where there is none of this name."""
    weight = parameters.below("parts.canon.convolutions").get(f"{name}.weight")
    if weight is None:
        return x
    output = x.clone()
    for token in range(len(x)):
        for back, place in enumerate(text.own[token].nonzero()[:, 0].flip(0)[:4]):
            output[token] += weight[:, 3 - back] * x[place]
    return output


def selections(scores, visible, is_token):
    """Selective attention: what the score of a query with a key loses, given the scores of the first head."""
    loss = torch.zeros_like(scores)
    for i in range(len(scores)):
        for j in range(i):
            if visible[j].sum() > 1:  # a text's first token loses nothing
                between = [k for k in range(j + 1, i) if visible[k, j] and is_token[k]]
                loss[i, j] = sum(relu(scores[k, j]) for k in between)
    return loss


def after_the_weights(layer, head, output, parameters, value):
    """The steps after a head's weighted sum; `value` are the tokens' values."""
    if layer.head_projection:
        output = output @ parameters["head_proj.weight"][head]
    if layer.attention_output_scaling is not None:
        output = output * layer.attention_output_scaling
    output = FUNCTIONS[layer.attention_output_activation](output)
    if layer.attention_gate == "value":
        return output * FUNCTIONS[layer.gate_activation](linear(value, parameters.below("value_gate_proj")))
    return output


def gates_of(layer, states, parameters):
    """The gates of all heads, from the layer's input or from the outputs of all heads."""
    if layer.gate_rank is not None:
        states = states @ parameters["gate_down_proj.weight"].T
    gates = FUNCTIONS[layer.gate_activation](linear(states, parameters.below("gate_proj")))
    return gates if layer.attention_gate == "elementwise" else gates.repeat_interleave(layer.head_dim, dim=-1)


def forget_rates(config, layer, x, parameters, head, heads):
    if layer.forget_gate == "learned":
        return torch.log(sigmoid(linear(x, parameters.below("parts.forget_gate.proj"))[:, head]))
    exponent = head / (heads - 1) if heads > 1 else 0.0
    rate = -1.0 / (2.0 * (config.max_position_embeddings / 2.0) ** exponent)
    return torch.full((len(x),), rate, dtype=torch.float64)


def differences(layer, x, parameters, maps, index):
    """Differential attention: the differences of pairs of the maps `(length, ...)` of all query heads."""
    own = parameters.below("parts.differential_attention")
    if layer.differential_attention == "v2":
        factors = sigmoid(linear(x, own.below("proj")))
        return [maps[2 * head] - factors[:, head : head + 1] * maps[2 * head + 1] for head in range(len(maps) // 2)]
    first, second = (torch.exp((own[f"lambda_q{side}"] * own[f"lambda_k{side}"]).sum()) for side in (1, 2))
    factor = first - second + 0.8 - 0.6 * math.exp(-0.3 * index)
    half = len(maps) // 2
    return [maps[pair] - factor * maps[pair + half] for pair in range(half)]


def normalised_pairs(config, pairs, index):
    share = 1 - (0.8 - 0.6 * math.exp(-0.3 * index))
    normed = [share * rms_norm(pair, 1.0, config.layer_norm_eps) for pair in pairs]
    return [half for pair in normed for half in pair.chunk(2, dim=-1)]


# What cross-attention has not, whatever the layer has
ABSENT = {"position_embedding": "none", "attention_gate": None, "selective_attention": False} | dict.fromkeys(
    ("sliding_window", "linear_attention_decay", "exclusive_attention", "value_residual", "forget_gate", "canon")
)
ABSENT["linear_attention_update"] = "additive"


def cross_layer(layer):
    """The switches of a layer's cross-attention, or `None` if there is none."""
    if not layer.add_cross_attention or layer.cross_attention is False:
        return None
    absent = {**ABSENT, "attention_gate": None if layer.attention_gate == "value" else layer.attention_gate}
    return types.SimpleNamespace(**{**vars(layer), **absent, **(layer.cross_attention or {})})


def attention(config, layer, x, parameters, text, index, first_values=None, source=None):
    """One sequence through attention: its output, the weights of each head, and the values.

    In cross-attention `source` `(source length, width)` are an encoder's tokens. `first_values` are layer 0's.
    """
    eps, head_dim, rotated = config.layer_norm_eps, config.head_dim, layer.position_embedding == "rope"
    x = convolve("attention_input", x, parameters, text)
    source = x if source is None else source
    queries, keys, values = (
        convolve(name, projection(layer, name[0], states, parameters, eps), parameters, text)
        for name, states in (("query", x), ("key", source), ("value", source))
    )
    second_queries = linear(x, parameters.below("parts.parallax.proj")) if layer.parallax else queries
    if layer.qk_norm == "rms_all_heads":
        queries = rms_norm(queries, parameters.get("q_norm.weight", 1.0), eps)
        keys = rms_norm(keys, parameters.get("k_norm.weight", 1.0), eps)
    if layer.value_residual is not None and index > 0:
        first, own = 0.5, 0.5
        if layer.value_residual == "learned":
            first, own = parameters["parts.value_residual.mixing_bias"]
        values = first * first_values + own * values
    scaling = default_scaling(layer) if layer.attention_scaling is None else layer.attention_scaling
    groups, version = config.num_key_value_heads, layer.differential_attention
    query_heads = config.num_attention_heads * (2 if version == "v2" else 1)
    visible, turn = text.visible.expand(query_heads, -1, -1), None
    if rotated:
        turn = functools.partial(rotate, positions=text.positions, config=config)
    length_factors = parameters.get("parts.attention_length_scaling.scale_bias")
    length_shifts = parameters.get("parts.attention_length_scaling.shift_bias", torch.zeros(query_heads))

    def of_head(states, head):
        return states[:, head * head_dim : (head + 1) * head_dim]

    outputs, all_weights, loss = [], [], torch.zeros(len(x), len(source), dtype=torch.float64)
    for head in range(query_heads):
        group = head // (query_heads // groups)
        query, second, key, value = (
            of_head(queries, head),
            of_head(second_queries, head),
            of_head(keys, group),
            of_head(values, group),
        )
        if version == "v1":
            value = torch.cat([of_head(values, group % (groups // 2) + side) for side in (0, groups // 2)], dim=-1)
        if layer.qk_norm == "rms":
            query = rms_norm(query, parameters.get("q_norm.weight", 1.0), eps)
            key = rms_norm(key, parameters.get("k_norm.weight", 1.0), eps)
        elif layer.qk_norm == "l2":
            query, key = unit(query) * parameters["q_norm.scale"][head], unit(key)
        if layer.attention_activation == "linear_attention":
            decay = 1.0 if layer.linear_attention_decay is None else fixed_decay(group)
            if layer.linear_attention_decay == "learned":
                decay = sigmoid(parameters["decay_bias"][group])
            if layer.linear_attention_update == "delta":
                beta = layer.linear_attention_beta * sigmoid(linear(x, parameters.below("b_proj"))[:, group])
                if layer.linear_attention_decay == "gated":
                    step = linear(x, parameters.below("a_proj"))[:, group] + parameters["dt_bias"][group]
                    decay = torch.exp(-torch.exp(parameters["a_log_bias"][group]) * torch.log1p(torch.exp(step)))
                query, key = (query, key) if turn is None else (turn(query), turn(key))
                rates = (beta, decay * torch.ones_like(beta))
                outputs.append(delta_rule(query, key, value, visible[head], scaling, *rates))
                all_weights.append(torch.zeros(len(x), len(source)))  # there are none
                continue
            output, weights = linear_attention(query, key, value, visible[head], scaling, decay, turn)
            outputs.append(output)
            all_weights.append(weights)
            continue
        if rotated:
            query, key, second = (turn(states) for states in (query, key, second))
        if layer.selective_attention and head == 0:
            factors = torch.full((len(x),), scaling, dtype=torch.float64)
            if length_factors is not None:
                logs = visible[0].sum(dim=-1).clamp(min=1).double().log()
                factors = scaling * (length_factors[0] * logs + length_shifts[0])
            loss = selections(factors[:, None] * (query @ key.T), visible[0], text.is_token)
        sink = None
        if layer.attention_sink is not None:
            sink = parameters["sink_bias"][head] if layer.attention_sink == "learned" else torch.zeros(()).double()
        kept = torch.zeros(len(source), dtype=torch.float64)
        if layer.forget_gate is not None:
            kept = forget_rates(config, layer, x, parameters, head, query_heads)
            kept = torch.where(text.is_token, kept, 0.0)

        output = value.new_zeros(len(x), value.shape[-1])
        weights = torch.zeros(len(x), len(source), dtype=torch.float64)
        for i in range(len(x)):
            seen = visible[head, i].nonzero()[:, 0]
            if layer.sliding_window is not None:
                window = layer.sliding_window
                seen = seen[i - seen < window if config.is_causal else (i - seen).abs() <= window]
            if layer.attention_activation == "stick_breaking":
                seen = seen[seen != i]
            factor = scaling
            if length_factors is not None and len(seen):
                factor = scaling * (length_factors[head] * math.log(len(seen)) + length_shifts[head])
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
        outputs, all_weights = (differences(layer, x, parameters, maps, index) for maps in (outputs, all_weights))
        outputs = outputs if version == "v2" else normalised_pairs(config, outputs, index)
    heads_per_group = config.num_attention_heads // groups
    for head, output in enumerate(outputs):
        value = of_head(values, head // heads_per_group)
        if layer.exclusive_attention is not None:  # the output loses a share along the token's own value
            is_learned, direction = layer.exclusive_attention == "learned", unit(value)
            share = torch.tanh(parameters["parts.exclusive_attention.alpha"][head]) if is_learned else 1.0
            output = output - share * (output * direction).sum(dim=-1, keepdim=True) * direction
        outputs[head] = after_the_weights(layer, head, output, parameters, value)
    heads = torch.cat(outputs, dim=-1)
    if layer.attention_gate in ("headwise", "elementwise"):
        heads = heads * gates_of(layer, heads if layer.gate_source == "output" else x, parameters)
    return linear(heads, parameters.below("o_proj")), torch.stack(all_weights), values


def mlp(config, x, block, text):
    parameters, of_canon, activation = block.below("mlp"), block.below("self_attn"), FUNCTIONS[config.hidden_act]
    x = convolve("mlp_input", x, of_canon, text)
    if config.mlp_type == "gated":
        gate = convolve("mlp_gate", linear(x, parameters.below("gate_proj")), of_canon, text)
        factor = convolve("mlp_inner", linear(x, parameters.below("up_proj")), of_canon, text)
        return linear(activation(gate) * factor, parameters.below("down_proj"))
    inner = convolve("mlp_inner", linear(x, parameters.below("fc1")), of_canon, text)
    return linear(activation(inner), parameters.below("fc2"))


def read_stream(config, layer, block, reader, total, added):
    """What a reader gets of the residual stream, and the stream that goes on; `added` begins with the embeddings."""
    parts, read = block.below("self_attn.parts"), total
    if layer.depth_attention:
        sublayers = ["self_attn", "cross_attn", "mlp"] if cross_layer(layer) is not None else ["self_attn", "mlp"]
        readers = [*sublayers[: 1 if config.parallel_residual else None], "norm"]
        query = parts["depth_attention.queries_bias"][readers.index(reader)]
        scores = torch.stack([rms_norm(each, 1.0, config.layer_norm_eps) @ query for each in added])
        weights = torch.exp(scores) / torch.exp(scores).sum(dim=0)
        read = sum(weight[:, None] * each for weight, each in zip(weights, added))
    if layer.input_skip and reader == "self_attn":
        kept, of_input = parts["input_skip.mixing_bias"]
        read = total = kept * read + of_input * added[0]
    return read, total


def visible_keys(attention_mask, position_ids, is_causal=True):
    """The keys that each query of one sequence sees: its own document, or in causal order the past of it, without
    padding.
    """
    length, is_padded = len(position_ids), not attention_mask.all()
    if not is_causal:
        past = visible_keys(torch.ones_like(attention_mask), torch.arange(length) if is_padded else position_ids)
        return (past | past.T) & attention_mask.bool()
    visible = torch.zeros(length, length, dtype=torch.bool)
    for i in range(length):
        for j in range(i, -1, -1):
            visible[i, j] = attention_mask[j]
            if not is_padded and j > 0 and position_ids[j] != position_ids[j - 1] + 1:
                break  # a document begins at key j
    return visible


def forward_sequence(config, parameters, tokens, text, source=None, is_source=None):
    """The logits `(length, vocabulary)` and each layer's weights for one sequence, then those of its cross-attention.

    Weights are `(heads, length, length)`; `source` is `(source length, width)`, and `is_source` false for its padding.
    """
    before, after = FUNCTIONS[config.sublayer_activation], FUNCTIONS[config.residual_activation]
    model = parameters.below("model")
    x = model["embed_tokens.weight"][tokens]
    if config.per_layer_config[0].position_embedding == "learned":
        x = x + model["embed_positions.weight"][text.positions]
    x = norm_of(config, x, model.below("embed_norm")) if config.embedding_norm else x
    weights, cross_weights, first_values, added = [], [], [], [x]
    for index in range(config.num_hidden_layers):
        layer, block = config.per_layer_config[index], model.below(f"layers.{index}")
        cross = cross_layer(layer)

        def run(name, x, index=index, layer=layer, cross=cross, block=block):
            if name == "mlp":
                return mlp(config, x, block, text)
            of_name = block.below(name)
            if name == "cross_attn":
                seen = replace(text, visible=is_source.expand(1, len(x), -1))
                output, of_heads, _ = attention(config, cross, x, of_name, seen, index, source=source)
                cross_weights.append(of_heads)
                return output
            first = first_values[0] if first_values else None
            output, of_heads, values = attention(config, layer, x, of_name, text, index, first)
            weights.append(of_heads)
            first_values.append(values)
            return output

        def output_of(name, x, block=block, run=run):
            if config.norm_position in ("pre", "sandwich"):
                x = norm_of(config, x, block.below(f"{name}_norm"))
            output = run(name, before(x))
            if config.norm_position in ("output", "sandwich"):
                output = norm_of(config, output, block.below(f"{name}_output_norm"))
            return output

        names = [name for name in ("self_attn", "cross_attn", "mlp") if name != "cross_attn" or cross is not None]
        total, outputs = x, []
        for name in names:
            if name == "self_attn" or not config.parallel_residual:
                x, total = read_stream(config, layer, block, name, total, [*added, *outputs])
            outputs.append(output_of(name, x))
            total = total + outputs[-1]
            if name == "mlp" or not config.parallel_residual:
                is_post = config.norm_position == "post"
                total = x = after(norm_of(config, total, block.below(f"{name}_norm")) if is_post else total)
        added += outputs
        if index == config.num_hidden_layers - 1:
            x, _ = read_stream(config, layer, block, "norm", total, added)
    if config.norm_position != "post":
        x = norm_of(config, x, model.below("norm"))
    head = model["embed_tokens.weight"] if config.tie_word_embeddings else parameters["lm_head.weight"]
    logits, cap = x @ head.T, config.final_logit_softcapping
    return logits if cap is None else cap * torch.tanh(logits / cap), weights + cross_weights


def forward(model, input_ids, attention_mask=None, position_ids=None, visible=None, **source):
    """The logits `(batch, length, vocabulary)` of a batch, and attention weights `(batch, heads, length, length)`.

    Weights are those of each layer, then those of the cross-attention of each. `visible`
    `(batch, 1 or heads, length, length)` stands in place of what mask and positions say, and `source` are
    `encoder_hidden_states` and perhaps `encoder_attention_mask`.
    """
    config, parameters, rows = model.config, Parameters(model.state_dict()), []
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    positions = (mask.cumsum(dim=-1) - 1).clamp(min=0) if position_ids is None else position_ids
    states = source.get("encoder_hidden_states")
    for row in range(len(input_ids)):
        own = visible_keys(mask[row], positions[row], config.is_causal)
        text = Text(positions[row], own[None] if visible is None else visible[row], mask[row].bool(), own)
        inputs = [input_ids[row], text]
        if states is not None:
            is_source = source.get("encoder_attention_mask", torch.ones(states.shape[:2]))
            inputs += [states[row], is_source[row].bool()]
        rows.append(forward_sequence(config, parameters, *inputs))
    logits, weights = zip(*rows)
    return torch.stack(logits), [torch.stack(layer) for layer in zip(*weights)]


def check(model, tolerance=1e-10, visible=None, use_cache=None, **inputs):
    """Asserts that a float64 model equals the formulas in logits and weights, except at padding.

    Weights are compared where the model returns them, which no linear attention does. `visible` is what a 4-D mask of
    the inputs shows.
    """
    layers = [each for layer in model.config.per_layer_config for each in (layer, cross_layer(layer)) if each]
    has_weights = model.config._attn_implementation in ("eager", "nlq") and all(
        layer.attention_activation != "linear_attention" for layer in layers
    )
    with torch.no_grad():
        output = model(**inputs, use_cache=use_cache, output_attentions=has_weights)
    mask = inputs.get("attention_mask") if visible is None else None
    logits, weights = forward(model, **{**inputs, "attention_mask": mask}, visible=visible)
    is_token = torch.ones_like(inputs["input_ids"]).bool() if mask is None else mask.bool()
    torch.testing.assert_close(output.logits[is_token], logits[is_token], rtol=tolerance, atol=tolerance)
    if has_weights:
        for actual, expected in zip((*output.attentions, *output.get("cross_attentions", ())), weights, strict=True):
            actual, expected = (each.transpose(1, 2)[is_token] for each in (actual, expected))
            torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
