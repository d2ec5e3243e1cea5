"""The Home Assistant corpus, from a small wheel: cleaning, splits and errors."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from toy import command

from nmt.errors import DataError

Texts = dict[str, dict[str, str]]
SCRIPT = Path(__file__).parents[1] / "scripts" / "fetch_homeassistant.py"
SPEC = importlib.util.spec_from_file_location("fetch_homeassistant", SCRIPT)
assert SPEC is not None
assert SPEC.loader is not None
homeassistant = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(homeassistant)


def _write_wheel(path: Path, texts: Texts) -> Path:
    """Write {language: {key: text}} as two components, with a key path of two steps."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("homeassistant/components/light/manifest.json", "{}")
        for lang, flat in texts.items():
            components: Texts = {"light": {}, "lock": {}}
            for key, text in flat.items():
                components["light" if key.startswith("light") else "lock"][key] = text
            for component, step in components.items():
                member = f"homeassistant/components/{component}/translations/{lang}.json"
                archive.writestr(member, json.dumps({"config": {"step": step}}))
    return path


def _word(number: int) -> str:
    """Spell a number in letters, since all digits are equal after normalization."""
    return str(number).translate(str.maketrans("0123456789", "abcdefghij"))


def _corpus(extra: list[tuple[str, str]]) -> Texts:
    """Add `extra` pairs to 200 ordinary pairs, of which every tenth repeats a target."""
    pairs = []
    for n in range(1, 201):
        target_number = n - 1 if n % 10 == 0 else n
        pairs.append((f"the word {_word(n)}", f"das Wort {_word(target_number)}"))
    texts: Texts = {"en": {}, "de": {}}
    for n, (src, tgt) in enumerate([*pairs, *extra]):
        key = f"{'light' if n % 2 else 'lock'}{n}"
        texts["en"][key] = src
        texts["de"][key] = tgt
    return texts


def _extract(folder: Path, extra: list[tuple[str, str]]) -> dict[str, list[tuple[str, str]]]:
    return homeassistant.extract(_write_wheel(folder / "ha.whl", _corpus(extra)), "en", "de")


def _all_pairs(splits: dict[str, list[tuple[str, str]]]) -> list[tuple[str, str]]:
    return list(itertools.chain.from_iterable(splits.values()))


def test_texts_are_joined_by_key_in_either_direction_whatever_the_keys(tmp_path: Path) -> None:
    texts = _corpus([])
    texts["en"]["light_only_here"] = "nobody translated this"
    wheel = _write_wheel(tmp_path / "ha.whl", texts)
    expected = {(src, texts["de"][key]) for key, src in texts["en"].items() if key in texts["de"]}
    forward = homeassistant.extract(wheel, "en", "de")
    backward = _all_pairs(homeassistant.extract(wheel, "de", "en"))
    assert forward["train"]
    assert set(_all_pairs(forward)) <= expected
    assert {(src, tgt) for tgt, src in backward} <= expected
    renamed: Texts = {}
    for lang, flat in texts.items():
        renamed[lang] = {f"lock_new_{key}": text for key, text in reversed(flat.items())}
    splits = homeassistant.extract(_write_wheel(tmp_path / "b.whl", renamed), "en", "de")
    assert splits.keys() == forward.keys()
    for name, pairs in forward.items():
        assert set(splits[name]) == set(pairs), name


def test_pairs_that_teach_nothing_are_dropped_and_others_kept(tmp_path: Path) -> None:
    without = _all_pairs(_extract(tmp_path, []))
    for pair in [
        ("", ""),
        ("Empty here", ""),
        ("{name} ({host})", "{name} ({host})"),
        ("100 %", "100 %"),
        ("https://example.org/a/long/path here", "https://example.org/a/long/path hier"),
        ("Read the code", "[%key:common::state::on%] Code lesen"),
        ("Nobody did translate this", "Nobody did translate this"),
        ("Short text", "Kurzer Text, dem ein ganz anderer und viel zu langer Satz folgt"),
        ("long " * 100, "lang " * 100),
    ]:
        assert _all_pairs(_extract(tmp_path, [pair])) == without, pair
    for pair in [
        ("Cache", "Zwischenspeichern"),
        ("Status", "Status"),
        ("Connect to {host}", "Mit {host} verbinden"),
        ("See [the manual]({url}).", "Siehe [Handbuch]({url})."),
        ("75 watts", "75 Watt"),
    ]:
        assert pair in _all_pairs(_extract(tmp_path, [pair])), pair
    odd = (" Two\n\nlines\u00a0here", "Zwei  Zeilen\thier ")
    assert ("Two lines here", "Zwei Zeilen hier") in _all_pairs(_extract(tmp_path, [odd]))
    splits = _extract(tmp_path, [("Clear", "Frei"), ("Clear", "Leeren"), ("Clear", "Leeren")])
    assert [tgt for src, tgt in _all_pairs(splits) if src == "Clear"] == ["Leeren"]


def test_no_sentence_is_in_two_splits_or_twice_in_a_held_out_split(tmp_path: Path) -> None:
    variants = [(f"The word, {_word(n)}!", f"Das  Wort: {_word(n)}.") for n in range(1, 201)]
    families = []
    for n, i in itertools.product(range(200), (1, 2)):
        families.append((f"Relay {_word(n)} {i}", f"Relais {_word(n)} {i}"))
    for splits in (_extract(tmp_path, variants), _extract(tmp_path, families)):
        for side in (0, 1):
            seen: set[str] = set()
            for name, pairs in splits.items():
                sentences = {homeassistant.normalize(pair[side]) for pair in pairs}
                assert seen.isdisjoint(sentences), name
                seen |= sentences
                if side == 0 and name != "train":
                    assert len(sentences) == len(pairs), name


def test_languages_that_cannot_be_paired_say_why(tmp_path: Path) -> None:
    wheel = _write_wheel(tmp_path / "ha.whl", _corpus([]) | {"fr": {"light1": "un mot"}})
    assert homeassistant.languages(wheel) == ["de", "en", "fr"]
    for src_lang, tgt_lang, message in [
        ("en", "dee", r"unknown Home Assistant language 'dee'; did you mean de\?"),
        ("en", "en", "both 'en'"),
        ("en", "fr", "en-fr has only 1 texts in common"),
    ]:
        with pytest.raises(DataError, match=message):
            homeassistant.extract(wheel, src_lang, tgt_lang)


def test_wheel_is_downloaded_once_unless_damaged_and_a_failure_is_quoted_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bytes | None] = []
    content: bytes | None = b"wheel"

    def pip(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        calls.append(content)
        if content is None:
            stderr = "WARNING: retrying\nERROR: No matching distribution found"
            return subprocess.CompletedProcess(command, 1, "", stderr)
        folder = Path(command[command.index("-d") + 1])
        (folder / homeassistant.WHEEL_NAME).write_bytes(content)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    monkeypatch.setattr(homeassistant, "WHEEL_SHA256", hashlib.sha256(b"wheel").hexdigest())
    wheel = homeassistant.fetch(tmp_path / "cache")
    assert homeassistant.fetch(tmp_path / "cache") == wheel
    assert (wheel.read_bytes(), len(calls)) == (b"wheel", 1)
    wheel.write_bytes(b"whe")
    assert homeassistant.fetch(tmp_path / "cache").read_bytes() == b"wheel"
    for new_content, message in [
        (b"something else", "has SHA-256 .*, expected .*; run again"),
        (None, "ERROR: No matching distribution found"),
    ]:
        content = new_content
        (tmp_path / "new").mkdir(exist_ok=True)
        with pytest.raises(DataError, match=message) as caught:
            homeassistant.fetch(tmp_path / "new")
        assert "\n" not in str(caught.value)
        assert list((tmp_path / "new").iterdir()) == []


@pytest.mark.slow
def test_script_writes_line_aligned_files_where_the_experiment_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    wheel = _write_wheel(tmp_path / "ha.whl", _corpus([]))
    monkeypatch.setattr(homeassistant, "fetch", lambda _: wheel)
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--src", "de", "--tgt", "en"])
    command_line = ["data=homeassistant", "data.src_lang=de", "data.tgt_lang=en"]
    command_line += ["tokenizer.vocab_size=300", "data_dir=data/ha"]
    assert command("preprocess", command_line) == 2
    errors = capfd.readouterr().err.rstrip()
    assert "does not exist; make it with: " in errors
    assert errors.endswith("scripts/fetch_homeassistant.py --src de --tgt en")
    assert homeassistant.main() == 0
    for name, pairs in homeassistant.extract(wheel, "de", "en").items():
        for side, lang in enumerate(("de", "en")):
            path = tmp_path / f"data/raw/homeassistant/de-en/{name}.{lang}"
            lines = path.read_text(encoding="utf-8").split("\n")
            assert lines == [*(pair[side] for pair in pairs), ""]
    assert command("preprocess", command_line) == 0
    assert (tmp_path / "data/ha/test.src").read_text("utf-8").count("\n") == len(pairs)
