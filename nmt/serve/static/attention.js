// A view of the attention weights of sentence pairs: thumbnails of all layers and heads, an enlarged
// map of the chosen head, and lines between the tokens of both sides. Several heads of a layer can be
// shown at once, each in another color. The page of the server and the pages of nmt-visualize have
// this view.

import {
  cellSize, createElement, describe, drawLines, drawMap, drawPixels, MAP_MARGIN, MIN_WEIGHT, readPalette,
} from "/static/attention_drawing.js";
import { AttentionMap, KIND_TITLES, MEAN, readPair } from "/static/attention_maps.js";

const HEAD_COLORS = [
  "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b07800", "#3a8fc4", "#8a5fd0", "#7a7f85",
];
const THUMBNAIL_SIZE = 52; // pixels
const UNDERLINE_HEIGHT = 14; // pixels, of a weight of 1
const HINT = "Keys: arrows change layer and head, M shows the mean of heads, H several heads, "
  + "1 2 3 the kind, W words or pieces, Escape lets go. A click holds a token.";

// Return the number k + offset, wrapped around to 0 ... count - 1.
function wrap(k, offset, count) {
  return (k + offset + count) % count;
}

function headName(head) {
  return head === MEAN ? "mean of heads" : `head ${head + 1}`;
}

class AttentionView {
  // `load(i)` returns the JSON of pair i, or a promise of it. `keyTarget` is the element whose key
  // events are handled.
  constructor(container, titles, load, keyTarget) {
    this.container = container;
    this.load = load;
    this.numLoads = 0;
    this.pair = null;
    this.kind = "cross";
    this.layer = null; // null: the last layer
    this.heads = [MEAN]; // the heads that are shown, only one unless `showsSeveral`
    this.showsSeveral = false;
    this.byWords = false;
    this.pointed = { row: null, column: null }; // the token or cell that is pointed at
    this.isPinned = false; // whether a click holds `pointed`
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

  // Load a pair and show it.
  async open(number) {
    this.numLoads++;
    const loadNumber = this.numLoads;
    try {
      const json = await this.load(number);
      if (loadNumber !== this.numLoads) return; // another sentence was chosen in the meantime
      this.pair = readPair(json);
      const kind = this.pair.kinds.includes(this.kind) ? this.kind : this.pair.kinds[0];
      this.change({ kind });
      this.container.dataset.ready = number;
    } catch (error) {
      this.description.textContent = error.message;
    }
  }

  // Change properties of the view and draw it. Keeps the focus in the view, which handles keys.
  change(properties) {
    const focused = document.activeElement;
    const hadFocus = this.container.contains(focused);
    const wasKindButton = this.kindButtons.contains(focused);
    Object.assign(this, properties);
    if ("kind" in properties) this.drawThumbnails();
    this.draw();
    if (!hadFocus || this.container.contains(document.activeElement)) return;
    // the element with the focus was replaced
    let next = this.container;
    if (wasKindButton) next = this.kindButtons.querySelector("[aria-pressed=true]");
    next.focus({ preventScroll: true });
  }

  // Draw the thumbnails of all layers and heads, and the buttons of the kinds.
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

  // Draw all parts that depend on kind, layer, heads and words.
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

  // Return the mean of the heads that are shown, for the enlarged map.
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

  // With several heads, list all heads with their colors. A click shows or hides a head.
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

  // Mark the buttons of the kind, layer and heads that are shown.
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

  // Draw all parts that depend on the token that is pointed at.
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

  // Underline a token with a line whose height shows the weight.
  underline(token, weight) {
    token.style.boxShadow = "";
    if (weight >= MIN_WEIGHT) {
      const height = Math.ceil(UNDERLINE_HEIGHT * weight);
      token.style.boxShadow = `inset 0 -${height}px 0 color-mix(in srgb, var(--accent) 33%, transparent)`;
    }
  }

  // Show a head of a layer. With several heads, adds or removes a head of the same layer.
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

  // Switch between the mean and all heads, each in another color.
  toggleSeveral() {
    const [, numHeads] = this.pair.shape(this.kind);
    if (numHeads === 1) return;
    if (this.showsSeveral) {
      this.change({ showsSeveral: false, heads: [MEAN] });
    } else {
      this.change({ showsSeveral: true, heads: [...Array(numHeads).keys()] });
    }
  }

  // Point at a row, a column or a cell. Does nothing while another one is pinned.
  point(row, column, isPinned = false) {
    if (this.isPinned && !isPinned) return;
    this.pointed = { row, column };
    this.isPinned = isPinned;
    this.drawPointed();
  }

  // Return the row and column of the enlarged map under the pointer, or null outside of the map.
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

  // Show the next or previous head. The mean is before the first head.
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

// Return a pair from the alignment of a sentence. A target token has a weight of 1 for its source
// token, and of 0 for the others.
function alignmentPair({ source_tokens: src = [], hypotheses: [{ alignment = [], tokens = [] }] }) {
  const data = new Uint8Array(tokens.length * src.length);
  alignment.forEach((column, row) => { data[row * src.length + column] = 255; });
  const shape = [1, 1, tokens.length, src.length];
  return { src, predicted: tokens, maps: { cross: { shape, data } } };
}

// Show the attention of translated sentences in `container` when the details element `box` opens.
// `shape` is undefined if the server cannot compute attention; then, shows the alignment.
export function showAttention(box, container, sentences, { source, target, shape, ask }) {
  const translated = sentences.filter(({ hypotheses: [best] }) => best.text && best.tokens?.length);
  const titles = translated.map(({ source: text, hypotheses: [best] }) => `${text} → ${best.text}`);
  function load(i) {
    if (!shape) return alignmentPair(translated[i]);
    const { source: text, hypotheses: [best] } = translated[i];
    return ask("/v1/attention", { kind: "all", text, translation: best.text, source, target });
  }
  const view = createElement("div"); // a new element, without the listeners of an earlier text
  container.replaceChildren(view);
  let isShown = false;
  box.ontoggle = () => {
    if (!box.open || isShown || !translated.length) return;
    isShown = true;
    explore(view, titles, load);
  };
  box.ontoggle();
}
