// The words of a translation and the words of its source that belong together, by the attention of
// the model. Pointing at a word highlights its partners on the other side.

// The server counts code points, as this array does; `text.length` would count UTF-16 units.
function toCharacters(text) {
  return Array.from(text);
}

// Return the words of a text as spans [start, end]; a wide character, as in Chinese, is a word.
export function wordSpans(text) {
  const characters = toCharacters(text);
  const spans = [];
  let start = null; // of the word that is being read
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

// Return the index of the span that contains a character, -1 if there is none.
function findSpan(spans, position) {
  return spans.findIndex(([start, end]) => start <= position && position < end);
}

// Return the word spans of both sides, and for each target word the set of indices of the source
// words that its tokens attend to.
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

// Return a paragraph of the text in which each word is an element of its own.
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
  function highlight(event) {
    const word = event.target.closest(".word");
    for (const lit of pair.querySelectorAll(".lit")) lit.classList.remove("lit");
    if (!word) return;
    for (const lit of [word, ...partners.get(word)]) lit.classList.add("lit");
  }
  pair.addEventListener("mouseover", highlight);
  pair.addEventListener("focusin", highlight);
  pair.addEventListener("mouseleave", highlight);
  return pair;
}

// Name the partners of a word for screen readers.
function describeWord(word, partners) {
  const names = partners.map((partner) => partner.textContent).join(", ");
  const description = names ? `goes with ${names}` : "no partner";
  word.setAttribute("aria-label", `${word.textContent}: ${description}`);
}

// Show the words of translated sentences in `container`.
export function showAlignment(container, sentences) {
  container.replaceChildren(...sentences.map(createPair));
}
