"""An NLQ encoder and decoder, with cross-attention that is configured as self-attention is."""

from torch import nn
from transformers.modeling_outputs import BaseModelOutput, Seq2SeqLMOutput, Seq2SeqModelOutput
from transformers.modeling_utils import PreTrainedModel, slice_logits_to_keep
from transformers.models.auto import modeling_auto
from transformers.models.bart.modeling_bart import shift_tokens_right
from transformers.utils import can_return_tuple

from .backends_nlq import choose_implementation, supports_flash_attention
from .cache_nlq import CACHE_NAME
from .configuration_nlq import AUTOMATIC
from .configuration_seq2seq_nlq import NLQSeq2SeqConfig
from .integrations_nlq import (
    NLQGenerationMixin,
    NLQIntegrationMixin,
    accept_both_cache_names,
    register_default_targets,
)
from .masking_nlq import find_packed_documents, refuse_packed
from .modeling_nlq import NLQModel, cap_logits, without_last
from .parts_user_nlq import add_to_package


class NLQSeq2SeqPreTrainedModel(NLQIntegrationMixin, PreTrainedModel):
    config: NLQSeq2SeqConfig

    @property
    def _supports_flash_attn(self):
        return all(supports_flash_attention(half) for half in (self.config.encoder, self.config.decoder))

    @classmethod
    def _can_set_attn_implementation(cls):
        return True  # diff with PreTrainedModel, which reads this file

    def get_correct_attn_implementation(self, requested_attention, is_init_check=False):
        # Each half chooses its own, but refuses here what it cannot compute
        for half in (self.config.encoder, self.config.decoder):
            choose_implementation(half, requested_attention)
        return requested_attention or AUTOMATIC

    def resize_token_embeddings(self, *args, **kwargs):
        # diff with PreTrainedModel: an embedding of the decoder's own too
        if not self.config.tie_word_embeddings:
            self.base_model.decoder.resize_token_embeddings(*args, **kwargs)
        return super().resize_token_embeddings(*args, **kwargs)

    def tie_weights(self, missing_keys=None, recompute_mapping=True):
        # diff with PreTrainedModel: PEFT unties a merged head, and files hold the halves' embedding once
        super().tie_weights(missing_keys, recompute_mapping)
        for name in [name for name in missing_keys or () if name.endswith("decoder.embed_tokens.weight")]:
            if name.replace("decoder", "encoder") not in missing_keys:
                self.base_model.decoder.embed_tokens.weight = self.base_model.encoder.embed_tokens.weight
                missing_keys.discard(name)


class NLQSeq2SeqModel(NLQSeq2SeqPreTrainedModel):
    """An encoder, and a decoder with cross-attention to its last hidden states."""

    _tied_weights_keys = {"decoder.embed_tokens.weight": "encoder.embed_tokens.weight"}

    def __init__(self, config: NLQSeq2SeqConfig):
        super().__init__(config)
        self.encoder, self.decoder = NLQModel(config.encoder), NLQModel(config.decoder)
        self.post_init()

    def get_input_embeddings(self):
        return self.encoder.embed_tokens

    def set_input_embeddings(self, new_embeddings):
        self.encoder.embed_tokens = new_embeddings
        self.config.encoder.vocab_size = new_embeddings.num_embeddings
        if self.config.tie_word_embeddings:
            self.decoder.embed_tokens = new_embeddings

    @accept_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        use_cache=None,
        past_key_values=None,
        position_ids=None,
        decoder_position_ids=None,
        **kwargs,
    ) -> Seq2SeqModelOutput:
        """Computes the last hidden states of both halves. Arguments are `NLQModel`'s, of the source and of the target.

        Args:
            encoder_outputs: what the encoder has returned, instead of `input_ids`; the mask is still needed.
            decoder_input_ids: `(batch, query)`, the target, shifted right.
        """
        if decoder_input_ids is None and decoder_inputs_embeds is None:
            raise ValueError("decoder_input_ids: the decoder needs its tokens; give them, or labels")
        if attention_mask is None:
            reason = "cannot be a source: each target would see all of them; give one text per row"
            refuse_packed(find_packed_documents(position_ids), reason)
        for name in ("output_attentions", "output_hidden_states"):  # `capture_outputs` reads the halves' own
            if asked := getattr(self.config, name):
                kwargs.setdefault(name, asked)
        if encoder_outputs is None:
            encoder_outputs = self.encoder(
                input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, use_cache=False, **kwargs
            )
        elif not isinstance(encoder_outputs, dict):  # a tuple
            encoder_outputs = BaseModelOutput(*encoder_outputs)
        if decoder_inputs_embeds is None and self.decoder.embed_tokens.weight is self.encoder.embed_tokens.weight:
            # One module for one matrix: PEFT puts others in the place of a tied one
            decoder_input_ids, decoder_inputs_embeds = None, self.encoder.embed_tokens(decoder_input_ids)
        target = (decoder_input_ids, decoder_attention_mask, decoder_position_ids)
        source = (encoder_outputs.last_hidden_state, attention_mask)
        caches = (use_cache, past_key_values)
        outputs = self.decoder(*target, cache, decoder_inputs_embeds, *caches, *source, **kwargs)
        return Seq2SeqModelOutput(
            last_hidden_state=outputs.last_hidden_state,
            **{CACHE_NAME: getattr(outputs, CACHE_NAME)},
            decoder_hidden_states=outputs.hidden_states,
            decoder_attentions=outputs.attentions,
            cross_attentions=outputs.cross_attentions,
            encoder_last_hidden_state=encoder_outputs.last_hidden_state,
            encoder_hidden_states=encoder_outputs.hidden_states,
            encoder_attentions=encoder_outputs.attentions,
        )


class NLQForConditionalGeneration(NLQSeq2SeqPreTrainedModel, NLQGenerationMixin):
    """An encoder and a decoder with a language-modelling head."""

    _tied_weights_keys = {"lm_head.weight": "model.encoder.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}
    _fsdp_plan = {"lm_head": "keep_full_weight"}

    def __init__(self, config: NLQSeq2SeqConfig):
        super().__init__(config)
        self.model = NLQSeq2SeqModel(config)
        self.lm_head = nn.Linear(config.decoder.hidden_size, config.decoder.vocab_size, bias=False)
        self.loss_type = "ForMaskedLM"  # the decoder's inputs are shifted, not its labels
        self.post_init()

    def prepare_decoder_input_ids_from_labels(self, labels):
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(self.config, name) is None:
                raise ValueError(f"{name}=None: labels need it in the configuration, or give decoder_input_ids")
        return shift_tokens_right(labels, self.config.pad_token_id, self.config.decoder_start_token_id)

    def generate_batch(self, *args, **kwargs):
        raise ValueError("an encoder and decoder has no continuous batching; use generate")

    init_continuous_batching = generate_batch

    @accept_both_cache_names
    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        decoder_input_ids=None,
        decoder_attention_mask=None,
        encoder_outputs=None,
        cache=None,
        inputs_embeds=None,
        decoder_inputs_embeds=None,
        labels=None,
        use_cache=None,
        past_key_values=None,
        logits_to_keep=0,
        **kwargs,
    ) -> Seq2SeqLMOutput:
        """Computes logits `(batch, kept, vocabulary)`; the other arguments are `NLQSeq2SeqModel`'s.

        Args:
            labels: `(batch, query)` token ids of the target; -100 is ignored. By default the decoder reads these,
                shifted to the right. The loss is their mean, in nats.
            logits_to_keep: how many last positions get logits (0: all), or their indices.
        """
        if labels is not None and decoder_input_ids is None and decoder_inputs_embeds is None:
            decoder_input_ids = self.prepare_decoder_input_ids_from_labels(labels)
        source, target = (input_ids, attention_mask), (decoder_input_ids, decoder_attention_mask)
        embeds, caches = (inputs_embeds, decoder_inputs_embeds), (use_cache, past_key_values)
        outputs = self.model(*source, *target, encoder_outputs, cache, *embeds, *caches, **kwargs)
        hidden_states = slice_logits_to_keep(outputs.last_hidden_state, logits_to_keep)
        logits, loss = cap_logits(self.lm_head(hidden_states), self.config.decoder.final_logit_softcapping), None
        if labels is not None:
            options = {"labels": labels.contiguous(), "vocab_size": self.config.decoder.vocab_size}
            loss = self.loss_function(logits=logits, **options, **kwargs)
        return Seq2SeqLMOutput(loss=loss, logits=logits, **without_last(outputs))


modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.setdefault(
    NLQSeq2SeqConfig.model_type, NLQForConditionalGeneration.__name__
)
register_default_targets(NLQSeq2SeqConfig.model_type)
add_to_package(__name__)
