// What the search of the pages shows first. Sphinx puts it before searchtools.js, which asks `Scorer`. tools/website/search.py adds to the index
// how often each page has a word (`counts`, where it is more than once; `lengths`) and what errors say (`errors`).
"use strict";

var Scorer = (() => {
  // The first folder that fits: whoever searches wants to read on, and names and tables repeat words.
  const WEIGHTS = [
    ["errors", 1.2], ["docs/guide/", 1.3], ["notebooks/", 1.3],
    ["api/", 0.5], ["docs/architecture", 0.4], ["docs/api", 0.4], ["docs/cli", 0.6], ["docs/benchmarks", 0.6],
    ["docs/conformance-matrix", 0.5], ["docs/kill-matrix", 0.5], ["docs/field-reports", 0.6], ["docs/peers", 0.6],
    ["", 1],
  ];
  const TITLE = 0.5, HEADING = 0.6, EXACT = 2, ERROR = 10;
  const SOFT = 1.5, LENGTH = 0.75; // of Okapi BM25: how soon a word's count is enough, how much long pages have to have more

  const weight = (page) => WEIGHTS.find(([folder]) => page.startsWith(folder))[1];
  const plain = (text) => text.toLowerCase().replaceAll("-", ""); // zig-zag is zigzag
  let asked = null;

  function ask() {
    const query = new URLSearchParams(location.search).get("q") ?? "", index = Search._index;
    if (asked?.query === query && asked.index === index) return asked;
    const stemmer = new Stemmer(), stem = (word) => stemmer.stemWord(word.toLowerCase());
    const words = splitQuery(query).filter((word) => !stopwords.has(word.toLowerCase()) && !/^\d+$/.test(word)).map(stem);
    const pages = new Map(index.docnames.map((name, n) => [name, n]));
    const mean = index.lengths.reduce((sum, n) => sum + n, 0) / index.lengths.length;
    const terms = words.map((word) => {
      const having = new Set([index.terms[word] ?? [], index.titleterms[word] ?? []].flat());
      const count = (page) => index.counts[word]?.[page] ?? Number(having.has(page));
      return { count, rare: Math.log(1 + (index.docnames.length - having.size + 0.5) / (having.size + 0.5)) };
    });
    const titled = splitQuery(plain(query)).map(stem);
    asked = { query, index, pages, mean, terms, titled, stem, isError: isError(query, index.errors) };
    return asked;
  }

  // From 0 to 1: how much of the query a page is about.
  function relevance({ index, pages, mean, terms }, name) {
    const page = pages.get(name), most = terms.reduce((sum, { rare }) => sum + rare, 0);
    const long = SOFT * (1 - LENGTH + (LENGTH * index.lengths[page]) / mean);
    const found = terms.reduce((sum, { count, rare }) => sum + (rare * count(page)) / (count(page) + long), 0);
    return most ? found / most : 0;
  }

  // Words and the gaps between them that an error fills in.
  const parts = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+|…/gu) ?? [];
  const pairs = (words) => words.slice(1).map((word, n) => [words[n], word]);

  // Whether most of a line of the query stands in one message, in its order.
  function isError(query, messages) {
    const lines = query.split(/\n|\b(?:needed|got|remedy):/).map(parts).filter((words) => words.length > 2).map(pairs);
    return lines.length > 0 && messages.some((message) => {
      const known = new Set(pairs(parts(message)).map((pair) => pair.join(" ")));
      return lines.some((line) => {
        const said = line.filter(([a, b]) => known.has(`${a} ${b}`)).length;
        const filled = line.filter(([a, b]) => known.has(`${a} …`) || known.has(`… ${b}`)).length;
        return said >= 0.5 * line.length && said + filled >= 0.7 * line.length;
      });
    });
  }

  function score([page, title, anchor, _description, own, _file, kind]) {
    const now = ask(), words = new Set(splitQuery(plain(title)).map(now.stem));
    const share = now.titled.filter((word) => words.has(word)).length / Math.max(1, now.titled.length);
    let found = relevance(now, page) + (kind === "text" || kind === "title" ? TITLE * share : 0);
    if (kind === "title" && anchor) found += HEADING * share;
    const exact = kind === "object" && now.query.includes(".") && title.endsWith(now.query.trim());
    found += own / 1000; // a part of a word is in no count
    return found * weight(page) + (exact ? EXACT : 0) + (now.isError && page === "errors" && kind === "text" ? ERROR : 0);
  }

  return {
    score,
    objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  };
})();
