// Cut texts into sentences and long lines into parts, as nmt/documents/texts.py and nmt/translate/long_lines.py
// do.
import { replaceLineBreaks } from "./tokenizer.js";

const CLOSING = "[\"'”’»)\\]\\}」』）】》›]*";
const SENTENCE_END = new RegExp(`[.!?…؟۔।॥።၊။។．]${CLOSING}\\s+|[。！？｡]+${CLOSING}\\s*`, "gu");
const CLAUSE_END = new RegExp(`[,;:،؛፣፤–—]${CLOSING}\\s+|[、，；：､]${CLOSING}\\s*`, "gu");
const SPACE = /\s+/gu;
const LOWER_CASE = /^\p{Lowercase}/u;
// Han, kana, and their punctuation and full-width forms, which are written without spaces
const UNSPACED = "[\\u2e80-\\u30ff\\u3100-\\u312f\\u31a0-\\u4dbf\\u4e00-\\u9fff\\uf900-\\ufaff\\ufe30-\\ufe4f"
  + "\\uff00-\\uffdc\\u{20000}-\\u{3ffff}]";
const ENDS_UNSPACED = new RegExp(`${UNSPACED}$`, "u");
const STARTS_UNSPACED = new RegExp(`^${UNSPACED}`, "u");

/**
 * Cut a text at line ends and at the ends of sentences.
 * @returns {{sentences: string[], gaps: string[]}} the sentences, and the white space before each of them and
 *   after the last one.
 */
export function splitText(text) {
  const sentences = [];
  const gaps = [];
  let gap = "";
  text.split("\n").forEach((line, number) => {
    if (number > 0) gap += "\n";
    for (const part of cut(line, sentenceEnds(line))) {
      const sentence = part.trim();
      if (!sentence) {
        gap += part;
        continue;
      }
      const start = part.indexOf(sentence);
      gaps.push(gap + part.slice(0, start));
      sentences.push(replaceLineBreaks(sentence));
      gap = part.slice(start + sentence.length);
    }
  });
  return { sentences, gaps: [...gaps, gap] };
}

/** Join translations with the gaps of the source text. */
export function joinText(translations, gaps) {
  let text = "";
  translations.forEach((translation, i) => {
    let gap = gaps[i];
    const followsDirectly = i > 0 && !gap && text && translation;
    if (followsDirectly && !areUnspaced(text, translation)) gap = " ";
    text += gap + translation;
  });
  return text + gaps.at(-1);
}

/** Join translated parts of a line with spaces, except between Chinese or Japanese characters. */
export function joinParts(parts) {
  let line = "";
  for (const part of parts.filter(Boolean)) {
    if (line && !areUnspaced(line, part)) line += " ";
    line += part;
  }
  return line;
}

function areUnspaced(before, after) {
  return ENDS_UNSPACED.test(before) && STARTS_UNSPACED.test(after);
}

/** Return the position after each sentence. A period before a lower-case letter does not end a sentence. */
function sentenceEnds(text) {
  return endsOf(text, SENTENCE_END).filter((end) => !LOWER_CASE.test(text.slice(end)));
}

function endsOf(text, pattern) {
  return Array.from(text.matchAll(pattern), (match) => match.index + match[0].length);
}

/** Cut a text at positions; parts may be white space. */
function cut(text, positions) {
  const bounds = [0, ...positions, text.length];
  return bounds.slice(1).map((end, i) => text.slice(bounds[i], end));
}

/**
 * Return the ids of the parts of a long line, each of 1 to `maxTokens` tokens. A sentence that fits is one
 * part.
 * @param {function(string): number[]} encode
 */
export function splitLine(line, maxTokens, encode) {
  return cut(line, sentenceEnds(line)).flatMap((part) => encodeParts(part, maxTokens, encode));
}

/** Return the ids of a text, in several parts if it is too long. */
function encodeParts(text, maxTokens, encode) {
  const ids = encode(text);
  if (ids.length === 0) return [];
  if (ids.length <= maxTokens) return [ids];
  const parts = divide(text.trim(), ids.length, maxTokens, encode);
  if (parts.length === 1) return [ids.slice(0, maxTokens)]; // one character with more tokens than allowed
  return parts.flatMap((part) => encodeParts(part, maxTokens, encode));
}

/** Divide a text of too many tokens at the ends of clauses, else at spaces, else between characters. */
function divide(text, numTokens, maxTokens, encode) {
  for (const pattern of [CLAUSE_END, SPACE]) {
    const parts = merge(cut(text, endsOf(text, pattern)), maxTokens, encode);
    if (parts.length > 1) return parts;
  }
  const segmenter = new Intl.Segmenter();
  const characters = Array.from(segmenter.segment(text), ({ segment }) => segment); // as a reader counts them
  const step = Math.max(1, Math.floor((characters.length * maxTokens) / numTokens) - 1);
  const parts = [];
  for (let i = 0; i < characters.length; i += step) parts.push(characters.slice(i, i + step).join(""));
  return parts;
}

/** Merge neighboring parts as long as the result has at most `maxTokens` tokens. */
function merge(parts, maxTokens, encode) {
  const merged = [];
  let numFree = 0; // tokens that still fit in the newest merged part
  for (const part of parts.filter((candidate) => candidate.trim())) {
    const numTokens = encode(part).length;
    if (merged.length && numTokens <= numFree) {
      merged[merged.length - 1] += part;
      numFree -= numTokens;
    } else {
      merged.push(part);
      numFree = maxTokens - numTokens;
    }
  }
  return merged;
}
