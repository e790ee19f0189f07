"""The torch.compile backend, and all code that depends on Inductor."""
