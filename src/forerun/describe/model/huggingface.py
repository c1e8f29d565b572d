"""Reads a Hugging Face config.json into a ModelSpec.

Each family knows the keys that make its architecture and those that can't change it. Any other key is an error that
names it, as is a value that would make an architecture that the family doesn't have. The modules `huggingface_*.py`
beside this one hold the families.
"""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from forerun.common.errors import at
from forerun.describe.model.families import FAMILIES
from forerun.describe.model.fields import Fields, read_json
from forerun.describe.model.spec import ModelSpec

CONFIG = "config.json"


for _module in pkgutil.iter_modules([str(Path(__file__).parent)], "forerun.describe.model."):
    if ".huggingface_" in _module.name:
        importlib.import_module(_module.name)

IGNORED = (
    # who wrote the file, and with which software
    *("_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map", "is_llama_config", "name_or_path"),
    *("tokenizer_class", "transformers_version", "unsloth_fixed", "unsloth_version"),
    # number formats and kernels, which belong to the plan
    *("_attn_implementation", "_flash_attn_2_enabled", "attn_implementation", "compression_config", "dtype"),
    *("gradient_checkpointing", "pretraining_tp", "quantization_config", "torch_dtype", "torchscript", "use_bfloat16"),
    # positions without a table: rotary, ALiBi
    *("max_position_embeddings", "original_max_position_embeddings", "partial_rotary_factor", "rope_interleave"),
    *("rope_interleaved", "rope_parameters", "rope_scaling", "rope_theta"),
    # scalars of norms, dropout, initialisation and loss
    *("activation_dropout", "attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "classifier_dropout"),
    *("dropout", "embd_pdrop", "emb_pdrop", "hidden_dropout", "hidden_dropout_prob", "init_std", "initializer_factor"),
    *("initializer_range", "layer_norm_eps", "layer_norm_epsilon", "resid_pdrop", "rms_norm_eps"),
    # generation and token numbers
    *("bad_words_ids", "begin_suppress_tokens", "bos_token_id", "cls_token_id", "decoder_start_token_id"),
    *("diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id"),
    *("exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "length_penalty"),
    *("mask_token_id", "max_length", "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups"),
    *("num_beams", "num_return_sequences", "pad_token_id", "prefix", "remove_invalid_values", "repetition_penalty"),
    *("sep_token_id", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p", "unk_token_id", "use_cache"),
    # outputs, and heads for other tasks than language modelling
    *("chunk_size_feed_forward", "cross_attention_hidden_size", "finetuning_task", "id2label", "is_decoder"),
    *(
        "label2id",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_scores",
        "problem_type",
        "return_dict",
    ),
    *("return_dict_in_generate", "task_specific_params", "tf_legacy_loss"),
)
"""keys of any family that change neither what training computes nor its size"""


def load_huggingface(path: str | Path) -> ModelSpec:
    """Returns the model of a config.json (the file, or its folder), named after the folder or file.

    Raises ForerunError, in one line that names file and key, where the file is missing, cut short or no JSON object,
    its `model_type` or architecture is unknown, or a key is missing, unknown, mistyped or impossible.
    """
    path = Path(path)
    if path.is_dir():
        path = path / CONFIG
    name = path.resolve().parent.name if path.name == CONFIG else path.stem
    return spec_from_config(read_json(path), name)


def spec_from_config(config: Fields, name: str) -> ModelSpec:
    """Returns the model of the fields of a config.json. Raises ForerunError as `load_huggingface` does."""
    known = FAMILIES[config.text("model_type", choices=sorted(FAMILIES))]
    for architecture in config.items("architectures"):
        if architecture not in known.architectures:
            classes = ", ".join(known.architectures)
            raise config.error("architectures", f"has {architecture!r}, which is not known; known: {classes}")
    config.expect("is_encoder_decoder", False)
    config.expect("add_cross_attention", False)
    config.expect("tie_encoder_decoder", False)
    config.expect("pruned_heads", {})
    values = known.read(config)
    config.finish((*IGNORED, *known.ignored))
    with at(config.place):
        return ModelSpec(name=name, **values)  # type: ignore[arg-type]
