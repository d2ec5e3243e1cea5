// Lines in capitals or in title case, which models rarely see in training, as in
// nmt/translate/recasing.py. Such a line is translated in ordinary case, and its translation gets the case
// of the line. The tokenizer tells which words are names or acronyms: it divides a word in its usual case
// into the fewest tokens. Words with placeholders, tags and addresses keep their case, and do not count.

const MIN_CAPITALS = 5; // a shorter text may be an abbreviation
const MIN_CAPITAL_SHARE = 0.8; // of all letters; others may be marks such as the apostrophe of Uzbek
const MIN_TITLE_WORDS = 3; // fewer may be a name
const MIN_TITLE_SENTENCE_WORDS = 5; // in shorter sentences, names and German nouns may be capitalized
const ENDS_SENTENCE = /[.!?…]["'”’»)\]]*\s*$/u;
const LETTER = /\p{L}/gu;
const CAPITALS = /\p{Uppercase}/gu;
const CAPITAL = /\p{Uppercase}/u;
const SMALL = /[\p{Lowercase}\p{Lt}]/u;
// Lo: letters without case, such as Chinese ones; marks such as the ʻ of Hawaiian are Lm
const SMALL_OR_NO_CASE = /^(?:\p{Lowercase}|\p{Lo})/u;
const WORD = /\S+/gu;
const WORD_CHARACTER = /[\p{L}\p{N}_]/u;
// The start of a sentence up to its first letter, with its first word as a group. A placeholder such as {name}
// or a tag has no first letter. The pattern matches at each start, since a search that fails at the first of
// many full stops would read the text again from each of the others.
const SENTENCE_START = /(?:^|[.!?…]\s)[^\p{L}\p{N}_{<%$]*(?=(\S*))[\p{L}\p{N}_]?/gu;
const ADDRESS = /^www\.|:\/\/|@/u;
// a word with an address, a placeholder such as {name}, %s or $name, a tag or an entity
const LITERAL = /:\/\/|^www\.|@|[{}<>$]|(?:^|\P{Nd})%|&#?[\p{L}\p{N}_]+;/iu;
const UNKNOWN_COST = 1000; // more tokens than a word has

/** Return "upper" for a text in capitals, "title" for one in title case, and otherwise "". */
export function findCase(text) {
  const words = findWords(text);
  const prose = words.join(" ");
  if (isUpper(prose)) {
    // an acronym in Chinese or Arabic, whose letters have no case, does not count
    const numCapitals = (prose.match(CAPITALS) ?? []).length;
    const hasCase = numCapitals >= MIN_CAPITAL_SHARE * (prose.match(LETTER) ?? []).length;
    return hasCase && numCapitals >= MIN_CAPITALS ? "upper" : "";
  }
  if (words.some((word) => SMALL_OR_NO_CASE.test(word))) return "";
  const minWords = ENDS_SENTENCE.test(text) ? MIN_TITLE_SENTENCE_WORDS : MIN_TITLE_WORDS;
  return words.filter(isCapitalized).length >= minWords ? "title" : "";
}

/**
 * Return a text in capitals or in title case in the case of ordinary sentences.
 *
 * A word becomes the form with the fewest tokens of `tokenizer`: in lower case, with a capital, or unchanged.
 * Of forms with equally few tokens, the first in this order is chosen. In title case, words with further
 * capitals, such as NASA, do not change. Neither do words with placeholders, tags and addresses.
 */
export function toSentenceCase(text, tokenizer) {
  const isUpperText = isUpper(findWords(text).join(" "));
  const recased = changeWords(text, (word) => (
    isUpperText || isCapitalized(word) ? usualCase(word, tokenizer) : word
  ));
  return recased.replace(SENTENCE_START, (start, firstWord) => (
    ADDRESS.test(firstWord) ? start : start.toUpperCase()
  ));
}

/** Return a translation in a case that `findCase` returned for its source. */
export function applyCase(text, textCase) {
  if (textCase === "upper") return changeWords(text, (word) => word.toUpperCase());
  if (textCase === "title") return changeWords(text, capitalize);
  return text;
}

/** Return the words of a text, except those with placeholders, tags and addresses. */
function findWords(text) {
  return (text.match(WORD) ?? []).filter((word) => !LITERAL.test(word));
}

/** Change each word of a text, except those with placeholders, tags and addresses. */
function changeWords(text, changeWord) {
  return text.replace(WORD, (word) => (LITERAL.test(word) ? word : changeWord(word)));
}

/** Return the form of a word with the fewest tokens, see `toSentenceCase`. */
function usualCase(word, tokenizer) {
  const lowered = word.toLowerCase();
  const capitalized = lowered.replace(WORD_CHARACTER, (letter) => letter.toUpperCase());
  let best = lowered;
  for (const candidate of [capitalized, word]) {
    if (countTokens(candidate, tokenizer) < countTokens(best, tokenizer)) best = candidate;
  }
  return best;
}

/** Return the number of tokens of a word, and UNKNOWN_COST for each unknown token. */
function countTokens(word, tokenizer) {
  const ids = tokenizer.encode(word);
  const numUnknown = ids.filter((id) => id === tokenizer.vocabulary.unk_id).length;
  return ids.length + UNKNOWN_COST * numUnknown;
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
