// The attention of each sentence as a map: a row for each token that attends, a column for each that
// is attended to. Of any layer and head where the engine shows them, otherwise the alignment.

const CELL = 22, MARGIN = 110, TAIL = 60; // pixels; TAIL is for the last name, which leans

// Return the map of a sentence from its alignment: what each target token attends to most is 1.
function alignmentMap(sentence) {
  const [best] = sentence.hypotheses;
  const weights = (best.alignment ?? []).map((place) => {
    const row = new Array(sentence.source_tokens.length).fill(0);
    row[place] = 1;
    return row;
  });
  return { rows: best.tokens ?? [], columns: sentence.source_tokens ?? [], weights };
}

function visible(token) { return token.replaceAll("\u2581", " ").trim() || "␣"; }

function draw(canvas, { rows, columns, weights }) {
  const scale = window.devicePixelRatio || 1;
  const width = MARGIN + columns.length * CELL + TAIL, height = MARGIN + rows.length * CELL;
  canvas.width = width * scale;
  canvas.height = height * scale;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d"), style = getComputedStyle(document.body);
  pen.scale(scale, scale);
  pen.font = "13px system-ui, sans-serif";
  pen.fillStyle = style.color;
  pen.textBaseline = "middle";
  pen.textAlign = "right";
  rows.forEach((token, i) => pen.fillText(visible(token).slice(0, 14), MARGIN - 6, MARGIN + (i + 0.5) * CELL));
  pen.textAlign = "left";
  columns.forEach((token, j) => {
    pen.save();
    pen.translate(MARGIN + (j + 0.5) * CELL, MARGIN - 6);
    pen.rotate(-Math.PI / 3);
    pen.fillText(visible(token).slice(0, 14), 0, 0);
    pen.restore();
  });
  pen.strokeStyle = style.getPropertyValue("--line");
  weights.forEach((row, i) => row.forEach((weight, j) => {
    pen.globalAlpha = weight;
    pen.fillStyle = style.getPropertyValue("--accent");
    pen.fillRect(MARGIN + j * CELL, MARGIN + i * CELL, CELL, CELL);
    pen.globalAlpha = 0.6;
    pen.strokeRect(MARGIN + j * CELL + 0.5, MARGIN + i * CELL + 0.5, CELL, CELL);
    pen.globalAlpha = 1;
  }));
}

// A table of the same numbers for screen readers
function table({ rows, columns, weights }) {
  const element = document.createElement("table");
  element.className = "hidden";
  weights.forEach((row, i) => {
    const best = row.indexOf(Math.max(...row));
    const line = element.insertRow();
    line.insertCell().textContent = visible(rows[i] ?? "");
    line.insertCell().textContent = `attends most to ${visible(columns[best] ?? "")}`;
  });
  return element;
}

const KINDS = { cross: "Translation to source", encoder: "Within the source", decoder: "Within the translation" };

function choice(name, entries) {
  const label = document.createElement("label"), select = document.createElement("select");
  select.append(...entries.map(([value, text]) => new Option(text, value)));
  label.append(`${name} `, select);
  return { label, select };
}

// Return the choices of kind, layer and head, and what they say now
function choices(shape, onChange) {
  const bar = document.createElement("div");
  bar.className = "choices";
  const numbers = (n) => Array.from({ length: n }, (_, i) => [i, `${i + 1}`]);
  const kind = choice("Attention", Object.entries(KINDS));
  const layer = choice("Layer", numbers(shape.cross));
  const head = choice("Head", [["", "mean of all"], ...numbers(shape.heads)]);
  layer.select.value = shape.cross - 1;
  bar.append(kind.label, layer.label, head.label);
  kind.select.addEventListener("change", () => {
    layer.select.replaceChildren(...numbers(shape[kind.select.value]).map(([v, t]) => new Option(t, v)));
  });
  bar.addEventListener("change", onChange);
  const read = () => ({
    kind: kind.select.value, layer: Number(layer.select.value),
    ...(head.select.value === "" ? {} : { head: Number(head.select.value) }),
  });
  return { bar, read };
}

function view(sentence, map, note) {
  const box = document.createElement("div"), text = document.createElement("p");
  const canvas = document.createElement("canvas");
  box.className = "scroll pair";
  text.className = "quiet";
  text.textContent = note;
  canvas.setAttribute("role", "img");
  canvas.setAttribute("aria-label", `Attention of the translation ${sentence.hypotheses[0].text}`);
  draw(canvas, map);
  box.append(text, canvas, table(map));
  return box;
}

let newest = 0; // the call whose maps are shown
export function showAttention(box, place, sentences, { source, target, shape, ask }) {
  const call = ++newest;
  place.replaceChildren();
  box.ontoggle = null;
  if (!shape) {
    const note = "The source token that each target token attends to most.";
    place.append(...sentences.map((sentence) => view(sentence, alignmentMap(sentence), note)));
    return;
  }
  const maps = document.createElement("div"), { bar, read } = choices(shape, show);
  place.append(bar, maps);
  let shown = 0;
  async function show() {
    const number = ++shown, chosen = read();
    const views = [];
    try {
      for (const { source: text, hypotheses, ...rest } of sentences) {
        const body = { text, translation: hypotheses[0].text, source, target, ...chosen };
        if (!body.translation) continue;
        const map = await ask("/v1/attention", body);
        views.push(view({ hypotheses, ...rest }, map, text));
      }
      if (call === newest && number === shown) maps.replaceChildren(...views);
    } catch (error) {
      maps.textContent = error.message;
    }
  }
  box.ontoggle = () => { if (box.open && !shown) show(); };
  if (box.open) show();
}
