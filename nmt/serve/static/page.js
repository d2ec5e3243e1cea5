// The translation page. Texts are set with textContent alone, never as HTML.

import { showAlignment, wordSpans } from "/static/alignment.js";
import { showAttention } from "/static/attention.js";
import {
  findTranslations, otherWords, prefixOf, setUpWordKeys, showWords, WordMenu,
} from "/static/choices.js";
import { setUpFiles } from "/static/files.js";

const TYPING_DELAY = 250; // milliseconds between the last key press and the request
const MAX_ALTERNATIVES = 4; // number of translations to request
const MAX_WORDS = 8; // number of other words to request in place of a word
const MAX_HISTORY = 50; // number of entries

const $ = (id) => document.getElementById(id);

const state = {
  languages: [], // of the server, each with the codes of its targets
  settings: {},
  groups: [], // of models: sources, targets, beam_size, attention
  maxBeamSize: 1,
  answer: null, // the answer that is shown
  wordMenu: new WordMenu($("choices")),
  numRequests: 0,
  shownRequest: 0, // number of the request whose answer is shown
  abort: null, // the `AbortController` of the newest request
  typingTimer: 0,
};

// --- storage of the browser, which may be forbidden, for example in private windows

function recall(name, defaultValue) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? defaultValue;
  } catch {
    return defaultValue;
  }
}

function store(name, value) {
  try {
    localStorage.setItem(name, JSON.stringify(value));
  } catch {
    // the page works without storage
  }
}

// --- requests

// Send a GET request, or a POST request if there is a body, and return the JSON of the answer.
async function ask(path, body, signal) {
  const init = { signal };
  if (body) {
    init.method = "POST";
    init.headers = { "Content-Type": "application/json" };
    init.body = JSON.stringify({ ...body, api_key: $("key").value });
  }
  const answer = await fetch(path, init);
  const content = await answer.json().catch(() => ({}));
  if (!answer.ok) throw new Error(content.error || `the server answered ${answer.status}`);
  return content;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = false;
}

// --- languages

function fillSelect(select, languages, chosenCode) {
  select.replaceChildren(...languages.map(({ code, name }) => new Option(name, code)));
  if (languages.some(({ code }) => code === chosenCode)) select.value = chosenCode;
}

// Return the codes of the other languages to which a language can be translated.
function otherTargets({ code, targets }) {
  return targets.filter((target) => target !== code);
}

// Offer the targets of the chosen source, or of all sources if the source is detected.
function fillTargets(chosenCode) {
  const source = state.languages.find(({ code }) => code === $("source").value);
  const sources = source ? [source] : state.languages;
  const codes = new Set(sources.flatMap(otherTargets));
  fillSelect($("target"), state.languages.filter(({ code }) => codes.has(code)), chosenCode);
}

// Return the groups of models that translate to `target` and, if given, from `source`.
function findGroups(target, source) {
  return state.groups.filter(({ sources, targets }) => {
    const codes = sources.filter((code) => code !== target && (!source || code === source));
    return targets.includes(target) && codes.length > 0;
  });
}

// Return the number of translations to request, which all models that may translate can find.
function countAlternatives(source, target) {
  let groups = findGroups(target, source);
  if (!groups.length) groups = findGroups(target); // the source will be detected
  const beamSizes = groups.map((group) => group.beam_size);
  return Math.max(1, Math.min(MAX_ALTERNATIVES, state.maxBeamSize, ...beamSizes));
}

// Swap source and target languages, and translate the translation.
function swapLanguages() {
  const source = $("source").value;
  const target = $("target").value;
  const newSource = state.languages.find(({ code }) => code === target);
  const targets = newSource ? otherTargets(newSource) : [];
  const newTarget = source === "auto" ? targets[0] : source;
  if (!targets.includes(newTarget)) {
    $("state").textContent = "This server does not translate the other way.";
    return;
  }
  const translation = $("output").textContent;
  $("source").value = target;
  fillTargets(newTarget);
  if (translation) $("input").value = translation;
  changeLanguages();
}

function changeLanguages() {
  store("languages", [$("source").value, $("target").value]);
  translate();
}

// --- glossary

// Return the terms of the glossary as [source, translation]. Throws an error for an invalid line.
function readTerms() {
  const terms = [];
  for (const line of $("glossary-terms").value.split("\n")) {
    if (!line.trim()) continue;
    const [source, ...rest] = line.split("=");
    const translation = rest.join("=").trim();
    if (!source.trim() || !translation) {
      throw new Error(`Glossary: write a line as source = translation, not: ${line}`);
    }
    terms.push([source.trim(), translation]);
  }
  return terms;
}

// Return the glossary of a request: the terms of the page, or else the name of a glossary of the
// server.
function readGlossary() {
  const terms = readTerms();
  if (terms.length) return terms;
  return $("glossary-name").value || null;
}

function setUpGlossary(names) {
  $("glossary-name").replaceChildren(
    new Option("None", ""),
    ...names.map((name) => new Option(name, name)),
  );
  $("glossary-names").hidden = !names.length;
  $("glossary-terms").value = recall("glossary", "");
  $("glossary-name").addEventListener("change", translate);
  $("glossary-terms").addEventListener("input", () => {
    store("glossary", $("glossary-terms").value);
    translateAfterTyping();
  });
}

// --- translation

function translateAfterTyping() {
  clearTimeout(state.typingTimer);
  state.typingTimer = setTimeout(translate, TYPING_DELAY);
}

function showCount(text) {
  const { charLimit } = state.settings;
  $("count").textContent = charLimit > 0 ? `${text.length} / ${charLimit}` : `${text.length}`;
}

// Translate the text of the page. Never replaces the answer to a newer request.
async function translate() {
  const text = $("input").value;
  showCount(text);
  state.abort?.abort(); // frees its place in the queue of the server
  state.numRequests++;
  const request = state.numRequests;
  if (!text.trim()) {
    state.shownRequest = request;
    showAnswer(null);
    return;
  }
  state.abort = new AbortController();
  $("output").classList.add("stale");
  $("state").textContent = "Translating…";
  const source = $("source").value;
  const target = $("target").value;
  try {
    const body = {
      text,
      source,
      target,
      n_best: countAlternatives(source, target),
      scores: true,
      alignment: true,
      glossary: readGlossary(),
    };
    const { translations: [answer] } = await ask("/v1/translate", body, state.abort.signal);
    if (request < state.shownRequest) return; // the answer to a newer request is shown
    state.shownRequest = request;
    answer.request = { source, target, text };
    showAnswer(answer);
    if (answer.text !== null) addToHistory({ ...answer.request, translation: answer.text });
  } catch (error) {
    if (error.name === "AbortError" || request < state.numRequests) return;
    showAnswer(null);
    showError(error.message);
  }
}

// Show an answer of the server. null clears the answer.
function showAnswer(answer) {
  $("error").hidden = true;
  $("output").classList.remove("stale");
  state.answer = answer;
  state.wordMenu.close({});
  const sentences = answer?.sentences ?? [];
  showWords($("output"), answer, offerWords);
  $("spoken").textContent = answer?.text ?? "";
  const failed = sentences.find((sentence) => sentence.error);
  if (failed) showError(`A sentence cannot be translated: ${failed.error}`);
  $("state").textContent = "";
  if (answer && $("source").value === "auto") {
    const language = state.languages.find(({ code }) => code === answer.source);
    $("state").textContent = `Detected: ${language?.name}`;
  }
  showAlternatives(listAlternatives(answer));
  const translated = sentences.filter(({ hypotheses }) => hypotheses?.length);
  $("alignment-box").hidden = !translated.length;
  $("attention-box").hidden = !translated.length;
  showAlignment($("alignment"), translated);
  const source = answer?.source ?? $("source").value;
  const target = $("target").value;
  const shape = findGroups(target, source)[0]?.attention;
  showAttention($("attention-box"), $("attention"), translated, { source, target, shape, ask });
}

// Offer other words in place of a word in the translation of a sentence.
async function offerWords(sentence, wordIndex, word) {
  const menu = state.wordMenu;
  const text = sentence.hypotheses[0].text;
  menu.open(word, "Looking for other words…");
  try {
    const { translations: [{ sentences: [result] }] } = await ask("/v1/translate", {
      text: sentence.source,
      source: state.answer.source,
      target: $("target").value,
      split_sentences: false,
      prefix: prefixOf(text, wordIndex),
      search: { alternatives: Math.min(MAX_WORDS, state.maxBeamSize) },
      scores: true,
      glossary: readGlossary(),
    });
    if (menu.word !== word) return; // another menu is open, or none
    const choices = otherWords(text, wordIndex, result.hypotheses ?? []);
    if (!choices.length) menu.showMessage("No other word fits here.");
    else menu.showChoices(choices, (choice) => chooseWord(sentence, choice.hypothesis, wordIndex));
  } catch (error) {
    if (menu.word === word) menu.showMessage(error.message);
  }
}

// Replace the translation of a sentence by the hypothesis with the chosen word; focus this word.
function chooseWord(sentence, hypothesis, wordIndex) {
  const { answer } = state;
  const index = answer.sentences.indexOf(sentence);
  const [start, end] = findTranslations(answer)[index];
  const numWordsBefore = wordSpans(answer.text.slice(0, start)).length;
  answer.text = answer.text.slice(0, start) + hypothesis.text + answer.text.slice(end);
  answer.alternatives = [];
  sentence.hypotheses = [hypothesis];
  showAnswer(answer);
  addToHistory({ ...answer.request, translation: answer.text });
  $("output").querySelectorAll(".choice")[numWordsBefore + wordIndex]?.focus();
}

// Return the other translations, with scores if the text is a single sentence.
function listAlternatives(answer) {
  if (!answer) return [];
  const [sentence] = answer.sentences;
  const hypotheses = answer.sentences.length === 1 ? sentence.hypotheses ?? [] : [];
  if (hypotheses.length > 1) return hypotheses.slice(1);
  return (answer.alternatives ?? []).map((text) => ({ text }));
}

function showAlternatives(alternatives) {
  $("alternatives").replaceChildren(...alternatives.map(({ text, score }) => {
    const item = document.createElement("li");
    const note = document.createElement("span");
    note.className = "quiet";
    if (score !== undefined) note.textContent = `(${score.toFixed(2)})`;
    item.append(text, " ", note);
    return item;
  }));
  $("alternatives-box").hidden = !alternatives.length;
}

async function copyTranslation() {
  try {
    await navigator.clipboard.writeText($("output").textContent);
    $("state").textContent = "Copied";
  } catch {
    getSelection().selectAllChildren($("output")); // so that the user can copy it
    $("state").textContent = "Selected; copy it with Ctrl+C";
  }
}

// --- history

// Add an entry. It replaces entries with a beginning of its text, which were made during typing.
function addToHistory(entry) {
  const entries = recall("history", []).filter(({ text, target }) => (
    target !== entry.target || !entry.text.startsWith(text)
  ));
  store("history", [entry, ...entries].slice(0, MAX_HISTORY));
  showHistory();
}

function showHistory() {
  const entries = recall("history", []);
  $("history-box").hidden = !entries.length;
  $("history").replaceChildren(...entries.map((entry) => {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = `${entry.source} → ${entry.target}: ${entry.text} — ${entry.translation}`;
    button.addEventListener("click", () => translateAgain(entry));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
}

function translateAgain(entry) {
  $("source").value = entry.source;
  fillTargets(entry.target);
  $("input").value = entry.text;
  translate();
  $("input").focus();
}

function deleteHistory() {
  store("history", []);
  showHistory();
}

// --- start

function setUpTabs() {
  const tabs = [$("tab-text"), $("tab-file")];
  function select(chosenTab) {
    for (const tab of tabs) {
      const isChosen = tab === chosenTab;
      tab.setAttribute("aria-selected", isChosen);
      tab.tabIndex = isChosen ? 0 : -1;
      $(tab.getAttribute("aria-controls")).hidden = !isChosen;
    }
  }
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

function setUpLanguages(defaults) {
  const [source, target] = recall("languages", [defaults.source.code, defaults.target.code]);
  const sources = state.languages.filter((language) => otherTargets(language).length);
  fillSelect($("source"), [{ code: "auto", name: "Detect language" }, ...sources], source);
  if ($("source").value === "auto" && source !== "auto") $("source").value = sources[0].code;
  fillTargets(target);
  $("source").addEventListener("change", () => {
    fillTargets($("target").value);
    changeLanguages();
  });
  $("target").addEventListener("change", changeLanguages);
  $("swap").addEventListener("click", swapLanguages);
  document.addEventListener("keydown", (event) => {
    if (event.altKey && event.key.toLowerCase() === "s") {
      event.preventDefault();
      swapLanguages();
    }
  });
}

function setUpKey({ apiKeys, keyRequired }) {
  $("key-box").hidden = !apiKeys;
  $("key-box").open = keyRequired && !$("key").value;
  $("key-form").addEventListener("submit", (event) => event.preventDefault());
  $("key").addEventListener("change", () => {
    store("key", $("key").value);
    translate();
  });
}

async function start() {
  $("key").value = recall("key", "");
  const [languages, settings, models] = await Promise.all([
    ask("/languages"),
    ask("/frontend/settings"),
    ask("/v1/models"),
  ]);
  state.languages = languages;
  state.settings = settings;
  state.groups = models.groups;
  state.maxBeamSize = models.max_beam_size;
  setUpLanguages(settings.language);
  setUpGlossary(models.glossaries);
  setUpKey(settings);
  setUpTabs();
  $("tab-file").hidden = !settings.filesTranslation;
  setUpFiles({ settings, keyOf: () => $("key").value });
  showHistory();
  setUpWordKeys($("output"));
  $("input").addEventListener("input", translateAfterTyping);
  $("clear").addEventListener("click", () => {
    $("input").value = "";
    translate();
    $("input").focus();
  });
  $("forget").addEventListener("click", deleteHistory);
  $("copy").addEventListener("click", copyTranslation);
  translate();
  document.body.dataset.ready = "true";
}

start().catch((error) => showError(error.message));
