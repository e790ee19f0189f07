"""Around a training step: microbatches, deferred reduces, clipping, the fused optimizer."""
