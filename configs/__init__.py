"""The YAML of models, corpora and experiments, installed as `nmt.configs`."""
