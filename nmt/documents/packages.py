"""Read documents that are zip archives of XML files: DOCX, PPTX, OpenDocument and EPUB."""

from __future__ import annotations

import io
import lzma
import re
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from nmt.documents.document import Document, ReadOptions, check_count
from nmt.documents.markup import MarkupText, parse_html
from nmt.documents.office import XmlPart, read_office_part
from nmt.documents.texts import SourceText, WrappedText, make_untranslated
from nmt.documents.xml_text import XmlText, escape, is_cdata_mark, join_raw
from nmt.documents.xml_tokens import XmlEncoding, XmlKind, XmlToken, decode_xml, tokenize_xml
from nmt.errors import DataError, to_one_line
from nmt.translate.results import LineResult

_MAX_TEXT_BYTES = 64 << 20  # unpacked size of all files with text
# An archive may unpack to _MAX_RATIO times its size, or to _MIN_LIMIT_BYTES if that is more.
_MAX_RATIO = 200
_MIN_LIMIT_BYTES = 64 << 20
_MAX_FILES = 10_000
_MACROS = re.compile(
    r"(?i)(^|/)vbaProject\.bin$"  # in OOXML
    # in OpenDocument, where script-lb.xml and script-lc.xml only list modules
    r"|^Basic/.+/(?!script-l[bc]\.xml).+\.xml$"
)
_HTML_TAG = re.compile(r"</?[A-Za-z][^<>]*>")
_Reader = Callable[[str, ReadOptions], XmlPart]
_ZIP_ERRORS = (  # zipfile raises these for a damaged archive
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,  # a password, or a compression method that zipfile does not support
    ValueError,
)


@dataclass(frozen=True)
class _Format:
    """Which files of an archive have text, and how each is read."""

    name: str
    readers: dict[str, _Reader]
    """Maps patterns of file names to the functions that read these files."""

    def find_reader(self, file_name: str) -> _Reader | None:
        """Return the function that reads a file, or None if the file is not translated."""
        for pattern, read in self.readers.items():
            if re.fullmatch(pattern, file_name):
                return read
        return None


def _read_page(text: str, options: ReadOptions) -> XmlPart:
    """Read a page of an EPUB."""
    page = parse_html(text, split_sentences=options.split_sentences)
    texts: list[SourceText] = []
    for content in page.contents:
        block = MarkupText([content])
        texts.append(XmlText(block))
    return XmlPart(texts)


@dataclass(frozen=True)
class _EscapedHtml(WrappedText):
    """HTML in an element of XML, such as `&lt;b&gt;bold&lt;/b&gt;`. See `SourceText`."""

    def render(self, results: Sequence[LineResult], rank: int = 0, prefix: str = "") -> str:
        """See `SourceText.render`."""
        return escape(self.text.render(results, rank, prefix))


def _read_elements(text: str, options: ReadOptions, *, names: frozenset[str]) -> XmlPart:
    """Read the text of elements with these names."""
    texts: list[SourceText] = []
    markup: list[str] = []
    is_inside = False  # True from the opening tag of such an element to the next tag of any kind
    for is_text, group in groupby(tokenize_xml(text), _is_text):
        tokens = list(group)
        if is_text and is_inside:
            content = "".join(token.text for token in tokens)
            texts += [make_untranslated("".join(markup)), _read_element(content, options)]
            markup = []
            continue
        markup.append(join_raw(tokens))
        tags = [token for token in tokens if token.name]
        if tags:
            last_tag = tags[-1]
            is_inside = last_tag.kind is XmlKind.OPENING and last_tag.name in names
    return XmlPart([*texts, make_untranslated("".join(markup))])


def _is_text(token: XmlToken) -> bool:
    """Return whether a token is a part of a text. References and CDATA marks divide a text."""
    return token.kind is XmlKind.TEXT or is_cdata_mark(token)


def _read_element(content: str, options: ReadOptions) -> SourceText:
    """Read the text of an element, which may be HTML."""
    if _HTML_TAG.search(content):
        page = parse_html(content, split_sentences=options.split_sentences)
        return XmlText(_EscapedHtml(page))
    return XmlText(parse_html(escape(content), split_sentences=options.split_sentences))


DOCX = _Format(
    "DOCX",
    {
        r"word/(document|header|footer|footnotes|endnotes)\d*\.xml": read_office_part,
        r"word/(charts/chart|diagrams/(data|drawing))\d*\.xml": read_office_part,
    },
)
PPTX = _Format(
    "PPTX",
    {
        r"ppt/(slides/slide|notesSlides/notesSlide)\d*\.xml": read_office_part,
        r"ppt/(charts/chart|diagrams/(data|drawing))\d*\.xml": read_office_part,
    },
)
OPEN_DOCUMENT = _Format("OpenDocument", {r"(Object \d+/)?(content|styles)\.xml": read_office_part})
EPUB = _Format(
    "EPUB",
    {
        r"(?i).+\.(xhtml|html?)": _read_page,
        r"(?i).+\.ncx": partial(_read_elements, names=frozenset({"text"})),
        r"(?i).+\.opf": partial(_read_elements, names=frozenset({"title", "description"})),
    },
)


def read_package(content: bytes, options: ReadOptions, *, package_format: _Format) -> Document:
    """Read the texts of an archive. All its other files stay unchanged.

    Raises `DataError` for an archive that is damaged, has a password or macros, or unpacks to too
    many bytes.
    """
    text_files = _unpack_text_files(content, package_format)
    if not text_files:
        raise DataError(f"the file is not a {package_format.name} document: it has no text")
    xml_parts: dict[str, tuple[XmlPart, XmlEncoding]] = {}  # file name: its texts and its encoding
    texts: list[SourceText] = []
    for file_name, (read, xml) in text_files.items():
        try:
            text, encoding = decode_xml(xml)
            xml_part = read(text, options)
        except DataError as error:
            raise DataError(f"{file_name} in the file: {error}") from None
        xml_parts[file_name] = (xml_part, encoding)
        texts += xml_part.list_texts()
        check_count(len(texts))

    def assemble(translations: list[str]) -> bytes:
        return _assemble(content, xml_parts, iter(translations))

    return Document(texts, assemble)


def _unpack_text_files(content: bytes, package_format: _Format) -> dict[str, tuple[_Reader, bytes]]:
    """Check an archive, and map the name of each file with text to its reader and its bytes."""
    text_files: dict[str, tuple[_Reader, bytes]] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_files(archive, len(content), package_format)
            damaged = archive.testzip()
            if damaged is not None:
                raise zipfile.BadZipFile(f"{damaged} is damaged")
            for entry in archive.infolist():
                read = package_format.find_reader(entry.filename)
                if read is not None:
                    text_files[entry.filename] = (read, archive.read(entry))
    except _ZIP_ERRORS as error:
        reason = to_one_line(error)
        raise DataError(
            f"the file is not a {package_format.name} document, or is damaged or has a password: "
            f"{reason}"
        ) from None
    return text_files


def _check_files(archive: zipfile.ZipFile, packed_bytes: int, package_format: _Format) -> None:
    """Raise a `DataError` for macros, encryption, too many files and too large files."""
    num_bytes = 0
    num_text_bytes = 0
    entries = archive.infolist()
    names = {entry.filename for entry in entries}
    if len(entries) > _MAX_FILES or len(names) < len(entries):
        raise DataError(
            f"the file contains over {_MAX_FILES} files, or two files with the same name"
        )
    for entry in entries:
        num_bytes += entry.file_size
        if package_format.find_reader(entry.filename):
            num_text_bytes += entry.file_size
        if _MACROS.search(entry.filename):
            raise DataError(f"the file has macros ({entry.filename}); save it without them")
    if num_text_bytes > _MAX_TEXT_BYTES:
        raise DataError(f"the file has over {_MAX_TEXT_BYTES} bytes of text; cut it into several")
    if num_bytes > max(_MAX_RATIO * packed_bytes, _MIN_LIMIT_BYTES):
        raise DataError(
            f"the file of {packed_bytes} bytes unpacks to {num_bytes}, over {_MAX_RATIO} times its "
            "size, which no document needs"
        )
    manifest = "META-INF/manifest.xml"  # OpenDocument has this file
    if manifest in names and b"encryption-data" in archive.read(manifest):
        raise DataError("the file has a password; save it without one")


def _assemble(
    content: bytes, xml_parts: dict[str, tuple[XmlPart, XmlEncoding]], translations: Iterator[str]
) -> bytes:
    """Return the archive with translated parts.

    `translations` are in the order of the files in the archive.
    """
    output = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as archive,
        zipfile.ZipFile(output, "w") as new_archive,
    ):
        for entry in archive.infolist():
            new_entry = zipfile.ZipInfo(entry.filename, entry.date_time)
            new_entry.compress_type = entry.compress_type
            new_entry.external_attr = entry.external_attr
            new_entry.create_system = entry.create_system
            if entry.filename in xml_parts:
                xml_part, encoding = xml_parts[entry.filename]
                xml = xml_part.join(translations)  # takes the next translations of the iterator
                new_archive.writestr(new_entry, encoding.encode(xml))
            else:
                new_entry.file_size = entry.file_size  # tells zipfile whether ZIP64 is needed
                with archive.open(entry) as source, new_archive.open(new_entry, "w") as target:
                    shutil.copyfileobj(source, target)
    return output.getvalue()
