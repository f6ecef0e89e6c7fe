"""The toy's configuration: every kind of layer of the released model, real head geometry, small everything else."""

from typing import Any

from shoal.engines.model.config import TEXT_FIXED, VISION_FIXED, ModelConfig
from shoal.engines.model.engram import class_map, primes_from
from shoal.engines.toy.tokenizer import BOS, EOS, IMAGE_ID, NOISE_ID, PAD, VOCAB
from tokenizers import Tokenizer

# Layer 4 is KV source and Engram layer at once (as 14 in the released model), 6 is decoder boundary and candidate
# source, 8 selects anew among the candidates; every size fits the FP8 and FP4 groups of 32.
TEXT: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 10,
    "num_attention_heads": 8, "head_dim": 512, "qk_rope_head_dim": 64, "q_lora_rank": 128, "o_lora_rank": 64,
    "o_groups": 4, "swiglu_limit": 10.0, "rms_norm_eps": 1e-20, "max_position_embeddings": 8192,
    "rope_theta": 10000, "compress_rope_theta": 160000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536,
    },
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
    "sliding_window": 128, "compress_ratios": [0, 0, 2, 2, 2, 2, 1, 1, 1, 1, 0, 0, 0],
    "kv_source_layer_ids": [2, 4, 6], "index_source_layer_ids": [2, 4, 6, 8], "index_n_heads": 4,
    "index_head_dim": 128, "index_topk": 128, "candidate_source_layer_id": 6, "candidate_topk_blocks": 64,
    "candidate_block_size": 8, "hc_mult": 4, "hc_sinkhorn_iters": 20, "hc_eps": 1e-6, "engram_layer_ids": [1, 4],
    "engram_max_ngram_size": 4, "engram_vocab_size": 4000, "engram_n_heads": 2, "engram_head_dim": 64,
    "engram_pad_token_id": 2, "num_nextn_predict_layers": 3, "dspark_block_size": 5,
    "dspark_noise_token_id": NOISE_ID, "dspark_target_layer_ids": [7, 8, 9], "dspark_markov_rank": 32,
    "dspark_n_routed_experts": 4, "dspark_num_experts_per_tok": 2,
}  # fmt: skip
VISION: dict[str, Any] = {
    "num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 96, "patch_size": 14,
    "rope_theta": 10000.0, "downsample_ratio": 3, "max_image_tokens": 64, "min_pixels": 7056, "max_wh_ratio": None,
}  # fmt: skip


def toy_config(tokenizer: Tokenizer) -> ModelConfig:
    """The configuration that belongs to the toy tokenizer: its Engram classes and token ids filled in."""
    layers = len(TEXT["engram_layer_ids"])
    columns = (TEXT["engram_max_ngram_size"] - 1) * TEXT["engram_n_heads"]
    primes = primes_from(TEXT["engram_vocab_size"], layers * columns)
    ids = {token: tokenizer.token_to_id(token) for token in (BOS, EOS, PAD)}
    text = TEXT | {k: v for k, v in TEXT_FIXED.items() if k not in ("gate_temp", "tokenizer_compatibility")}
    text["engram_compressed_vocab_size"] = int(class_map(tokenizer).max()) + 1
    text["engram_num_embeddings"] = [sum(primes[i * columns : (i + 1) * columns]) for i in range(layers)]
    return ModelConfig.from_dict(
        {
            "architectures": ["DeepseekV41ForCausalLM"],
            "model_type": "deepseek_v41",
            "bos_token_id": ids[BOS],
            "eos_token_id": ids[EOS],
            "pad_token_id": ids[PAD],
            "image_token_id": IMAGE_ID,
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [32, 32],
                "scale_fmt": "ue8m0",
                "expert_dtype": "fp4",
            },
            "text_config": text,
            "vision_config": {**VISION, **VISION_FIXED},
        }
    )
