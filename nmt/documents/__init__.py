"""Read texts and documents to translate, and build them again from translations.

texts                               cuts a text into sentences, and joins translations
document                            the texts of a file, and the function that builds it again
suffixes                            the suffixes of all formats
formats                             chooses the format by the suffix of a file
markup, html_tokens, inline_tags    HTML, and tags within a sentence
subtitles, tables, po               SubRip, CSV and TSV, and message catalogs of gettext
xml_tokens, xml_text, xliff         XML and XLIFF
packages, office                    archives of XML files, and paragraphs of office documents
"""
