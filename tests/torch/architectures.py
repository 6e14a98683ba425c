"""Small random models of Hugging Face's transformers, one for each class of architecture that is streamed, and inputs for them."""
import dataclasses
import fractions
from collections.abc import Callable

import torch
import transformers

VOCABULARY = 64
BATCH, LENGTH = 2, 12

TEXT = {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
GPT = {"vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 6, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
       "pad_token_id": 0}
PATCHES = {"image_size": 16, "patch_size": 4, "num_channels": 3}
VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, **PATCHES}
SEQ2SEQ = {"vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4,
           "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "max_position_embeddings": 64, "pad_token_id": 0,
           "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
MOE = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True,
       "router_aux_loss_coef": 0.1}


def tokens(random, length=LENGTH):
    return torch.randint(3, VOCABULARY, (BATCH, length), generator=random)


def causal(config, random):
    ids = tokens(random)
    return {"input_ids": ids, "labels": ids.clone()}


def masked(config, random):
    """Padded rows, with a mask."""
    ids = tokens(random)
    mask = torch.ones_like(ids)
    mask[1, -3:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translation(config, random):
    return {"input_ids": tokens(random), "labels": tokens(random, 7)}


def pictures(random, size=16):
    return torch.randn((BATCH, 3, size, size), generator=random)


def classified(config, random):
    size = config.image_size
    return {"pixel_values": pictures(random, size if isinstance(size, int) else size[0]), "labels": torch.tensor([0, 1])}


def classified_32(config, random):
    return {"pixel_values": pictures(random, 32), "labels": torch.tensor([0, 1])}


def spectrogram(config, random):
    return {"input_features": torch.randn((BATCH, 8, 32), generator=random), "labels": tokens(random, 7)}


def waveform(config, random):
    return {"input_values": torch.randn((BATCH, 800), generator=random), "labels": tokens(random, 4)}


def long_waveform(config, random):
    return {"input_values": torch.randn((BATCH, 3000), generator=random), "labels": tokens(random, 7)}


def sounds(config, random):
    return {"input_values": torch.randn((BATCH, 16, 8), generator=random), "labels": torch.tensor([0, 1])}


def pairs(config, random):
    """Pictures and their texts."""
    return {"input_ids": tokens(random), "pixel_values": pictures(random), "return_loss": True}


def one_picture(count):
    """Text in which `count` tokens stand for a picture."""
    def make(config, random):
        ids = tokens(random)
        ids[ids == config.image_token_id] = 5
        labels = torch.cat([torch.full((BATCH, count), -100), ids], 1)
        ids = torch.cat([torch.full((BATCH, count), config.image_token_id), ids], 1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels, "pixel_values": pictures(random)}
    return make


def with_types(make):
    """Inputs that say which tokens are of a picture."""
    def more(config, random):
        found = make(config, random)
        return {**found, "token_type_ids": (found["input_ids"] == config.image_token_id).long()}
    return more


def patches(config, random):
    """A picture of 4x4 patches for each row, flat as Qwen2-VL's processor gives them; four make a token."""
    ids = tokens(random)
    ids[ids >= 60] = 5
    start, picture = torch.full((BATCH, 1), config.vision_start_token_id), torch.full((BATCH, 4), config.image_token_id)
    labels = torch.cat([torch.full((BATCH, 5), -100), ids], 1)
    ids = torch.cat([start, picture, ids], 1)
    depth = 3 * 2 * config.vision_config.patch_size**2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels,
            "mm_token_type_ids": (ids == config.image_token_id).int(),
            "pixel_values": torch.randn((BATCH * 16, depth), generator=random), "image_grid_thw": torch.tensor([[1, 4, 4]] * BATCH)}


#: Architectures of a normal run.
NORMAL = ("LlamaForCausalLM", "MixtralForCausalLM", "Mamba2ForCausalLM", "T5ForConditionalGeneration", "ViTForImageClassification",
          "LlavaForConditionalGeneration")
#: Parts of the state where the smallest plan needs more than a quarter: blocks are few, shared, or of very different sizes.
SHARES = {"Zamba2ForCausalLM": 0.5, "AlbertForMaskedLM": 1.5, "ConvNextForImageClassification": 1, "ResNetForImageClassification": 1,
          "SwinForImageClassification": 1, "SegformerForImageClassification": 0.75}


@dataclasses.dataclass
class Architecture:
    """A model's class, its small configuration and the inputs that it is trained by."""

    kind: str
    model: str  # class of transformers
    values: dict
    inputs: Callable = causal

    @property
    def normal(self):
        """Whether it is one of a normal run, which has few."""
        return self.model in NORMAL

    @property
    def share(self):
        """The part of the state's 16 bytes a parameter that the device has memory for."""
        return SHARES.get(self.model, 0.25)

    def configuration(self):
        return getattr(transformers, self.model).config_class(**self.values)

    def make(self):
        """The model, in training, with the same random weights each time."""
        torch.manual_seed(1)
        config = self.configuration()
        module = getattr(transformers, self.model)(config).float()
        return module.train()

    def batch(self, module, seed=0):
        return self.inputs(module.config, torch.Generator().manual_seed(seed))


def _text(model, inputs=causal, kind="decoder", **values):
    return Architecture(kind, model, {**TEXT, **values}, inputs)


def _mla(**values):
    return {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 8, "n_routed_experts": 4,
            "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4, **values}


_MAMBA = {"vocab_size": VOCABULARY, "hidden_size": 64, "state_size": 8, "num_hidden_layers": 6, "pad_token_id": 0, "bos_token_id": 1,
          "eos_token_id": 2, "use_cache": False}
_LAYERS = {"layer_types": ["linear_attention", "full_attention"] * 3, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
           "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_T5 = {"vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 3, "num_heads": 4, "decoder_start_token_id": 0}
_WAVES = {**TEXT, "conv_dim": [16, 16], "conv_stride": [5, 4], "conv_kernel": [10, 8], "num_feat_extract_layers": 2,
          "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "mask_time_length": 2}

TEXT_WITH_PICTURES = {**TEXT, "num_hidden_layers": 4}

ARCHITECTURES = [
    _text("LlamaForCausalLM", masked, attention_dropout=0.1),
    _text("MistralForCausalLM", sliding_window=5),
    _text("Qwen2ForCausalLM", tie_word_embeddings=True),
    _text("Qwen3ForCausalLM"),
    _text("GemmaForCausalLM"),
    _text("Gemma2ForCausalLM", sliding_window=5),
    _text("Gemma3ForCausalLM", sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 3),
    _text("OlmoForCausalLM"),
    _text("Olmo2ForCausalLM"),
    _text("PhiForCausalLM", resid_pdrop=0.1, embd_pdrop=0.1),
    _text("Phi3ForCausalLM", resid_pdrop=0.1),
    Architecture("decoder", "FalconForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 6, "bos_token_id": 1,
                 "num_attention_heads": 4, "eos_token_id": 2, "hidden_dropout": 0.1, "attention_dropout": 0.1}),
    _text("StableLmForCausalLM", hidden_dropout=0.1),
    _text("Starcoder2ForCausalLM", residual_dropout=0.1, embedding_dropout=0.1),
    _text("CohereForCausalLM", logit_scale=1.0),
    _text("GraniteForCausalLM"),
    _text("GlmForCausalLM"),
    _text("NemotronForCausalLM"),
    _text("SmolLM3ForCausalLM"),
    _text("GPTNeoXForCausalLM", hidden_dropout=0.1, attention_dropout=0.1),
    _text("OPTForCausalLM", ffn_dim=128, word_embed_proj_dim=24, dropout=0.1),
    _text("Gemma3nForCausalLM", hidden_size_per_layer_input=16, vocab_size_per_layer_input=64, laurel_rank=8, altup_num_inputs=2,
          num_kv_shared_layers=2, layer_types=["sliding_attention", "full_attention"] * 3, activation_sparsity_pattern=[0.0] * 6),
    _text("DiffLlamaForCausalLM"),
    _text("ModernBertDecoderForCausalLM", cls_token_id=1, sep_token_id=2),
    _text("BioGptForCausalLM"),
    _text("XGLMForCausalLM", d_model=64, ffn_dim=128, num_layers=6, attention_heads=4),
    _text("CTRLLMHeadModel", n_embd=64, n_layer=6, n_head=4, dff=128),
    _text("GPTNeoForCausalLM", num_layers=6, num_heads=4, attention_types=[[["global", "local"], 3]]),
    Architecture("decoder", "GPT2LMHeadModel", GPT),
    Architecture("decoder", "GPTJForCausalLM", {**GPT, "rotary_dim": 4}),
    Architecture("decoder", "GPTBigCodeForCausalLM", GPT),
    Architecture("decoder", "CodeGenForCausalLM", {**GPT, "rotary_dim": 4}),
    Architecture("decoder", "BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 6, "n_head": 4, "pad_token_id": 0,
                                                 "hidden_dropout": 0.1, "bos_token_id": 1, "eos_token_id": 2}),
    Architecture("decoder", "MptForCausalLM", {"vocab_size": VOCABULARY, "d_model": 64, "n_layers": 6, "n_heads": 4, "max_seq_len": 64}),
    _text("MixtralForCausalLM", kind="experts", **MOE),
    _text("Qwen2MoeForCausalLM", kind="experts", **MOE, shared_expert_intermediate_size=24),
    _text("Qwen3MoeForCausalLM", kind="experts", **MOE),
    _text("OlmoeForCausalLM", kind="experts", **MOE),
    _text("GptOssForCausalLM", kind="experts", **MOE, sliding_window=5),
    _text("PhimoeForCausalLM", kind="experts", **MOE),
    _text("GraniteMoeForCausalLM", kind="experts", **MOE),
    _text("JetMoeForCausalLM", kind="experts", **MOE, kv_channels=16),
    _text("DeepseekV2ForCausalLM", kind="experts", **{**MOE, **_mla()}),
    _text("DeepseekV3ForCausalLM", kind="experts", **{**MOE, **_mla()}),
    _text("Glm4MoeForCausalLM", kind="experts", **{**MOE, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}),
    _text("Llama4ForCausalLM", kind="experts", **MOE, intermediate_size_mlp=128),
    _text("MiniMaxForCausalLM", kind="linear attention", **MOE, block_size=4, layer_types=["linear_attention", "full_attention"] * 3),
    _text("OlmoHybridForCausalLM", kind="linear attention", layer_types=["linear_attention", "full_attention"] * 3),
    _text("Qwen3NextForCausalLM", kind="linear attention", **{**MOE, **_LAYERS}, shared_expert_intermediate_size=24),
    Architecture("state space", "MambaForCausalLM", _MAMBA),
    Architecture("state space", "Mamba2ForCausalLM", {**_MAMBA, "num_heads": 8, "head_dim": 16, "n_groups": 2, "chunk_size": 4}),
    Architecture("state space", "FalconMambaForCausalLM", _MAMBA),
    _text("JambaForCausalLM", kind="state space", **MOE, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2,
          expert_layer_offset=1, mamba_d_state=8, mamba_dt_rank=4, use_mamba_kernels=False),
    _text("BambaForCausalLM", kind="state space", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8,
          mamba_chunk_size=4),
    _text("Zamba2ForCausalLM", kind="state space", num_hidden_layers=6, mamba_d_state=8, n_mamba_heads=8, mamba_headdim=16,
          mamba_ngroups=2, chunk_size=4, num_mem_blocks=1, attention_hidden_size=128, attention_head_dim=32,
          layers_block_type=["mamba", "hybrid"] * 3, use_mamba_kernels=False, num_key_value_heads=4),
    _text("FalconH1ForCausalLM", kind="state space", mamba_d_ssm=128, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=8,
          mamba_chunk_size=4),
    Architecture("linear attention", "RwkvForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 6,
                                                         "attention_hidden_size": 64, "intermediate_size": 128, "context_length": 64}),
    _text("Lfm2ForCausalLM", kind="linear attention", layer_types=["conv", "full_attention"] * 3),
    Architecture("encoder-decoder", "T5ForConditionalGeneration", _T5, translation),
    Architecture("encoder-decoder", "BartForConditionalGeneration", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "LEDForConditionalGeneration",
                 {**SEQ2SEQ, "attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64}, translation),
    Architecture("encoder-decoder", "BlenderbotForConditionalGeneration", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "MarianMTModel", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "LongT5ForConditionalGeneration", _T5, translation),
    Architecture("encoder-decoder", "PegasusForConditionalGeneration", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "MBartForConditionalGeneration", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "M2M100ForConditionalGeneration", SEQ2SEQ, translation),
    Architecture("encoder-decoder", "SwitchTransformersForConditionalGeneration",
                 {**_T5, "num_experts": 4, "expert_capacity": 8, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
                  "output_router_logits": True}, translation),
    _text("BertForMaskedLM", masked, "encoder"),
    _text("LongformerForMaskedLM", masked, "encoder", attention_window=4),
    _text("MobileBertForMaskedLM", masked, "encoder", embedding_size=32, true_hidden_size=64, intra_bottleneck_size=64),
    _text("RobertaForMaskedLM", masked, "encoder"),
    _text("ModernBertForMaskedLM", masked, "encoder", cls_token_id=1, sep_token_id=2, attention_dropout=0.1),
    _text("ElectraForMaskedLM", masked, "encoder", embedding_size=24),
    _text("AlbertForMaskedLM", masked, "encoder", embedding_size=24),
    _text("DistilBertForMaskedLM", masked, "encoder", dim=64, hidden_dim=128, n_layers=6, n_heads=4),
    Architecture("vision", "ViTForImageClassification", {**VISION, "hidden_dropout_prob": 0.1}, classified),
    Architecture("vision", "DeiTForImageClassification", VISION, classified),
    Architecture("vision", "Dinov2ForImageClassification", {**VISION, "drop_path_rate": 0.2}, classified),
    Architecture("vision", "BeitForImageClassification", VISION, classified),
    Architecture("vision", "ConvNextForImageClassification",
                 {"hidden_sizes": [32, 64], "depths": [2, 2], "num_stages": 2, "patch_size": 4, "drop_path_rate": 0.2}, classified_32),
    Architecture("vision", "ResNetForImageClassification",
                 {"embedding_size": 32, "hidden_sizes": [64, 64], "depths": [2, 2]}, classified_32),
    Architecture("vision", "SwinForImageClassification",
                 {"image_size": 32, "patch_size": 2, "embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}, classified),
    Architecture("vision", "SegformerForImageClassification",
                 {"hidden_sizes": [32, 64], "num_encoder_blocks": 2, "depths": [2, 2], "sr_ratios": [2, 1], "patch_sizes": [7, 3],
                  "strides": [4, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 64}, classified_32),
    Architecture("vision and language", "CLIPModel",
                 {"text_config": {**TEXT, "projection_dim": 64}, "vision_config": {**VISION, "projection_dim": 64}, "projection_dim": 64}, pairs),
    Architecture("vision and language", "LlavaForConditionalGeneration",
                 {"text_config": {"model_type": "llama", **TEXT_WITH_PICTURES}, "vision_config": {"model_type": "clip_vision_model", **VISION},
                  "image_token_id": 63, "image_seq_length": 16}, one_picture(16)),
    Architecture("vision and language", "PaliGemmaForConditionalGeneration",
                 {"text_config": {"model_type": "gemma", **TEXT_WITH_PICTURES}, "vision_config": {"model_type": "siglip_vision_model", **VISION,
                  "projection_dim": 64}, "image_token_id": 63, "projection_dim": 64}, with_types(one_picture(16))),
    Architecture("vision and language", "Qwen2VLForConditionalGeneration",
                 {"text_config": {**TEXT_WITH_PICTURES, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                  "mrope_section": [2, 2, 4]}}, "vision_config": {"depth": 4, "embed_dim": 64, "hidden_size": 64, "num_heads": 4,
                  "patch_size": 4, "mlp_ratio": 2}, "image_token_id": 63, "video_token_id": 62, "vision_start_token_id": 61,
                  "vision_end_token_id": 60}, patches),
    Architecture("audio", "Wav2Vec2ForCTC", _WAVES, waveform),
    Architecture("audio", "HubertForCTC", _WAVES, waveform),
    Architecture("audio", "ASTForAudioClassification",
                 {**TEXT, "patch_size": 4, "num_mel_bins": 8, "max_length": 16, "frequency_stride": 4, "time_stride": 4}, sounds),
    Architecture("audio", "MoonshineForConditionalGeneration",
                 {"vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "encoder_num_hidden_layers": 3, "pad_token_id": 0,
                  "decoder_num_hidden_layers": 3, "encoder_num_attention_heads": 4, "decoder_num_attention_heads": 4,
                  "max_position_embeddings": 64}, long_waveform),
    Architecture("audio", "WhisperForConditionalGeneration",
                 {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "dropout": 0.1,
                  "suppress_tokens": [], "begin_suppress_tokens": []}, spectrogram),
]


@dataclasses.dataclass
class Refusal:
    """An architecture that is refused, the part of the error that says so, and the reason, for the page. `tables`: modules without
    which, left out of the units, it is streamed."""

    of: Architecture
    error: str
    reason: str
    tables: tuple = ()


_ELSEWHERE = "is used outside of the forward of its unit"
_KEPT = "keeps its weights beyond its use"

REFUSED = [
    Refusal(_text("RecurrentGemmaForCausalLM", kind="linear attention", lru_width=64, attention_window_size=8), _KEPT,
            "its blocks keep their last state, with its graph, in the module"),
    Refusal(_text("DebertaForMaskedLM", masked, "encoder", relative_attention=True, pos_att_type=["p2c", "c2p"]), _ELSEWHERE,
            "reads the table of relative positions without calling its module", ("deberta.encoder.rel_embeddings",)),
    Refusal(_text("DebertaV2ForMaskedLM", masked, "encoder", relative_attention=True, position_buckets=8, pos_att_type=["p2c", "c2p"]),
            _ELSEWHERE, "reads the table of relative positions without calling its module", ("deberta.encoder.rel_embeddings",)),
    Refusal(Architecture("encoder-decoder", "ProphetNetForConditionalGeneration",
                         {"vocab_size": VOCABULARY, "hidden_size": 64, "num_encoder_layers": 2, "num_decoder_layers": 2,
                          "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "encoder_ffn_dim": 128,
                          "decoder_ffn_dim": 128, "max_position_embeddings": 64}, translation), _ELSEWHERE,
            "reads tables of positions without calling their modules",
            ("prophetnet.decoder.position_embeddings", "prophetnet.encoder.position_embeddings", "prophetnet.decoder.ngram_embeddings")),
]


def page_lines():
    """Rows of the page's tables: what is streamed, with the part of the state that the device has memory for, and what is refused."""
    works = [f"| `{row.model}` | {row.kind} | {fractions.Fraction(row.share).limit_denominator(8)} |" for row in ARCHITECTURES]
    return works + [f"| `{one.of.model}` | {one.of.kind} | {one.reason} |" for one in REFUSED]
