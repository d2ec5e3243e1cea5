// The translation page. Texts are set with textContent alone, never as HTML.
import { showAlignment } from "/static/alignment.js";
import { showAttention } from "/static/attention.js";
import { setUpFiles } from "/static/files.js";

const DELAY = 250; // milliseconds after the last key
const ALTERNATIVES = 4; // translations asked for, at most
const HISTORY = 50; // entries
const $ = (id) => document.getElementById(id);
const state = { languages: [], settings: {}, groups: [], most: 1, asked: 0, shown: 0, timer: 0 };

// What is stored may be missing or forbidden (private windows)
export function recall(name, otherwise) {
  try { return JSON.parse(localStorage.getItem(name)) ?? otherwise; } catch { return otherwise; }
}
export function keep(name, value) {
  try { localStorage.setItem(name, JSON.stringify(value)); } catch { /* not stored then */ }
}

export async function ask(path, body, signal) {
  const init = body ? {
    method: "POST", signal, body: JSON.stringify({ ...body, api_key: $("key").value }),
    headers: { "Content-Type": "application/json" },
  } : { signal };
  const answer = await fetch(path, init);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

function options(select, languages, chosen) {
  select.replaceChildren(...languages.map(({ code, name }) => new Option(name, code)));
  if (languages.some(({ code }) => code === chosen)) select.value = chosen;
}

function showTargets(chosen) {
  const source = state.languages.find(({ code }) => code === $("source").value);
  const codes = source ? source.targets.filter((code) => code !== source.code)
    : [...new Set(state.languages.flatMap(({ code, targets }) => targets.filter((t) => t !== code)))];
  options($("target"), state.languages.filter(({ code }) => codes.includes(code)), chosen);
}

function beamSize(target) {
  const own = groupsOf(target, $("source").value);
  return Math.min(...(own.length ? own : groupsOf(target)).map((group) => group.beam_size));
}

function groupsOf(target, source) {
  return state.groups.filter(({ sources, targets }) => targets.includes(target)
    && sources.some((code) => code !== target && (!source || code === source)));
}

let running = null;
async function translate() {
  const text = $("input").value, number = ++state.asked;
  $("count").textContent = state.settings.charLimit > 0
    ? `${text.length} / ${state.settings.charLimit}` : `${text.length}`;
  running?.abort(); // its place in the server's queue is free again
  if (!text.trim()) { state.shown = number; show(null); return; }
  running = new AbortController();
  $("output").classList.add("stale");
  $("state").textContent = "Translating…";
  const source = $("source").value, target = $("target").value;
  try {
    const n = Math.max(1, Math.min(ALTERNATIVES, state.most, beamSize(target)));
    const answer = await ask("/v1/translate", {
      text, source, target, n_best: n, scores: true, alignment: true,
    }, running.signal);
    if (number < state.shown) return; // a newer answer is shown already
    state.shown = number;
    const [found] = answer.translations;
    show(found, source === "auto");
    if (found.text !== null) remember({ source, target, text, translation: found.text });
  } catch (error) {
    if (error.name === "AbortError" || number < state.asked) return;
    show(null);
    $("error").textContent = error.message;
    $("error").hidden = false;
  }
}

function show(answer, wasDetected) {
  $("error").hidden = true;
  $("output").classList.remove("stale");
  $("output").textContent = answer?.text ?? "";
  const failed = answer?.sentences.find((sentence) => sentence.error);
  if (failed) {
    $("error").textContent = `A sentence cannot be translated: ${failed.error}`;
    $("error").hidden = false;
  }
  const name = state.languages.find(({ code }) => code === answer?.source)?.name;
  $("state").textContent = answer && wasDetected ? `Detected: ${name}` : "";
  const only = answer?.sentences.length === 1 ? answer.sentences[0].hypotheses ?? [] : [];
  const others = only.length > 1 ? only.slice(1).map(({ text, score }) => [text, score])
    : (answer?.alternatives ?? []).map((text) => [text]);
  $("alternatives").replaceChildren(...others.map(([text, score]) => {
    const item = document.createElement("li"), note = document.createElement("span");
    item.append(text, " ", note);
    note.className = "quiet";
    note.textContent = score === undefined ? "" : `(${score.toFixed(2)})`;
    return item;
  }));
  $("alternatives-box").hidden = !others.length;
  const sentences = (answer?.sentences ?? []).filter(({ hypotheses }) => hypotheses?.length);
  $("alignment-box").hidden = $("attention-box").hidden = !sentences.length;
  showAlignment($("alignment"), sentences);
  const detected = answer?.source ?? $("source").value;
  const target = $("target").value, shape = groupsOf(target, detected)[0]?.attention;
  showAttention($("attention-box"), $("attention"), sentences, { source: detected, target, shape, ask });
}

function remember(entry) {
  const entries = recall("history", []).filter(
    ({ text, target }) => !(target === entry.target && entry.text.startsWith(text)));
  keep("history", [entry, ...entries].slice(0, HISTORY));
  showHistory();
}

function showHistory() {
  const entries = recall("history", []);
  $("history-box").hidden = !entries.length;
  $("history").replaceChildren(...entries.map((entry) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.textContent = `${entry.source} → ${entry.target}: ${entry.text} — ${entry.translation}`;
    button.addEventListener("click", () => {
      $("source").value = entry.source;
      showTargets(entry.target);
      $("input").value = entry.text;
      translate();
      $("input").focus();
    });
    item.append(button);
    return item;
  }));
}

function swap() {
  const source = $("source").value, target = $("target").value;
  const back = state.languages.find(({ code }) => code === target);
  const goal = source === "auto" ? back?.targets.find((code) => code !== target) : source;
  if (!back?.targets.some((code) => code === goal && code !== target)) {
    $("state").textContent = "This server does not translate the other way.";
    return;
  }
  const text = $("output").textContent;
  $("source").value = target;
  showTargets(goal);
  if (text) $("input").value = text;
  chosen();
}

function chosen() {
  keep("languages", [$("source").value, $("target").value]);
  translate();
}

function setUpTabs() {
  const tabs = [$("tab-text"), $("tab-file")];
  const select = (tab) => tabs.forEach((other) => {
    other.setAttribute("aria-selected", other === tab);
    other.tabIndex = other === tab ? 0 : -1;
    $(other.getAttribute("aria-controls")).hidden = other !== tab;
  });
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab));
    tab.addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const next = tabs[(i + 1) % tabs.length];
      select(next);
      next.focus();
    });
  });
}

async function start() {
  $("key").value = recall("key", "");
  const [languages, settings, models] = await Promise.all(
    [ask("/languages"), ask("/frontend/settings"), ask("/v1/models")]);
  Object.assign(state, { languages, settings });
  Object.assign(state, { groups: models.groups, most: models.max_beam_size });
  const [source, target] = recall("languages", [settings.language.source.code, settings.language.target.code]);
  const sources = languages.filter(({ code, targets }) => targets.some((other) => other !== code));
  options($("source"), [{ code: "auto", name: "Detect language" }, ...sources], source);
  if ($("source").value === "auto" && source !== "auto") $("source").value = sources[0].code;
  showTargets(target);
  $("key-box").hidden = !settings.apiKeys;
  $("key-box").open = settings.keyRequired && !$("key").value;
  $("tab-file").hidden = !settings.filesTranslation;
  setUpTabs();
  setUpFiles({ settings, keyOf: () => $("key").value });
  showHistory();
  $("input").addEventListener("input", () => {
    clearTimeout(state.timer);
    state.timer = setTimeout(translate, DELAY);
  });
  $("source").addEventListener("change", () => { showTargets($("target").value); chosen(); });
  $("target").addEventListener("change", chosen);
  $("swap").addEventListener("click", swap);
  document.addEventListener("keydown", (event) => {
    if (event.altKey && event.key.toLowerCase() === "s") { event.preventDefault(); swap(); }
  });
  $("clear").addEventListener("click", () => { $("input").value = ""; translate(); $("input").focus(); });
  $("key-form").addEventListener("submit", (event) => event.preventDefault());
  $("key").addEventListener("change", () => { keep("key", $("key").value); translate(); });
  $("forget").addEventListener("click", () => { keep("history", []); showHistory(); });
  $("copy").addEventListener("click", async () => {
    try {
      await navigator.clipboard.writeText($("output").textContent);
      $("state").textContent = "Copied";
    } catch {
      getSelection().selectAllChildren($("output")); // for Ctrl+C
      $("state").textContent = "Selected; copy it with Ctrl+C";
    }
  });
  translate();
  document.body.dataset.ready = "true";
}

start().catch((error) => {
  $("error").textContent = error.message;
  $("error").hidden = false;
});
