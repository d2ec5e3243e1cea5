// Which words of a translation go with which words of its source, by the model's attention.

function characters(text) { return Array.from(text); } // the server counts code points

// Return the words of a text as spans [from, to]; a wide character, as of Chinese, is a word.
export function words(text) {
  const found = [];
  let start = -1;
  const all = characters(text);
  all.forEach((character, i) => {
    const wide = /[\u2e80-\u9fff\uf900-\ufaff\uff00-\uff60]/.test(character);
    const space = /\s/.test(character);
    if (start >= 0 && (wide || space)) { found.push([start, i]); start = -1; }
    if (wide) found.push([i, i + 1]);
    else if (start < 0 && !space) start = i;
  });
  if (start >= 0) found.push([start, all.length]);
  return found;
}

// Return for each target word the numbers of the source words that its tokens attend to.
export function wordPairs(sentence) {
  const [best] = sentence.hypotheses;
  const source = words(sentence.source), target = words(best.text);
  const wordAt = (all, place) => all.findIndex(([from, to]) => from <= place && place < to);
  const pairs = target.map(() => new Set());
  (best.alignment ?? []).forEach((place, token) => {
    const from = wordAt(source, sentence.source_spans[place]?.[0] ?? -1);
    const to = wordAt(target, best.spans[token][0]);
    if (from >= 0 && to >= 0) pairs[to].add(from);
  });
  return { source, target, pairs };
}

function line(text, spans, side) {
  const block = document.createElement("p");
  block.className = "words";
  const all = characters(text);
  let done = 0;
  spans.forEach(([from, to], number) => {
    block.append(all.slice(done, from).join(""));
    const word = document.createElement("span");
    word.className = "word";
    word.tabIndex = 0;
    word.dataset.side = side;
    word.dataset.number = number;
    word.textContent = all.slice(from, to).join("");
    block.append(word);
    done = to;
  });
  block.append(all.slice(done).join(""));
  return block;
}

export function showAlignment(place, sentences) {
  place.replaceChildren(...sentences.map((sentence) => {
    const { source, target, pairs } = wordPairs(sentence);
    const pair = document.createElement("div");
    pair.className = "pair";
    const top = line(sentence.source, source, "source");
    const bottom = line(sentence.hypotheses[0].text, target, "target");
    pair.append(top, bottom);
    const sources = [...top.querySelectorAll(".word")], targets = [...bottom.querySelectorAll(".word")];
    const partners = (word) => {
      const number = Number(word.dataset.number);
      return word.dataset.side === "target" ? [...pairs[number]].map((i) => sources[i])
        : targets.filter((_, i) => pairs[i].has(number));
    };
    sources.forEach((word) => describe(word, partners(word)));
    targets.forEach((word) => describe(word, partners(word)));
    const light = (event) => {
      const word = event.target.closest(".word");
      pair.querySelectorAll(".lit").forEach((other) => other.classList.remove("lit"));
      if (word) [word, ...partners(word)].forEach((other) => other.classList.add("lit"));
    };
    pair.addEventListener("mouseover", light);
    pair.addEventListener("focusin", light);
    pair.addEventListener("mouseleave", light);
    return pair;
  }));
}

function describe(word, partners) {
  const names = partners.map((other) => other.textContent).join(", ");
  word.setAttribute("aria-label", `${word.textContent}: ${names ? `goes with ${names}` : "no partner"}`);
}
