"""Other libraries that train through zcompile: DeepSpeed; transformers, accelerate and TRL."""
