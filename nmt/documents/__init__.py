"""Texts and documents to translate, by format.

texts                               sentences of a text, and a text from translations
document                            the texts of a file, and a file from translations
formats                             formats by suffix
markup, html_tokens, inline_tags    HTML; tags within a sentence
subtitles, tables, po               SubRip; CSV and TSV; messages of gettext
xml_tokens, xml_text, xliff         XML; XLIFF
packages, office                    archives of XML files; paragraphs of office documents
"""
