// Normalization of text before SentencePiece cuts it into pieces, as in SentencePiece's normalizer.cc.

const SPACE = 0x20;
const SPACE_SYMBOL = [0xe2, 0x96, 0x81]; // ▁ in UTF-8
const LAST_LENGTH_1 = 0x7f; // greatest first byte of a character of one byte
const FIRST_LENGTH_3 = 0xe0;
const FIRST_LENGTH_4 = 0xf0;

/** The replacements of a model: a double-array trie (darts-clone) and the replacement texts. */
class Charsmap {
  /** @param {Uint8Array} bytes - `precompiled_charsmap` of the SentencePiece model. */
  constructor(bytes) {
    const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
    const trieBytes = view.getUint32(0, true);
    this.units = new Uint32Array(trieBytes / 4);
    for (let i = 0; i < this.units.length; i++) this.units[i] = view.getUint32(4 + 4 * i, true);
    this.replacements = bytes.subarray(4 + trieBytes); // each ends with a zero byte
  }

  /**
   * Find the longest sequence at a position that has a replacement.
   * @returns {?{length: number, replacement: Uint8Array}} its number of bytes and the replacement; null if
   *   there is none.
   */
  match(text, position) {
    let longest = null;
    let node = offsetOf(this.units[0]);
    for (let i = position; i < text.length; i++) {
      node ^= text[i];
      const unit = this.units[node];
      if (labelOf(unit) !== text[i]) break;
      node ^= offsetOf(unit);
      if (hasValue(unit)) longest = { length: i + 1 - position, start: valueOf(this.units[node]) };
    }
    if (longest === null) return null;
    const end = this.replacements.indexOf(0, longest.start);
    return { length: longest.length, replacement: this.replacements.subarray(longest.start, end) };
  }
}

// The fields of a unit of the double array: Darts::Details::DoubleArrayUnit
function labelOf(unit) { return (unit & 0x800000ff) >>> 0; }
function offsetOf(unit) { return (unit >>> 10) << ((unit & 0x200) >>> 6); }
function hasValue(unit) { return (unit & 0x100) !== 0; }
function valueOf(unit) { return unit & 0x7fffffff; }

/** Return the number of bytes of a UTF-8 character that begins with a byte. */
export function characterLength(firstByte) {
  if (firstByte <= LAST_LENGTH_1) return 1;
  if (firstByte < FIRST_LENGTH_3) return 2;
  return firstByte < FIRST_LENGTH_4 ? 3 : 4;
}

function startsWith(text, position, prefix) {
  return prefix.every((byte, i) => text[position + i] === byte);
}

function endsWith(text, suffix) {
  return text.length >= suffix.length && startsWith(text, text.length - suffix.length, suffix);
}

/** Normalizes text by the rules of a SentencePiece model. */
export class Normalizer {
  /**
   * @param {Object} rules - `normalizer` of the exported vocabulary.
   * @param {string[]} symbols - user-defined pieces, which are never changed.
   */
  constructor(rules, symbols) {
    this.addDummyPrefix = rules.add_dummy_prefix;
    this.removeExtraSpaces = rules.remove_extra_whitespaces;
    this.escapeSpaces = rules.escape_whitespaces;
    this.spaceIsSuffix = rules.treat_whitespace_as_suffix;
    const charsmap = Uint8Array.from(atob(rules.charsmap), (character) => character.charCodeAt(0));
    this.charsmap = charsmap.length ? new Charsmap(charsmap) : null;
    this.symbols = symbols.map((symbol) => new TextEncoder().encode(symbol));
  }

  /** Return the normalized text, with ▁ for spaces. */
  normalize(text) {
    const input = new TextEncoder().encode(text);
    const space = this.escapeSpaces ? SPACE_SYMBOL : [SPACE];
    let position = 0;
    if (this.removeExtraSpaces) position = this.skipSpaces(input);
    if (position === input.length) return "";
    const output = [];
    if (this.addDummyPrefix && !this.spaceIsSuffix) output.push(...space);
    let followsSpace = this.removeExtraSpaces;
    while (position < input.length) {
      const { length, replacement } = this.matchAt(input, position);
      position += length;
      let start = 0;
      while (followsSpace && replacement[start] === SPACE) start++;
      for (const byte of replacement.subarray(start)) {
        if (byte === SPACE) output.push(...space);
        else output.push(byte);
      }
      if (start < replacement.length) followsSpace = this.removeExtraSpaces && replacement.at(-1) === SPACE;
    }
    if (this.removeExtraSpaces) {
      while (endsWith(output, space)) output.length -= space.length;
    }
    if (this.addDummyPrefix && this.spaceIsSuffix) output.push(...space);
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(new Uint8Array(output));
  }

  /** Return the position after the spaces at the start of a text. */
  skipSpaces(input) {
    let position = 0;
    while (position < input.length) {
      const { length, replacement } = this.matchAt(input, position);
      if (replacement.length !== 1 || replacement[0] !== SPACE) break;
      position += length;
    }
    return position;
  }

  /** Return the number of bytes at a position that are replaced together, and their replacement. */
  matchAt(input, position) {
    let length = 0;
    for (const symbol of this.symbols) {
      if (symbol.length > length && startsWith(input, position, symbol)) length = symbol.length;
    }
    if (length === 0) { // no symbol begins here
      const match = this.charsmap?.match(input, position);
      if (match) return match;
      length = characterLength(input[position]);
    }
    return { length, replacement: input.subarray(position, position + length) };
  }
}
