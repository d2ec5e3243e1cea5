// Text without words, which is copied instead of translated, as in nmt/translate/copied.py.

const LETTER_OR_DIGIT = /[\p{L}\p{N}]/u;
// Scripts whose letters may follow an address without a space, and their punctuation
const UNSPACED_LETTERS =
  "\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u2e80-\\u2fff\\u3040-\\u9fff\\uac00-\\ud7af" +
  "\\uf900-\\ufaff\\u{20000}-\\u{3ffff}";
const UNSPACED = `${UNSPACED_LETTERS}\\u3000-\\u303f\\ufe30-\\ufe4f\\uff00-\\uffef`;
const SPACED_CHARACTER = `(?![${UNSPACED}])[\\p{L}\\p{N}_]`;
// Some browsers do not know lookbehind assertions
const ADDRESS = new RegExp(
  `^(?:(?:[a-zA-Z][a-zA-Z+.\\-]*://|[wW]{3}\\.)(?=\\S)` +
  `(?:[^\\s/?#${UNSPACED}]|[${UNSPACED_LETTERS}]+(?=[./?#]))*(?:[/?#][^\\s、。，！？；]*)?` +
  `|(?:${SPACED_CHARACTER}|[.+\\-]){1,256}@(?:${SPACED_CHARACTER}|-){1,256}` +
  `\\.(?:${SPACED_CHARACTER}|[.\\-]){1,256})$`, "u");
const ADDRESS_SIGNS = /:\/\/|www\.|Www\.|WWW\.|@/u;
const MARK_AFTER_ADDRESS = /[?!,;:…)\]}"'”’»›]$/u;
// Emoji and other pictures, as in nmt/search/protect.py: signs, symbols that \ufe0f makes emoji, keycaps
const PICTURES =
  "\\u231a\\u231b\\u23e9-\\u23fa\\u2600-\\u275a\\u2761-\\u2767\\u2795-\\u2797\\u27a1\\u27b0\\u27bf" +
  "\\u2b05-\\u2b07\\u2b1b-\\u2b2f\\u2b50-\\u2b55\\u{1f000}-\\u{1f7ff}\\u{1f900}-\\u{1faff}";
const SYMBOLS = "©®™‼⁉ℹ↔-↪⌨⏏Ⓜ▪-◾⤴⤵〰〽㊗㊙";
const EMOJI_SIGN = `(?:[${PICTURES}]|[${SYMBOLS}]\\ufe0f|[0-9#*]\\ufe0f?\\u20e3)`;
const EMOJI = `${EMOJI_SIGN}(?:${EMOJI_SIGN}|[\\u200d\\ufe0e\\ufe0f\\u{e0020}-\\u{e007f}]){0,63}`;
const MAX_END_WORDS = 16; // that are copied at each end of a line
const LEADING_EMOJI = new RegExp(`^\\s*(?:${EMOJI}\\s*){1,${MAX_END_WORDS}}`, "u");
const TRAILING_EMOJI = new RegExp(`${EMOJI}$`, "u");
const ONLY_EMOJI = new RegExp(`^${EMOJI}$`, "u");
const MAX_EMOJI_CHARACTERS = 256; // of one word that are copied at the end of a line
const MARK = /[.。．।۔?？؟!！…;；؛:：]$/u;

/** Return whether a line consists of web and e-mail addresses, emoji and other symbols. */
export function hasNoWords(line) {
  const words = line.match(/\S+/gu) ?? [];
  // keycaps have a digit, and \u2139 is a letter
  return words.length > 0 && words.every((word) => (
    !LETTER_OR_DIGIT.test(word) || ADDRESS.test(word) || ONLY_EMOJI.test(word)
  ));
}

/**
 * Divide a line into `start`, `middle` and `end`. Only the middle is translated: emoji are copied at both ends, and web
 * and e-mail addresses at the end. If the middle would have no letters or digits, both ends are empty.
 */
export function splitEnds(line) {
  const whole = { start: "", middle: line, end: "" };
  const middleStart = line.match(LEADING_EMOJI)?.[0].length ?? 0;
  const middleEnd = Math.max(findMiddleEnd(line), middleStart);
  const middle = line.slice(middleStart, middleEnd);
  if (!LETTER_OR_DIGIT.test(middle)) return whole;
  return { start: line.slice(0, middleStart), middle, end: line.slice(middleEnd) };
}

/** Return the index of the spaces before the emoji and addresses at the end of a line; without these, its length. */
function findMiddleEnd(line) {
  let endStart = line.length;
  const words = [...line.matchAll(/\S+/gu)].slice(-MAX_END_WORDS).reverse();
  for (const { 0: word, index } of words) {
    // a mark other than a full stop, such as in "Is it at www.example.org?", is translated
    if (ADDRESS.test(word) && !MARK_AFTER_ADDRESS.test(word)) {
      endStart = index;
      continue;
    }
    // the last characters, as whole code points
    const characters = Array.from(word).slice(-MAX_EMOJI_CHARACTERS).join("");
    const emoji = characters.match(TRAILING_EMOJI);
    if (emoji === null) break;
    const emojiStart = index + word.length - emoji[0].length;
    const followsNumber = /\p{Nd}$/u.test(word.slice(0, emojiStart - index));
    if (followsNumber && /^\d/u.test(emoji[0])) break; // a number that ends in a keycap
    endStart = emojiStart;
    if (endStart > index) break; // the emoji directly follow a word, such as "Great!👍"
  }
  if (endStart === line.length) return endStart; // without emoji and addresses, spaces are not copied either
  return line.slice(0, endStart).trimEnd().length;
}

/**
 * Return the translation of `middle` with both ends. If an address follows, and `middle` does not end with a mark,
 * removes the full stop that the model may have added.
 */
export function addEnds(translation, { start, middle, end }) {
  let text = translation;
  if (ADDRESS_SIGNS.test(end) && !MARK.test(middle) && !text.endsWith("..")) {
    text = /[.。]$/u.test(text) ? text.slice(0, -1).trimEnd() : text;
  }
  return start + text + end;
}
