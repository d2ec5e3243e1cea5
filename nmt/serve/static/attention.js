// A view of the attention weights of sentence pairs: small maps of all layers and heads, the chosen
// one enlarged, and lines between the tokens of both sides. Several heads of a layer can be shown at
// once, each in a color of its own. The page of the server and the pages of nmt-visualize use it.

const KIND_TITLES = {
  cross: "Target to source",
  encoder: "Within the source",
  decoder: "Within the target",
};
const KIND_SIDES = { // the tokens of the rows and of the columns
  cross: ["predicted", "src"],
  encoder: ["src", "src"],
  decoder: ["tgt", "tgt"],
};
const MEAN = -1; // the number of the mean of all heads
const HEAD_COLORS = [
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#3a8fc4", "#8a5fd0", "#7a7f85",
];
const MIN_WEIGHT = 0.02; // smaller weights get no line and are not listed
const MAX_LISTED = 6; // tokens in the description of a token

// sizes in pixels
const THUMBNAIL_SIZE = 52;
const MAP_MARGIN = 104; // for the labels of rows and columns
const MAP_TAIL = 46; // for the label of the last column, which leans to the right
const LINE_HEIGHT = 26; // of a token beside the lines
const LINES_WIDTH = 180;
const MAX_LABEL_LENGTH = 14; // characters

const HINT = "Keys: arrows change layer and head, M shows the mean of heads, H several heads, "
  + "1 2 3 the kind, W words or pieces, Escape lets go. A click holds a token.";

// --- data

// Return the number k + offset, wrapped around to 0 ... count - 1.
function wrap(k, offset, count) {
  return (k + offset + count) % count;
}

function decodeBytes(data) {
  if (typeof data !== "string") return data;
  return Uint8Array.from(atob(data), (character) => character.charCodeAt(0));
}

// Join pieces to text; pieces that are single bytes are decoded as UTF-8.
function joinPieces(pieces) {
  let bytes = [];
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

// The weights of one layer, for one head or the mean of several: `rows` and `columns` are labels, and
// `weights` is a flat array of rows.
class AttentionMap {
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
    this.words = words; // the number of the word of each piece, by side
    this.hasWords = Boolean(words);
    this.shapes = {};
    this.data = {};
    for (const [kind, { shape, data }] of Object.entries(maps)) {
      this.shapes[kind] = shape; // layers, heads, rows, columns
      this.data[kind] = decodeBytes(data); // 255 is a weight of 1
    }
    this.kinds = Object.keys(KIND_TITLES).filter((kind) => kind in maps);
  }

  shape(kind) {
    return this.shapes[kind];
  }

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

  pieceWeights(kind, layer, head) {
    const [, numHeads, height, width] = this.shapes[kind];
    const data = this.data[kind];
    const size = height * width;
    const heads = head === MEAN ? [...Array(numHeads).keys()] : [head];
    const weights = new Float32Array(size);
    for (const h of heads) {
      const start = (layer * numHeads + h) * size;
      for (let k = 0; k < size; k++) weights[k] += data[start + k] / 255 / heads.length;
    }
    return weights;
  }

  // A word attends with the mean of its pieces, and receives the sum of their weights.
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

function readPair(json) {
  return new Pair(json);
}

// --- drawing

function createElement(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Read the colors of the page: `shades` are 256 colors [r, g, b] from the paper to the accent.
function readPalette(element) {
  const style = getComputedStyle(element);
  const canvas = createElement("canvas");
  const context = canvas.getContext("2d", { willReadFrequently: true });
  function rgb(variable) {
    context.fillStyle = style.getPropertyValue(variable).trim();
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data].slice(0, 3);
  }
  const paper = rgb("--paper");
  const accent = rgb("--accent");
  const shades = Array.from({ length: 256 }, (_, i) => (
    paper.map((from, channel) => Math.round(from + (accent[channel] - from) * i / 255))
  ));
  return {
    shades,
    masked: rgb("--line"),
    ink: `rgb(${rgb("--ink").join()})`,
    accent: `rgb(${accent.join()})`,
  };
}

// Return a canvas with one pixel for each weight.
function drawPixels(map, palette) {
  const width = map.columns.length;
  const height = map.rows.length;
  const pixels = new ImageData(width, height);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const shade = Math.min(255, Math.round(map.weight(i, j) * 255));
      const color = map.isMasked(i, j) ? palette.masked : palette.shades[shade];
      pixels.data.set([...color, 255], 4 * (i * width + j));
    }
  }
  const canvas = createElement("canvas", { width, height });
  canvas.getContext("2d").putImageData(pixels, 0, 0);
  return canvas;
}

// Resize a canvas, and return a context that draws in CSS pixels.
function resize(canvas, width, height) {
  const scale = window.devicePixelRatio || 1;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  return context;
}

function shortenLabel(text) {
  const characters = Array.from(text);
  if (characters.length <= MAX_LABEL_LENGTH) return text;
  return `${characters.slice(0, MAX_LABEL_LENGTH - 1).join("")}…`;
}

export function cellSize(map) {
  const longest = Math.max(map.rows.length, map.columns.length);
  return Math.max(9, Math.min(24, Math.floor(620 / longest)));
}

// Draw the enlarged map with its labels. `row` and `column`, if not null, are framed.
function drawMap(canvas, map, palette, { row, column }) {
  const cell = cellSize(map);
  const width = map.columns.length * cell;
  const height = map.rows.length * cell;
  const context = resize(canvas, MAP_MARGIN + width + MAP_TAIL, MAP_MARGIN + height);
  context.imageSmoothingEnabled = false;
  context.drawImage(drawPixels(map, palette), MAP_MARGIN, MAP_MARGIN, width, height);
  context.font = `${Math.min(13, cell + 1)}px system-ui, sans-serif`;
  context.fillStyle = palette.ink;
  context.strokeStyle = palette.ink;
  context.textBaseline = "middle";
  context.textAlign = "right";
  map.rows.forEach((label, i) => {
    context.globalAlpha = row === null || row === i ? 1 : 0.45;
    context.fillText(shortenLabel(label), MAP_MARGIN - 6, MAP_MARGIN + (i + 0.5) * cell);
  });
  context.textAlign = "left";
  map.columns.forEach((label, j) => {
    context.globalAlpha = column === null || column === j ? 1 : 0.45;
    context.save();
    context.translate(MAP_MARGIN + (j + 0.5) * cell, MAP_MARGIN - 6);
    context.rotate(-Math.PI / 3);
    context.fillText(shortenLabel(label), 0, 0);
    context.restore();
  });
  context.globalAlpha = 1;
  if (row !== null) {
    context.strokeRect(MAP_MARGIN - 0.5, MAP_MARGIN + row * cell - 0.5, width + 1, cell + 1);
  }
  if (column !== null) {
    context.strokeRect(MAP_MARGIN + column * cell - 0.5, MAP_MARGIN - 0.5, cell + 1, height + 1);
  }
}

// Draw a line for each weight of `maps`, in the color of the map.
function drawLines(canvas, maps, colors, { row, column }) {
  const numLines = Math.max(maps[0].rows.length, maps[0].columns.length);
  const context = resize(canvas, LINES_WIDTH, numLines * LINE_HEIGHT);
  maps.forEach((map, k) => {
    context.strokeStyle = colors[k];
    const offset = 3 * (k - (maps.length - 1) / 2); // so that lines of several heads stay apart
    for (let i = 0; i < map.rows.length; i++) {
      for (let j = 0; j < map.columns.length; j++) {
        const weight = map.weight(i, j);
        const isChosen = (row === null || row === i) && (column === null || column === j);
        if (weight >= MIN_WEIGHT && isChosen) drawLine(context, i, j, weight, offset);
      }
    }
  });
}

function drawLine(context, row, column, weight, offset) {
  const start = (row + 0.5) * LINE_HEIGHT + offset;
  const end = (column + 0.5) * LINE_HEIGHT + offset;
  const middle = LINES_WIDTH / 2;
  context.globalAlpha = Math.min(1, weight);
  context.lineWidth = 0.5 + 4 * weight;
  context.beginPath();
  context.moveTo(0, start);
  context.bezierCurveTo(middle, start, middle, end, LINES_WIDTH, end);
  context.stroke();
}

// Describe in words the row or the column that is pointed at, the largest weights first.
function describe(map, { row, column }) {
  if (row === null && column === null) return "Point at a token, or move to it with Tab.";
  if (row !== null && column !== null) {
    const verb = map.isMasked(row, column) ? "may not attend to" : "attends to";
    const weight = map.weight(row, column).toFixed(3);
    return `${map.rows[row]} ${verb} ${map.columns[column]}: ${weight}`;
  }
  if (row !== null) {
    const weights = map.columns.map((_, j) => map.weight(row, j));
    return `${map.rows[row]} attends to ${listLargest(map.columns, weights)}`;
  }
  const weights = map.rows.map((_, i) => map.weight(i, column));
  return `${map.columns[column]} gets from ${listLargest(map.rows, weights)}`;
}

function listLargest(labels, weights) {
  const order = [...labels.keys()].sort((a, b) => weights[b] - weights[a]);
  const largest = order.slice(0, MAX_LISTED).filter((k) => weights[k] >= MIN_WEIGHT);
  if (!largest.length) return "nothing much";
  return largest.map((k) => `${labels[k]} ${weights[k].toFixed(2)}`).join(", ");
}

// --- the view

function headName(head) {
  return head === MEAN ? "mean of heads" : `head ${head + 1}`;
}

class AttentionView {
  // `load(i)` returns the JSON of pair i, or a promise of it; keys are read from `keyTarget`.
  constructor(container, titles, load, keyTarget) {
    this.container = container;
    this.load = load;
    this.numLoads = 0;
    this.pair = null;
    this.kind = "cross";
    this.layer = null; // null: the last one
    this.heads = [MEAN]; // the heads that are shown, only one unless `showsSeveral`
    this.showsSeveral = false;
    this.byWords = false;
    this.pointed = { row: null, column: null };
    this.isPinned = false;
    this.createElements(titles);
    this.listen(keyTarget);
  }

  createElements(titles) {
    this.sentenceSelect = createElement(
      "select",
      { ariaLabel: "Sentence", hidden: titles.length < 2 },
      ...titles.map((title, i) => new Option(title, i)),
    );
    this.kindButtons = createElement("div", { className: "kinds" });
    this.wordsButton = createElement("button", { type: "button", title: "W" });
    this.severalButton = createElement("button", { type: "button", title: "H", textContent: "Several heads" });
    this.grid = createElement("div", { className: "heads", role: "group", ariaLabel: "Layers and heads" });
    this.title = createElement("h3");
    this.legend = createElement("p", { className: "legend" });
    this.description = createElement("p", { className: "said", ariaLive: "polite" });
    this.enlarged = createElement("canvas", { className: "enlarged" });
    this.enlarged.setAttribute("role", "img");
    this.lines = createElement("canvas");
    this.rowTokens = createElement("div", { className: "tokens right" });
    this.columnTokens = createElement("div", { className: "tokens" });
    const choices = createElement(
      "div", { className: "choices" },
      this.sentenceSelect, this.kindButtons, this.wordsButton, this.severalButton,
    );
    const tokenLines = createElement(
      "div", { className: "lines scroll" }, this.rowTokens, this.lines, this.columnTokens,
    );
    const maps = createElement(
      "div", { className: "columns" },
      createElement("div", { className: "scroll" }, this.enlarged), tokenLines,
    );
    const detail = createElement(
      "div", { className: "detail" }, this.title, this.legend, this.description, maps,
    );
    const columns = createElement(
      "div", { className: "columns" }, createElement("div", { className: "scroll" }, this.grid), detail,
    );
    const hint = createElement("p", { className: "quiet", textContent: HINT });
    this.container.classList.add("attention");
    this.container.tabIndex = -1;
    this.container.replaceChildren(choices, hint, columns);
  }

  async open(number) {
    this.numLoads++;
    const load = this.numLoads;
    try {
      const json = await this.load(number);
      if (load !== this.numLoads) return; // another sentence was chosen in the meantime
      this.pair = readPair(json);
      const kind = this.pair.kinds.includes(this.kind) ? this.kind : this.pair.kinds[0];
      this.change({ kind });
      this.container.dataset.ready = number;
    } catch (error) {
      this.description.textContent = error.message;
    }
  }

  // Change properties of the view and draw it. Keeps the focus inside, where keys are received.
  change(properties) {
    const focused = document.activeElement;
    const hadFocus = this.container.contains(focused);
    const wasKindButton = this.kindButtons.contains(focused);
    Object.assign(this, properties);
    if ("kind" in properties) this.drawThumbnails();
    this.draw();
    if (!hadFocus || this.container.contains(document.activeElement)) return;
    let next = this.container; // the element with the focus was replaced
    if (wasKindButton) next = this.kindButtons.querySelector("[aria-pressed=true]");
    next.focus({ preventScroll: true });
  }

  drawThumbnails() {
    const [numLayers, numHeads] = this.pair.shape(this.kind);
    const heads = [...Array(numHeads).keys()];
    if (numHeads > 1) heads.unshift(MEAN);
    else this.heads = [0];
    this.palette = readPalette(this.container);
    this.grid.hidden = numLayers * numHeads === 1;
    this.grid.style.gridTemplateColumns = `auto repeat(${heads.length}, ${THUMBNAIL_SIZE}px)`;
    this.grid.replaceChildren(createElement("span"));
    for (const head of heads) {
      this.grid.append(createElement("span", { textContent: head === MEAN ? "mean" : head + 1 }));
    }
    for (let layer = 0; layer < numLayers; layer++) {
      this.grid.append(createElement("span", { textContent: layer + 1 }));
      for (const head of heads) this.grid.append(this.createThumbnail(layer, head));
    }
    this.kindButtons.hidden = this.pair.kinds.length < 2;
    this.kindButtons.replaceChildren(...this.pair.kinds.map((kind, i) => createElement(
      "button", { type: "button", value: kind, textContent: KIND_TITLES[kind], title: i + 1 },
    )));
  }

  createThumbnail(layer, head) {
    const name = `Layer ${layer + 1}, ${headName(head)}`;
    const canvas = drawPixels(this.pair.pick(this.kind, layer, head, false), this.palette);
    const button = createElement("button", { type: "button", title: name, ariaLabel: name }, canvas);
    button.dataset.layer = layer;
    button.dataset.head = head;
    return button;
  }

  // Draw all that depends on kind, layer, heads and words.
  draw() {
    const [numLayers, numHeads] = this.pair.shape(this.kind);
    this.layer = Math.min(this.layer ?? numLayers - 1, numLayers - 1);
    this.pointed = { row: null, column: null };
    this.isPinned = false;
    this.palette = readPalette(this.container);
    this.maps = this.heads.map((head) => (
      this.pair.pick(this.kind, this.layer, head, this.byWords)
    ));
    this.meanMap = this.meanOfMaps();
    this.title.textContent = "";
    if (numHeads > 1 || numLayers > 1) {
      const names = this.heads.map(headName).join(", ");
      this.title.textContent = `${KIND_TITLES[this.kind]}, layer ${this.layer + 1}, ${names}`;
    }
    const { rows, columns } = this.meanMap;
    this.enlarged.setAttribute(
      "aria-label", `${this.title.textContent}: a map of ${rows.length} rows and ${columns.length} columns`,
    );
    this.wordsButton.textContent = this.byWords ? "Show pieces" : "Show words";
    this.wordsButton.hidden = !this.pair.hasWords;
    this.severalButton.hidden = numHeads === 1;
    this.severalButton.setAttribute("aria-pressed", this.showsSeveral);
    this.drawTokens(this.rowTokens, rows, "row");
    this.drawTokens(this.columnTokens, columns, "column");
    this.drawLegend();
    this.markButtons();
    this.drawPointed();
  }

  // Return the mean of the heads that are shown, which the enlarged map draws.
  meanOfMaps() {
    const [first] = this.maps;
    if (this.maps.length === 1) return first;
    const weights = new Float32Array(first.weights.length);
    for (const map of this.maps) {
      map.weights.forEach((weight, k) => { weights[k] += weight / this.maps.length; });
    }
    return new AttentionMap(first.kind, first.rows, first.columns, weights);
  }

  headColor(head) {
    if (!this.showsSeveral || head === MEAN) return this.palette.accent;
    return HEAD_COLORS[head % HEAD_COLORS.length];
  }

  drawTokens(box, labels, side) {
    box.replaceChildren(...labels.map((label, number) => {
      const token = createElement(
        "span", { className: "token", textContent: label, tabIndex: 0, dir: "auto" },
      );
      token.dataset.side = side;
      token.dataset.number = number;
      return token;
    }));
  }

  // In the view of several heads, list them with their colors; a click shows or hides a head.
  drawLegend() {
    const [, numHeads] = this.pair.shape(this.kind);
    this.legend.hidden = !this.showsSeveral;
    this.legend.replaceChildren();
    if (!this.showsSeveral) return;
    for (let head = 0; head < numHeads; head++) {
      const button = createElement("button", { type: "button", textContent: `head ${head + 1}` });
      button.dataset.head = head;
      button.setAttribute("aria-pressed", this.heads.includes(head));
      button.style.setProperty("--head", this.headColor(head));
      this.legend.append(button);
    }
  }

  markButtons() {
    for (const button of this.kindButtons.children) {
      button.setAttribute("aria-pressed", button.value === this.kind);
    }
    for (const button of this.grid.querySelectorAll("button")) {
      const isLayer = Number(button.dataset.layer) === this.layer;
      const isChosen = isLayer && this.heads.includes(Number(button.dataset.head));
      button.setAttribute("aria-pressed", isChosen);
    }
  }

  // Draw all that depends on the token that is pointed at.
  drawPointed() {
    const { row, column } = this.pointed;
    drawMap(this.enlarged, this.meanMap, this.palette, this.pointed);
    drawLines(this.lines, this.maps, this.heads.map((head) => this.headColor(head)), this.pointed);
    this.description.textContent = describe(this.meanMap, this.pointed);
    [...this.rowTokens.children].forEach((token, i) => {
      token.classList.toggle("lit", row === i);
      const weight = column === null || row !== null ? 0 : this.meanMap.weight(i, column);
      this.underline(token, weight);
    });
    [...this.columnTokens.children].forEach((token, j) => {
      token.classList.toggle("lit", column === j);
      const weight = row === null || column !== null ? 0 : this.meanMap.weight(row, j);
      this.underline(token, weight);
    });
  }

  // Underline a token; the height of the line shows the weight.
  underline(token, weight) {
    token.style.boxShadow = "";
    if (weight >= MIN_WEIGHT) {
      const height = Math.ceil(14 * weight);
      token.style.boxShadow = `inset 0 -${height}px 0 color-mix(in srgb, var(--accent) 33%, transparent)`;
    }
  }

  // Choose a head in a layer. With several heads, a head of the same layer is added or removed.
  chooseHead(layer, head) {
    if (!this.showsSeveral || head === MEAN) {
      this.change({ layer, heads: [head], showsSeveral: this.showsSeveral && head !== MEAN });
      return;
    }
    let heads = this.heads.filter((number) => number !== MEAN);
    if (layer === this.layer) {
      const isShown = heads.includes(head);
      heads = isShown ? heads.filter((number) => number !== head) : [...heads, head];
    }
    if (!heads.length) heads = [head];
    this.change({ layer, heads: heads.sort((a, b) => a - b) });
  }

  // Switch between one head and all heads in colors of their own.
  toggleSeveral() {
    const [, numHeads] = this.pair.shape(this.kind);
    if (numHeads === 1) return;
    if (this.showsSeveral) {
      this.change({ showsSeveral: false, heads: [MEAN] });
    } else {
      this.change({ showsSeveral: true, heads: [...Array(numHeads).keys()] });
    }
  }

  point(row, column, isPinned = false) {
    if (this.isPinned && !isPinned) return;
    this.pointed = { row, column };
    this.isPinned = isPinned;
    this.drawPointed();
  }

  // Return the row and column of the enlarged map under the pointer, null outside.
  cellAt(event) {
    const cell = cellSize(this.meanMap);
    const row = Math.floor((event.offsetY - MAP_MARGIN) / cell);
    const column = Math.floor((event.offsetX - MAP_MARGIN) / cell);
    const isRow = row >= 0 && row < this.meanMap.rows.length;
    const isColumn = column >= 0 && column < this.meanMap.columns.length;
    return [isRow ? row : null, isColumn ? column : null];
  }

  listen(keyTarget) {
    this.sentenceSelect.addEventListener("change", () => this.open(Number(this.sentenceSelect.value)));
    this.kindButtons.addEventListener("click", ({ target }) => {
      if (target.value) this.change({ kind: target.value });
    });
    this.wordsButton.addEventListener("click", () => this.change({ byWords: !this.byWords }));
    this.severalButton.addEventListener("click", () => this.toggleSeveral());
    this.grid.addEventListener("click", (event) => {
      const button = event.target.closest("button");
      if (button) this.chooseHead(Number(button.dataset.layer), Number(button.dataset.head));
    });
    this.legend.addEventListener("click", ({ target }) => {
      if (target.dataset.head) this.chooseHead(this.layer, Number(target.dataset.head));
    });
    this.enlarged.addEventListener("mousemove", (event) => this.point(...this.cellAt(event)));
    this.enlarged.addEventListener("click", (event) => (
      this.point(...this.cellAt(event), !this.isPinned)
    ));
    this.enlarged.addEventListener("mouseleave", () => this.point(null, null));
    this.listenToTokens(this.rowTokens);
    this.listenToTokens(this.columnTokens);
    keyTarget.addEventListener("keydown", (event) => this.handleKey(event));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      if (this.pair) this.change({ kind: this.kind });
    });
  }

  listenToTokens(box) {
    const pointAtToken = (event, isPinned) => {
      const token = event.target.closest?.(".token");
      if (!token) return;
      const number = Number(token.dataset.number);
      if (token.dataset.side === "row") this.point(number, null, isPinned);
      else this.point(null, number, isPinned);
    };
    box.addEventListener("mouseover", (event) => pointAtToken(event, false));
    box.addEventListener("focusin", (event) => pointAtToken(event, false));
    box.addEventListener("mouseleave", () => this.point(null, null));
    box.addEventListener("click", (event) => pointAtToken(event, !this.isPinned));
  }

  handleKey(event) {
    const hasModifier = event.ctrlKey || event.altKey || event.metaKey;
    if (!this.pair || hasModifier || event.target.tagName === "SELECT") return;
    const [numLayers, numHeads] = this.pair.shape(this.kind);
    const actions = {
      ArrowUp: () => this.change({ layer: wrap(this.layer, -1, numLayers) }),
      ArrowDown: () => this.change({ layer: wrap(this.layer, 1, numLayers) }),
      ArrowLeft: () => this.moveHead(-1),
      ArrowRight: () => this.moveHead(1),
      m: () => this.chooseHead(this.layer, numHeads > 1 ? MEAN : 0),
      h: () => this.toggleSeveral(),
      w: () => this.change({ byWords: this.pair.hasWords && !this.byWords }),
      Escape: () => this.change({}),
    };
    this.pair.kinds.forEach((kind, i) => {
      actions[i + 1] = () => this.change({ kind });
    });
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  }

  // Show the next head alone, or the one before; after the mean comes the first one.
  moveHead(offset) {
    const [, numHeads] = this.pair.shape(this.kind);
    const current = this.heads.at(-1);
    let head = wrap(current, offset, numHeads);
    if (current === MEAN) head = offset > 0 ? 0 : numHeads - 1;
    this.change({ heads: [head] });
  }
}

// Show the attention of pairs in `container`; `load(i)` returns pair i or a promise of it.
export function explore(container, titles, load, keyTarget = container) {
  const view = new AttentionView(container, titles, load, keyTarget);
  return view.open(0);
}

// --- on the page of the server

// Return a pair from the alignment of a sentence: a target token has a weight of 1 for the source
// token that it attends to most.
function alignmentPair({ source_tokens: src = [], hypotheses: [{ alignment = [], tokens = [] }] }) {
  const data = new Uint8Array(tokens.length * src.length);
  alignment.forEach((column, row) => { data[row * src.length + column] = 255; });
  const shape = [1, 1, tokens.length, src.length];
  return { src, predicted: tokens, maps: { cross: { shape, data } } };
}

// Show the attention of translated sentences in `container` once the details element `box` opens.
export function showAttention(box, container, sentences, { source, target, shape, ask }) {
  const translated = sentences.filter(({ hypotheses: [best] }) => best.text && best.tokens?.length);
  const titles = translated.map(({ source: text, hypotheses: [best] }) => `${text} → ${best.text}`);
  function load(i) {
    if (!shape) return alignmentPair(translated[i]);
    const { source: text, hypotheses: [best] } = translated[i];
    return ask("/v1/attention", { kind: "all", text, translation: best.text, source, target });
  }
  const view = createElement("div"); // a new one, without the listeners of the text before
  container.replaceChildren(view);
  let isShown = false;
  box.ontoggle = () => {
    if (!box.open || isShown || !translated.length) return;
    isShown = true;
    explore(view, titles, load);
  };
  box.ontoggle();
}
