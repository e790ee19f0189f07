"""Models of transformers and diffusers, small, with inputs: `small(task, kind)` and `loss_of(task)`."""

import contextlib
import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.support.diffusion import KINDS, diffusion_loss, diffusion_model

TASKS = {
    "causal": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "masked": ("AutoModelForMaskedLM", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    "images": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "segmentation": ("AutoModelForSemanticSegmentation", "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES"),
    "ctc": ("AutoModelForCTC", "MODEL_FOR_CTC_MAPPING_NAMES"),
    "speech": ("AutoModelForSpeechSeq2Seq", "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"),
    "audio": ("AutoModelForAudioClassification", "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES"),
    "vision-language": ("AutoModelForImageTextToText", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    "diffusion": ("", ""),
}
LANGUAGE = ("causal", "masked", "seq2seq")
MOST_PARAMETERS = 30_000_000

VOCABULARY, LABELS, IMAGE, SAMPLES, FRAMES = 64, 5, 64, 3200, 64
TOKENS = {"use_cache": False, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 1, "eos_token_id": 2}
# What configs call their sizes. Each takes those that it has.
_SIZES = (
    (VOCABULARY, "vocab_size vocab_size_per_layer_input"),
    (32, "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim emb_dim lru_width"),
    (2, "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers"),
    (4, "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads"),
    (48, "intermediate_size n_inner d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"),
    (2, "num_key_value_heads linear_num_key_heads num_experts_per_tok n_group"),
    (8, "head_dim v_head_dim kv_lora_rank linear_key_head_dim linear_value_head_dim index_head_dim"),
    (4, "num_local_experts num_experts n_routed_experts linear_num_value_heads conv_kernel index_n_heads"),
    (4, "qk_rope_head_dim qk_nope_head_dim rotary_dim"),
    (16, "moe_intermediate_size shared_expert_intermediate_size sliding_window"),
    (1, "n_shared_experts topk_group first_k_dense_replace attn_layer_offset"),
    (64, "max_position_embeddings n_positions n_ctx"),
    (2, "attn_layer_period expert_layer_period sep_token_id"),
    (8, "mamba_d_state state_size hidden_size_per_layer_input"),
    (12, "q_lora_rank"),
    (4, "mamba_n_heads"),
    (16, "mamba_d_head"),
)
SIZES = {name: size for size, names in _SIZES for name in names.split()} | {"attention_window": [8, 8]} | TOKENS
LATENT = {"head_dim": 4, "num_key_value_heads": 4}  # of attention whose keys and values are made of one vector
# Of models of images and sound; arguments of a config, since some of its other values follow from these.
_ALIKE = (
    "hidden_size d_model num_hidden_layers num_attention_heads encoder_layers decoder_layers intermediate_size "
    "encoder_ffn_dim encoder_attention_heads decoder_attention_heads decoder_ffn_dim"
)
SENSES = {
    **{name: SIZES[name] for name in _ALIKE.split()},
    "vocab_size": VOCABULARY, "num_labels": LABELS, "image_size": IMAGE, "num_conv_pos_embeddings": 16,
    **dict.fromkeys(("max_source_positions", "max_target_positions"), FRAMES // 2),
    "max_length": FRAMES, "ctc_zero_infinity": True, "apply_spec_augment": False,
    **dict.fromkeys(("mask_time_prob", "mask_feature_prob", "layerdrop"), 0.0), **TOKENS,
}  # fmt: skip
WIDTHS = ("hidden_sizes", "embed_dims", "neck_hidden_sizes", "embed_dim", "embedding_size", "decoder_hidden_size")


class CannotBeMade(Exception):
    """Says nothing of zcompile."""


def kinds(task: str) -> list[str]:
    """The kinds of model for `task` that the installed library has."""
    if task == "diffusion":
        return sorted(KINDS)
    from transformers.models.auto import modeling_auto

    return sorted(getattr(modeling_auto, TASKS[task][1]))


def small(task: str, kind: str) -> nn.Module:
    """A small model of `kind`, the same in each call. Raises CannotBeMade: too large, or it does not train in eager."""
    arguments = _arguments_that_work(task, kind)
    if isinstance(arguments, str):
        raise CannotBeMade(arguments)
    return _make(task, kind, arguments)


@functools.cache
def _arguments_that_work(task: str, kind: str) -> str | dict[str, Any]:
    """Arguments of a config with which a model of `kind` can be made and trains; else why not."""
    reasons = []
    for arguments in _candidates(task, kind):
        try:
            loss_of(task)(_make(task, kind, arguments), 0, 0).backward()
            return arguments
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {error}".splitlines()[0][:200])
    return "; ".join(reasons)


def _candidates(task: str, kind: str) -> Iterator[dict[str, Any]]:
    if task in (*LANGUAGE, "vision-language", "diffusion"):
        yield {}
        return
    import transformers

    config = transformers.AutoConfig.for_model(kind)
    yield _senses(config)
    few = ("num_labels", "image_size", "num_hidden_layers", *(name for name in SENSES if name.startswith("mask_")))
    yield {name: SENSES[name] for name in few if hasattr(config, name)}


HUGGING_FACE = ("llama", "qwen3", "gpt2", "t5", "vit", "mixtral", "deepseek_v3", "llama4_text")
TASK_OF = {"t5": "seq2seq", "vit": "images"}  # the others are causal


def hugging_face(kind: str, experts: str = "batched_mm") -> nn.Module:
    """A `small` model of transformers that can generate. "eager" `experts` are a loop over those that tokens hit."""
    model = small(TASK_OF.get(kind, "causal"), kind)
    if kind in ("mixtral", "deepseek_v3", "llama4_text"):
        model.config._experts_implementation = experts
    if kind == "gpt2":
        model.loss_type = "ForCausalLM"  # else it logs a warning in forward, which breaks any full graph
    if kind != "vit":
        model.generation_config.use_cache = True
    return model


def hugging_face_loss(kind: str, model: nn.Module, step: int, rank: int) -> torch.Tensor:
    """The loss of `hugging_face(kind)` on the batch that `rank` sees at `step`."""
    return loss_of(TASK_OF.get(kind, "causal"))(model, step, rank)


def _make(task: str, kind: str, arguments: dict[str, Any]) -> Any:
    if task == "diffusion":
        torch.manual_seed(0)
        return diffusion_model(kind).train()
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.integrations.unset_hf_deepspeed_config()  # an earlier test's would have models made under zero.Init
    make = getattr(transformers, TASKS[task][0]).from_config
    config = transformers.AutoConfig.for_model(kind, **arguments)
    if task in LANGUAGE or task == "vision-language":
        shrink(config)
        if task != "seq2seq" and config.get_text_config() is not config:
            shrink(config.get_text_config())
    if task == "seq2seq" and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = SIZES["decoder_start_token_id"]  # newer ones have it for generation only
    if hasattr(config, "vision_config"):
        _shrink_vision(config)
    _without_dropout(config)
    config.architectures = config.architectures or []  # transformers looks through them
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in make(config).parameters())
    if count > MOST_PARAMETERS:
        raise CannotBeMade(f"{count} parameters")
    torch.manual_seed(0)
    model = make(config).train()
    if task == "vision-language":
        _count_places(model)
    return model


def shrink(config: Any) -> None:
    """Small sizes, no dropout; what refuses a value keeps its own."""
    for name in [*SIZES, *vars(config)]:  # in one order: some values follow from others
        value = SIZES.get(name)
        if name in LATENT and "kv_lora_rank" in vars(config):
            value = LATENT[name]
        _set(config, name, value)
    _without_dropout(config)
    layer_kinds = getattr(config, "layer_types", None)
    with contextlib.suppress(AttributeError, TypeError):
        config.layer_types = (list(dict.fromkeys(layer_kinds)) * 2)[:2]  # of each kind that there is


def _set(config: Any, name: str, value: Any) -> None:
    with contextlib.suppress(Exception):  # a property, or of each layer its own
        if value is not None and hasattr(config, name):
            setattr(config, name, value)


def _without_dropout(config: Any) -> None:
    for name in list(vars(config)):
        if name.endswith(("dropout", "dropout_prob", "pdrop", "layerdrop", "drop_path_rate", "drop_rate")):
            old = getattr(config, name)
            if isinstance(old, (list, tuple)):
                _set(config, name, [0.0] * len(old))
            elif isinstance(old, float):
                _set(config, name, 0.0)


def _senses(config: Any) -> dict[str, Any]:
    """Arguments for the config of a model of images or sound: a quarter of its widths, one layer a stage."""
    arguments = {name: value for name, value in SENSES.items() if name in vars(config) or name == "num_labels"}
    for name in WIDTHS:
        old = getattr(config, name, None)
        if isinstance(old, (list, tuple)):
            arguments[name] = [max(4, width // 4) for width in old]
        elif isinstance(old, int) and "hidden_sizes" not in arguments and name != "embedding_size":
            arguments[name] = max(8, old // 4)
    if "hidden_sizes" in arguments:  # one width a stage: the scalar follows from them, or is another thing
        arguments.pop("hidden_size", None)
        if isinstance(getattr(config, "embedding_size", None), int):
            arguments["embedding_size"] = max(8, config.embedding_size // 4)
    for name in ("depths", "depth", "num_attention_heads", "num_heads"):
        old = getattr(config, name, None)
        if isinstance(old, (list, tuple)):
            arguments[name] = list(old) if "heads" in name else [1] * len(old)
    if isinstance(getattr(config, "conv_dim", None), (list, tuple)):
        arguments["conv_dim"] = [32] * len(config.conv_dim)
    if isinstance(getattr(config, "embed_dim", None), int):  # Swin's kind: the width doubles with each stage
        arguments.pop("hidden_size", None)
        if hasattr(config, "window_size"):
            arguments["window_size"] = 2
    return arguments


def _shrink_vision(config: Any) -> None:
    vision = config.vision_config
    for name, value in {**SENSES, "image_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "heads": 4}.items():
        if not isinstance(getattr(vision, name, None), (list, tuple)):
            _set(vision, name, value)
    text = config.get_text_config()
    for name in ("out_hidden_size", "projection_dim", "text_hidden_size"):
        _set(vision, name, getattr(text, "hidden_size", None))
    _set(vision, "num_key_value_heads", 4)
    _set(vision, "head_dim", 8)
    _without_dropout(vision)
    _set(config, "image_seq_length", (32 // 8) ** 2)
    for name in ("image_token_id", "image_token_index"):
        if isinstance(getattr(config, name, None), int):
            _set(config, name, IMAGE_TOKEN)
    rope = getattr(text, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        rope["mrope_section"] = [1, 1, 2]


# --- inputs and losses ----------------------------------------------------------------------------------------------

IMAGE_TOKEN = 3
Loss = Callable[[nn.Module, int, int], torch.Tensor]


def loss_of(task: str) -> Loss:
    """(model, step, rank) -> the loss of that rank's batch at that step."""
    make = {"images": _images, "segmentation": _segmentation, "ctc": _sound, "audio": _sound, "speech": _speech}
    make |= {"vision-language": _pictures_and_text}

    def loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        if task == "diffusion":
            return diffusion_loss(model, step, generator)
        device = next(model.parameters()).device
        inputs = {name: value.to(device) for name, value in make.get(task, _tokens)(model, generator).items()}
        torch.manual_seed(step)  # for those that draw numbers
        return model(**inputs).loss

    return loss


def _tokens(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, VOCABULARY, (2, 16), generator=generator)
    return {"input_ids": tokens, "labels": tokens}


def _picture(config: Any, generator: torch.Generator) -> torch.Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", IMAGE) or IMAGE
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(2, getattr(config, "num_channels", 3), height, width, generator=generator)


def _images(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    labels = torch.randint(0, model.config.num_labels, (2,), generator=generator)
    if model.main_input_name == "input_ids":
        return {"input_ids": torch.randint(0, VOCABULARY, (2, 16), generator=generator), "labels": labels}
    name = "inputs" if model.main_input_name == "inputs" else "pixel_values"
    return {name: _picture(model.config, generator), "labels": labels}


def _segmentation(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    pixels = _picture(model.config, generator)
    labels = torch.randint(0, model.config.num_labels, (2, *pixels.shape[2:]), generator=generator)
    return {"pixel_values": pixels, "labels": labels}


def _features(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    config, name = model.config, "input_features"
    if model.main_input_name == "input_values":
        name, bins = "input_values", getattr(config, "num_mel_bins", None)
        shape = (config.max_length, bins) if bins and hasattr(config, "max_length") else (SAMPLES,)
    elif hasattr(config, "feature_projection_input_dim"):
        shape = (FRAMES, config.feature_projection_input_dim)
    else:
        encoder = getattr(config, "encoder_config", config)
        bins = getattr(encoder, "num_mel_bins", None) or getattr(config, "input_feat_per_channel", 80)
        shape = (bins, FRAMES) if config.model_type == "whisper" else (FRAMES, bins)
    return {name: torch.randn(2, *shape, generator=generator)}


def _sound(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    if "CTC" in type(model).__name__:
        labels = torch.randint(1, VOCABULARY, (2, 3), generator=generator)
    else:
        labels = torch.randint(0, model.config.num_labels, (2,), generator=generator)
    return {**_features(model, generator), "labels": labels}


def _speech(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    return {**_features(model, generator), "labels": torch.randint(3, VOCABULARY, (2, 8), generator=generator)}


def _pictures_and_text(model: Any, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """One picture and some text a sequence, with as many places for the picture as it has features."""
    config, vision = model.config, model.config.vision_config
    text = torch.randint(4, VOCABULARY, (2, 8), generator=generator)
    inputs: dict[str, torch.Tensor] = {}
    if "image_grid_thw" in _arguments(model):
        merge, side = getattr(vision, "spatial_merge_size", 2), 32 // vision.patch_size
        channels = getattr(vision, "in_channels", getattr(vision, "in_chans", 3))
        patch = channels * getattr(vision, "temporal_patch_size", 2) * vision.patch_size**2
        inputs["pixel_values"] = torch.randn(2 * side * side, patch, generator=generator)
        inputs["image_grid_thw"] = torch.tensor([[1, side, side]] * 2)
        places = side * side // merge**2
    else:
        inputs["pixel_values"] = _picture(vision, generator)
        places = model.places_of_a_picture
    token = next(getattr(config, name) for name in ("image_token_id", "image_token_index") if hasattr(config, name))
    pictures = torch.full((2, places), token)
    inputs["input_ids"] = torch.cat([text[:, :2], pictures, text[:, 2:]], 1)
    inputs["labels"] = torch.cat([text[:, :2], torch.full((2, places), -100), text[:, 2:]], 1)
    for name in {"token_type_ids", "mm_token_type_ids"} & _arguments(model):
        inputs[name] = (inputs["input_ids"] == token).long()
    return inputs


def _arguments(model: Any) -> set[str]:
    return set(inspect.signature(model.forward).parameters)


def _count_places(model: Any) -> None:
    """Note on the model how many tokens a picture takes, which its features tell."""
    if "image_grid_thw" in _arguments(model):  # it depends on the picture, see _pictures_and_text
        return
    with torch.no_grad():
        pixels = _picture(model.config.vision_config, torch.Generator().manual_seed(0))
        features = model.get_image_features(pixel_values=pixels)
    features = getattr(features, "pooler_output", features)
    tensors = [features] if isinstance(features, torch.Tensor) else list(features)
    width = model.config.get_text_config().hidden_size
    model.places_of_a_picture = sum(math.prod(tensor.shape) for tensor in tensors) // width // 2
