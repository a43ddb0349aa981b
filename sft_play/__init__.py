"""Fine-tune language models on one GPU or many, from one YAML file."""

__version__ = "0.1.0"
