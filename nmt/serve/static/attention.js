// The attention of one sentence as a map: a row for each target token, a column for each of the
// source. Shows what the server's alignment says; the maps of single layers and heads go here.

const CELL = 22, MARGIN = 110;

// Return the map of a sentence: what each target token attends to most is 1.
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
  const width = MARGIN + columns.length * CELL, height = MARGIN + rows.length * CELL;
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

export function showAttention(place, sentences) {
  place.replaceChildren(...sentences.map((sentence) => {
    const box = document.createElement("div"), note = document.createElement("p");
    const canvas = document.createElement("canvas"), map = alignmentMap(sentence);
    box.className = "scroll pair";
    note.className = "quiet";
    note.textContent = "The source token that each target token attends to most.";
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `Attention of the translation ${sentence.hypotheses[0].text}`);
    draw(canvas, map);
    box.append(note, canvas, table(map));
    return box;
  }));
}
