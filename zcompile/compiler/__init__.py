"""The torch.compile backend, and all that knows Inductor."""
