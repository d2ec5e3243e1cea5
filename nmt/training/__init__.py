"""From a data folder to a trained model."""
