// The two algorithms by which SentencePiece cuts normalized text into pieces: BPE and unigram.

const UNKNOWN_PENALTY = 10; // the score of an unknown character is this much below the lowest score
const SYMBOL_PENALTY = 0.1;

/** Cuts text by BPE, as in SentencePiece's bpe_model.cc. */
export class BpeSegmenter {
  /**
   * @param {Map<string, number>} scores - score of each piece.
   * @param {string[]} symbols - user-defined pieces, which are never merged with others.
   */
  constructor(scores, symbols) {
    this.scores = scores;
    this.symbols = symbols;
  }

  /**
   * Merge the two neighbors whose merged piece has the highest score, the first among equals, until no two
   * neighbors form a piece.
   * @param {string} text - normalized text.
   * @returns {string[]} pieces and unknown characters.
   */
  segment(text) {
    const parts = this.splitCharacters(text);
    const pairScores = parts.map((_, i) => this.scorePair(parts, i)); // of each part and the next one
    for (;;) {
      let best = 0;
      pairScores.forEach((score, i) => {
        if (score > pairScores[best]) best = i;
      });
      if (!(pairScores[best] > -Infinity)) return parts.map((part) => part.text);
      parts[best] = { text: parts[best].text + parts[best + 1].text, isSymbol: false };
      parts.splice(best + 1, 1);
      pairScores.splice(best + 1, 1);
      pairScores[best] = this.scorePair(parts, best);
      if (best > 0) pairScores[best - 1] = this.scorePair(parts, best - 1);
    }
  }

  /** Cut text into characters and user-defined symbols. */
  splitCharacters(text) {
    const parts = [];
    let position = 0;
    while (position < text.length) {
      let symbol = "";
      for (const candidate of this.symbols) {
        if (candidate.length > symbol.length && text.startsWith(candidate, position)) symbol = candidate;
      }
      const part = symbol || String.fromCodePoint(text.codePointAt(position));
      parts.push({ text: part, isSymbol: symbol !== "" });
      position += part.length;
    }
    return parts;
  }

  /** Return the score of the piece that part i and the next one form; minus infinity if they form none. */
  scorePair(parts, i) {
    const next = parts[i + 1];
    if (next === undefined || parts[i].isSymbol || next.isSymbol) return -Infinity;
    return this.scores.get(parts[i].text + next.text) ?? -Infinity;
  }
}

/** Cuts text into the pieces with the highest sum of scores, as in SentencePiece's unigram_model.cc. */
export class UnigramSegmenter {
  /**
   * @param {Map<string, number>} scores - score of each piece.
   * @param {string[]} symbols - user-defined pieces, which are preferred to all others.
   */
  constructor(scores, symbols) {
    this.scores = new Map(scores);
    let highest = -Infinity;
    let lowest = Infinity;
    this.longest = 1; // number of UTF-16 units of the longest piece
    for (const [piece, score] of scores) {
      this.longest = Math.max(this.longest, piece.length);
      if (symbols.includes(piece)) continue;
      highest = Math.max(highest, score);
      lowest = Math.min(lowest, score);
    }
    for (const symbol of symbols) {
      const numBytes = new TextEncoder().encode(symbol).length;
      this.scores.set(symbol, Math.fround(numBytes * highest) - SYMBOL_PENALTY);
    }
    this.unknownScore = Math.fround(lowest - UNKNOWN_PENALTY);
  }

  /**
   * Find the best pieces (Viterbi). Sums are rounded to float32, as in SentencePiece, so that ties are broken
   * in the same way.
   * @param {string} text - normalized text.
   * @returns {string[]} pieces and unknown characters.
   */
  segment(text) {
    const characters = Array.from(text);
    const best = [{ start: 0, total: 0 }]; // start and total score of the best piece that ends at a position
    const propose = (start, end, total) => {
      const isBest = best[end] === undefined || total > best[end].total;
      if (isBest) best[end] = { start, total: Math.fround(total) };
    };
    for (let start = 0; start < characters.length; start++) {
      const { total } = best[start];
      let piece = "";
      for (let end = start + 1; end <= characters.length && piece.length < this.longest; end++) {
        piece += characters[end - 1];
        const score = this.scores.get(piece);
        if (score !== undefined) propose(start, end, total + score);
      }
      const isUnknown = !this.scores.has(characters[start]);
      if (isUnknown) propose(start, start + 1, Math.fround(total + this.unknownScore));
    }
    const pieces = [];
    for (let end = characters.length; end > 0; end = best[end].start) {
      pieces.unshift(characters.slice(best[end].start, end).join(""));
    }
    return pieces;
  }
}
