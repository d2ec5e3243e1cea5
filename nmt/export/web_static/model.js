// The exported model: `encoder.onnx` and `decoder.onnx`, run by ONNX Runtime Web in WebAssembly.
import * as ort from "./runtime/ort.wasm.bundle.min.mjs";

// L decoder layers, R hypotheses, K heads of keys and values, T cached tokens, d dimensions of a head,
// V vocab

/** A translation model. */
export class Model {
  /**
   * @param {Object} settings - `model/settings.json`.
   * @param {Object} files - contents of `encoder.onnx`, `decoder.onnx` and the WebAssembly of the runtime.
   * @returns {Promise<Model>}
   */
  static async load(settings, { encoder, decoder, wasm }) {
    ort.env.wasm.numThreads = 1; // several threads need headers that static hosts do not send
    ort.env.wasm.wasmBinary = wasm;
    const model = new Model();
    model.bosId = settings.target_bos_id;
    model.eosId = settings.target_eos_id;
    model.shiftsAlignment = settings.alignment_shift;
    model.maxPositions = settings.max_positions;
    model.sourceEnd = settings.source_eos ? [settings.source_eos_id] : [];
    model.encoder = await ort.InferenceSession.create(encoder);
    model.decoder = await ort.InferenceSession.create(decoder);
    return model;
  }

  /** Encode source ids, and return the state of a search: one hypothesis without tokens. */
  async start(source) {
    const ids = [...source, ...this.sourceEnd];
    const mask = new ort.Tensor("bool", new Uint8Array(ids.length).fill(1), [1, ids.length]);
    const output = await this.encoder.run({ source: idTensor(ids, [1, ids.length]), source_mask: mask });
    const [numLayers, , numHeads, , headSize] = output.source_keys.dims;
    const empty = new ort.Tensor("float32", new Float32Array(0), [numLayers, 1, numHeads, 0, headSize]);
    return {
      mask,
      sourceKeys: output.source_keys,
      sourceValues: output.source_values,
      keys: empty,
      values: empty,
    };
  }

  /**
   * Append a token to each hypothesis of a state.
   * @returns {Promise<{logProbs: Float32Array, position: number}[]>} for each hypothesis, the log-probabilities
   *   (V) of the next token, and the source position with the highest attention.
   */
  async step(state, tokens) {
    const output = await this.decoder.run({
      tokens: idTensor(tokens, [tokens.length]),
      source_mask: state.mask, // of one sentence, broadcast to all hypotheses, as are its keys and values
      source_keys: state.sourceKeys,
      source_values: state.sourceValues,
      past_keys: state.keys,
      past_values: state.values,
    });
    state.keys = output.keys;
    state.values = output.values;
    return tokens.map((_, i) => {
      const attention = rowOf(output.source_attention, i);
      return { logProbs: rowOf(output.log_probs, i), position: attention.indexOf(Math.max(...attention)) };
    });
  }

  /** Replace the hypotheses of a state by those at `rows`; a row may be repeated or missing. */
  reorder(state, rows) {
    state.keys = selectRows(state.keys, rows);
    state.values = selectRows(state.values, rows);
  }
}

/** Return the values of a row of a matrix. */
function rowOf({ data, dims: [, numColumns] }, row) {
  return data.subarray(row * numColumns, (row + 1) * numColumns);
}

function idTensor(ids, dims) {
  return new ort.Tensor("int64", BigInt64Array.from(ids, BigInt), dims);
}

/** Return the rows of a cache (L, R, K, T, d) as a cache of the same form. */
function selectRows(cache, rows) {
  const [numLayers, numRows, ...rowDims] = cache.dims;
  const rowSize = rowDims.reduce((product, size) => product * size, 1);
  const data = new Float32Array(numLayers * rows.length * rowSize);
  for (let layer = 0; layer < numLayers; layer++) {
    rows.forEach((row, i) => {
      const start = (layer * numRows + row) * rowSize;
      data.set(cache.data.subarray(start, start + rowSize), (layer * rows.length + i) * rowSize);
    });
  }
  return new ort.Tensor("float32", data, [numLayers, rows.length, ...rowDims]);
}
