"""Lets other libraries train models with zcompile: DeepSpeed, and Hugging Face's transformers, accelerate and TRL."""
