// The page: it sends texts and files to the worker, and shows the translations. Texts are set with textContent,
// never as HTML.

import { showAlignment } from "./alignment.js";

const DELAY = 250; // milliseconds after the last key; pasted text is translated at once
const DEFAULT_BEAM_SIZE = 4; // for a model whose own setting is greedy search
const $ = (id) => document.getElementById(id);
const page = { worker: null, settings: null, numTasks: 0, textTask: 0, fileTask: 0, file: null, timer: 0 };

/** Return the English name of a language code, or the code if the browser has no name for it. */
function languageName(code) {
  try {
    return new Intl.DisplayNames(["en"], { type: "language" }).of(code.replace("_", "-"));
  } catch {
    return code;
  }
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function chosenOptions() {
  return { beamSize: Number($("beam").value), direction: Number($("direction").value) };
}

/** Translate the text of the input field. */
function translateText() {
  const text = $("input").value;
  page.textTask = ++page.numTasks;
  $("count").textContent = `${text.length} characters`;
  showError("");
  if (!text.trim()) {
    showTranslation("", []);
    return;
  }
  $("output").classList.add("stale");
  $("state").textContent = "Translating…";
  page.worker.postMessage({ id: page.textTask, text, options: chosenOptions() });
}

function showTranslation(text, pairs) {
  $("output").textContent = text;
  $("alignment-box").hidden = pairs.length === 0;
  showAlignment($("alignment"), pairs);
  $("output").classList.remove("stale");
  $("state").textContent = "";
}

/** Translate a text file, line by line. */
async function translateFile(file) {
  $("download").hidden = true;
  $("file-box").hidden = false;
  $("file-box").scrollIntoView({ block: "nearest" }); // it is below the text and its alignment
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    $("progress").hidden = true;
    $("file-state").textContent = `${file.name} is not a text file in UTF-8; save it as UTF-8 text.`;
    return;
  }
  const lines = text.split("\n").map((line) => line.replace(/\r$/, ""));
  const endsWithNewline = lines.at(-1) === "";
  if (endsWithNewline) lines.pop();
  page.fileTask = ++page.numTasks;
  page.file = { name: file.name, endsWithNewline, ...page.settings.directions[$("direction").value] };
  $("progress").value = 0;
  $("progress").hidden = false;
  $("file-state").textContent = `Translating ${file.name}…`;
  page.worker.postMessage({ id: page.fileTask, lines, options: chosenOptions() });
}

/** Offer the translation of a file for download: `text.txt` becomes `text.de.txt`. */
function offerDownload(lines) {
  const { name, endsWithNewline, target } = page.file;
  const text = lines.join("\n") + (endsWithNewline ? "\n" : "");
  URL.revokeObjectURL($("download").href);
  $("download").href = URL.createObjectURL(new Blob([text], { type: "text/plain" }));
  $("download").download = name.replace(/(\.[^.]*)?$/, `.${target}$1`);
  $("download").textContent = `Download ${$("download").download}`;
  $("download").hidden = false;
  $("file-state").textContent = "Done.";
  $("download").focus();
}

function receive({ data }) {
  if (data.type === "ready") {
    start(data.settings);
  } else if (data.type === "failed") {
    if (data.id === page.fileTask) $("file-state").textContent = data.message;
    else if (data.id === undefined || data.id === page.textTask) showError(data.message);
  } else if (data.id === page.fileTask) {
    if (data.type === "result") offerDownload(data.lines);
    else showFileProgress(data);
  } else if (data.id === page.textTask) {
    if (data.type === "result") showTranslation(data.text, data.pairs);
    else showTextProgress(data);
  }
}

function showTextProgress({ done, total }) {
  if (total > 1) $("state").textContent = `Translating… ${done} of ${total} sentences`;
}

function showFileProgress({ done, total }) {
  $("progress").value = done / total;
  $("file-state").textContent = `${done} of ${total} lines`;
}

/** Fill the choices, and translate as soon as there is text. */
function start(settings) {
  page.settings = settings;
  const options = settings.directions.map(({ source, target }, i) => {
    return new Option(`${languageName(source)} → ${languageName(target)}`, i);
  });
  $("direction").replaceChildren(...options);
  const beamSize = settings.search.beam_size > 1 ? settings.search.beam_size : DEFAULT_BEAM_SIZE;
  $("beam").replaceChildren(new Option("Beam search", beamSize), new Option("Greedy search", 1));
  $("beam").value = settings.search.beam_size === 1 ? 1 : beamSize;
  for (const id of ["direction", "beam", "open"]) $(id).disabled = false;
  $("state").textContent = "";
  translateText();
  document.body.dataset.ready = "true";
}

function setUpInput() {
  $("input").addEventListener("input", ({ inputType }) => {
    page.textTask = 0; // do not show a translation of the text before this input
    clearTimeout(page.timer);
    if (!page.settings) return;
    if (inputType === "insertFromPaste" || inputType === "insertFromDrop") translateText();
    else page.timer = setTimeout(translateText, DELAY);
  });
  $("direction").addEventListener("change", translateText);
  $("beam").addEventListener("change", translateText);
  $("clear").addEventListener("click", () => {
    $("input").value = "";
    if (page.settings) translateText();
    $("input").focus();
  });
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("output").textContent);
      $("state").textContent = "Copied";
    } catch {
      getSelection().selectAllChildren($("output")); // for Ctrl+C
      $("state").textContent = "Selected; copy it with Ctrl+C";
    }
  });
}

function setUpFiles() {
  $("open").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    const [file] = $("file").files;
    if (file) translateFile(file);
    $("file").value = ""; // the same file can be chosen again
  });
  document.addEventListener("dragover", (event) => {
    if (!event.dataTransfer.types.includes("Files")) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  document.addEventListener("dragleave", () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    document.body.classList.remove("dropping");
    const [file] = event.dataTransfer.files;
    if (!file) return;
    event.preventDefault();
    if (page.settings) translateFile(file);
  });
}

/** Register the service worker, which keeps all files of the page; without it the page needs the network. */
async function keepFiles() {
  if (!navigator.serviceWorker) return;
  try {
    await navigator.serviceWorker.register("service_worker.js", { updateViaCache: "none" });
    await navigator.serviceWorker.ready;
  } catch { /* not allowed, as in some private windows */ }
}

setUpInput();
setUpFiles();
await keepFiles(); // first, so that the worker below loads each file only once
page.worker = new Worker("worker.js", { type: "module" });
page.worker.addEventListener("message", receive);
page.worker.addEventListener("error", (event) => showError(event.message || "The worker cannot be loaded."));
