// The attention weights of sentence pairs, as the view in attention.js shows them.

export const KIND_TITLES = {
  cross: "Target to source",
  encoder: "Within the source",
  decoder: "Within the target",
};
const KIND_SIDES = { // the tokens of the rows and of the columns
  cross: ["predicted", "src"],
  encoder: ["src", "src"],
  decoder: ["tgt", "tgt"],
};
export const MEAN = -1; // instead of the number of a head, for the mean of all heads
export const MAX_BYTE = 255; // in the data of a pair, a weight of 1

// Return bytes that are given as base64 or as an array.
function decodeBytes(data) {
  if (typeof data !== "string") return data;
  return Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
}

// Join pieces to text. Pieces that are single bytes, such as <0xE2>, are decoded as UTF-8.
function joinPieces(pieces) {
  let bytes = []; // of neighboring pieces
  let text = "";
  function flushBytes() {
    text += new TextDecoder().decode(new Uint8Array(bytes));
    bytes = [];
  }
  for (const piece of pieces) {
    const byte = /^<0x([0-9A-F]{2})>$/.exec(piece);
    if (byte) {
      bytes.push(parseInt(byte[1], 16));
    } else {
      flushBytes();
      text += piece;
    }
  }
  flushBytes();
  return text.replaceAll("\u2581", " ").trim() || "␣";
}

// The weights of a head, or the mean of several heads, in one layer. `rows` and `columns` are labels,
// and `weights` is a flat array, row by row.
export class AttentionMap {
  constructor(kind, rows, columns, weights) {
    this.kind = kind;
    this.rows = rows;
    this.columns = columns;
    this.weights = weights;
  }

  weight(row, column) {
    return this.weights[row * this.columns.length + column];
  }

  isMasked(row, column) {
    return this.kind === "decoder" && column > row;
  }
}

// The attention of one sentence pair, from the JSON of `PairAttention.as_json`.
class Pair {
  constructor({ src, tgt, predicted, words, maps }) {
    this.pieces = { src, tgt, predicted };
    this.words = words; // for each side, the number of the word of each piece
    this.hasWords = Boolean(words);
    this.shapes = {}; // by kind: numbers of layers, heads, rows and columns
    this.data = {}; // by kind: a flat array of bytes
    for (const [kind, { shape, data }] of Object.entries(maps)) {
      this.shapes[kind] = shape;
      this.data[kind] = decodeBytes(data);
    }
    this.kinds = Object.keys(KIND_TITLES).filter((kind) => kind in maps);
  }

  shape(kind) {
    return this.shapes[kind];
  }

  // Return the pieces of a side, or the words that they form.
  labels(side, byWords) {
    const pieces = this.pieces[side];
    if (!byWords) return pieces;
    const groups = [];
    pieces.forEach((piece, i) => {
      const word = this.words[side][i];
      groups[word] ??= [];
      groups[word].push(piece);
    });
    return groups.map(joinPieces);
  }

  // Return the `AttentionMap` of one head, or of the mean of all heads for MEAN.
  pick(kind, layer, head, byWords) {
    const [rowSide, columnSide] = KIND_SIDES[kind];
    const rows = this.labels(rowSide, byWords);
    const columns = this.labels(columnSide, byWords);
    let weights = this.pieceWeights(kind, layer, head);
    if (byWords) {
      weights = this.wordWeights(kind, weights, rows.length, columns.length);
    }
    return new AttentionMap(kind, rows, columns, weights);
  }

  // Return the weights between pieces as a flat array, for one head or the mean of all heads.
  pieceWeights(kind, layer, head) {
    const [, numHeads, height, width] = this.shapes[kind];
    const data = this.data[kind];
    const size = height * width;
    const heads = head === MEAN ? [...Array(numHeads).keys()] : [head];
    const weights = new Float32Array(size);
    for (const h of heads) {
      const start = (layer * numHeads + h) * size;
      for (let k = 0; k < size; k++) weights[k] += data[start + k] / MAX_BYTE / heads.length;
    }
    return weights;
  }

  // Return the weights between words: the mean over the pieces of the word that attends, and the sum
  // over the pieces of the word that is attended to.
  wordWeights(kind, weights, numRows, numColumns) {
    const [, , height, width] = this.shapes[kind];
    const [rowSide, columnSide] = KIND_SIDES[kind];
    const rowWords = this.words[rowSide];
    const columnWords = this.words[columnSide];
    const numPieces = new Float32Array(numRows);
    for (const word of rowWords) numPieces[word]++;
    const merged = new Float32Array(numRows * numColumns);
    for (let i = 0; i < height; i++) {
      for (let j = 0; j < width; j++) {
        const index = rowWords[i] * numColumns + columnWords[j];
        merged[index] += weights[i * width + j] / numPieces[rowWords[i]];
      }
    }
    return merged;
  }
}

export function readPair(json) {
  return new Pair(json);
}
