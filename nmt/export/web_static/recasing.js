// Lines in capitals or in title case, which models rarely see in training, as in
// nmt/translate/recasing.py. Such a line is translated in ordinary case, and its translation gets the case
// of the line. The tokenizer tells which words are names or acronyms: it divides a word in its usual case
// into the fewest tokens. Tags and placeholders in braces are separated from the words that they touch, as
// in <b>OPEN</b> FILE{n}, and do not change. Words with addresses, entities and other placeholders keep their
// case, and do not count.

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
const WORD_CHARACTER = /[\p{L}\p{N}_]/u;
const TAG = String.raw`</?[\p{L}\p{N}_][^<>]*>`; // such as <b>, </b>, <0> and <a href="X Y">
const PLACEHOLDER = String.raw`[$#%]?\{(?:\{[^{}]*\}|[^{}\s]*)\}`; // in braces: {name}, {{ name }}
const TAGS = new RegExp(TAG, "gu");
const PLACEHOLDERS = new RegExp(`(${PLACEHOLDER})`, "u");
const ALL_PLACEHOLDERS = new RegExp(PLACEHOLDER, "gu");
// White space, a tag, or characters without either, which may contain placeholders.
const PIECE = new RegExp(String.raw`(\s+)|(${TAG})|(?:[^\s<{$#%]+|${PLACEHOLDER}|[{$#%]|(?!${TAG})<)+`, "gu");
// The start of a sentence up to its first letter, which is the last group. Tags before it belong to the
// start. A placeholder or an entity has no first letter. The second group is the first word. The pattern
// matches at each start, since a search that fails at the first of many full stops would read the text again
// from each of the others.
const NO_LETTERS = String.raw`(?:[^\p{L}\p{N}_{<%$&]|&(?!#?[\p{L}\p{N}_]+;)|${TAG})*`;
const SENTENCE_START = new RegExp(
  String.raw`((?:^|[.!?…](?:\s|(?=${TAG})))${NO_LETTERS})(?=([^\s<]*))([\p{L}\p{N}_]?)`,
  "gu",
);
const ADDRESS = /^www\.|:\/\/|@/iu;
// A word that does not change at all, since it has an address, an entity, a single brace or angle bracket, or
// a placeholder such as %s or $name, whose end is not certain.
const LITERAL = /:\/\/|^www\.|@|[{}<>$]|(?:^|\P{Nd})%|&#?[\p{L}\p{N}_]+;/iu;
const UNKNOWN_COST = 1000; // more tokens than a word has

/** Return "upper" for a text in capitals, "title" for one in title case, and otherwise "". */
export function findCase(text) {
  const textWithoutTags = removeTags(text);
  const words = listWordStarts(textWithoutTags);
  const prose = words.join(" ");
  if (isUpper(prose)) {
    // an acronym in Chinese or Arabic, whose letters have no case, does not count
    const numCapitals = (prose.match(CAPITALS) ?? []).length;
    const hasCase = numCapitals >= MIN_CAPITAL_SHARE * (prose.match(LETTER) ?? []).length;
    return hasCase && numCapitals >= MIN_CAPITALS ? "upper" : "";
  }
  if (words.some((word) => SMALL_OR_NO_CASE.test(word))) return "";
  const minWords = ENDS_SENTENCE.test(textWithoutTags) ? MIN_TITLE_SENTENCE_WORDS : MIN_TITLE_WORDS;
  return words.filter(isCapitalized).length >= minWords ? "title" : "";
}

/**
 * Return a text in capitals or in title case in the case of ordinary sentences.
 *
 * A word becomes the form with the fewest tokens of `tokenizer`: in lower case, with a capital, or unchanged.
 * Of forms with equally few tokens, the first in this order is chosen. In title case, words with further
 * capitals, such as NASA, do not change. Neither do tags, placeholders and addresses.
 */
export function toSentenceCase(text, tokenizer) {
  const prose = listWordStarts(removeTags(text)).join(" ");
  const isUpperText = isUpper(prose);
  const recased = changeWords(text, (word) => {
    const hasUnusualCase = isUpperText || isCapitalized(word);
    return hasUnusualCase ? usualCase(word, tokenizer) : word;
  });
  return recased.replace(SENTENCE_START, (_, start, firstWord, firstLetter) => (
    start + (ADDRESS.test(firstWord) ? firstLetter : firstLetter.toUpperCase())
  ));
}

/**
 * Change placeholders in capitals, such as {NAME}, to lower case, unless two of them differ only in their case. In a
 * line that was changed to capitals as a whole, their names are in capitals too, which a model can hardly copy.
 */
export function lowerPlaceholders(text) {
  const placeholders = new Set(text.match(ALL_PLACEHOLDERS) ?? []);
  const lowered = new Set([...placeholders].map((placeholder) => placeholder.toLowerCase()));
  if (lowered.size < placeholders.size) return text;
  return text.replace(ALL_PLACEHOLDERS, (placeholder) => (
    isUpper(placeholder) ? placeholder.toLowerCase() : placeholder
  ));
}

/** Give the placeholders of a translation the case that they have in the source. */
export function restorePlaceholders(translation, source) {
  const originals = new Set(source.match(ALL_PLACEHOLDERS) ?? []);
  const originalsByName = new Map([...originals].map((original) => [original.toLowerCase(), original]));
  return translation.replace(ALL_PLACEHOLDERS, (placeholder) => {
    if (originals.has(placeholder)) return placeholder;
    return originalsByName.get(placeholder.toLowerCase()) ?? placeholder;
  });
}

/** Return a translation in a case that `findCase` returned for its source. */
export function applyCase(text, textCase) {
  if (textCase === "upper") return changeWords(text, (word) => word.toUpperCase());
  if (textCase === "title") return changeWords(text, capitalize, true);
  return text;
}

/** Change each word of a text. With `onlyStarts`, do not change words that continue another one. */
function changeWords(text, changeWord, onlyStarts = false) {
  let changedText = "";
  for (const { text: piece, isWord, continuesWord } of splitPieces(text)) {
    const isKept = !isWord || (onlyStarts && continuesWord);
    changedText += isKept ? piece : changeWord(piece);
  }
  return changedText;
}

/**
 * Split a text at white space, tags and placeholders in braces. Joining the pieces gives the text.
 *
 * An address may contain placeholders that look like tags, as in https://example.org/<name>/A.
 */
function splitPieces(text) {
  const pieces = [];
  let continuesWord = false; // as the "s" in {name}s and the "he" in <b>T</b>he
  let hasAddress = false; // in the characters since the last white space
  for (const [characters, space, tag] of text.matchAll(PIECE)) {
    if (space) {
      continuesWord = false;
      hasAddress = false;
    }
    if (space || tag) {
      pieces.push({ text: characters, isWord: false });
      continue;
    }
    hasAddress = hasAddress || ADDRESS.test(characters);
    if (hasAddress) {
      pieces.push({ text: characters, isWord: false });
    } else {
      pieces.push(...splitPlaceholders(characters, continuesWord));
    }
    continuesWord = true;
  }
  return pieces;
}

/** Split characters between spaces and tags at their placeholders in braces. */
function splitPlaceholders(characters, continuesWord) {
  const segments = characters.split(PLACEHOLDERS); // every second one is a placeholder
  const words = segments.filter((_, i) => i % 2 === 0);
  if (LITERAL.test(words.join(" "))) return [{ text: characters, isWord: false }];
  return segments.map((segment, i) => (
    { text: segment, isWord: i % 2 === 0 && segment !== "", continuesWord: continuesWord || i > 0 }
  ));
}

/** Return a text without its tags: in <b>T</b>he, they are inside of a word. */
function removeTags(text) {
  return text.replace(TAGS, "");
}

/** Return the words of a text, without those that continue another word or a placeholder. */
function listWordStarts(text) {
  const words = splitPieces(text).filter(({ isWord, continuesWord }) => isWord && !continuesWord);
  return words.map((word) => word.text);
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
