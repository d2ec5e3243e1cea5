// SentencePiece in JavaScript: text to token ids and back, equal to the Python tokenizer of the model.
import { Normalizer, characterLength } from "./normalizer.js";
import { BpeSegmenter, UnigramSegmenter } from "./segmentation.js";

const SPACE_SYMBOL = "▁";
const NORMAL = 1; // types of pieces in sentencepiece_model.proto
const UNKNOWN = 2;
const CONTROL = 3;
const USER_DEFINED = 4;
const BYTE = 6;
const LINE_BREAKS = /[\n\r\v\f\x1c-\x1e\x85\u2028\u2029\0]/g;

/** Replace line breaks and NUL with spaces. */
export function replaceLineBreaks(text) {
  return text.replace(LINE_BREAKS, " ");
}

/** A SentencePiece model. */
export class Tokenizer {
  /** @param {Object} vocabulary - the vocabulary that nmt-export wrote, with `pieces`, `scores`, `types`. */
  constructor(vocabulary) {
    const { pieces, scores, types } = vocabulary;
    this.vocabulary = vocabulary;
    this.ids = new Map(); // of pieces that text is cut into
    this.scores = new Map();
    this.byteIds = new Map();
    this.symbols = [];
    pieces.forEach((piece, id) => {
      if (types[id] === BYTE) this.byteIds.set(Number(piece.slice(1, -1)), id); // <0x41>
      if (types[id] === USER_DEFINED) this.symbols.push(piece);
      if (types[id] !== NORMAL && types[id] !== USER_DEFINED) return;
      this.ids.set(piece, id);
      this.scores.set(piece, scores[id]);
    });
    this.normalizer = new Normalizer(vocabulary.normalizer, this.symbols);
    const Segmenter = vocabulary.type === "bpe" ? BpeSegmenter : UnigramSegmenter;
    this.segmenter = new Segmenter(this.scores, this.symbols);
  }

  /** Return the ids of one sentence, without BOS and EOS. */
  encode(text) {
    const ids = [];
    let followsUnknown = false;
    for (const piece of this.segmenter.segment(this.normalizer.normalize(text))) {
      const id = this.ids.get(piece);
      const isUnknown = id === undefined;
      if (!isUnknown) {
        ids.push(id);
      } else if (this.byteIds.size) {
        for (const byte of new TextEncoder().encode(piece)) ids.push(this.byteIds.get(byte));
      } else if (!followsUnknown) {
        ids.push(this.vocabulary.unk_id); // one id for a run of unknown characters
      }
      followsUnknown = isUnknown;
    }
    return ids;
  }

  /** Return the text of ids on one line, without control symbols. */
  decode(ids) {
    const { pieces, types } = this.vocabulary;
    let text = "";
    let bytes = [];
    let isAtStart = true;
    for (const id of ids) {
      if (types[id] === BYTE) {
        bytes.push(Number(pieces[id].slice(1, -1)));
        continue;
      }
      text += decodeBytes(bytes);
      bytes = [];
      if (text) isAtStart = false;
      text += this.decodePiece(id, isAtStart);
      const hadPrefix = pieces[id].startsWith(SPACE_SYMBOL);
      if (hadPrefix && !this.normalizer.removeExtraSpaces) isAtStart = false; // only one is removed
    }
    return replaceLineBreaks(text + decodeBytes(bytes));
  }

  /**
   * Return the text of ids, and the span [start, end] of each id in it, in code points without spaces. The bytes
   * of one character share its span.
   */
  decodeWithSpans(ids) {
    const text = this.decode(ids);
    const characters = Array.from(text);
    const ends = ids.map((_, i) => Array.from(this.decode(ids.slice(0, i + 1))).length);
    // Some bytes of a character without the others decode to several U+FFFD, after which `ends` is too large.
    for (let i = ids.length - 2; i >= 0; i--) ends[i] = Math.min(ends[i], ends[i + 1]);
    const spans = ends.map((end, i) => {
      let start = ends[i - 1] ?? 0;
      while (start < end && characters[start] === " ") start++;
      return [start, end];
    });
    return { text, spans };
  }

  /** Return the text of a piece; at the start of a text, without the space of the dummy prefix. */
  decodePiece(id, isAtStart) {
    const { pieces, types } = this.vocabulary;
    if (types[id] === CONTROL) return "";
    if (types[id] === UNKNOWN) return this.vocabulary.unk_surface;
    let piece = pieces[id];
    if (isAtStart && (this.normalizer.addDummyPrefix || this.normalizer.removeExtraSpaces)) {
      if (piece.startsWith(SPACE_SYMBOL)) piece = piece.slice(SPACE_SYMBOL.length);
    }
    return piece.replaceAll(SPACE_SYMBOL, " ");
  }
}

/** Decode UTF-8; each byte that is not part of a valid character becomes U+FFFD. */
function decodeBytes(bytes) {
  const decoder = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true });
  let text = "";
  let position = 0;
  while (position < bytes.length) {
    let length = characterLength(bytes[position]);
    try {
      text += decoder.decode(new Uint8Array(bytes.slice(position, position + length)));
    } catch {
      text += "\ufffd";
      length = 1;
    }
    position += length;
  }
  return text;
}
