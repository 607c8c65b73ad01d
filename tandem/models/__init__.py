"""Target and draft models, and reading them from Hugging Face folders and GGUF files."""
