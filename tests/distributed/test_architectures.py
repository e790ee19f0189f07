"""Every language model of transformers that can be made small, sharded over two ranks, beside itself unsharded.

Both are compiled. This takes ten to thirty minutes, and so runs on demand: `make models` runs it three times, with
ZCOMPILE_ARCHITECTURES=causal, masked and seq2seq. ZCOMPILE_ARCHITECTURES_INNER=inductor takes another inner backend
than aot_eager, for both.
"""

import contextlib
import copy
import functools
import os

import pytest
import torch

from tests.support.reference import compiled, train_beside

WHICH = os.environ.get("ZCOMPILE_ARCHITECTURES", "")
INNER = os.environ.get("ZCOMPILE_ARCHITECTURES_INNER", "aot_eager")
MAPPINGS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
}
TOLERANCE = 2e-4  # some multiply by their width, or scale a softmax up
MOST_PARAMETERS = 30_000_000

VOCABULARY = 64
# What configs call their sizes. Each takes those that it has.
SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), VOCABULARY),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embedding_size", "word_embed_proj_dim", "emb_dim", "lru_width"), 32
    ),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads", "decoder_attention_heads"),
        4,
    ),
    **dict.fromkeys(
        ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size"), 48
    ),
    **dict.fromkeys(("num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok", "n_group"), 2),
    **dict.fromkeys(
        ("head_dim", "v_head_dim", "kv_lora_rank", "linear_key_head_dim", "linear_value_head_dim", "index_head_dim"), 8
    ),
    **dict.fromkeys(
        (
            "num_local_experts",
            "num_experts",
            "n_routed_experts",
            "linear_num_value_heads",
            "conv_kernel",
            "index_n_heads",
        ),
        4,
    ),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "sliding_window"), 16),
    **dict.fromkeys(("n_shared_experts", "topk_group", "first_k_dense_replace", "attn_layer_offset"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx"), 64),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), 2),
    **dict.fromkeys(("mamba_d_state", "state_size", "hidden_size_per_layer_input"), 8),
    "q_lora_rank": 12,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "attention_window": [8, 8],
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "decoder_start_token_id": 1,
    "eos_token_id": 2,
    "sep_token_id": 2,
}
LATENT = {"head_dim": 4, "num_key_value_heads": 4}  # of attention whose keys and values are made of one vector


class CannotBeMade(Exception):
    """Says nothing of zcompile."""


def shrink(config) -> None:
    """Small sizes, no dropout; what refuses a value keeps its own."""
    for name in [*SIZES, *vars(config)]:  # in one order: some values follow from others
        value = 0.0 if name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop")) else SIZES.get(name)
        if name in LATENT and "kv_lora_rank" in vars(config):
            value = LATENT[name]
        try:
            if value is not None and hasattr(config, name):
                setattr(config, name, value)
        except Exception:  # a property, or of each layer its own
            pass
    kinds = getattr(config, "layer_types", None)
    with contextlib.suppress(AttributeError, TypeError):
        config.layer_types = (list(dict.fromkeys(kinds)) * 2)[:2]  # of each kind that there is


def small(kind: str):
    """The model of `kind`, compiled unsharded."""
    import transformers

    transformers.logging.set_verbosity_error()
    make = getattr(transformers, MAPPINGS[WHICH][0]).from_config
    try:
        config = transformers.AutoConfig.for_model(kind)
        shrink(config)
        if WHICH != "seq2seq" and config.get_text_config() is not config:
            shrink(config.get_text_config())
        with torch.device("meta"):
            count = sum(parameter.numel() for parameter in make(config).parameters())
        if count > MOST_PARAMETERS:
            raise CannotBeMade(f"{count} parameters")
        torch.manual_seed(0)
        model = make(config).train()
        tried = copy.deepcopy(model)  # some keep what they computed, and cannot be copied afterwards
        loss_of(tried, 0, 0).backward()
        tried.compile(backend=INNER)
        loss_of(tried, 0, 0).backward()
    except Exception as error:
        raise CannotBeMade(f"{type(error).__name__}: {error}") from error
    model.compile(backend=INNER)
    return model


def loss_of(model, step: int, rank: int) -> torch.Tensor:
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(1000 * step + rank))
    torch.manual_seed(step)  # for those that draw numbers
    return model(input_ids=tokens, labels=tokens).loss


def rank_trains(rank, world, kind):
    try:
        prepare = functools.partial(compiled, inner=INNER, fullgraph=False)
        train_beside(
            rank, world, prepare, make=functools.partial(small, kind), loss=loss_of, steps=3, tolerance=TOLERANCE
        )
    except CannotBeMade as reason:
        return str(reason)


def kinds() -> list[str]:
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, MAPPINGS[WHICH][1]))


@pytest.mark.skipif(not WHICH, reason="set ZCOMPILE_ARCHITECTURES to causal, masked or seq2seq")
@pytest.mark.parametrize("kind", kinds() if WHICH else [""])
def test_trains_as_unsharded(ranks, kind):
    reasons = ranks(2).run(rank_trains, kind)
    if reasons[0]:
        pytest.skip(f"{kind} cannot be made small or be compiled: {reasons[0].splitlines()[0][:200]}")
