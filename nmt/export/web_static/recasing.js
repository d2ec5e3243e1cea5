// Lines in capitals or in title case, which models rarely see in training, as in
// nmt/translate/recasing.py. Such a line is translated in ordinary case, and its translation gets the case
// of the line.

const MIN_CAPITALS = 5; // a shorter text may be an abbreviation
const MIN_CAPITAL_SHARE = 0.8; // of all letters; others may be marks such as the apostrophe of Uzbek
const MIN_TITLE_WORDS = 3; // fewer may be a name
const MIN_TITLE_SENTENCE_WORDS = 5; // in shorter sentences, names and German nouns may be capitalized
const ENDS_SENTENCE = /[.!?…]["'”’»)\]]*\s*$/u;
const LETTER = /\p{L}/gu;
const CAPITALS = /\p{Uppercase}/gu;
const CAPITAL = /\p{Uppercase}/u;
const SMALL = /[\p{Lowercase}\p{Lt}]/u;
const WORD = /\S+/gu;
const SENTENCE_START = /(?:^|[.!?…]\s)[^\p{L}\p{N}_]*[\p{L}\p{N}_]/gu;

/** Return "upper" for a text in capitals, "title" for one in title case, and otherwise "". */
export function findCase(text) {
  if (isUpper(text)) {
    // an acronym in Chinese or Arabic, whose letters have no case, does not count
    const numCapitals = (text.match(CAPITALS) ?? []).length;
    const hasCase = numCapitals >= MIN_CAPITAL_SHARE * (text.match(LETTER) ?? []).length;
    return hasCase && numCapitals >= MIN_CAPITALS ? "upper" : "";
  }
  const words = text.match(WORD) ?? [];
  if (words.some((word) => /^\p{L}/u.test(word) && !/^\p{Uppercase}/u.test(word))) return "";
  const minWords = ENDS_SENTENCE.test(text) ? MIN_TITLE_SENTENCE_WORDS : MIN_TITLE_WORDS;
  return words.filter(isCapitalized).length >= minWords ? "title" : "";
}

/** Turn a text in capitals or in title case into one or more sentences in ordinary case. */
export function toSentenceCase(text) {
  const lowered = isUpper(text) ? text.toLowerCase()
    : text.replace(WORD, (word) => (isCapitalized(word) ? word.toLowerCase() : word));
  return lowered.replace(SENTENCE_START, (start) => start.toUpperCase());
}

/** Return a translation in a case that `findCase` returned for its source. */
export function applyCase(text, textCase) {
  if (textCase === "upper") return text.toUpperCase();
  if (textCase === "title") return text.replace(WORD, (word) => capitalize(word));
  return text;
}

function isUpper(text) {
  return CAPITAL.test(text) && !SMALL.test(text);
}

/** Return whether the first letter of a word is its only capital. */
function isCapitalized(word) {
  const [first, ...others] = word;
  const end = others.join("");
  return isUpper(first) && end === end.toLowerCase();
}

function capitalize(word) {
  const [first, ...others] = word;
  return first.toUpperCase() + others.join("");
}
