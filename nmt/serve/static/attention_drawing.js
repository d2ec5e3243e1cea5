// Drawing and description of attention maps, for the view in attention.js.

import { MAX_BYTE } from "/static/attention_maps.js";

export const MIN_WEIGHT = 0.02; // smaller weights get no line and are not listed
const MAX_LISTED = 6; // number of tokens that the description of a token lists
const MAX_LABEL_LENGTH = 14; // characters
const FAINT = 0.45; // opacity of the labels of other rows and columns than the chosen one
const LABEL_ANGLE = -Math.PI / 3; // of the labels of columns

// sizes in pixels
const MAP_SIZE = 620; // of the enlarged map, unless this would make its cells too small or large
const MIN_CELL_SIZE = 9;
const MAX_CELL_SIZE = 24;
export const MAP_MARGIN = 104; // for the labels of rows and columns
const MAP_TAIL = 46; // for the label of the last column, which leans to the right
const LABEL_GAP = 6; // between labels and map
const MAX_FONT_SIZE = 13; // of labels
const LINE_HEIGHT = 26; // of a token beside the lines
const LINES_WIDTH = 180;
const HEAD_OFFSET = 3; // between the lines of several heads
const MIN_LINE_WIDTH = 0.5; // of a weight of 0
const EXTRA_LINE_WIDTH = 4; // of a weight of 1

export function createElement(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

// Return the colors of the page. `shades` are 256 colors [r, g, b] from the paper to the accent.
export function readPalette(element) {
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
  const shades = Array.from({ length: MAX_BYTE + 1 }, (_, i) => (
    paper.map((from, channel) => Math.round(from + (accent[channel] - from) * i / MAX_BYTE))
  ));
  return {
    shades,
    masked: rgb("--line"),
    ink: `rgb(${rgb("--ink").join()})`,
    accent: `rgb(${accent.join()})`,
  };
}

// Return a canvas with one pixel for each weight.
export function drawPixels(map, palette) {
  const width = map.columns.length;
  const height = map.rows.length;
  const pixels = new ImageData(width, height);
  for (let i = 0; i < height; i++) {
    for (let j = 0; j < width; j++) {
      const shade = Math.min(MAX_BYTE, Math.round(map.weight(i, j) * MAX_BYTE));
      const color = map.isMasked(i, j) ? palette.masked : palette.shades[shade];
      const position = 4 * (i * width + j); // red, green, blue and opacity of each pixel
      pixels.data.set([...color, MAX_BYTE], position);
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

// Return the size in pixels of a cell of the enlarged map.
export function cellSize(map) {
  const numCells = Math.max(map.rows.length, map.columns.length);
  return Math.max(MIN_CELL_SIZE, Math.min(MAX_CELL_SIZE, Math.floor(MAP_SIZE / numCells)));
}

// Draw the enlarged map with its labels, and a frame around `row` and `column` unless null.
export function drawMap(canvas, map, palette, { row, column }) {
  const cell = cellSize(map);
  const width = map.columns.length * cell;
  const height = map.rows.length * cell;
  const context = resize(canvas, MAP_MARGIN + width + MAP_TAIL, MAP_MARGIN + height);
  context.imageSmoothingEnabled = false;
  context.drawImage(drawPixels(map, palette), MAP_MARGIN, MAP_MARGIN, width, height);
  context.font = `${Math.min(MAX_FONT_SIZE, cell + 1)}px system-ui, sans-serif`;
  context.fillStyle = palette.ink;
  context.strokeStyle = palette.ink;
  context.textBaseline = "middle";
  context.textAlign = "right";
  map.rows.forEach((label, i) => {
    context.globalAlpha = row === null || row === i ? 1 : FAINT;
    context.fillText(shortenLabel(label), MAP_MARGIN - LABEL_GAP, MAP_MARGIN + (i + 0.5) * cell);
  });
  context.textAlign = "left";
  map.columns.forEach((label, j) => {
    context.globalAlpha = column === null || column === j ? 1 : FAINT;
    context.save();
    context.translate(MAP_MARGIN + (j + 0.5) * cell, MAP_MARGIN - LABEL_GAP);
    context.rotate(LABEL_ANGLE);
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

// Draw a line for each weight of `maps`, in the color of the map. Unless null, `row` and `column`
// select weights.
export function drawLines(canvas, maps, colors, { row, column }) {
  const numLines = Math.max(maps[0].rows.length, maps[0].columns.length);
  const context = resize(canvas, LINES_WIDTH, numLines * LINE_HEIGHT);
  maps.forEach((map, k) => {
    context.strokeStyle = colors[k];
    const offset = HEAD_OFFSET * (k - (maps.length - 1) / 2); // so that heads do not overlap
    for (let i = 0; i < map.rows.length; i++) {
      for (let j = 0; j < map.columns.length; j++) {
        const weight = map.weight(i, j);
        const isChosen = (row === null || row === i) && (column === null || column === j);
        if (weight >= MIN_WEIGHT && isChosen) drawLine(context, i, j, weight, offset);
      }
    }
  });
}

// Draw a curve from the token of a row to the token of a column.
function drawLine(context, row, column, weight, offset) {
  const start = (row + 0.5) * LINE_HEIGHT + offset;
  const end = (column + 0.5) * LINE_HEIGHT + offset;
  const middle = LINES_WIDTH / 2;
  context.globalAlpha = Math.min(1, weight);
  context.lineWidth = MIN_LINE_WIDTH + EXTRA_LINE_WIDTH * weight;
  context.beginPath();
  context.moveTo(0, start);
  context.bezierCurveTo(middle, start, middle, end, LINES_WIDTH, end);
  context.stroke();
}

// Return a sentence about the row or column that is pointed at, with the largest weights.
export function describe(map, { row, column }) {
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

// Return the labels with the largest weights, as text.
function listLargest(labels, weights) {
  const order = [...labels.keys()].sort((a, b) => weights[b] - weights[a]);
  const largest = order.slice(0, MAX_LISTED).filter((k) => weights[k] >= MIN_WEIGHT);
  if (!largest.length) return "nothing much";
  return largest.map((k) => `${labels[k]} ${weights[k].toFixed(2)}`).join(", ");
}
