"""The suffixes of the formats that have a reader.

`nmt.documents.formats` has a reader for each. A command that only compares suffixes imports this
module, and does not wait for the readers.
"""

FORMATS = (
    ".txt",
    ".srt",
    ".html",
    ".htm",
    ".csv",
    ".tsv",
    ".docx",
    ".pptx",
    ".odt",
    ".odp",
    ".epub",
    ".xlf",
    ".xliff",
    ".sdlxliff",
    ".mqxliff",
    ".po",
    ".pot",
)
LINE_FORMATS = (".txt", ".csv", ".tsv")
"""Formats that nmt-translate reads as lines."""
PACKAGES = (".docx", ".pptx", ".odt", ".odp", ".epub")
"""Formats that are zip archives, and not text."""
