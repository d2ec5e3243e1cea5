"""Pictures of models, runs and data: `nmt-visualize`."""
