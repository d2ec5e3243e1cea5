// Lines without words, which are copied instead of translated, as in nmt/translate/copied.py.

const LETTER_OR_DIGIT = /[\p{L}\p{N}]/u;
// Scripts whose letters may follow an address without a space, and their punctuation
const UNSPACED_LETTERS =
  "\\u0e00-\\u0eff\\u1000-\\u109f\\u1780-\\u17ff\\u2e80-\\u2fff\\u3040-\\u9fff\\uac00-\\ud7af" +
  "\\uf900-\\ufaff\\u{20000}-\\u{3ffff}";
const UNSPACED = `${UNSPACED_LETTERS}\\u3000-\\u303f\\ufe30-\\ufe4f\\uff00-\\uffef`;
const SPACED_CHARACTER = `(?![${UNSPACED}])[\\p{L}\\p{N}_]`;
// Some browsers do not know lookbehind assertions
const ADDRESS = new RegExp(
  `^(?:(?:[a-z]+://|www\\.)(?=\\S)` +
  `(?:[^\\s/?#${UNSPACED}]|[${UNSPACED_LETTERS}]+(?=[./?#]))*(?:[/?#][^\\s、。，！？；]*)?` +
  `|(?:${SPACED_CHARACTER}|[.+\\-]){1,256}@(?:${SPACED_CHARACTER}|-){1,256}` +
  `\\.(?:${SPACED_CHARACTER}|[.\\-]){1,256})$`, "u");

/** Return whether a line consists of web and e-mail addresses, emoji and other symbols. */
export function hasNoWords(line) {
  const words = line.match(/\S+/gu) ?? [];
  return words.length > 0 && words.every((word) => !LETTER_OR_DIGIT.test(word) || ADDRESS.test(word));
}
