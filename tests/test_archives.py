"""Text in .zip and .tar files gives the same pairs as plain text; hostile archives are refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import pytest
from test_foreign_files import REPLACEMENTS, limited
from test_sources import PAIRS, SRC, TGT, TSV, find, read
from toy import command

from nmt.data.text import read_input
from nmt.errors import EXIT_DONE, DataError
from nmt.preprocess import archives

MOSES = {"README": b"x", "LICENSE": b"x", "OPUS.de-en.de": TGT, "OPUS.de-en.en": SRC}


def write_archive(path: Path, files: dict[str, bytes]) -> str:
    """Write files into an archive of the format that its suffix names."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, content in files.items():
                archive.writestr(name, content)
        return str(path)
    compression = {".tar": "", ".tgz": "gz"}.get(path.suffix, path.suffix[1:])
    with tarfile.open(path, f"w:{compression}") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(f"./{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return str(path)


def test_archives_of_every_kind_give_the_pairs_of_their_files(tmp_path: Path) -> None:
    for suffix in ("zip", "tar", "tar.gz", "tgz", "tar.bz2", "tar.xz"):
        path = write_archive(tmp_path / f"moses.{suffix}", MOSES)
        sources = find(tmp_path, src=[path], tgt=[path])
        assert read(sources) == PAIRS, suffix
        assert sources[0].names == (f"{path}/OPUS.de-en.en", f"{path}/OPUS.de-en.de")
        named = f"{path}/OPUS.de-en.de"
        assert read(find(tmp_path, src=[named], tgt=[named.replace(".de-en.de", ".de-en.en")])) == [
            (tgt, src) for src, tgt in PAIRS
        ]
    one_each = [
        write_archive(tmp_path / f"{side}.zip", {f"{side}.txt.gz": gzip.compress(content)})
        for side, content in (("s", SRC), ("t", TGT))
    ]
    assert read(find(tmp_path, src=one_each[:1], tgt=one_each[1:])) == PAIRS
    path = write_archive(tmp_path / "tsv.tar.gz", {"notes.txt": b"x\n", "all.tsv": TSV})
    assert read(find(tmp_path, tsv=[path])) == PAIRS


def test_an_archive_without_the_text_is_refused_with_the_names_that_it_has(tmp_path: Path) -> None:
    path = write_archive(tmp_path / "a.zip", {"x.fr": b"x\n", "x.de": b"x\n", "y.de": b"y\n"})
    for src, tgt, message in (
        (path, path, r"a\.zip has 0 files that end in \.en, but x\.fr, x\.de, y\.de; name one"),
        (f"{path}/x.fr", path, r"a\.zip has 2 files that end in \.de"),
        (f"{path}/x.it", path, r"a\.zip has no file x\.it, but x\.fr"),
        (f"{path}/x.it", path, r"name one, such as \S+/a\.zip/x\.fr, or"),
        (f"{path}/x.fr", f"{path}/x.fr", r"data\.train: source and target are the same file"),
        (write_archive(tmp_path / "e.zip", {"README": b""}), path, "e.zip has no file with text"),
    ):
        with pytest.raises(DataError, match=message):
            find(tmp_path, src=[src], tgt=[tgt])


def test_scores_are_found_in_an_archive_or_refused_with_the_names_that_it_has(
    tmp_path: Path,
) -> None:
    for suffix in ("zip", "tar"):
        path = write_archive(tmp_path / f"m.{suffix}", {**MOSES, "OPUS.de-en.scores": b"1\n2\n3\n"})
        [source] = find(tmp_path, src=[path], tgt=[path], scores=[path])
        assert source.names[2] == f"{path}/OPUS.de-en.scores"
        assert source.paths[2].read_text() == "1\n2\n3\n"
        message = rf"m\.{suffix} has no file none, but OPUS"
        with pytest.raises(DataError, match=message):
            find(tmp_path, src=[path], tgt=[path], scores=[f"{path}/none"])
        with pytest.raises(DataError, match=r"has 0 files that end in \.alignments"):
            find(tmp_path, src=[path], tgt=[path], alignments=[path])


def test_bombs_and_damaged_archives_are_refused_before_they_fill_memory_or_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "MIN_LIMIT_BYTES", 1 << 20)
    zeros = bytes(4 << 20)
    for suffix in ("zip", "tar.gz"):
        bomb = write_archive(tmp_path / f"bomb.{suffix}", {"x.en": zeros, "x.de": b"x\n"})
        with pytest.raises(DataError, match=r"unpacks to 4,194,304 or more, over 200 times"):
            find(tmp_path, src=[bomb], tgt=[bomb])
    inner = {"x.en.gz": gzip.compress(zeros), "x.de": b"x\n"}
    nested = write_archive(tmp_path / "nested.zip", inner)
    with pytest.raises(DataError, match="over 200 times"):
        find(tmp_path, src=[nested], tgt=[nested])
    assert not list((tmp_path / "spool").glob("*0-0"))
    monkeypatch.setattr(archives, "MAX_FILES", 3)
    crowded = write_archive(tmp_path / "many.zip", {f"{i}.en": b"x\n" for i in range(9)})
    with pytest.raises(DataError, match="more than 3 files"):
        find(tmp_path, src=[crowded], tgt=[crowded])
    for suffix in ("zip", "tar.gz"):
        path = Path(write_archive(tmp_path / f"cut.{suffix}", {"x.en": SRC * 99, "x.de": TGT}))
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(DataError, match=rf"cut\.{suffix}.*fetch it again"):
            find(tmp_path, src=[str(path)], tgt=[str(path)])
    links = tmp_path / "links.tar"
    with tarfile.open(links, "w") as tar:
        for name in ("x.en", "x.de"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.SYMTYPE
            member.linkname = "/etc/passwd"
            tar.addfile(member)
    with pytest.raises(DataError, match="no file with text"):
        find(tmp_path, src=[str(links)], tgt=[str(links)])


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = Path(write_archive(tmp_path / "secret.zip", {"x.en": SRC, "x.de": TGT}))
    content = bytearray(path.read_bytes())
    for start in (content.find(b"PK\1\2"), content.rfind(b"PK\1\2")):
        content[start + 8] |= 1  # the flag of an encrypted file
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"secret\.zip cannot be read \(.*encrypted"):
        find(tmp_path, src=[str(path)], tgt=[str(path)])


def test_nmt_preprocess_reads_a_moses_archive_of_opus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = {"en": "", "de": ""}
    for i in range(300):
        lines["en"] += f"the tree number {i} is green\n"
        lines["de"] += f"der Baum Nummer {i} ist grün\n"
    files = {f"Tatoeba.de-en.{lang}": text.encode() for lang, text in lines.items()}
    write_archive(tmp_path / "de-en.txt.zip", {"README": b"", **files})
    words = ["data.train.src=de-en.txt.zip", "data.train.tgt=de-en.txt.zip", "data.src_lang=en"]
    words += ["data.tgt_lang=de", "data.valid.num_pairs=10", "data.test.num_pairs=10"]
    assert command("preprocess", *words, "tokenizer.vocab_size=310") == EXIT_DONE
    assert "300" in capsys.readouterr().out


@pytest.mark.parametrize("replacement", ["sparse file", "endless device"])
def test_zeros_in_the_place_of_a_compressed_file_are_refused_at_once(
    tmp_path: Path, replacement: str
) -> None:
    """Python's lzma skips zeros before a stream, and tarfile tries each compression."""
    packed = tmp_path / "a.xz"
    REPLACEMENTS[replacement](packed)
    with limited(), pytest.raises(DataError, match=r"a\.xz: not a whole xz file"):
        list(read_input(str(packed)))
    archive = tmp_path / "a.tar.xz"
    REPLACEMENTS["sparse file"](archive)  # a device is refused before
    with limited(), pytest.raises(DataError, match=r"a\.tar\.xz cannot be read"):
        archives.list_files(archive)
