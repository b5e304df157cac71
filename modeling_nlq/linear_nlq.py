"""Linear attention, with weights `psi(c q) . psi(k)`, which is a recurrent network.

`psi(x) = elu(x) + 1` (Katharopoulos et al. 2020, arXiv 2006.16236), `c = attention_scaling * sqrt(head_dim)`. The
output is

    o_i = sum_j decay^(t_i - t_j) (R_i psi(c q_i)) . (R_j psi(k_j)) v_j / sum_j decay^(t_i - t_j) psi(c q_i) . psi(k_j)

over the keys that query `i` sees. `t` counts the tokens but padding. `R` are rotary positions (Su et al. 2021, arXiv
2104.09864, section 3.3). `decay` is 1 or a rate per head (Sun et al. 2023, arXiv 2307.08621). Later tokens need only
the state, two sums over earlier tokens. `parallel_form`, quadratic in the length, is the readable reference.

The delta rule replaces what the state holds for a key, with the strength `b_t` (Schlag et al. 2021, arXiv 2102.11174).
Each token may set its decay `a_t` (Gated DeltaNet, Yang et al. 2024, arXiv 2412.06464):

    S_t = a_t S_(t-1) (I - b_t k_t k_t^T) + b_t v_t k_t^T,  o_t = attention_scaling S_t q_t

`q` and `k` are rotated and then of unit length, and nothing is divided. `recurrent_delta_step` is the reference.

Letters of shapes: b batch, g key and value heads, r query heads for each of them, n length, c chunk, d head_dim.
"""

import itertools
import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import apply_rotary_pos_emb as rotate_part
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_whole
from transformers.utils.generic import maybe_autocast

from .activations_nlq import at_least_float32, counts_as_zero
from .cache_nlq import LinearState
from .masking_nlq import Visibility, make_visibility


# With heads of 64, its pairs cost about as much as reading the state
CHUNK_SIZE = 64
# Tokens computed at once, with memory that the next segment uses again
SEGMENT_SIZE = 2048


def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates the first elements of heads, as many as `cos` and `sin` have."""
    rotation = rotate_whole if cos.shape[-1] == query.shape[-1] else rotate_part
    return rotation(query, key, cos, sin)


class LinearInputs(NamedTuple):
    """The inputs of all forms, in at least float32. Rotated states have rotary positions, for the numerator."""

    query: Tensor  # (b, g, r, n, d), psi(c q)
    key: Tensor  # (b, g, n, d), psi(k), 0 for padding
    rotated_query: Tensor
    rotated_key: Tensor
    value: Tensor  # (b, g, n, d)
    count: Tensor | None  # (b, n), tokens without padding up to each one, including those of the state
    is_valid: Tensor | None  # (b, n), false for padding; both are `None` for a single token
    document_start: Tensor | None  # (b, n), the first token of each token's packed document
    log_decay: Tensor | None  # (g,)


class DeltaInputs(NamedTuple):
    """The inputs of the delta rule, in at least float32. `beta` and `log_decay` are 0 for padding."""

    query: Tensor  # (b, g, r, n, d), of the length `attention_scaling`
    key: Tensor  # (b, g, n, d), of length 1
    value: Tensor  # (b, g, n, d)
    beta: Tensor  # (b, g, n), the strength of each write
    log_decay: Tensor  # (b, g, n)
    document_start: Tensor | None  # (b, n), as in `LinearInputs`


def fixed_log_decay(num_heads: int) -> Tensor:
    """Returns `(heads,)`, the logarithms of RetNet's rates `1 - 2^(-5 - head)`."""
    return torch.log1p(-torch.exp2(-5.0 - torch.arange(num_heads, dtype=torch.float64)))


def initial_decay_bias(num_heads: int) -> Tensor:
    """Returns `(heads,)`, the logits of RetNet's rates."""
    exponent = 5.0 + torch.arange(num_heads, dtype=torch.float64)
    return exponent * math.log(2.0) + fixed_log_decay(num_heads)


class _FeatureMap(torch.autograd.Function):
    """`psi`, with the derivative `min(psi, 1)`, which needs only the result."""

    generate_vmap_rule = True

    @staticmethod
    def forward(states) -> Tensor:
        # `elu(x) + 1` computed literally would be 0 below -17, and inaccurate above
        return torch.exp(states.clamp(max=0.0)).add_(states.clamp(min=0.0))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient) -> Tensor:
        (features,) = ctx.saved_tensors
        return gradient * features.clamp(max=1.0)


def feature_map(states: Tensor) -> Tensor:
    has_gradient = torch.is_grad_enabled() and states.requires_grad
    return _FeatureMap.apply(states) if has_gradient else _FeatureMap.forward(states)


def parallel_form(inputs, is_causal=True) -> Tensor:
    """Returns `(b, g, r, n, d)`, computed from a weight for each pair of tokens."""
    pairs = _pairs(inputs, is_causal)
    weights = (inputs.query @ inputs.key[:, :, None].mT) * pairs
    rotated = (inputs.rotated_query @ inputs.rotated_key[:, :, None].mT) * pairs
    return divide(rotated @ inputs.value[:, :, None], weights.sum(dim=-1))


def chunked_form(inputs, state=None, chunk_size=CHUNK_SIZE) -> tuple[Tensor, LinearState]:
    """Returns `(b, g, r, n, d)`, from the pairs within a chunk and the state before it, and the last state.

    Decay is counted from the end of a chunk or of the state, so no factor is above 1. Without a `chunk_size` all
    tokens are one chunk.
    """
    *sums, state = _chunked_sums(inputs, state, chunk_size)
    return divide(*sums), state


def bidirectional_form(inputs, document_end) -> Tensor:
    """Returns `(b, g, r, n, d)` where each query sees its packed document, up to token `document_end` `(b, n)`."""
    if document_end is None:
        numerator = inputs.rotated_query @ (inputs.rotated_key.mT @ inputs.value)[:, :, None]
        return divide(numerator, (inputs.query @ inputs.key.sum(dim=-2)[:, :, None, :, None]).squeeze(-1))
    # The sums up to each token, and from it on, have its own term twice
    states = (states.flip(-2) for states in inputs[:5])
    document_start = document_end.shape[-1] - 1 - document_end.flip(-1)
    mirrored = LinearInputs(*states, inputs.count, inputs.is_valid.flip(-1), document_start, None)
    chunk_size = None if torch.compiler.is_exporting() else CHUNK_SIZE  # chunks would fix the length
    before, after = (_chunked_sums(each, None, chunk_size)[:2] for each in (inputs, mirrored))
    self_sum = (inputs.query * inputs.key[:, :, None]).sum(dim=-1)
    rotated = (inputs.rotated_query * inputs.rotated_key[:, :, None]).sum(dim=-1, keepdim=True)
    numerator = before[0] + after[0].flip(-2) - rotated * inputs.value[:, :, None]
    return divide(numerator, before[1] + after[1].flip(-1) - self_sum)


def state_of_source(key, value, is_valid) -> LinearState:
    """Returns the sums over an encoder's tokens `(b, g, n, d)` without padding."""
    with maybe_autocast(key.device.type, enabled=False):
        key, value = (states.to(at_least_float32(states)) for states in (key, value))
        key = feature_map(key) if is_valid is None else feature_map(key) * is_valid[:, None, :, None]
        return LinearState(key.mT @ value, key.sum(dim=-2))


def attend_to_state(query, state, scaling) -> Tensor:
    """Returns `(b, query, heads, d)` for queries `(b, heads, query, d)` that see all tokens."""
    with maybe_autocast(query.device.type, enabled=False):
        query = feature_map(query.to(state.numerator.dtype) * (scaling * math.sqrt(query.shape[-1])))
        query = query.unflatten(1, (state.denominator.shape[1], -1))
        denominator = (query @ state.denominator[:, :, None, :, None]).squeeze(-1)
        return divide(query @ state.numerator[:, :, None], denominator).flatten(1, 2).transpose(1, 2)


def _chunked_sums(inputs, state, chunk_size) -> tuple[Tensor, Tensor, LinearState]:
    """Returns `chunked_form`'s numerator `(b, g, r, n, d)`, denominator `(b, g, r, n)` and state."""
    length = inputs.query.shape[-2]
    chunk_size = length if chunk_size is None else chunk_size
    inputs = _chunked(inputs, chunk_size)
    # (b, chunks): tokens before each chunk
    before = inputs.count[..., 0] - inputs.is_valid[..., 0].to(inputs.count.dtype)
    after = inputs.count[..., -1]
    first = torch.arange(before.shape[-1], device=before.device) * chunk_size

    # The earlier state decays over a chunk by a factor, and the chunk adds to it
    from_end = _decay(inputs.log_decay, after[..., None] - inputs.count)  # (b, g, chunks, c)
    chunk_decay = _decay(inputs.log_decay, after - before)  # (b, g, chunks)
    if inputs.document_start is not None:
        last_start = inputs.document_start[..., -1]
        index = first[:, None] + torch.arange(chunk_size, device=first.device)
        from_end = from_end * (index >= last_start[..., None])[:, None]
        chunk_decay = chunk_decay * (last_start < first)[:, None]
    keys = inputs.rotated_key * from_end[..., None]
    added = LinearState(keys.mT @ inputs.value, (inputs.key * from_end[..., None]).sum(dim=-2))
    if state is None:
        state = LinearState(*(torch.zeros_like(part[:, :, 0]) for part in added))
    states = []
    # Unbound: the gradient of an index has the size of all chunks, which would make this quadratic
    for decay, numerator, denominator in zip(*(part.unbind(dim=2) for part in (chunk_decay, *added))):
        states.append(state)
        decayed = (state.numerator * decay[..., None, None], state.denominator * decay[..., None])
        state = LinearState(decayed[0] + numerator, decayed[1] + denominator)
    numerators, denominators = (torch.stack(parts, dim=2) for parts in zip(*states))  # (b, g, chunks, ...)

    # (b, g, chunks, c): the decay of the earlier state up to each query
    seen = _decay(inputs.log_decay, inputs.count - before[..., None])
    if inputs.document_start is not None:
        seen = seen * (inputs.document_start < first[:, None])[:, None]
    pairs = _pairs(inputs)
    weights = (inputs.query @ inputs.key[:, :, None].mT) * pairs
    rotated = weights
    if inputs.rotated_query is not inputs.query:
        rotated = (inputs.rotated_query @ inputs.rotated_key[:, :, None].mT) * pairs
    numerator = rotated @ inputs.value[:, :, None]
    numerator = numerator + (inputs.rotated_query @ numerators[:, :, None]) * seen[:, :, None, ..., None]
    denominator = (inputs.query @ denominators[:, :, None, ..., None]).squeeze(-1)
    denominator = weights.sum(dim=-1) + denominator * seen[:, :, None]
    return numerator.flatten(3, 4)[..., :length, :], denominator.flatten(3, 4)[..., :length], state


def recurrent_step(inputs, index, state) -> tuple[Tensor, LinearState]:
    """Returns one token's output `(b, g, r, d)`, and the state `S_i = decay S_(i-1) + k_i v_i^T`."""
    key, rotated_key, value = (states[:, :, index] for states in (inputs.key, inputs.rotated_key, inputs.value))
    if state is None:
        state = LinearState(key.new_zeros(*key.shape, key.shape[-1]), torch.zeros_like(key))
    decay = None
    if inputs.log_decay is not None:  # (b or 1, g)
        is_valid, ones = inputs.is_valid, inputs.key.new_ones(1)
        tokens = ones if is_valid is None else is_valid[:, index].to(inputs.count.dtype)
        decay = _decay(inputs.log_decay, tokens)
    if inputs.document_start is not None:
        is_inside = (inputs.document_start[:, index] < index)[:, None]
        decay = is_inside.to(key.dtype) if decay is None else decay * is_inside
    if decay is not None:
        state = LinearState(state.numerator * decay[..., None, None], state.denominator * decay[..., None])
    state = LinearState(state.numerator + rotated_key[..., :, None] * value[..., None, :], state.denominator + key)
    denominator = (inputs.query[..., index, :] @ state.denominator[..., None]).squeeze(-1)
    return divide(inputs.rotated_query[..., index, :] @ state.numerator, denominator), state


def recurrent_delta_step(inputs, index, state) -> tuple[Tensor, LinearState]:
    """Returns one token's output `(b, g, r, d)` by the delta rule, and the state, which is `S_t^T`."""
    query, key, value = (states[..., index, :] for states in inputs[:3])
    decay = torch.exp(inputs.log_decay[..., index])
    if inputs.document_start is not None:
        decay = decay * (inputs.document_start[:, index] < index)[:, None]
    earlier = value.new_zeros(*key.shape, value.shape[-1]) if state is None else state.numerator
    sums, output = _delta_step(earlier, (query, key, value, inputs.beta[..., index], decay))
    return output, _delta_state(sums)


def _delta_step(sums, token) -> tuple[Tensor, Tensor]:
    query, key, value, beta, decay = token
    sums = sums * decay[..., None, None]
    # The state already holds a part of `v_t` for this key
    change = beta[..., None] * (value - (key[..., None, :] @ sums).squeeze(-2))
    sums = sums + key[..., :, None] * change[..., None, :]
    return sums, query @ sums


def chunked_delta_form(inputs, state=None, chunk_size=CHUNK_SIZE) -> tuple[Tensor, LinearState]:
    """Returns `(b, g, r, n, d)` by the delta rule, and the last state.

    Within a chunk, the state is the decayed earlier one plus decayed `k_j u_j^T`. The changes `u` solve a triangular
    system, `u_i = b_i (v_i - k_i . state before i)` (the WY form, Yang et al. 2024, arXiv 2406.06484, section 3).
    Without a `chunk_size` all tokens are one chunk.
    """
    length = inputs.key.shape[-2]
    size = length if chunk_size is None else chunk_size
    query, key, value = (_cut(states, size) for states in inputs[:3])
    beta, log_decay = (_cut(states[..., None], size) for states in (inputs.beta, inputs.log_decay))

    # The decay up to each token of the state before the chunk (b, g, chunks, c, 1), and of each earlier token
    total = log_decay.cumsum(dim=-2)
    from_start = torch.exp(total)
    visible = torch.ones(size, size, dtype=torch.bool, device=key.device).tril()
    if inputs.document_start is not None:
        start = _cut_row(inputs.document_start, size)
        first = torch.arange(start.shape[1], device=start.device) * size
        from_start = from_start * (start < first[:, None])[:, None, ..., None]
        visible = visible & (start[..., :, None] == start[..., None, :])[:, None]
    pairs = torch.exp((total - total.mT).masked_fill(~visible, -torch.inf))

    # `u` is linear in the state before the chunk
    written = beta * key
    system = (written @ key.mT) * pairs
    sides = torch.cat([beta * value, written * from_start], dim=-1)
    solution = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    of_values, of_state = solution.split([value.shape[-1], key.shape[-1]], dim=-1)
    kept_keys = key * pairs[..., -1, :, None]
    chunk_decay = from_start[..., -1:, :]
    shape = (*key.shape[:2], key.shape[-1], value.shape[-1])
    sums = value.new_zeros(shape) if state is None else state.numerator
    states, changes = [], []
    # Unbound for the same reason as in `_chunked_sums`
    for parts in zip(*(part.unbind(dim=2) for part in (of_values, of_state, kept_keys, chunk_decay))):
        own_values, own_state, keys, decay = parts
        states.append(sums)
        changes.append(own_values - own_state @ sums)
        sums = sums * decay + keys.mT @ changes[-1]
    states, changes = (torch.stack(parts, dim=2)[:, :, None] for parts in (states, changes))

    weights = (query @ key[:, :, None].mT) * pairs[:, :, None]
    output = (query * from_start[:, :, None]) @ states + weights @ changes
    return output.flatten(3, 4)[..., :length, :], _delta_state(sums)


def exported_delta_form(inputs, state=None) -> tuple[Tensor, LinearState]:
    """Returns what `chunked_delta_form` does, without a gradient, by a loop that ONNX has.

    ONNX solves no triangular systems.
    """
    from torch._higher_order_ops.scan import scan  # a private place, which only an export needs

    query, key, value, beta, log_decay, start = inputs
    decay = torch.exp(log_decay)
    if start is not None:
        decay = decay * (start < torch.arange(key.shape[-2], device=key.device))[:, None]
    sums = value.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]) if state is None else state.numerator
    tokens = [states.movedim(-2, 0) for states in (query, key, value)]
    tokens += [rate.movedim(-1, 0) for rate in (beta, decay)]
    sums, outputs = scan(_delta_step, sums.detach(), [states.detach() for states in tokens])
    return outputs.movedim(0, -2), _delta_state(sums)


def _delta_state(sums) -> LinearState:
    return LinearState(sums, sums.new_zeros(*sums.shape[:2], 0))


def divide(numerator, denominator) -> Tensor:
    """Divides; a query that sees no key gets 0."""
    is_zero = counts_as_zero(denominator)[..., None]
    return (numerator / denominator[..., None].masked_fill(is_zero, 1.0)).masked_fill(is_zero, 0.0)


def _decay(log_decay, tokens) -> Tensor:
    """Returns `decay^tokens`, `(b, ...)` -> `(b, g or 1, ...)`; tokens below 0 are of hidden pairs."""
    if log_decay is None:
        return torch.ones_like(tokens, dtype=torch.float32)[:, None]
    rate = log_decay.view(-1, *[1] * (tokens.ndim - 1))
    return torch.exp(rate * tokens.clamp(min=0)[:, None].to(log_decay.dtype))


def _pairs(inputs, is_causal=True) -> Tensor:
    """Returns each pair's decay, `(b, g or 1, 1, ..., c, c)`, 0 where the key is hidden."""
    length = inputs.query.shape[-2]
    visible = torch.ones(length, length, dtype=torch.bool, device=inputs.query.device)
    visible = visible.tril() if is_causal else visible
    visible = visible & inputs.is_valid[..., None, :]
    if inputs.document_start is not None:
        start = inputs.document_start
        visible = visible & (start[..., :, None] == start[..., None, :])
    tokens = inputs.count[..., :, None] - inputs.count[..., None, :]
    return (_decay(inputs.log_decay, tokens) * visible[:, None])[:, :, None]


def _chunked(inputs, chunk_size) -> LinearInputs:
    """Cuts the length into chunks, `(..., n, d)` -> `(..., chunks, c, d)`, and fills up with padding."""
    query, key, value = (_cut(states, chunk_size) for states in (inputs.query, inputs.key, inputs.value))
    is_rotated = inputs.rotated_query is not inputs.query
    rotated = (inputs.rotated_query, inputs.rotated_key)
    rotated = [_cut(states, chunk_size) for states in rotated] if is_rotated else [query, key]
    is_valid = _cut(inputs.is_valid[..., None], chunk_size).squeeze(-1)
    count = _cut_row(inputs.count, chunk_size)
    start = None if inputs.document_start is None else _cut_row(inputs.document_start, chunk_size)
    return LinearInputs(query, key, *rotated, value, count, is_valid, start, inputs.log_decay)


def _cut(states, size) -> Tensor:
    """Cuts `(..., n, d)` into chunks `(..., chunks, size, d)`, filled up with 0."""
    return F.pad(states, (0, 0, 0, -states.shape[-2] % size)).unflatten(-2, (-1, size))


def _cut_row(row, size) -> Tensor:
    """Cuts `(b, n)` into chunks `(b, chunks, size)`; padding repeats the last token's number."""
    if missing := -row.shape[-1] % size:
        row = torch.cat([row, row[:, -1:].expand(-1, missing)], dim=-1)
    return row.unflatten(-1, (-1, size))


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    visibility: Visibility | None,
    scaling: float,
    log_decay: Tensor | None = None,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    state: LinearState | None = None,
    form: str = "chunked",
    is_causal: bool = True,
    beta: Tensor | None = None,
    has_gradient: bool = True,
) -> tuple[Tensor, LinearState | None]:
    """Computes linear attention of the tokens of one call.

    Args:
        query: `(batch, heads, query, head_dim)`, before rotary positions.
        key, value: `(batch, key_value_heads, query, head_dim)`.
        visibility: padding and packed documents, or `None`.
        log_decay: `(key_value_heads,)`; with a `beta` also `(batch, key_value_heads, query)`.
        form: `"chunked"`, or `"parallel"`, which neither takes nor returns a state. The latter goes token by token
            with a `beta`.
        is_causal: if false, there is neither a state nor a decay.
        beta: `(batch, key_value_heads, query)`, the strength of each write by the delta rule.
        has_gradient: if false, an exported program may lack the gradient.

    Returns:
        The output `(batch, query, heads, head_dim)`, and the state after these tokens.
    """
    batch, _, length, head_dim = query.shape
    dtype = value.dtype
    query_scaling = scaling * math.sqrt(head_dim)
    count = is_valid = start = end = None  # a single token that is not padding needs none of them
    if visibility is not None or length > 1 or form == "parallel" or not is_causal:
        if visibility is None:
            visibility = make_visibility(length, length, 0, query.device, is_causal=is_causal)
        start = visibility.first_key
        end = visibility.last_key
        count = visibility.visible_count.expand(batch, -1)
        if start is not None:  # pairs across documents are hidden, so only differences within a document matter
            start = start.expand(batch, -1)
            count = (end + 1).expand(batch, -1)
        if visibility.key_is_valid is None:
            is_valid = torch.ones(batch, length, dtype=torch.bool, device=query.device)
        else:
            is_valid = visibility.key_is_valid[:, end[0] if is_causal else slice(None)].expand(batch, -1)
    # A loop over segments or chunks would fix the length of an exported program
    is_exporting = torch.compiler.is_exporting()
    size = None if form == "parallel" or is_exporting or not is_causal else SEGMENT_SIZE

    def split(states, dim) -> Iterable[Tensor | None]:
        if states is None:
            return itertools.repeat(None)
        # Split: the gradient of a slice has the size of the whole, which would make this quadratic
        return [states] if size is None else states.split(size, dim)

    rates = (None, None)
    if beta is not None:
        log_decay = torch.zeros_like(beta) if log_decay is None else log_decay
        rates = (beta, log_decay[:, None].expand_as(beta) if log_decay.ndim == 1 else log_decay)
    chunked = chunked_form if beta is None else chunked_delta_form
    step = recurrent_step if beta is None else recurrent_delta_step
    segments = zip(
        *(split(states, 2) for states in (query, key, value, *rates)),
        *(split(row, 1) for row in (count, is_valid, start, *(position_embeddings or (None, None)))),
    )
    outputs = []
    # Sums over thousands of tokens need float32, also where autocast would use less
    with maybe_autocast(query.device.type, enabled=False):
        for index, (*states, beta, rate, count, is_valid, start, cos, sin) in enumerate(segments):
            # A document that began before these tokens begins at a negative index
            document_start = None if start is None else start - index * SEGMENT_SIZE
            embeddings = None if cos is None else (cos, sin)
            if beta is None:
                inputs = _make_inputs(*states, count, is_valid, query_scaling, document_start, log_decay, embeddings)
            else:
                inputs = _make_delta_inputs(*states, beta, rate, is_valid, scaling, document_start, embeddings)
            if form == "parallel" and beta is None:
                output = parallel_form(inputs, is_causal)
            elif not is_causal:
                output = bidirectional_form(inputs, None if end is None else end.expand(batch, -1))
            elif length == 1 or (form == "parallel" and not is_exporting):
                tokens = []
                for place in range(length):
                    output, state = step(inputs, place, state)
                    tokens.append(output)
                output = torch.stack(tokens, dim=-2)
            elif is_exporting and beta is not None and not has_gradient:
                output, state = exported_delta_form(inputs, state)
            elif is_exporting:
                output, state = chunked(inputs, state, chunk_size=None)
            else:
                output, state = chunked(inputs, state)
            outputs.append(output.flatten(1, 2).transpose(1, 2).to(dtype))
    return torch.cat(outputs, dim=1), None if form == "parallel" else state


def _make_inputs(
    query, key, value, count, is_valid, query_scaling, document_start, log_decay, position_embeddings
) -> LinearInputs:
    query, key, value = (states.to(at_least_float32(states)) for states in (query, key, value))
    query, key = feature_map(query * query_scaling), feature_map(key)
    if is_valid is not None:
        key = key * is_valid[:, None, :, None]
    groups = (key.shape[1], query.shape[1] // key.shape[1])
    rotated_query, rotated_key = query, key
    if position_embeddings is not None:
        rotated_query, rotated_key = rotate(query, key, *(part.to(query.dtype) for part in position_embeddings))
    grouped = query.unflatten(1, groups)
    rotated_query = grouped if rotated_query is query else rotated_query.unflatten(1, groups)
    log_decay = None if log_decay is None else log_decay.to(query)
    return LinearInputs(grouped, key, rotated_query, rotated_key, value, count, is_valid, document_start, log_decay)


def _make_delta_inputs(
    query, key, value, beta, log_decay, is_valid, scaling, document_start, position_embeddings
) -> DeltaInputs:
    dtype = at_least_float32(query)
    query, key, value, beta, log_decay = (states.to(dtype) for states in (query, key, value, beta, log_decay))
    # What decays further is 0 in float32; in sums with larger numbers, the chunked form would lose small ones
    log_decay = log_decay.clamp(min=-100.0)
    if position_embeddings is not None:
        query, key = rotate(query, key, *(part.to(dtype) for part in position_embeddings))
    query, key = _of_unit_length(query) * scaling, _of_unit_length(key)
    if is_valid is not None:
        beta, log_decay = (rate * is_valid[:, None] for rate in (beta, log_decay))
    query = query.unflatten(1, (key.shape[1], -1))
    return DeltaInputs(query, key, value, beta, log_decay, document_start)


def _of_unit_length(states) -> Tensor:
    # The epsilon of Transformers' `qwen3_next`
    return states * torch.rsqrt(states.square().sum(dim=-1, keepdim=True) + 1e-6)
