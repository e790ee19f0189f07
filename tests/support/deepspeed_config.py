"""DeepSpeed configs for tests. Nothing here imports DeepSpeed."""

from typing import Any

MICROBATCHES = 2  # in a step
BF16 = {"bf16": {"enabled": True}}
SUB_GROUPS = {"zero_optimization": {"stage": 3, "sub_group_size": 700, "stage3_param_persistence_threshold": 20}}


def config_of(flag: dict | None, **more: Any) -> dict[str, Any]:
    """A ZeRO-3 config, with `more` in place of its entries. `flag` has zcompile's options; None leaves zcompile off."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": MICROBATCHES,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 20},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "torch_adam": True}},
    }
    config |= more
    if flag is not None:
        block = {"enabled": True, "inner": "aot_eager", **flag}
        config["zero_optimization"] = config["zero_optimization"] | {"zcompile": block}
    return config
