// Lines without words, which are copied instead of translated, as in nmt/translate/copied.py.

const LETTER_OR_DIGIT = /[\p{L}\p{N}]/u;
const ADDRESS = /^(?:[a-z]+:\/\/\S+|www\.\S+|[\p{L}\p{N}_.+-]+@[\p{L}\p{N}_-]+\.[\p{L}\p{N}_.-]+)$/u;

/** Return whether a line consists of web and e-mail addresses, emoji and other symbols. */
export function hasNoWords(line) {
  const words = line.match(/\S+/gu) ?? [];
  return words.length > 0 && words.every((word) => !LETTER_OR_DIGIT.test(word) || ADDRESS.test(word));
}
