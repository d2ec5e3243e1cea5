// Translation of lines and texts with an exported model.
import { addEnds, hasNoWords, splitEnds } from "./copied.js";
import { isSecondBetter, needsSecondSearch, NGRAM_OF_SECOND_SEARCH } from "./loops.js";
import { applyCase, findCase, lowerPlaceholders, restorePlaceholders, toSentenceCase } from "./recasing.js";
import { search } from "./search.js";
import { joinParts, splitLine } from "./sentences.js";
import { replaceLineBreaks, Tokenizer } from "./tokenizer.js";

/** Translates one line at a time. */
export class Translator {
  /**
   * @param {Model} model
   * @param {Object} settings - `model/settings.json`.
   * @param {Object} vocabularies - `source` and `target`, as nmt-export wrote them.
   */
  constructor(model, settings, { source, target }) {
    this.model = model;
    this.settings = settings;
    this.source = new Tokenizer(source);
    this.target = source === target ? this.source : new Tokenizer(target);
  }

  /**
   * Translate a line. Empty lines, lines without words, and emoji and addresses at the ends of lines stay as they are.
   * @param {string} line
   * @param {{beamSize: number, direction: number}} options - `direction` is an index of the directions of
   *   the settings.
   * @returns {Promise<{text: string, pairs: Object[]}>} the translation, and the aligned pairs of the parts of the
   *   line, as `alignment.js` shows them.
   */
  async translate(line, { beamSize, direction }) {
    const source = replaceLineBreaks(line);
    if (hasNoWords(source)) return { text: source, pairs: [] };
    const { source_tag: tag, target_prefix: prefix } = this.settings.directions[direction];
    const config = { ...this.settings.search, beam_size: beamSize };
    const ends = splitEnds(source);
    const textCase = findCase(ends.middle);
    const numTagTokens = this.countTagTokens(tag);
    const translations = [];
    const pairs = [];
    let sentence = textCase ? toSentenceCase(ends.middle, this.source) : ends.middle;
    if (textCase === "upper") sentence = lowerPlaceholders(sentence);
    for (const ids of this.encodeParts(sentence, tag)) {
      const hypothesis = await this.searchWithoutLoops(ids, config, prefix);
      const tokens = hypothesis.tokens.slice(prefix.length);
      const alignment = hypothesis.alignment.slice(prefix.length).map((position) => position - numTagTokens);
      translations.push(this.target.decode(tokens));
      pairs.push(this.alignedPair(ids.slice(numTagTokens), tokens, alignment));
    }
    let text = applyCase(joinParts(translations), textCase);
    if (textCase === "upper") text = restorePlaceholders(text, source);
    return { text: addEnds(text, ends), pairs };
  }

  /** Return a sentence and its translation with the positions of their tokens, as in the JSON of nmt-serve. */
  alignedPair(sourceIds, tokens, alignment) {
    const source = this.source.decodeWithSpans(sourceIds);
    const target = this.target.decodeWithSpans(tokens);
    return { source: source.text, source_spans: source.spans, hypotheses: [{ ...target, alignment }] };
  }

  countTagTokens(tag) {
    return tag ? this.source.encode(tag).length : 0;
  }

  /** Return the ids of a line and its tag: one list, several for a long line, none for an empty one. */
  encodeParts(line, tag) {
    const numTagTokens = this.countTagTokens(tag);
    const encode = (text) => {
      const ids = this.source.encode(tag ? `${tag} ${text}` : text);
      return ids.length > numTagTokens ? ids : [];
    };
    const maxTokens = this.settings.max_source_length - 1; // without EOS
    const ids = encode(line);
    if (ids.length > maxTokens) return splitLine(line, maxTokens, encode);
    return ids.length ? [ids] : [];
  }

  /** Search; if the translation loops or meets the length limit, search once more without repeats. */
  async searchWithoutLoops(ids, config, prefix) {
    const first = await search(this.model, ids, config, prefix);
    const forbidsRepeats = config.no_repeat_ngram > 0 && config.no_repeat_ngram <= NGRAM_OF_SECOND_SEARCH;
    if (!config.loop_guard || forbidsRepeats || !needsSecondSearch(ids, first)) return first;
    const secondConfig = { ...config, no_repeat_ngram: NGRAM_OF_SECOND_SEARCH };
    const second = await search(this.model, ids, secondConfig, prefix);
    return isSecondBetter(ids, first, second) ? second : first;
  }
}
