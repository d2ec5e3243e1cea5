"""The commands. Only this package imports Hydra and OmegaConf."""
