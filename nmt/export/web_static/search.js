// Greedy and beam search for one sentence, as in nmt/search: the same hypotheses, scores and order of ties.
import { pruneThreshold, score } from "./scoring.js";

/**
 * A translation as token ids.
 * @typedef {Object} Hypothesis
 * @property {number[]} tokens - ids, EOS last when finished.
 * @property {number} logProb - sum over the tokens, in nats.
 * @property {number} score
 * @property {boolean} finished - whether it ends with EOS; false if the length limit cut it off.
 * @property {number[]} alignment - the source position that each token is aligned with; EOS is the last one.
 */

/**
 * Return the best translation of a sentence; with beam size 1, search greedily.
 * @param {Model} model
 * @param {number[]} source - source ids without EOS.
 * @param {Object} config - settings of search, named as in `SearchConfig`.
 * @param {number[]} prefix - ids that the translation is forced to begin with.
 * @returns {Promise<Hypothesis>}
 */
export async function search(model, source, config, prefix) {
  const task = {
    model,
    config,
    prefix,
    numSource: source.length,
    limit: lengthLimit(source, config, prefix, model.maxPositions),
    state: await model.start(source),
  };
  const best = config.beam_size === 1 ? await searchGreedily(task) : await searchWithBeam(task);
  if (!best || !Number.isFinite(best.logProb)) throw new Error("the model gives no probabilities");
  return best;
}

/** Return the greatest number of tokens of a translation, EOS included. */
function lengthLimit(source, config, prefix, maxPositions) {
  const limit = Math.floor(config.max_length_a * source.length) + config.max_length_b;
  return Math.min(Math.max(limit, config.min_length + 1, prefix.length + 1), maxPositions);
}

/** Return the output of `Model.step` for each hypothesis, constrained by the settings. */
async function step(task, hypotheses) {
  const { model, state, config, prefix } = task;
  const newest = hypotheses.map(({ tokens }) => tokens.at(-1) ?? model.bosId);
  const rows = await model.step(state, newest);
  const rules = { config, prefix, eosId: model.eosId };
  rows.forEach(({ logProbs }, i) => constrain(logProbs, hypotheses[i].tokens, rules));
  return rows;
}

/** Lower the log-probabilities of the token after `tokens` by the rules of the settings. */
function constrain(logProbs, tokens, { config, prefix, eosId }) {
  if (tokens.length < config.min_length) logProbs[eosId] = -Infinity;
  if (tokens.length < prefix.length) {
    const token = prefix[tokens.length];
    const value = logProbs[token];
    logProbs.fill(-Infinity);
    logProbs[token] = value;
    return;
  }
  if (config.repetition_penalty > 1) {
    for (const token of new Set(tokens)) logProbs[token] *= config.repetition_penalty;
  }
  if (config.no_repeat_ngram > 0) {
    for (const token of repeatedNext(tokens, config.no_repeat_ngram)) logProbs[token] = -Infinity;
  }
}

/** Return the tokens that would repeat an n-gram of `size` tokens. */
function repeatedNext(tokens, size) {
  const repeated = [];
  const start = tokens.length - size + 1; // of the newest size - 1 tokens
  for (let i = 0; i + size <= tokens.length; i++) {
    const isRepeated = tokens.slice(start).every((token, j) => tokens[i + j] === token);
    if (isRepeated) repeated.push(tokens[i + size - 1]);
  }
  return repeated;
}

/** Append the most probable token, the lowest id among equals, until EOS or the limit. */
async function searchGreedily(task) {
  let hypothesis = { tokens: [], positions: [], logProb: 0 };
  while (hypothesis.tokens.length < task.limit) {
    const [{ logProbs, position }] = await step(task, [hypothesis]);
    const [token] = findHighest(logProbs, 1);
    if (token === undefined) return null;
    hypothesis = {
      tokens: [...hypothesis.tokens, token],
      positions: [...hypothesis.positions, position],
      logProb: hypothesis.logProb + logProbs[token],
    };
    if (token === task.model.eosId) break;
  }
  return complete(hypothesis, task);
}

/**
 * Extend the beam by one token per step. Of the 2 K best continuations, those among the first K that end with
 * EOS are finished; the first K others become the new beam, without those that can no longer be the best.
 */
async function searchWithBeam(task) {
  const { model, config, limit } = task;
  const endsWithEos = ({ tokens }) => tokens.at(-1) === model.eosId;
  let best = null;
  let beam = [{ tokens: [], positions: [], logProb: 0, total: 0 }];
  const offer = (candidate) => {
    const hypothesis = complete(candidate, task);
    if (isBetter(hypothesis, best)) best = hypothesis;
  };
  for (let length = 1; length <= limit && beam.length; length++) {
    const rows = await step(task, beam);
    const ranking = rankContinuations(beam, rows, 2 * config.beam_size);
    for (const candidate of ranking.slice(0, config.beam_size)) {
      if (endsWithEos(candidate)) offer(candidate);
    }
    const unfinished = ranking.filter((candidate) => !endsWithEos(candidate));
    beam = unfinished.slice(0, config.beam_size);
    if (length === limit) {
      beam.forEach(offer);
      break;
    }
    if (best !== null) {
      const threshold = pruneThreshold(best.score, length, limit, config);
      beam = beam.filter(({ total }) => total > threshold);
    }
    model.reorder(task.state, beam.map(({ parent }) => parent));
  }
  return best;
}

/** Return whether a hypothesis replaces the best one: a finished one is better than an unfinished one. */
function isBetter(hypothesis, best) {
  if (best === null) return true;
  if (hypothesis.finished !== best.finished) return hypothesis.finished;
  return hypothesis.score > best.score;
}

/** Return the `Hypothesis` of a candidate, whose `positions` have the highest attention in each step. */
function complete({ tokens, positions, logProb }, { model, config, numSource }) {
  const finished = tokens.at(-1) === model.eosId;
  let alignment = positions;
  if (model.shiftsAlignment) { // a token is aligned in the step that reads it; no step reads the last one
    alignment = [...positions.slice(1), finished ? numSource : positions.at(-1)];
  }
  return { tokens, logProb, finished, alignment, score: score(logProb, tokens.length, config) };
}

/**
 * Return up to `count` continuations with the highest totals, best first. Among equal totals, lower rows come
 * first, then lower tokens. Totals are sums in float32, as in nmt.
 */
function rankContinuations(beam, rows, count) {
  const candidates = [];
  rows.forEach(({ logProbs, position }, parent) => {
    const hypothesis = beam[parent];
    for (const token of findHighest(logProbs, count)) {
      candidates.push({
        parent,
        tokens: [...hypothesis.tokens, token],
        positions: [...hypothesis.positions, position],
        logProb: hypothesis.logProb + logProbs[token],
        total: Math.fround(hypothesis.total + logProbs[token]),
      });
    }
  });
  candidates.sort((a, b) => b.total - a.total); // stable
  return candidates.slice(0, count);
}

/**
 * Return the indices of the `count` highest values above minus infinity, best first. Among equal values, lower
 * indices come first.
 */
function findHighest(values, count) {
  const indices = [];
  let threshold = -Infinity; // a value must exceed it to be among the highest so far
  for (let i = 0; i < values.length; i++) {
    if (!(values[i] > threshold)) continue; // also skips NaN
    let rank = indices.length;
    while (rank > 0 && values[indices[rank - 1]] < values[i]) rank--;
    indices.splice(rank, 0, i);
    if (indices.length > count) indices.pop();
    if (indices.length === count) threshold = values[indices.at(-1)];
  }
  return indices;
}
