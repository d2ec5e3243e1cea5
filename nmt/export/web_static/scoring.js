// Scores of hypotheses, as in nmt/search/scoring.py; docs/search.md derives the formulas.

/** Return the divisor of the log-probability of a number of tokens, EOS included. */
export function normalizer(length, config) {
  if (config.normalization === "wu") return ((5 + length) / 6) ** config.length_penalty;
  return config.normalization === "average" ? length : 1;
}

/** Return (logProb + reward * length) / normalizer(length). */
export function score(logProb, length, config) {
  return (logProb + config.word_reward * length) / normalizer(length, config);
}

/**
 * Return the log-probability that a live hypothesis must exceed to have a better score later.
 * @param {number} worstScore - the score to exceed.
 * @param {number} length - number of tokens of the hypothesis, which can end with its next token.
 * @param {number} limit - greatest number of tokens; matters with `stop=exact`.
 */
export function pruneThreshold(worstScore, length, limit, config) {
  const { length_penalty: alpha, word_reward: reward } = config;
  const shortest = length + 1;
  const lengths = [shortest];
  if (config.stop === "exact") {
    const longest = Math.max(limit, shortest);
    lengths.push(longest);
    if (config.normalization === "wu" && reward !== 0 && alpha !== 0 && alpha !== 1) {
      // where the derivative of worstScore * normalizer(l) - reward * l is 0; NaN if it is 0 nowhere
      let extremum = 6 * ((6 * reward) / (worstScore * alpha)) ** (1 / (alpha - 1)) - 5;
      if (!Number.isFinite(extremum)) extremum = shortest;
      extremum = Math.min(Math.max(extremum, shortest), longest);
      lengths.push(Math.floor(extremum), Math.ceil(extremum));
    }
  }
  return Math.min(...lengths.map((l) => worstScore * normalizer(l, config) - reward * l));
}
