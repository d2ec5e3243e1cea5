"""Engines that search and score: PyTorch (native) and CTranslate2."""
