// The attention of every layer and head of sentence pairs, to walk through: small maps of all heads,
// the chosen one enlarged, and lines between its tokens. Also part of the page of nmt-visualize.

const KINDS = { cross: "Target to source", encoder: "Within the source", decoder: "Within the target" };
const MEAN = -1; // in the place of a head
const THUMBNAIL = 52, MARGIN = 104, TAIL = 46, LINE = 26; // pixels; TAIL is for the last name, which leans
const SEEN = 0.02; // weights below draw no line

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// Return pieces as text; single bytes are put together to characters.
function join(pieces) {
  let bytes = [], text = "";
  const flush = () => { text += new TextDecoder().decode(new Uint8Array(bytes)); bytes = []; };
  for (const piece of pieces) {
    const byte = /^<0x([0-9A-F]{2})>$/.exec(piece);
    if (byte) { bytes.push(parseInt(byte[1], 16)); continue; }
    flush();
    text += piece;
  }
  flush();
  return text.replaceAll("\u2581", " ").trim() || "␣";
}

function bytes(data) {
  return typeof data === "string" ? Uint8Array.from(atob(data), (c) => c.charCodeAt(0)) : data;
}

// Return what `pick(kind, layer, head, byWords)` needs of a pair: names, and weights from 0 to 1 by row.
function readPair({ src, tgt, predicted, words, maps }) {
  const decoded = Object.fromEntries(Object.entries(maps).map(([kind, { shape, data }]) => [kind, { shape, data: bytes(data) }]));
  const sides = { cross: ["predicted", "src"], encoder: ["src", "src"], decoder: ["tgt", "tgt"] };
  const pieces = { src, tgt, predicted };
  function names(side, byWords) {
    if (!byWords) return pieces[side];
    const groups = [];
    pieces[side].forEach((piece, i) => (groups[words[side][i]] ??= []).push(piece));
    return groups.map(join);
  }
  function one({ shape: [, heads, height, width], data }, layer, head) {
    const size = height * width, sum = new Float32Array(size);
    const [first, last] = head === MEAN ? [0, heads] : [head, head + 1];
    for (let h = first; h < last; h++) {
      const from = (layer * heads + h) * size;
      for (let k = 0; k < size; k++) sum[k] += data[from + k];
    }
    return sum.map((x) => x / 255 / (last - first));
  }
  function pick(kind, layer, head, byWords) {
    const [rowSide, columnSide] = sides[kind], [, , height, width] = decoded[kind].shape;
    const rows = names(rowSide, byWords), columns = names(columnSide, byWords);
    let weights = one(decoded[kind], layer, head);
    if (byWords) { // what a word gives is the mean of its pieces, what it gets their sum
      const merged = new Float32Array(rows.length * columns.length), sizes = new Float32Array(rows.length);
      words[rowSide].forEach((word) => { sizes[word]++; });
      for (let i = 0; i < height; i++) for (let j = 0; j < width; j++) {
        const row = words[rowSide][i];
        merged[row * columns.length + words[columnSide][j]] += weights[i * width + j] / sizes[row];
      }
      weights = merged;
    }
    return { rows, columns, weights, at: (i, j) => weights[i * columns.length + j], isHidden: (i, j) => kind === "decoder" && j > i };
  }
  return { pick, kinds: Object.keys(KINDS).filter((kind) => kind in decoded), shape: (kind) => decoded[kind].shape, hasWords: Boolean(words) };
}

// Return 256 colors from paper to accent, and that of what may not be attended to, as [r, g, b].
function palette(place) {
  const style = getComputedStyle(place), pen = element("canvas").getContext("2d", { willReadFrequently: true });
  const [paper, accent, hidden, ink] = ["--paper", "--accent", "--line", "--ink"].map((name) => {
    pen.fillStyle = style.getPropertyValue(name).trim();
    pen.fillRect(0, 0, 1, 1);
    return [...pen.getImageData(0, 0, 1, 1).data].slice(0, 3);
  });
  const mix = (share) => paper.map((from, k) => Math.round(from + (accent[k] - from) * share));
  const css = (color) => `rgb(${color.join()})`;
  return { shades: Array.from({ length: 256 }, (_, i) => mix(i / 255)), hidden, ink: css(ink), accent: css(accent) };
}

function image(map, { shades, hidden }) {
  const { rows, columns } = map, picture = new ImageData(columns.length, rows.length);
  for (let i = 0; i < rows.length; i++) for (let j = 0; j < columns.length; j++) {
    const color = map.isHidden(i, j) ? hidden : shades[Math.min(255, Math.round(map.at(i, j) * 255))];
    picture.data.set([...color, 255], 4 * (i * columns.length + j));
  }
  const canvas = element("canvas", { width: columns.length, height: rows.length });
  canvas.getContext("2d").putImageData(picture, 0, 0);
  return canvas;
}

function sized(canvas, width, height) { // return a pen that draws in CSS pixels
  const scale = window.devicePixelRatio || 1;
  Object.assign(canvas, { width: width * scale, height: height * scale });
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return pen;
}

function shorten(text, most = 14) {
  const all = Array.from(text);
  return all.length > most ? `${all.slice(0, most - 1).join("")}…` : text;
}

export const cellSize = (map) => Math.max(9, Math.min(24, Math.floor(620 / Math.max(map.rows.length, map.columns.length))));

function drawMap(canvas, map, colors, { row, column }) {
  const cell = cellSize(map), { rows, columns } = map;
  const pen = sized(canvas, MARGIN + columns.length * cell + TAIL, MARGIN + rows.length * cell);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(image(map, colors), MARGIN, MARGIN, columns.length * cell, rows.length * cell);
  pen.font = `${Math.min(13, cell + 1)}px system-ui, sans-serif`;
  pen.fillStyle = pen.strokeStyle = colors.ink;
  pen.textBaseline = "middle";
  const shade = (k, chosen) => { pen.globalAlpha = chosen === null || chosen === k ? 1 : 0.45; };
  pen.textAlign = "right";
  rows.forEach((name, i) => { shade(i, row); pen.fillText(shorten(name), MARGIN - 6, MARGIN + (i + 0.5) * cell); });
  pen.textAlign = "left";
  columns.forEach((name, j) => {
    shade(j, column);
    pen.save();
    pen.translate(MARGIN + (j + 0.5) * cell, MARGIN - 6);
    pen.rotate(-Math.PI / 3);
    pen.fillText(shorten(name), 0, 0);
    pen.restore();
  });
  pen.globalAlpha = 1;
  if (row !== null) pen.strokeRect(MARGIN - 0.5, MARGIN + row * cell - 0.5, columns.length * cell + 1, cell + 1);
  if (column !== null) pen.strokeRect(MARGIN + column * cell - 0.5, MARGIN - 0.5, cell + 1, rows.length * cell + 1);
}

function drawLines(canvas, map, colors, { row, column }) {
  const height = Math.max(map.rows.length, map.columns.length) * LINE, width = 180;
  const pen = sized(canvas, width, height);
  pen.strokeStyle = colors.accent;
  for (let i = 0; i < map.rows.length; i++) for (let j = 0; j < map.columns.length; j++) {
    const weight = map.at(i, j);
    if (weight < SEEN || (row !== null && row !== i) || (column !== null && column !== j)) continue;
    pen.globalAlpha = Math.min(1, weight);
    pen.lineWidth = 0.5 + 4 * weight;
    pen.beginPath();
    pen.moveTo(0, (i + 0.5) * LINE);
    pen.bezierCurveTo(width / 2, (i + 0.5) * LINE, width / 2, (j + 0.5) * LINE, width, (j + 0.5) * LINE);
    pen.stroke();
  }
}

// Return what the row or the column that is pointed at says, the greatest weights first.
function describe(map, { row, column }) {
  if (row === null && column === null) return "Point at a token, or move to it with Tab.";
  if (row !== null && column !== null) {
    const what = map.isHidden(row, column) ? "may not attend to" : "attends to";
    return `${map.rows[row]} ${what} ${map.columns[column]}: ${map.at(row, column).toFixed(3)}`;
  }
  const [name, others, weight, verb] = row !== null
    ? [map.rows[row], map.columns, (k) => map.at(row, k), "attends to"]
    : [map.columns[column], map.rows, (k) => map.at(k, column), "gets from"];
  const best = [...others.keys()].sort((a, b) => weight(b) - weight(a)).slice(0, 6).filter((k) => weight(k) >= SEEN);
  return `${name} ${verb} ${best.map((k) => `${others[k]} ${weight(k).toFixed(2)}`).join(", ") || "nothing much"}`;
}

// Show in `place` the attention of pairs; `load(i)` gives pair i, at once or as a promise.
// Keys are read wherever `keyTarget` receives them.
export function explore(place, titles, load, keyTarget = place) {
  const state = { pair: null, kind: "cross", layer: null, head: MEAN, byWords: false, row: null, column: null, isPinned: false };
  const sentence = element("select", { ariaLabel: "Sentence" }, ...titles.map((title, i) => new Option(title, i)));
  const kinds = element("div", { className: "kinds" });
  const byWords = element("button", { type: "button", title: "W" });
  const grid = element("div", { className: "heads", role: "group", ariaLabel: "Layers and heads" });
  const title = element("h3"), said = element("p", { className: "said" });
  said.setAttribute("aria-live", "polite");
  const enlarged = element("canvas", { className: "enlarged" }), lines = element("canvas");
  enlarged.setAttribute("role", "img");
  const left = element("div", { className: "tokens right" }), right = element("div", { className: "tokens" });
  const hint = element("p", { className: "quiet", textContent: "Keys: arrows change layer and head, M the mean of heads, 1 2 3 the kind, W words or pieces, Escape lets go. A click holds a token." });
  sentence.hidden = titles.length < 2;
  place.classList.add("attention");
  place.tabIndex = -1;
  place.replaceChildren(
    element("div", { className: "choices" }, sentence, kinds, byWords), hint,
    element("div", { className: "columns" }, element("div", { className: "scroll" }, grid),
      element("div", { className: "detail" }, title, said, element("div", { className: "columns" },
        element("div", { className: "scroll" }, enlarged), element("div", { className: "lines scroll" }, left, lines, right)))));
  let map, colors, loads = 0;

  function tokens(box, names, side) {
    box.replaceChildren(...names.map((name, number) => {
      const token = element("span", { className: "token", textContent: name, tabIndex: 0, dir: "auto" });
      Object.assign(token.dataset, { side, number });
      return token;
    }));
  }

  function mark() { // draw what depends on the token that is pointed at
    drawMap(enlarged, map, colors, state);
    drawLines(lines, map, colors, state);
    said.textContent = describe(map, state);
    for (const [box, own, other, weight] of [[left, state.row, state.column, (k) => map.at(k, state.column)],
      [right, state.column, state.row, (k) => map.at(state.row, k)]]) {
      [...box.children].forEach((token, k) => {
        token.classList.toggle("lit", own === k);
        const share = other === null || own !== null ? 0 : weight(k);
        token.style.boxShadow = share >= SEEN ? `inset 0 -${Math.ceil(14 * share)}px 0 ${colors.accent}55` : "";
      });
    }
  }

  function show() { // draw what depends on kind, layer, head and words
    const { pair, kind } = state, [layers, heads] = pair.shape(kind);
    state.layer = Math.min(state.layer ?? layers - 1, layers - 1);
    Object.assign(state, { row: null, column: null, isPinned: false });
    colors = palette(place);
    map = pair.pick(kind, state.layer, state.head, state.byWords);
    const head = state.head === MEAN ? "mean of heads" : `head ${state.head + 1}`;
    title.textContent = heads > 1 || layers > 1 ? `${KINDS[kind]}, layer ${state.layer + 1}, ${head}` : "";
    enlarged.setAttribute("aria-label", `${title.textContent}: a map of ${map.rows.length} rows and ${map.columns.length} columns`);
    byWords.textContent = state.byWords ? "Show pieces" : "Show words";
    byWords.hidden = !pair.hasWords;
    tokens(left, map.rows, "row");
    tokens(right, map.columns, "column");
    for (const button of kinds.children) button.setAttribute("aria-pressed", button.value === kind);
    for (const button of grid.querySelectorAll("button")) {
      const isChosen = Number(button.dataset.layer) === state.layer && Number(button.dataset.head) === state.head;
      button.setAttribute("aria-pressed", isChosen);
    }
    mark();
  }

  function thumbnails() {
    const { pair, kind } = state, [layers, heads] = pair.shape(kind);
    const columns = heads > 1 ? [MEAN, ...Array(heads).keys()] : [0];
    if (heads === 1) state.head = 0;
    colors = palette(place);
    grid.hidden = layers * heads === 1;
    grid.style.gridTemplateColumns = `auto repeat(${columns.length}, ${THUMBNAIL}px)`;
    const labels = columns.map((head) => element("span", { textContent: head === MEAN ? "mean" : head + 1 }));
    grid.replaceChildren(element("span"), ...labels, ...[...Array(layers).keys()].flatMap((layer) => [
      element("span", { textContent: layer + 1 }),
      ...columns.map((head) => {
        const name = `Layer ${layer + 1}, ${head === MEAN ? "mean of heads" : `head ${head + 1}`}`;
        const button = element("button", { type: "button", title: name, ariaLabel: name },
          image(pair.pick(kind, layer, head, false), colors));
        Object.assign(button.dataset, { layer, head });
        return button;
      })]));
    kinds.replaceChildren(...pair.kinds.map((value, i) => element("button", { type: "button", value, textContent: KINDS[value], title: `${i + 1}` })));
    kinds.hidden = pair.kinds.length < 2;
  }

  function choose(changes) {
    const focused = document.activeElement, hadFocus = place.contains(focused), wasKind = kinds.contains(focused);
    Object.assign(state, changes);
    if ("kind" in changes) thumbnails();
    show();
    if (!hadFocus || place.contains(document.activeElement)) return;
    // the element with the focus was replaced; without focus, `place` would receive no more keys
    const next = wasKind ? kinds.querySelector("[aria-pressed=true]") : place;
    next.focus({ preventScroll: true });
  }

  function point(row, column, isPinned = false) {
    if (state.isPinned && !isPinned) return;
    Object.assign(state, { row, column, isPinned });
    mark();
  }

  async function open(number) {
    const call = ++loads;
    try {
      const data = await load(number);
      if (call !== loads) return;
      state.pair = readPair(data);
      choose({ kind: state.pair.kinds.includes(state.kind) ? state.kind : state.pair.kinds[0] });
      place.dataset.ready = number;
    } catch (error) {
      said.textContent = error.message;
    }
  }

  function cellAt(event) {
    const cell = cellSize(map), row = Math.floor((event.offsetY - MARGIN) / cell), column = Math.floor((event.offsetX - MARGIN) / cell);
    const inside = (k, all) => k >= 0 && k < all.length;
    return [inside(row, map.rows) ? row : null, inside(column, map.columns) ? column : null];
  }

  const of = (event) => event.target.closest?.(".token")?.dataset;
  const both = ({ side, number }) => side === "row" ? [Number(number), null] : [null, Number(number)];
  sentence.addEventListener("change", () => open(Number(sentence.value)));
  kinds.addEventListener("click", ({ target }) => { if (target.value) choose({ kind: target.value }); });
  byWords.addEventListener("click", () => choose({ byWords: !state.byWords }));
  grid.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) choose({ layer: Number(button.dataset.layer), head: Number(button.dataset.head) });
  });
  enlarged.addEventListener("mousemove", (event) => point(...cellAt(event)));
  enlarged.addEventListener("click", (event) => point(...cellAt(event), !state.isPinned));
  enlarged.addEventListener("mouseleave", () => point(null, null));
  for (const box of [left, right]) {
    for (const kind of ["mouseover", "focusin"]) box.addEventListener(kind, (event) => { if (of(event)) point(...both(of(event))); });
    box.addEventListener("mouseleave", () => point(null, null));
    box.addEventListener("click", (event) => { if (of(event)) point(...both(of(event)), !state.isPinned); });
  }
  keyTarget.addEventListener("keydown", (event) => {
    if (!state.pair || event.ctrlKey || event.altKey || event.metaKey || event.target.tagName === "SELECT") return;
    const [layers, heads] = state.pair.shape(state.kind), turn = (k, n) => (k + n) % n, isMean = state.head === MEAN;
    const changes = {
      ArrowUp: { layer: turn(state.layer - 1, layers) }, ArrowDown: { layer: turn(state.layer + 1, layers) },
      ArrowLeft: { head: isMean ? heads - 1 : turn(state.head - 1, heads) }, ArrowRight: { head: isMean ? 0 : turn(state.head + 1, heads) },
      m: { head: heads > 1 ? MEAN : 0 }, w: { byWords: state.pair.hasWords && !state.byWords }, Escape: {},
    }[event.key] ?? (state.pair.kinds[event.key - 1] ? { kind: state.pair.kinds[event.key - 1] } : null);
    if (!changes) return;
    event.preventDefault();
    choose(changes);
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (state.pair) choose({ kind: state.kind }); });
  return open(0);
}

// --- on the page of the server

// Return a map of a sentence from its alignment: what each target token attends to most is 1.
function alignmentPair({ source_tokens: src = [], hypotheses: [{ alignment, tokens = [] }] }) {
  const data = new Uint8Array(tokens.length * src.length);
  alignment?.forEach((place, row) => { data[row * src.length + place] = 255; });
  return { src, predicted: tokens, maps: { cross: { shape: [1, 1, tokens.length, src.length], data } } };
}

export function showAttention(box, place, sentences, { source, target, shape, ask }) {
  const some = sentences.filter(({ hypotheses: [best] }) => best.text && best.tokens?.length);
  const titles = some.map(({ source: text, hypotheses }) => `${text} → ${hypotheses[0].text}`);
  const load = (i) => shape ? ask("/v1/attention", {
    kind: "all", text: some[i].source, translation: some[i].hypotheses[0].text, source, target,
  }) : alignmentPair(some[i]);
  const fresh = element("div"); // without the listeners of the text before
  place.replaceChildren(fresh);
  let isShown = false;
  box.ontoggle = () => {
    if (!box.open || isShown || !some.length) return;
    isShown = true;
    explore(fresh, titles, load);
  };
  box.ontoggle();
}
