"""Convert a trained model to folders that other libraries run without nmt."""
