// Ranks the results of the pages' search. Sphinx puts this file before searchtools.js, which asks `Scorer`.
// tools/website/search.py adds to the index: `counts` (how often a page has a word, if more than once), `lengths` (how many
// words a page has), and `errors` (the texts of errors).
"use strict";

var Scorer = (() => {
  // The first entry that fits counts. Pages to read come first, because pages of names and tables repeat words.
  const WEIGHTS = [
    ["errors", 1.2], ["docs/guide/", 1.3], ["notebooks/", 1.3],
    ["api/", 0.5], ["docs/architecture", 0.4], ["docs/api", 0.4], ["docs/cli", 0.6], ["docs/benchmarks", 0.6],
    ["docs/conformance-matrix", 0.5], ["docs/kill-matrix", 0.5], ["docs/field-reports", 0.6], ["docs/peers", 0.6],
    ["", 1],
  ];
  const TITLE = 0.5, HEADING = 0.6, EXACT = 2, ERROR = 10;
  const SOFT = 1.5, LENGTH = 0.75; // of Okapi BM25: how soon further counts add little, and how much more often a long page must have a word

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

  // Returns from 0 to 1 how well a page fits the query.
  function relevance({ index, pages, mean, terms }, name) {
    const page = pages.get(name), most = terms.reduce((sum, { rare }) => sum + rare, 0);
    const long = SOFT * (1 - LENGTH + (LENGTH * index.lengths[page]) / mean);
    const found = terms.reduce((sum, { count, rare }) => sum + (rare * count(page)) / (count(page) + long), 0);
    return most ? found / most : 0;
  }

  // Returns the words of a text, and an ellipsis for each value that an error fills in.
  const parts = (text) => text.toLowerCase().match(/[\p{L}\p{N}_]+|…/gu) ?? [];
  const pairs = (words) => words.slice(1).map((word, n) => [words[n], word]);

  // Returns whether most of a line of the query is in one message, in the same order.
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
    found += own / 1000; // so that pages rank by Sphinx's own score if the query is only a part of a word
    return found * weight(page) + (exact ? EXACT : 0) + (now.isError && page === "errors" && kind === "text" ? ERROR : 0);
  }

  return {
    score,
    objNameMatch: 11, objPartialMatch: 6, objPrio: {}, objPrioDefault: 0,
    title: 15, partialTitle: 7, term: 5, partialTerm: 2,
  };
})();
