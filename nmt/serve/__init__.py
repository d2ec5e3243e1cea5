"""The translation server: LibreTranslate's HTTP API, one of its own, and a web page."""
