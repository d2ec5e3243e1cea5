// Find translations that repeat the same tokens again and again, as in nmt/translate/loops.py.

const MAX_REPEATS = 4; // a translation with more repeats in a row than this loops
export const NGRAM_OF_SECOND_SEARCH = 4; // `no_repeat_ngram` when a looping translation is searched again

/** Return whether a translation loops or met the length limit. */
export function needsSecondSearch(source, hypothesis) {
  return !hypothesis.finished || isLooping(source, hypothesis.tokens);
}

/**
 * Return whether the second translation is better than the first one: one that does not loop is better, then
 * the one with the higher log-probability per token.
 */
export function isSecondBetter(source, first, second) {
  const firstLoops = isLooping(source, first.tokens);
  if (firstLoops !== isLooping(source, second.tokens)) return firstLoops;
  return second.logProb / second.tokens.length > first.logProb / first.tokens.length;
}

/** Return whether the target repeats tokens more often in a row than `MAX_REPEATS` and than the source. */
function isLooping(source, target) {
  return countRepeats(target) > Math.max(MAX_REPEATS, countRepeats(source));
}

/** Return how many times in a row any sequence of tokens occurs: 3 in `x a b a b a b`. */
function countRepeats(tokens) {
  let numRepeats = Math.min(tokens.length, 1);
  for (let period = 1; period <= tokens.length / 2; period++) {
    let run = 0; // number of tokens in a row that equal the token one period later
    for (let i = 0; i + period < tokens.length; i++) {
      run = tokens[i] === tokens[i + period] ? run + 1 : 0;
      numRepeats = Math.max(numRepeats, Math.floor(run / period) + 1);
    }
  }
  return numRepeats;
}
