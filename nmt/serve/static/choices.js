// Show the words of a translation as buttons. A button offers other words in place of its word. If
// one is chosen, the text after it changes, too.

import { wordSpans } from "/static/alignment.js";

// Return the words of a text.
function wordsOf(text) {
  const characters = Array.from(text);
  return wordSpans(text).map(([start, end]) => characters.slice(start, end).join(""));
}

// Return the text before a word, without the space at its end.
export function prefixOf(text, wordIndex) {
  const [start] = wordSpans(text)[wordIndex];
  return Array.from(text).slice(0, start).join("").trimEnd();
}

// Return the words that hypotheses have in place of a word of `text`, after equal words before it.
// Each choice has the word, the text after the word, and the hypothesis. Each word is returned once.
export function otherWords(text, wordIndex, hypotheses) {
  const words = wordsOf(text);
  const seen = new Set([words[wordIndex]]);
  const choices = [];
  for (const hypothesis of hypotheses) {
    const newWords = wordsOf(hypothesis.text);
    const word = newWords[wordIndex];
    const isSameBefore = words.slice(0, wordIndex).every((before, i) => before === newWords[i]);
    if (!word || seen.has(word) || !isSameBefore) continue;
    seen.add(word);
    const [, end] = wordSpans(hypothesis.text)[wordIndex];
    const rest = Array.from(hypothesis.text).slice(end).join("");
    choices.push({ word, rest, hypothesis });
  }
  return choices;
}

// Return for each sentence the span [start, end] of its translation in the text of an answer.
export function findTranslations({ text, sentences }) {
  let position = 0;
  return sentences.map(({ hypotheses }) => {
    const translation = hypotheses?.[0]?.text ?? "";
    const start = text.indexOf(translation, position);
    position = start + translation.length;
    return [start, position];
  });
}

// Show the text of an answer in `container`, with a button for each word of a translation. A click
// calls `onWord` with the sentence, the index of the word in its translation, and the button.
export function showWords(container, answer, onWord) {
  container.replaceChildren();
  if (!answer?.text) return;
  let position = 0;
  findTranslations(answer).forEach(([start, end], i) => {
    container.append(answer.text.slice(position, start));
    appendWords(container, answer.sentences[i], answer.text.slice(start, end), onWord);
    position = end;
  });
  container.append(answer.text.slice(position));
  const first = container.querySelector(".choice");
  if (first) first.tabIndex = 0;
}

// Append the translation of a sentence to `container`.
function appendWords(container, sentence, translation, onWord) {
  const characters = Array.from(translation);
  let position = 0;
  wordSpans(translation).forEach(([start, end], i) => {
    const word = document.createElement("span");
    word.className = "choice";
    word.tabIndex = -1; // not reached by Tab, but by the arrow keys
    word.setAttribute("role", "button");
    word.setAttribute("aria-haspopup", "menu");
    word.textContent = characters.slice(start, end).join("");
    word.addEventListener("click", () => {
      if (getSelection().isCollapsed) onWord(sentence, i, word); // no text is selected
    });
    container.append(characters.slice(position, start).join(""), word);
    position = end;
  });
  container.append(characters.slice(position).join(""));
}

// Let the arrow keys, Home and End move the focus between words, and Enter and Space click.
export function setUpWordKeys(container) {
  container.addEventListener("keydown", (event) => {
    const words = [...container.querySelectorAll(".choice")];
    const index = words.indexOf(event.target);
    if (index < 0) return;
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      getSelection().removeAllRanges();
      event.target.click();
      return;
    }
    moveFocus(event, words, index, ["ArrowLeft", "ArrowRight"]);
  });
}

// Focus the element that a key leads to. Tab then reaches only this element.
function moveFocus(event, elements, index, [previousKey, nextKey]) {
  const last = elements.length - 1;
  if (last < 0) return;
  const targets = {
    [previousKey]: Math.max(index - 1, 0),
    [nextKey]: Math.min(index + 1, last),
    Home: 0,
    End: last,
  };
  if (!(event.key in targets)) return;
  event.preventDefault();
  for (const element of elements) element.tabIndex = -1;
  const target = elements[targets[event.key]];
  target.tabIndex = 0;
  target.focus();
}

// The menu of other words below a word.
export class WordMenu {
  constructor(menu) {
    this.menu = menu;
    this.word = null; // the word whose menu is open
    menu.addEventListener("keydown", (event) => {
      const items = [...menu.querySelectorAll("[role=menuitem]")];
      moveFocus(event, items, items.indexOf(document.activeElement), ["ArrowUp", "ArrowDown"]);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.close({ focusWord: true });
    });
    document.addEventListener("click", (event) => {
      if (!menu.contains(event.target) && event.target !== this.word) this.close({});
    });
  }

  // Open the menu of a word with a message, until the other words are known.
  open(word, message) {
    this.close({});
    this.word = word;
    word.setAttribute("aria-expanded", "true");
    this.menu.setAttribute("aria-label", `Instead of ${word.textContent}`);
    this.showMessage(message);
    this.menu.hidden = false;
    this.place();
  }

  showMessage(message) {
    const note = document.createElement("p");
    note.className = "quiet";
    note.setAttribute("role", "menuitem");
    note.setAttribute("aria-disabled", "true");
    note.textContent = message;
    this.menu.replaceChildren(note);
  }

  // Show the choices of `otherWords`. A click calls `onChoice` with the choice.
  showChoices(choices, onChoice) {
    this.menu.replaceChildren(...choices.map((choice) => {
      const item = document.createElement("button");
      item.type = "button";
      item.tabIndex = -1;
      item.setAttribute("role", "menuitem");
      const rest = document.createElement("span");
      rest.className = "quiet";
      rest.textContent = choice.rest;
      item.append(choice.word, rest);
      item.addEventListener("click", () => onChoice(choice));
      return item;
    }));
    this.place();
    this.menu.querySelector("button").focus();
  }

  // Put the menu below its word, within the width of its parent.
  place() {
    const maxLeft = this.menu.parentElement.clientWidth - this.menu.offsetWidth;
    this.menu.style.left = `${Math.max(0, Math.min(this.word.offsetLeft, maxLeft))}px`;
    this.menu.style.top = `${this.word.offsetTop + this.word.offsetHeight}px`;
  }

  close({ focusWord = false }) {
    if (!this.word) return;
    this.word.removeAttribute("aria-expanded");
    if (focusWord) this.word.focus();
    this.word = null;
    this.menu.hidden = true;
    this.menu.replaceChildren();
  }
}
