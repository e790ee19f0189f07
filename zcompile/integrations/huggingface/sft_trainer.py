"""TRL's `SFTTrainer`, for models that zcompile shards."""

import trl

from zcompile.integrations.huggingface.trainer import TrainerMixin


class SFTTrainer(TrainerMixin, trl.SFTTrainer):
    """`trl.SFTTrainer` that shards its model with zcompile; see `TrainerMixin`."""
