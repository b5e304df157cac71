"""The attention parts that come with NLQ, and their table, from which `NLQConfig` has its fields for them."""

import math
from dataclasses import make_dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.utils.import_utils import is_tracing

from .activations_nlq import at_least_float32
from .cache_nlq import CROP_ADVICE, cache_layer_with, keep_rows_together, refuse_offloading
from .masking_nlq import TokenContext
from .parts_base_nlq import AttentionPart, ScoreBias, own_heads, shared_by_heads, sum_over_processes
from .parts_user_nlq import find_part


KERNEL = 4  # tokens of a sum of `canon`
FIXED_OR_LEARNED = Literal["fixed", "learned"] | None


class ShortConvolution(nn.Module):
    """`x_t + sum_k w_k x_{t-k}` over the tokens of one text, with weights for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, KERNEL))
        nn.init.uniform_(self.weight, -0.5, 0.5)

    def initialize(self) -> None:
        init.uniform_(self.weight, -0.5, 0.5)  # as PyTorch's convolution over 4 tokens of one channel

    def forward(
        self, states: Tensor, earlier: Tensor | None, context: TokenContext, mesh=None
    ) -> tuple[Tensor, Tensor]:
        """Returns the sums of `states` `(batch, query, width)`, and the last 3 tokens without padding.

        `earlier` are the 3 tokens before, `(batch, 3, width)`; `None` is 0. Padding is passed over, wherever it is.
        """
        (batch, length, width), kept = states.shape, KERNEL - 1
        if earlier is None:
            earlier = states.new_zeros(batch, kept, width)
        tokens = torch.cat([earlier, states], dim=1)
        is_valid = None
        if context.is_valid is not None:  # tokens move together, and padding to the end
            is_valid = F.pad(context.is_valid, (kept, 0), value=True)
            order = torch.argsort(is_valid.logical_not().byte(), dim=1, stable=True)
            tokens = tokens.gather(1, order[..., None].expand_as(tokens))
        weight = own_heads(self.weight, mesh, dim=0)
        sums = tokens[:, kept:] * (1.0 + weight[:, -1])
        for back in range(1, KERNEL):
            term = tokens[:, kept - back : kept - back + length] * weight[:, -1 - back]
            if context.document is not None:
                term = term * (context.query_position >= back)[..., None]
            sums = sums + term
        if is_valid is None:
            return sums.to(states.dtype), tokens[:, length:]
        index = (is_valid.cumsum(dim=1)[:, kept:] - 1 - kept).clamp(min=0)[..., None]
        last = is_valid.sum(dim=1)[:, None] + torch.arange(-kept, 0, device=states.device)
        latest = tokens.gather(1, last[..., None].expand(-1, -1, width))
        return sums.gather(1, index.expand_as(states)).to(states.dtype), latest


class Canon(AttentionPart):
    """`h + conv(h)` over 4 tokens, at sites that the letters name.

    `"A"`: the input of the attention. `"B"`: queries, keys and values, before norms and positions. `"C"`: the input of
    the MLP. `"D"`: the input of the MLP's activation, and the factor of a gated MLP.
    """

    name = "canon"
    field_type = str | None
    causal_only = True
    formula = "h_t + sum_{k < 4} w_k * h_{t-k}"
    source = "Allen-Zhu 2025, arXiv 2512.17351"
    needs_token_context = True
    start = "zero"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        widths = self.widths(config)
        self.convolutions = nn.ModuleDict({name: ShortConvolution(width) for name, width in widths.items()})
        # Among the states of the cache layer, after linear attention's
        self.state_indices = {name: config.first_conv_state + index for index, name in enumerate(widths)}

    @classmethod
    def widths(cls, config) -> dict[str, int]:
        key_value_width = config.num_key_value_heads * config.head_dim
        inner = ("mlp_gate", "mlp_inner") if config.mlp_type == "gated" else ("mlp_inner",)
        sites = {
            "A": {"attention_input": config.hidden_size},
            "B": {"query": config.num_query_heads * config.head_dim, "key": key_value_width, "value": key_value_width},
            "C": {"mlp_input": config.hidden_size},
            "D": dict.fromkeys(inner, config.intermediate_size),
        }
        return {name: width for site in config.canon for name, width in sites.get(site, {}).items()}

    @classmethod
    def check(cls, config):
        sites = config.canon
        if not sites or set(sites) - set("ABCD") or list(sites) != sorted(set(sites)):
            raise ValueError(f"canon={sites!r} must be letters out of 'ABCD', each once and in order, such as 'AC'")

    @classmethod
    def conv_states(cls, config):
        return len(cls.widths(config))

    @classmethod
    def shard_dim(cls, parameter):
        _, name, _ = parameter.split(".")
        return {"key": "key_value", "value": "key_value", "mlp_gate": "inner", "mlp_inner": "inner"}.get(name, "query")

    def _convolve(self, name, call, states, is_split=False) -> Tensor:
        if name not in self.convolutions:
            return states
        if call.token_context.has_own_mask:
            raise ValueError("canon takes no 4-D attention_mask and no BlockMask; give a padding mask or position_ids")
        index = self.state_indices[name]
        earlier = cache_layer = None
        if call.cache is not None:
            cache_layer = cache_layer_with("update_conv_state", call.cache, self.layer_idx, "canon")
            keep_rows_together(cache_layer)
            refuse_offloading(call.cache, "canon")
            if cache_layer.is_conv_states_initialized[index]:
                earlier = cache_layer.conv_states[index].transpose(1, 2)[:, -(KERNEL - 1) :]
                earlier = F.pad(earlier, (0, 0, KERNEL - 1 - earlier.shape[1], 0))
        sums, kept = self.convolutions[name](states, earlier, call.token_context, call.tp_mesh if is_split else None)
        if cache_layer is not None:
            is_cropped = cache_layer.record_past  # later; until then it keeps all tokens
            if is_cropped and hasattr(cache_layer, "max_cache_len"):
                raise ValueError(f"canon: a static cache cannot be cropped; {CROP_ADVICE}")
            kept = (states if is_cropped else kept).transpose(1, 2)
            cache_layer.update_conv_state(kept, state_idx=index, conv_kernel_size=KERNEL - 1)
            if is_cropped and call.token_context.is_valid is not None:  # padding moves before all tokens
                stored, is_valid = cache_layer.conv_states[index], call.token_context.is_valid
                is_valid = F.pad(is_valid, (stored.shape[-1] - is_valid.shape[1], 0), value=True)[:, None]
                order = torch.argsort(is_valid.byte(), stable=True).expand_as(stored)
                cache_layer.conv_states[index] = stored.masked_fill(~is_valid, 0.0).gather(-1, order)
        return sums

    def change_input(self, call, hidden_states):
        return self._convolve("attention_input", call, hidden_states)

    def change_qkv(self, call, query, key, value):
        pairs = zip(("query", "key", "value"), (query, key, value))
        return tuple(
            self._convolve(name, call, states.flatten(2), is_split=True).view(states.shape) for name, states in pairs
        )

    def change_mlp_input(self, call, hidden_states):
        return self._convolve("mlp_input", call, hidden_states)

    def change_mlp_inner(self, call, *states):
        names = ("mlp_gate", "mlp_inner")[-len(states) :]
        return tuple(self._convolve(name, call, channels, is_split=True) for name, channels in zip(names, states))


class DepthAttention(AttentionPart):
    """Gives each sub-layer, and the final norm, a weighted mean of the embeddings and all earlier sub-layers' outputs.

    A learned query for each reader, at first 0, attends to the normed outputs. So a model begins with their mean,
    which a norm before the sub-layer does not distinguish from their sum, but for its epsilon. The queries have no
    weight decay, as gains of norms: `bias` in their name keeps them out of Trainer's.
    """

    name = "depth_attention"
    formula = "sum_i softmax_i(w . RMSNorm(b_i)) b_i"
    source = "Attention Residuals, arXiv 2603.15031"
    start = "its mean of outputs equals the residual stream up to a factor only"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.readers = self.stream_readers(config, layer_idx)
        self.queries_bias = nn.Parameter(torch.zeros(len(self.readers), config.hidden_size))

    @classmethod
    def check(cls, config):
        if config.norm_position == "post":
            raise ValueError("depth_attention needs norm_position='pre', 'sandwich' or 'output', not 'post'")
        if config.residual_activation is not None:
            value = config.residual_activation
            raise ValueError(f"residual_activation={value!r} changes a sum that depth_attention does not read")

    @classmethod
    def calls_per_token(cls, config, layer_idx, earlier):
        readers = cls.stream_readers(config, layer_idx)
        after = earlier + config.number_of_sublayers
        outputs = [after if name == "final_norm" else earlier + index for index, name in enumerate(readers)]
        return {"parts.depth_attention": 2 * sum(outputs) / len(outputs)}  # for the score of each, and for the mean

    def change_residual(self, call, states, earlier):
        query, width = self.queries_bias[self.readers.index(call.reader)], states.shape[-1:]
        dtype = at_least_float32(states)
        scores = [F.rms_norm(each.to(dtype), width, query.to(dtype), self.config.layer_norm_eps) for each in earlier]
        weights = torch.stack([score.sum(dim=-1, keepdim=True) for score in scores]).softmax(dim=0)
        return sum(weight * each for weight, each in zip(weights, earlier)).to(states.dtype)


class InputSkip(AttentionPart):
    """Mixes the embeddings into the residual stream at the beginning of each block, by two learned numbers."""

    name = "input_skip"
    formula = "l_0 x + l_1 x_0"
    source = "modded-nanogpt, KellerJordan 2024"
    replaces_stream = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.mixing_bias = nn.Parameter(torch.tensor([1.0, 0.0]))

    def start_without_effect(self, layer):
        self.mixing_bias.copy_(torch.tensor([1.0, 0.0]))
        return None

    def change_residual(self, call, states, earlier):
        if call.reader != "attention":
            return states
        share, input_share = self.mixing_bias
        return share * states + input_share * earlier[0]


class NLQRMSNorm(nn.RMSNorm):
    """RMSNorm of each head, with one gain for all heads."""

    tp_mesh = None

    def forward(self, heads):
        weight = None if self.weight is None else shared_by_heads(self.weight, self.tp_mesh)
        return F.rms_norm(heads, self.normalized_shape, weight, self.eps)


class NLQAllHeadsRMSNorm(nn.RMSNorm):
    """RMSNorm over the width of all heads (OLMo 2, arXiv 2501.00656)."""

    tp_mesh = None

    def forward(self, heads):
        states = heads.flatten(2)
        if self.tp_mesh is None:
            return super().forward(states).view(heads.shape)
        dtype = at_least_float32(heads)
        total = sum_over_processes(states.to(dtype).square().sum(dim=-1, keepdim=True), self.tp_mesh)
        states = states.to(dtype) * torch.rsqrt(total / self.normalized_shape[0] + self.eps)
        if self.weight is not None:
            states = states * own_heads(self.weight, self.tp_mesh, dim=0)
        return states.to(heads.dtype).view(heads.shape)


class NLQL2Norm(nn.Module):
    """Unit-length heads, times a learned scale per head if `num_heads` is given (arXiv 2010.04245)."""

    tp_mesh = None

    def __init__(self, head_dim: int, num_heads: int | None = None):
        super().__init__()
        self.head_dim = head_dim
        self.scale = nn.Parameter(torch.full((num_heads,), math.sqrt(head_dim))) if num_heads else None

    def initialize(self) -> None:
        if self.scale is not None:
            init.constant_(self.scale, math.sqrt(self.head_dim))

    def forward(self, heads):
        # Float16 rounds the epsilon to 0
        normed = F.normalize(heads.to(at_least_float32(heads)), dim=-1)
        heads = normed.to(heads.dtype)
        return heads if self.scale is None else heads * own_heads(self.scale, self.tp_mesh, dim=0)[:, None]


class QKNorm(AttentionPart):
    """`"rms"`: RMSNorm of each head. `"rms_all_heads"`: RMSNorm over the width of all heads.

    `"l2"`: cosine similarities times a learned scale per query head, which replaces the default scaling.
    """

    name = "qk_norm"
    field_type = Literal["rms", "rms_all_heads", "l2"] | None
    formula = "norm(q_i) . norm(k_j)"
    source = "Henry et al. 2020, arXiv 2010.04245 (l2); OLMo 2, arXiv 2501.00656 (rms_all_heads)"
    keeps_keys = True  # but for `k_norm`, through which the layer also passes what a cache holds

    @classmethod
    def layer_modules(cls, config):
        head_dim, query_heads = config.head_dim, config.num_query_heads
        options = {"eps": config.layer_norm_eps, "elementwise_affine": config.norm_gain}
        if config.qk_norm == "rms":
            return {name: NLQRMSNorm(head_dim, **options) for name in ("q_norm", "k_norm")}
        if config.qk_norm == "rms_all_heads":
            widths = {"q_norm": query_heads * head_dim, "k_norm": config.num_key_value_heads * head_dim}
            return {name: NLQAllHeadsRMSNorm(width, **options) for name, width in widths.items()}
        return {"q_norm": NLQL2Norm(head_dim, query_heads), "k_norm": NLQL2Norm(head_dim)}

    def change_qkv(self, call, query, key, value):
        return call.layer.q_norm(query), call.layer.k_norm(key), value


class LengthScaling(AttentionPart):
    """Multiplies scores by `s_h log n_i` of `n_i` visible keys, but neither sinks nor biases.

    `"log_bias"`: by `s_h log n_i + b_h`, which is 1 at first, as in Mistral Large 4.
    """

    name = "attention_length_scaling"
    field_type = Literal["log", "log_bias"] | None
    formula = "s_h log(n_i) s_ij, or (s_h log(n_i) + b_h) s_ij"
    source = "Nakanishi 2025, arXiv 2501.19399; Mistral Large 4"
    needs_token_context = True
    keeps_keys = True
    start = "its factor depends on the number of keys"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        has_shift = config.attention_length_scaling == "log_bias"
        # The factor is 1 at first, without a bias for a query that sees the most keys
        scale = 0.0 if has_shift else 1.0 / math.log(max(2, config.most_visible_keys))
        self.scale_bias = nn.Parameter(torch.full((config.num_query_heads,), scale))
        self.shift_bias = nn.Parameter(torch.ones(config.num_query_heads)) if has_shift else None

    def start_without_effect(self, layer):
        return self.start if self.shift_bias is None else None  # it begins so

    @classmethod
    def check(cls, config):
        activation = config.activation
        normalization = config.attention_normalization or activation.normalization
        if activation.kind == "linear" or (activation.is_homogeneous and normalization == "sum"):
            raise ValueError(
                f"attention_length_scaling: attention_activation={activation.name!r} normalised by "
                f"{normalization!r} cancels a factor of the scores; use another activation or normaliser"
            )

    def change_qkv(self, call, query, key, value):
        log_count = call.token_context.visible_count.clamp(min=1).to(at_least_float32(query)).log()
        factor = own_heads(self.scale_bias, call.tp_mesh, dim=0) * log_count.transpose(1, 2)  # (batch, query, heads)
        if self.shift_bias is not None:
            factor = factor + own_heads(self.shift_bias, call.tp_mesh, dim=0)
        return (query * factor[..., None]).to(query.dtype), key, value


class Parallax(AttentionPart):
    """A second query `r = X W_r` corrects the weights `p` to first order, with `t = r . k` unscaled.

    Weights that sum to 1 still do, and can be negative.
    """

    name = "parallax"
    formula = "(1 + sum_k p_ik t_ik - t_ij) p_ij, t_ij = (x_i W_r) . k_j"
    source = "arXiv 2605.29157"
    start = "zero"
    keeps_keys = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        size = config.num_query_heads * config.head_dim
        self.proj = nn.Linear(config.hidden_size, size, bias=config.has_bias("query_key_value"))

    @classmethod
    def product_cost(cls, config):
        return 1.5  # another product with the keys

    @classmethod
    def refuse_paged(cls, config):
        return None

    @classmethod
    def split_layers(cls, config):
        return {"parts.parallax.proj": "colwise"}

    def scale_keys(self, factor):
        for parameter in self.proj.parameters():
            parameter.div_(factor)

    def change_qkv(self, call, query, key, value):
        # As more heads, which get the query's positions
        second = self.proj(call.hidden_states)
        return torch.cat([query, second.view(query.shape)], dim=2), key, value

    def change_cached_qkv(self, call, query, key, value):
        return torch.cat(query.chunk(2, dim=1), dim=-1), key, value

    def change_weights(self, call, weights, own_columns, key):
        change = torch.matmul(own_columns, key.transpose(2, 3)).to(weights.dtype)
        return weights * (1.0 + (weights * change).sum(dim=-1, keepdim=True) - change)


class ValueResidual(AttentionPart):
    """Mixes the values of every later layer with the first layer's: in equal parts, or learned."""

    name = "value_residual"
    field_type = FIXED_OR_LEARNED
    formula = "a_l V_1 + b_l V_l"
    source = "Zhou et al. 2024, arXiv 2410.17897"
    needs_first_values = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        is_learned = config.value_residual == "learned"
        self.mixing_bias = nn.Parameter(torch.full((2,), 0.5)) if is_learned else None

    def start_without_effect(self, layer):
        if self.mixing_bias is None:
            return "the values would become a mixture; use 'learned', which starts at a = 0 and b = 1"
        self.mixing_bias.copy_(torch.tensor([0.0, 1.0]))
        return None

    def change_qkv(self, call, query, key, value):
        if self.mixing_bias is None:
            return query, key, (call.first_values + value) * 0.5
        first_share, share = shared_by_heads(self.mixing_bias, call.tp_mesh)
        return query, key, first_share * call.first_values + share * value


class SelectiveAttention(AttentionPart):
    """A token lowers the scores that later tokens give earlier ones, in all heads by the first head's scores.

    A document's first token loses nothing. The cache keeps the sums, so tokens cannot be taken back.
    """

    name = "selective_attention"
    causal_only = True
    formula = "s_ij - sum_{j < k < i} relu(s_kj of the first head)"
    source = "Leviathan et al. 2024, arXiv 2410.02703"
    needs_token_context = True
    supports_crop = False
    state_size = 3  # the sum, how many tokens it covers, and whether the key is a document's first
    start = "it has no parameters"

    @classmethod
    def refuse_split(cls, config):
        return "all heads read the scores of the first one"

    def token_state(self, call):
        states, groups = call.hidden_states, call.layer.config.num_key_value_heads
        state = states.new_zeros(*states.shape[:2], self.state_size, dtype=at_least_float32(states))
        state[..., 2] = call.token_context.visible_count[:, 0] <= int(call.layer.activation.sees_own_key)
        return state[:, None].expand(-1, groups, -1, -1)

    def change_scores(self, call, scores, visible):
        context = call.token_context
        earlier_sum, covered, is_first = call.states[self.name][:, 0].unbind(dim=-1)  # (batch, key) each
        has_numbers = not (is_tracing(covered) or covered.is_meta) and covered.numel()
        if call.cache is not None and has_numbers and covered.max() > context.query_index[0]:
            raise ValueError(f"selective_attention: the cache was cropped, and its sums cannot go back; {CROP_ADVICE}")
        is_self = torch.arange(scores.shape[-1], device=scores.device) == context.query_index[:, None]
        selects = F.relu(scores[:, 0]).masked_fill(is_self | is_first.bool()[:, None], 0.0)
        if visible is not None:
            selects = selects.masked_fill(~visible[:, 0], 0.0)
        if context.is_valid is not None:
            selects = selects.masked_fill(~context.is_valid[..., None], 0.0)
        # What a query selects holds for later queries
        sums = F.pad(selects, (0, 0, 1, 0)).cumsum(dim=1) + earlier_sum[:, None]
        if call.cache is not None:
            covered = torch.zeros_like(earlier_sum) + (context.query_index[-1] + 1)
            state = torch.stack([sums[:, -1], covered, is_first], dim=-1)[:, None]
            call.store_state(self.name, state.expand_as(call.states[self.name]))
        return scores - sums[:, None, :-1]


class ForgetGate(AttentionPart):
    """Adds `c_i - c_j` to the scores. `c` is the running sum of `log sigmoid(x w_h + b_h)` over the tokens.

    `"fixed"` has no parameters: `sigmoid(b_h) = exp(-1 / T_h)`, with `T` from 2 tokens to `max_position_embeddings`,
    equally spaced in logarithm.
    """

    name = "forget_gate"
    field_type = FIXED_OR_LEARNED
    causal_only = True
    formula = "s_ij + sum_{j < t <= i} log sigmoid(x_t w_h + b_h)"
    source = "Lin et al. 2025, arXiv 2503.02130"
    needs_token_context = True
    # A low score gets no weight
    activations = ("softmax", "sigmoid", "softplus", "relu", "relu_squared", "sparsemax", "entmax15")
    start = "a gate that forgets nothing has no gradient"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_heads, self.longest = config.num_query_heads, config.max_position_embeddings
        self.state_size = config.num_query_heads // config.num_key_value_heads
        self.proj = nn.Linear(config.hidden_size, self.num_heads) if config.forget_gate == "learned" else None

    @classmethod
    def split_layers(cls, config):
        return {"parts.forget_gate.proj": "colwise"} if config.forget_gate == "learned" else {}

    @classmethod
    def refuse_change(cls, before, after):
        names = ("max_position_embeddings", "num_query_heads")
        if before.forget_gate == "learned" or all(getattr(before, name) == getattr(after, name) for name in names):
            return None
        return "the rates depend on max_position_embeddings and on the number of query heads"

    def token_state(self, call):
        batch, length = call.hidden_states.shape[:2]
        if self.proj is None:
            dtype, device = at_least_float32(call.hidden_states), call.hidden_states.device
            steps = torch.logspace(0.0, 1.0, self.num_heads, base=self.longest / 2.0, dtype=dtype, device=device)
            log_gate = -1.0 / (2.0 * steps)  # log sigmoid(b) = -1 / T
            log_gate = own_heads(log_gate, call.tp_mesh, dim=0).expand(batch, length, -1)
        else:
            gate = self.proj(call.hidden_states)
            log_gate = F.logsigmoid(gate.to(at_least_float32(gate)))
        if call.token_context.is_valid is not None:
            log_gate = log_gate.masked_fill(~call.token_context.is_valid[..., None], 0.0)
        return log_gate.unflatten(-1, (-1, self.state_size)).transpose(1, 2)

    def score_bias(self, call, state):
        # In float64, because only differences of these sums count
        dtype = torch.float32 if state.device.type == "mps" else torch.float64
        total = state.transpose(2, 3).flatten(1, 2).cumsum(dim=-1, dtype=dtype)
        return ScoreBias(total[..., call.token_context.query_index], total)

    def measure(self, call):
        return {"mean_log_forget_gate": self.token_state(call).mean(dim=(0, 2)).flatten()}


class AttentionSink(AttentionPart):
    """Adds `exp(b)` to softmax's denominator, with `b = 0` or learned. Backends read `b` from the layer."""

    name = "attention_sink"
    field_type = Literal["zero", "learned"] | None
    formula = "exp(s_j) / (exp(b_h) + sum_k exp(s_k))"
    source = "gpt-oss; Xiao et al. 2023, arXiv 2309.17453"
    activations = ("softmax",)


class DifferentialAttention(AttentionPart):
    """Subtracts one softmax map from another.

    `"v2"`: `num_attention_heads` counts the outputs, and there are twice as many heads of queries. Heads `2h` and
    `2h + 1` share their keys and values, and output `h` is `A_2h - sigmoid(x W)_h A_2h+1`.

    `"v1"`: `(1 - lambda_init) RMSNorm(A_1 - lambda A_2)` of heads `h` and `h + H/2`, with the values of groups `g` and
    `g + G/2` side by side. `lambda = exp(q_1 . k_1) - exp(q_2 . k_2) + lambda_init` has four learned vectors.
    """

    name = "differential_attention"
    field_type = Literal["v1", "v2"] | None
    formula = "A_1 - lambda A_2"
    source = "Ye et al. 2024, arXiv 2410.05258; the second version: microsoft/unilm, Diff-Transformer-V2"
    activations = ("softmax",)

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_v2 = config.differential_attention == "v2"
        self.eps = config.layer_norm_eps
        if self.is_v2:
            self.proj = nn.Linear(config.hidden_size, config.num_attention_heads, bias=config.use_bias)
        else:
            self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * layer_idx)
            for name in ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2"):
                self.register_parameter(name, nn.Parameter(torch.normal(0.0, 0.1, (config.head_dim,))))

    @classmethod
    def check(cls, config):
        is_odd = config.num_attention_heads % 2 or config.num_key_value_heads % 2
        if config.differential_attention == "v1" and is_odd:
            raise ValueError(
                f"differential_attention='v1' pairs heads: num_attention_heads={config.num_attention_heads} and "
                f"num_key_value_heads={config.num_key_value_heads} must be even"
            )

    @classmethod
    def query_heads(cls, config):
        return config.num_attention_heads * (2 if config.differential_attention == "v2" else 1)

    @classmethod
    def product_cost(cls, config):
        return 2.0 if config.differential_attention == "v2" else 1.5  # v1 has values of twice the width

    @classmethod
    def refuse_split(cls, config):
        is_v1 = config.differential_attention == "v1"
        return "its pairs of heads are on several processes; use 'v2'" if is_v1 else None

    @classmethod
    def refuse_paged(cls, config):
        return super().refuse_paged(config) if config.differential_attention == "v1" else None

    @classmethod
    def split_layers(cls, config):
        return {"parts.differential_attention.proj": "colwise"} if config.differential_attention == "v2" else {}

    def start_without_effect(self, layer):
        if not self.is_v2:
            return "the norm of the difference has no counterpart; use 'v2'"
        if getattr(layer, "output_activation", None) is not None or self.config.gate_source == "output":
            return "an activation, or what a gate reads, comes before the weights that would be doubled"
        for parameter in self.proj.parameters():
            parameter.zero_()
        layer.o_proj.weight.mul_(2.0)  # both maps are equal, and sigmoid(0) = 1/2
        return None

    def change_cached_qkv(self, call, query, key, value):
        if self.is_v2:
            return query, key, value
        value = torch.cat(value.chunk(2, dim=1), dim=-1).repeat(1, 2, 1, 1)
        # Fused kernels need keys as wide as the values
        query, key = (F.pad(states, (0, states.shape[-1])) for states in (query, key))
        return query, key, value

    def change_output(self, call, heads):
        difference = self._subtract(call, heads, dim=2)
        if self.is_v2:
            return difference
        normed = F.rms_norm(difference, difference.shape[-1:], eps=self.eps)
        return ((1.0 - self.lambda_init) * normed).unflatten(-1, (2, -1)).flatten(2, 3)

    def change_returned_weights(self, call, weights):
        return self._subtract(call, weights, dim=1)

    def measure(self, call):
        factor = self._factor(call)
        factor = factor.mean(dim=(0, 1)) if self.is_v2 else factor.expand(call.layer.num_heads // 2)
        return {"factor_of_second_map": factor}

    def _factor(self, call) -> Tensor:
        """Returns the factor of the second map: `(batch, query, heads)`, or one number for `"v1"`."""
        if self.is_v2:
            return torch.sigmoid(self.proj(call.hidden_states))
        pairs = ((self.lambda_q1, self.lambda_k1), (self.lambda_q2, self.lambda_k2))
        first, second = (torch.exp((q * k).sum(dtype=at_least_float32(q))) for q, k in pairs)
        return first - second + self.lambda_init

    def _subtract(self, call, states, dim) -> Tensor:
        factor = self._factor(call)
        if not self.is_v2:
            first, second = states.chunk(2, dim=dim)
        else:
            first, second = states.unflatten(dim, (-1, 2)).unbind(dim=dim + 1)
            factor = (factor if dim == 2 else factor.transpose(1, 2))[..., None]
        return first - factor.to(states.dtype) * second


class ExclusiveAttention(AttentionPart):
    """Takes the direction of the token's own value out of the output: `a_h = 1`, or `tanh(alpha_h)`."""

    name = "exclusive_attention"
    field_type = FIXED_OR_LEARNED
    needs_own_value = True
    formula = "y_i - a_h (y_i . v_i) v_i / |v_i|^2"
    source = "arXiv 2603.09078"

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        # A norm would blow up the rounding of what is left
        self.needs_exact_output = config.norm_position in ("output", "sandwich")
        self.alpha = None
        self.start = "the outputs would lose a direction; use 'learned', which starts at 0"
        if config.exclusive_attention == "learned":
            self.alpha = nn.Parameter(torch.zeros(config.num_attention_heads))
            self.start = "zero"

    def measure(self, call):
        return {} if self.alpha is None else {"own_value_taken_out": torch.tanh(self.alpha)}

    def change_output(self, call, heads):
        values = call.values.transpose(1, 2)[:, :, :, None]  # (batch, query, groups, 1, head_dim)
        values = values.to(at_least_float32(values))
        # 0 where the value is 0
        direction = F.normalize(values, dim=-1, eps=torch.finfo(values.dtype).tiny)
        by_group = heads.unflatten(2, (values.shape[2], -1))
        along = (by_group * direction).sum(dim=-1, keepdim=True)
        if self.alpha is not None:
            alpha = own_heads(self.alpha, call.tp_mesh, dim=0)
            along = along * torch.tanh(alpha.to(values.dtype)).view(values.shape[2], -1, 1)
        return (by_group - along * direction).to(call.values.dtype).flatten(2, 3)


class NLQHeadProjection(nn.Module):
    """A square matrix for each head's output, at first the identity."""

    tp_mesh = None

    def __init__(self, num_heads: int, head_dim: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(head_dim).repeat(num_heads, 1, 1))

    def initialize(self) -> None:
        init.copy_(self.weight, torch.eye(self.weight.shape[-1]).expand_as(self.weight))

    def forward(self, heads):
        return torch.einsum("bqhd,hde->bqhe", heads, own_heads(self.weight, self.tp_mesh, dim=0))


class HeadProjection(AttentionPart):
    name = "head_projection"
    formula = "y_i W_h"
    source = "the fourth matrix beside query, key and value"

    @classmethod
    def layer_modules(cls, config):
        return {"head_proj": NLQHeadProjection(config.num_attention_heads, config.head_dim)}

    def change_output(self, call, heads):
        return call.layer.head_proj(heads)


class OutputScaling(AttentionPart):
    name = "attention_output_scaling"
    field_type = int | float | None
    formula = "c y_i"

    def change_output(self, call, heads):
        return heads * call.layer.output_scaling


class OutputActivation(AttentionPart):
    name = "attention_output_activation"
    field_type = str | None
    formula = "act(y_i)"

    @classmethod
    def layer_modules(cls, config):
        return {"output_activation": ACT2FN[config.attention_output_activation]}

    def change_output(self, call, heads):
        return call.layer.output_activation(heads)


class NLQSharedLinear(nn.Linear):
    tp_mesh = None

    def forward(self, states):
        parameters = (self.weight,) if self.bias is None else (self.weight, self.bias)
        return F.linear(states, *(shared_by_heads(parameter, self.tp_mesh) for parameter in parameters))


def softplus(states: Tensor) -> Tensor:
    return F.softplus(states.to(at_least_float32(states))).to(states.dtype)  # in float32, as Laguna


GATE_ACTIVATIONS = {"sigmoid": torch.sigmoid, "softplus": softplus}


class AttentionGate(AttentionPart):
    """A gate for each head or each element. The gate `"value"` reads the token's own value, by one shared matrix.

    With `gate_source="output"` it reads the outputs of all heads in place of the layer's input. `gate_rank` makes its
    matrix a product of two, and `gate_activation` is `"sigmoid"` or `"softplus"`.
    """

    name = "attention_gate"
    field_type = Literal["headwise", "elementwise", "value"] | None
    formula = "y_i * sigmoid(x_i W_g), or y_i * sigmoid(v_i W_g)"
    source = "Qiu et al. 2025, arXiv 2505.06708; of values: arXiv 2510.09017; of outputs: arXiv 2608.11805"

    @classmethod
    def layer_modules(cls, config):
        if config.attention_gate == "value":
            return {"value_gate_proj": NLQSharedLinear(config.head_dim, config.head_dim, bias=config.use_bias)}
        width = config.num_attention_heads * (config.head_dim if config.attention_gate == "elementwise" else 1)
        inputs = config.num_attention_heads * config.head_dim
        inputs = inputs if config.gate_source == "output" else config.hidden_size
        if (rank := config.gate_rank) is None:
            return {"gate_proj": nn.Linear(inputs, width, bias=config.use_bias)}
        down_proj = nn.Linear(inputs, rank, bias=False)
        return {"gate_down_proj": down_proj, "gate_proj": nn.Linear(rank, width, bias=config.use_bias)}

    @classmethod
    def calls_per_token(cls, config, layer_idx, earlier):
        return {"value_gate_proj": config.num_key_value_heads}

    @classmethod
    def split_layers(cls, config):
        if config.attention_gate == "value":
            return {}
        down = {"gate_down_proj": "rowwise"} if config.gate_source == "output" else {}
        return {"gate_proj": "colwise", **down}

    @classmethod
    def refuse_split(cls, config):
        is_whole = config.gate_source == "output" and config.gate_rank is None
        return "each gate reads the outputs of all heads; set a gate_rank" if is_whole else None

    def change_output(self, call, heads):
        gate = self._gate(call, heads)
        return (heads.unflatten(2, (gate.shape[2], -1)) * gate[:, :, :, None]).flatten(2, 3)

    def measure(self, call):
        if self.config.gate_source == "output":
            return {}  # there are no outputs here
        heads = self.config.num_attention_heads
        gate = self._gate(call).mean(dim=(0, 1, 3))
        return {"mean_gate": gate.repeat_interleave(heads // len(gate))}

    def _gate(self, call, heads=None) -> Tensor:
        """Returns `(batch, query, heads or groups, head_dim or 1)`, from the outputs `heads` if it reads them."""
        config, layer = self.config, call.layer
        activation = GATE_ACTIVATIONS[config.gate_activation]
        if config.attention_gate == "value":
            return activation(layer.value_gate_proj(call.values.transpose(1, 2)))
        states = heads.flatten(2) if config.gate_source == "output" else call.hidden_states
        states = states if config.gate_rank is None else layer.gate_down_proj(states)
        size = config.head_dim if config.attention_gate == "elementwise" else 1
        return activation(layer.gate_proj(states)).unflatten(-1, (-1, size))


# In the order of hooks
_PARTS: tuple[type[AttentionPart], ...] = (
    DepthAttention,
    InputSkip,
    Canon,
    QKNorm,
    LengthScaling,
    Parallax,
    ValueResidual,
    SelectiveAttention,
    ForgetGate,
    AttentionSink,
    DifferentialAttention,
    ExclusiveAttention,
    HeadProjection,
    OutputScaling,
    OutputActivation,
    AttentionGate,
)
ATTENTION_PARTS = {part.name: part for part in _PARTS}
# The fields of `NLQConfig` that turn the parts on: `None` or `False` for none
PartFields = make_dataclass(
    "PartFields",
    [(part.name, part.field_type, False if part.field_type is bool else None) for part in _PARTS],
    namespace={"__module__": __name__},
    init=False,
    repr=False,
    eq=False,
)


def parts_of(config: PreTrainedConfig) -> list[type[AttentionPart]]:
    """Returns the parts of a layer with this configuration, the user's last."""
    values = {name: getattr(config, name) for name in ATTENTION_PARTS}
    parts = [ATTENTION_PARTS[name] for name, value in values.items() if value is not None and value is not False]
    codes = config.attention_parts_code or {}
    for name in config.attention_parts or ():
        if name in ATTENTION_PARTS:
            raise ValueError(f"attention_parts: {name!r} is a field of its own; choose another name for your part")
        parts.append(find_part(name, codes.get(name)))
    return parts
