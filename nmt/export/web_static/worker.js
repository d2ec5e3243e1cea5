// The worker of the page: it loads the model and translates, while the page stays responsive.
import { Model } from "./model.js";
import { joinText, splitText } from "./sentences.js";
import { Translator } from "./translator.js";

const GZIP_MAGIC = [0x1f, 0x8b];

let newestText = 0; // number of the newest text; older ones are abandoned
let newestTurn = Promise.resolve(); // ends when all lines so far are translated

async function fetchBytes(path) {
  const response = await fetch(new URL(path, import.meta.url));
  if (!response.ok) throw new Error(`${path} cannot be loaded (${response.status})`);
  return new Uint8Array(await response.arrayBuffer());
}

async function fetchJson(path) {
  return JSON.parse(new TextDecoder().decode(await fetchBytes(path)));
}

/** Load a gzip file; some servers decompress such files themselves. */
async function fetchGzip(path) {
  const bytes = await fetchBytes(path);
  if (!GZIP_MAGIC.every((byte, i) => bytes[i] === byte)) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

async function load() {
  const [settings, source, encoder, decoder, wasm] = await Promise.all([
    fetchJson("model/settings.json"),
    fetchJson("model/source.json"),
    fetchBytes("model/encoder.onnx"),
    fetchBytes("model/decoder.onnx"),
    fetchGzip("runtime/ort-wasm-simd-threaded.wasm.gz"),
  ]);
  const target = settings.has_joint_vocabulary ? source : await fetchJson("model/target.json");
  const model = await Model.load(settings, { encoder, decoder, wasm });
  return new Translator(model, settings, { source, target });
}

/** Translate a line when the lines before it are done, if `isNeeded` still returns true then. */
function translateInTurn(translator, line, options, isNeeded = () => true) {
  const translateIfNeeded = async () => {
    await new Promise((resolve) => { setTimeout(resolve); }); // let messages arrive between two lines
    return isNeeded() ? translator.translate(line, options) : null;
  };
  const result = newestTurn.then(translateIfNeeded);
  newestTurn = result.catch(() => {});
  return result;
}

/** Translate a text, sentence by sentence, unless a newer text arrives. */
async function translateText(translator, { id, text, options }) {
  const { sentences, gaps } = splitText(text);
  const translations = [];
  for (const sentence of sentences) {
    translations.push(await translateInTurn(translator, sentence, options, () => id === newestText));
    if (id !== newestText) return;
    postMessage({ type: "progress", id, done: translations.length, total: sentences.length });
  }
  const texts = translations.map(({ text: translation }) => translation);
  const pairs = translations.flatMap((translation) => translation.pairs);
  postMessage({ type: "result", id, text: joinText(texts, gaps), pairs });
}

/** Translate each line of a file. */
async function translateFile(translator, { id, lines, options }) {
  const translations = [];
  for (const line of lines) {
    translations.push((await translateInTurn(translator, line, options)).text);
    postMessage({ type: "progress", id, done: translations.length, total: lines.length });
  }
  postMessage({ type: "result", id, lines: translations });
}

const loading = load();
loading.then(
  ({ settings }) => postMessage({ type: "ready", settings }),
  (error) => postMessage({ type: "failed", message: error.message }),
);

addEventListener("message", async ({ data }) => {
  const isFile = data.lines !== undefined;
  if (!isFile) newestText = data.id;
  try {
    const translator = await loading;
    if (isFile) await translateFile(translator, data);
    else await translateText(translator, data);
  } catch (error) {
    postMessage({ type: "failed", id: data.id, message: error.message });
  }
});
