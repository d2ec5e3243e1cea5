// Show which words of a translation and of its source belong together, by the alignment of the model.
// Pointing at a word highlights its partners on the other side.

// Return the code points of a text, by which the server counts positions. `text.length` would count
// UTF-16 units.
function toCharacters(text) {
  return Array.from(text);
}

// Return the words of a text as spans [start, end]. A wide character, such as in Chinese, is a word.
export function wordSpans(text) {
  const characters = toCharacters(text);
  const spans = [];
  let start = null; // of the current word; null between words
  characters.forEach((character, i) => {
    const isWide = /[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]/.test(character);
    const isSpace = /\s/.test(character);
    if (start !== null && (isWide || isSpace)) {
      spans.push([start, i]);
      start = null;
    }
    if (isWide) spans.push([i, i + 1]);
    else if (start === null && !isSpace) start = i;
  });
  if (start !== null) spans.push([start, characters.length]);
  return spans;
}

// Return the index of the span that contains a position, or -1.
function findSpan(spans, position) {
  return spans.findIndex(([start, end]) => start <= position && position < end);
}

// Return the spans of the words on both sides, and for each target word the set of the indices of
// the source words that its tokens are aligned with.
export function alignWords(sentence) {
  const [best] = sentence.hypotheses;
  const sourceSpans = wordSpans(sentence.source);
  const targetSpans = wordSpans(best.text);
  const sourceWords = targetSpans.map(() => new Set());
  (best.alignment ?? []).forEach((sourceToken, targetToken) => {
    const [sourcePosition] = sentence.source_spans[sourceToken] ?? [-1];
    const [targetPosition] = best.spans[targetToken];
    const sourceWord = findSpan(sourceSpans, sourcePosition);
    const targetWord = findSpan(targetSpans, targetPosition);
    if (sourceWord >= 0 && targetWord >= 0) sourceWords[targetWord].add(sourceWord);
  });
  return { sourceSpans, targetSpans, sourceWords };
}

// Return a paragraph of the text with an element for each word.
function createLine(text, spans) {
  const line = document.createElement("p");
  line.className = "words";
  const characters = toCharacters(text);
  let position = 0;
  for (const [start, end] of spans) {
    const word = document.createElement("span");
    word.className = "word";
    word.tabIndex = 0;
    word.textContent = characters.slice(start, end).join("");
    line.append(characters.slice(position, start).join(""), word);
    position = end;
  }
  line.append(characters.slice(position).join(""));
  return line;
}

// Return an element with a source and its translation.
function createPair(sentence) {
  const { sourceSpans, targetSpans, sourceWords } = alignWords(sentence);
  const sourceLine = createLine(sentence.source, sourceSpans);
  const targetLine = createLine(sentence.hypotheses[0].text, targetSpans);
  const sources = [...sourceLine.querySelectorAll(".word")];
  const targets = [...targetLine.querySelectorAll(".word")];
  const partners = new Map(); // elements of the other side, by the element of a word
  sources.forEach((word, i) => {
    partners.set(word, targets.filter((_, j) => sourceWords[j].has(i)));
  });
  targets.forEach((word, j) => {
    partners.set(word, [...sourceWords[j]].map((i) => sources[i]));
  });
  for (const [word, others] of partners) describeWord(word, others);

  const pair = document.createElement("div");
  pair.className = "pair";
  pair.append(sourceLine, targetLine);
  function clearHighlight() {
    for (const lit of pair.querySelectorAll(".lit")) lit.classList.remove("lit");
  }
  function highlight(event) {
    const word = event.target.closest(".word");
    clearHighlight();
    if (!word) return;
    for (const lit of [word, ...partners.get(word)]) lit.classList.add("lit");
  }
  pair.addEventListener("mouseover", highlight);
  pair.addEventListener("focusin", highlight);
  pair.addEventListener("mouseleave", clearHighlight);
  pair.addEventListener("focusout", clearHighlight);
  return pair;
}

// Name the partners of a word for screen readers, which may ignore the label of a span without a role.
function describeWord(word, partners) {
  const names = partners.map((partner) => partner.textContent).join(", ");
  const description = names ? `goes with ${names}` : "no partner";
  word.setAttribute("role", "group");
  word.setAttribute("aria-label", `${word.textContent}: ${description}`);
}

// Show the words of translated sentences in `container`.
export function showAlignment(container, sentences) {
  container.replaceChildren(...sentences.map(createPair));
}
