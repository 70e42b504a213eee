"use strict";
// Text from data only ever enters the page as text nodes and attribute values.
const $ = (selector, root = document) => root.querySelector(selector);
const $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "onclick") node.addEventListener("click", value);
    else if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) if (child !== null && child !== undefined) node.append(child);
  return node;
}
const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);
const sentence = (text) => text ? `${text[0].toUpperCase()}${text.slice(1)}.` : "";
const number = (value, digits = 1) =>
  value === null || value === undefined ? "-" : Number(value).toLocaleString("en", {
    minimumFractionDigits: digits, maximumFractionDigits: digits });
const colour = (place) => `var(--c${place % 8})`;

// Light and dark
const root = document.documentElement;
const isDark = () => root.dataset.theme ? root.dataset.theme === "dark"
  : matchMedia("(prefers-color-scheme: dark)").matches;
function showTheme() { $("#theme").textContent = isDark() ? "Light" : "Dark"; }
function remember(value) { try { localStorage.setItem("theme", value); } catch { /* not kept */ } }
try { const kept = localStorage.getItem("theme"); if (kept) root.dataset.theme = kept; }
catch { /* storage may be closed to files */ }
$("#theme").addEventListener("click", () => {
  root.dataset.theme = isDark() ? "light" : "dark";
  remember(root.dataset.theme);
  showTheme();
});
showTheme();

// What is heavy is compressed inside the page and inflated when it is asked for
const inflated = new Map();
function inflate(name) {
  if (!inflated.has(name)) inflated.set(name, (async () => {
    const text = atob($(`script[data-blob="${CSS.escape(name)}"]`).textContent);
    const bytes = Uint8Array.from(text, (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return new Response(stream).text();
  })());
  return inflated.get(name);
}
const index = JSON.parse($("#index").textContent);
const runs = index.runs.map(([id, method, dataset, seed, worst, average, digits, kind, reason,
  blob, tree]) => ({ id, method: index.methods[method], dataset: index.datasets[dataset], seed, worst,
  average, digits, kind: index.kinds[kind], reason: index.reasons[reason], blob, tree }));
const byId = new Map(runs.map((run) => [run.id, run]));
async function details(id) {
  const run = byId.get(id);
  return run && JSON.parse(await inflate(`runs-${run.blob}`)).find((one) => one.run_id === id);
}

// Sections open when they are linked to
function reveal(id) {
  const target = id && document.getElementById(id);
  if (!target) return;
  for (let node = target; node; node = node.parentElement) if (node.tagName === "DETAILS") node.open = true;
  target.scrollIntoView();
  if (target.tagName === "DETAILS") $("summary", target).focus({ preventScroll: true });
}
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#"]');
  if (link && !link.hash.startsWith("#run=")) setTimeout(() => reveal(link.hash.slice(1)));
});
const sections = $$("details.card:not(.figure)");
$("#open-all").addEventListener("click", () => sections.forEach((one) => { one.open = true; }));
$("#close-all").addEventListener("click", () =>
  $$("details.card").forEach((one) => { one.open = false; }));
$("#print").addEventListener("click", () => print());
for (const box of $$("details.figure")) box.addEventListener("toggle", async () => {
  const place = $("[data-drawing]", box);
  if (!box.open || !place || place.firstChild) return;
  const drawing = await inflate(place.dataset.drawing);
  const address = `data:image/svg+xml,${encodeURIComponent(drawing)}`;
  if (!place.firstChild) place.append(el("img", { src: address, alt: place.dataset.alt }));
});

// Sorting and filtering
function sortKey(row, column) {
  const cell = row.cells[column];
  const text = cell.dataset.v ?? cell.textContent.trim();
  return text === "" || text === "-" ? null : isNaN(text) ? text.toLowerCase() : Number(text);
}
function compare(a, b, sign) {
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return sign * (a < b ? -1 : a > b ? 1 : 0);
}
// Numbers begin with the highest, texts with the first; the third click brings back the order
function nextOrder(heads, head, isNumber) {
  const steps = isNumber ? ["descending", "ascending"] : ["ascending", "descending"];
  const order = steps[steps.indexOf(head.getAttribute("aria-sort")) + 1];
  heads.forEach((other) => other.removeAttribute("aria-sort"));
  if (order) head.setAttribute("aria-sort", order);
  return order === "ascending" ? 1 : order === "descending" ? -1 : 0;
}
const words = (text) => text.toLowerCase().split(/\s+/).filter(Boolean);
function prepare(table) {
  const body = table.tBodies[0], original = [...body.rows];
  const rows = original.filter((row) => !row.classList.contains("section"));
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  heads.forEach((head, column) => $("button", head).addEventListener("click", () => {
    const isNumber = rows.some((row) => typeof sortKey(row, column) === "number");
    const sign = nextOrder(heads, head, isNumber);
    if (!sign) return body.replaceChildren(...original);
    const keyed = rows.map((row) => [sortKey(row, column), row]);
    keyed.sort((one, two) => compare(one[0], two[0], sign));
    body.replaceChildren(...keyed.map(([, row]) => row));
  }));
  const card = table.closest(".card"), count = $(".count", card);
  const texts = new Map();
  const textOf = (row) => {
    if (!texts.has(row)) texts.set(row, row.textContent.toLowerCase());
    return texts.get(row);
  };
  $("[data-filter]", card).addEventListener("input", (event) => {
    const wanted = words(event.target.value);
    let shown = 0;
    for (const row of rows) {
      row.hidden = !wanted.every((word) => textOf(row).includes(word));
      shown += !row.hidden;
    }
    for (const row of original) if (!rows.includes(row)) row.hidden = wanted.length > 0;
    count.textContent = wanted.length ? `${shown} of ${rows.length} rows` : "";
  });
  const unfold = $("[data-unfold]", card);
  if (unfold) unfold.addEventListener("click", () => {
    const folded = table.classList.toggle("folded");
    unfold.setAttribute("aria-pressed", String(!folded));
    $("u", unfold).textContent = folded ? "Show" : "Hide";
  });
  reachable(table);
}
// One cell of a table is in the tab order; arrows go from there, Enter opens it
function reachable(table) {
  const first = $("td[data-tip]:not(.fold)", table) || $("td[data-tip]", table);
  if (first) first.tabIndex = 0;
}
const ARROWS = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
function neighbour(cell, [down, right]) {
  const rows = [...cell.closest("tbody").rows].filter((row) => row.offsetParent);
  let row = cell.parentElement, column = cell.cellIndex;
  for (;;) {
    if (right) column += right; else row = rows[rows.indexOf(row) + down];
    const next = row && row.cells[column];
    if (!next) return null;
    if (next.dataset.tip !== undefined && next.offsetParent) return next;
  }
}
document.addEventListener("keydown", (event) => {
  const cell = event.target.closest && event.target.closest("td[data-tip]");
  if (!cell || event.target !== cell) return;
  if (ARROWS[event.key]) {
    const next = neighbour(cell, ARROWS[event.key]);
    event.preventDefault();
    if (!next) return;
    cell.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pin(cell);
    const link = $("a", tip);
    if (link) link.focus();
  }
});
for (const table of $$("table.data")) {
  const box = table.closest("details");
  const once = () => { if (box.open) { box.removeEventListener("toggle", once); prepare(table); } };
  box.addEventListener("toggle", once);
}
$$(".board table").forEach(reachable);

// Exact values of a number, with links to the runs behind it
const tip = $("#tip");
let pinned = null;
const runsOf = (cell) => (cell.dataset.runs || "").split(" ").filter(Boolean).flatMap((range) => {
  const [first, last] = range.split("-").map(Number);
  return runs.slice(first, (last ?? first) + 1);
});
function showTip(cell) {
  const own = runsOf(cell);
  tip.replaceChildren(...cell.dataset.tip.split("\n").map((part) => el("div", {}, part)),
    ...own.slice(0, 12).map(({ id }) => el("a", { href: `#run=${encodeURIComponent(id)}` }, id)),
    own.length > 12 ? `and ${own.length - 12} more` : "");
  tip.hidden = false;
  const at = cell.getBoundingClientRect(), size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(6, Math.min(at.left, innerWidth - size.width - 6))}px`;
  const below = at.bottom + 4;
  tip.style.top = `${below + size.height < innerHeight ? below
    : Math.max(6, at.top - size.height - 4)}px`;
}
function pin(cell) { showTip(cell); pinned = cell; }
function hideTip() { pinned = null; tip.hidden = true; }
document.addEventListener("mouseover", (event) => {
  if (pinned) return;
  const cell = event.target.closest("td[data-tip]");
  if (cell) showTip(cell); else if (!event.target.closest("#tip")) tip.hidden = true;
});
document.addEventListener("click", (event) => {
  const cell = event.target.closest("td[data-tip]");
  if (cell && pinned !== cell) pin(cell);
  else if (!event.target.closest("#tip") || event.target.closest("#tip a")) hideTip();
});
addEventListener("scroll", () => { if (!pinned) tip.hidden = true; }, { passive: true });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (pinned && tip.contains(document.activeElement)) pinned.focus();
  hideTip();
});

// The list of runs, a hundred at a time
const PAGE = 100;
const list = { shown: PAGE, sign: 0, key: null, wanted: [] };
const COLUMNS = ["id", "method", "dataset", "seed", "worst", "average", "kind", "reason"];
function listRuns() {
  let found = runs.filter((run) => {
    const text = COLUMNS.map((name) => run[name]).join(" ").toLowerCase();
    return list.wanted.every((word) => text.includes(word));
  });
  if (list.sign) found = [...found].sort((one, two) => compare(one[list.key], two[list.key], list.sign));
  const tone = { smoke: " warn", "left out": " bad" };
  $("#run-list tbody").replaceChildren(...found.slice(0, list.shown).map((run) => el("tr", {},
    el("th", { class: "stub", scope: "row" },
      el("a", { href: `#run=${encodeURIComponent(run.id)}` }, run.id)),
    el("td", { class: "l" }, run.method), el("td", { class: "l" }, run.dataset),
    el("td", { class: "r" }, String(run.seed)),
    el("td", { class: "r" }, number(run.worst, run.digits)),
    el("td", { class: "r" }, number(run.average)),
    el("td", { class: "l" }, el("span", { class: `tag${tone[run.kind] || ""}` }, run.kind)),
    el("td", { class: "l wrap" }, run.reason))));
  $("#run-count").textContent = list.wanted.length ? `${found.length} of ${runs.length} runs` : "";
  $("#more-runs").hidden = found.length <= list.shown;
}
function prepareRuns() {
  const heads = $$("#run-list thead th");
  heads.forEach((head, column) => $("button", head).addEventListener("click", () => {
    list.key = COLUMNS[column];
    list.sign = nextOrder(heads, head, runs.some((run) => typeof run[list.key] === "number"));
    listRuns();
  }));
  $("#run-filter").addEventListener("input", (event) => {
    Object.assign(list, { wanted: words(event.target.value), shown: PAGE });
    listRuns();
  });
  $("#more-runs").addEventListener("click", () => { list.shown *= 4; listRuns(); });
  listRuns();
}
function whenOpened(selector, prepareIt) {
  const box = $(selector);
  if (box) box.addEventListener("toggle", () => { if (box.open) prepareIt(); }, { once: true });
}
if ($("#run-list")) whenOpened("#runs", prepareRuns);

// Trees: one at a time, of the runs that have one
whenOpened("#trees", () => {
  const grown = runs.filter((run) => run.tree && run.kind === "published");
  const shown = (grown.length ? grown : runs.filter((run) => run.tree)).slice(0, 200);
  const buttons = [], rows = new Map();
  for (const run of shown) {
    const title = `${run.method} on ${run.dataset}, seed`;
    if (!rows.has(title)) rows.set(title, el("div", { class: "seeds" }, title));
    const button = el("button", { type: "button", "aria-pressed": "false",
      "aria-label": `${title} ${run.seed}`, onclick: async () => {
        buttons.forEach((one) => one.setAttribute("aria-pressed", String(one === button)));
        const found = await details(run.id);
        $("#tree-shown").replaceChildren(
          el("p", {}, el("a", { href: `#run=${encodeURIComponent(run.id)}` }, run.id),
            `: worst group ${number(run.worst, run.digits)} on test`), tree(found));
      } }, String(run.seed));
    buttons.push(button);
    rows.get(title).append(button);
  }
  $("#tree-runs").replaceChildren(...rows.values());
  if (buttons.length) buttons[0].click();
});

// One run in full
const dialog = $("#run");
async function openRun(id) {
  const run = await details(id);
  if (!run) return;
  $("#run-title").textContent = id;
  $("#run-body").replaceChildren(...describe(run).filter(Boolean));
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
}
function followHash() {
  const wanted = location.hash.match(/^#run=(.*)$/);
  if (wanted) return openRun(decodeURIComponent(wanted[1]));
  if (dialog.open) dialog.close();
  return reveal(location.hash.slice(1));
}
let opener = null;
addEventListener("hashchange", followHash);
document.addEventListener("click", (event) => {
  const link = event.target.closest('a[href^="#run="]');
  if (!link) return;
  opener = link.closest("#tip") ? null : link;
  if (link.hash === location.hash) followHash();
});
$("#close").addEventListener("click", () => dialog.close());
dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
dialog.addEventListener("close", () => {
  if (location.hash.startsWith("#run=")) history.replaceState(null, "", "#answer");
  if (opener) opener.focus();
});

const card = (title, ...content) =>
  el("section", { class: "card" }, el("h3", {}, title), ...content);
function facts(entries) {
  return el("dl", {}, entries.filter(([, value]) => value !== undefined && value !== null &&
    value !== "").map(([name, value]) => [el("dt", {}, name), el("dd", {},
    value instanceof Node ? value : typeof value === "object" ? JSON.stringify(value)
      : String(value))]));
}
function flat(value, prefix = "") {
  return Object.entries(value || {}).flatMap(([name, item]) =>
    item && typeof item === "object" && !Array.isArray(item) ? flat(item, `${prefix}${name}.`)
      : [[prefix + name, Array.isArray(item) ? item.join(", ") : item]]);
}
function grid(heads, rows) {
  return el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": heads.join(", ") },
    el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head, place) =>
        el("th", { class: place ? "r" : "stub", scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell, place) =>
        place ? el("td", { class: "r" }, cell) : el("th", { class: "stub", scope: "row" }, cell)))))));
}
function describe(run) {
  const marks = [run.standin && "stand-in data", run.quick && "quick run"].filter(Boolean);
  return [
    marks.length ? el("p", { class: "banner" },
      `${marks.join(", ")}: this run is not a result.`) : null,
    run.kind === "left out" ? el("p", { class: "banner" }, `Not in the tables: ${run.reason}.`)
      : null,
    run.failure ? card("Failure", facts([["kind", run.failure.kind],
      ["message", run.failure.message], ["remedy", run.failure.remedy],
      ["command", run.failure.command]]), el("pre", {}, run.failure.stderr_tail || "")) : null,
    headline(run),
    run.command ? card("Command", copied(run.command)) : null,
    run.metrics ? byGroup(run) : null,
    run.curves ? curves(run) : null,
    run.tree ? tree(run) : null,
    run.slices && run.slices.length ? slices(run) : null,
    run.metrics ? metrics(run) : null,
    el("div", { class: "pair" },
      card("Run", facts([["method", `${run.method}, version ${run.method_version}`],
        ["dataset", `${run.dataset}, ${run.protocol}`], ["seed", run.seed],
        ["preset", run.preset], ["changed", flat(run.overrides).map((o) => o.join("=")).join(" ")],
        ["selection", flat(run.selection).map((o) => o.join(" ")).join(", ")],
        ["commit", run.git && run.git.commit],
        ["uncommitted changes", run.git && String(run.git.dirty)],
        ["data", run.data_fingerprint],
        ["peak memory", run.peak_memory_bytes &&
          `${number(run.peak_memory_bytes / 2 ** 20, 0)} MiB`]])),
      card("Environment", facts([["device", run.device], ["threads", run.threads],
        ...flat(run.environment)]))),
    run.stages ? card("Stages", grid(["stage", "alone (s)", "marginal (s)", "images", "reused"],
      run.stages.map((s) => [s.name, number(s.seconds_standalone), number(s.seconds_marginal),
        number(s.image_passes, 0), s.reused ? "yes" : "no"]))) : null,
    run.partition ? card("Inferred partition", facts(flat(run.partition))) : null,
    card("Configuration", facts(flat(run.config))),
  ];
}
// The answer in a line; of development seeds it is validation's
function headline(run) {
  const line = byId.get(run.run_id);
  if (!run.metrics || !line || line.worst === null) return null;
  const groups = Object.entries(run.metrics.test.group_accuracy || {}).filter(([, v]) => v !== null);
  const [worst] = groups.sort((one, two) => one[1] - two[1])[0] || [];
  return el("p", { class: "headline" }, `${line.method} on ${line.dataset}, seed ${line.seed}: `,
    el("b", {}, `worst group ${number(line.worst, line.digits)}`),
    ` on test${worst ? ` (${worst})` : ""}, average ${number(line.average)}.`);
}
function copied(command) {
  const button = el("button", { type: "button", onclick: async () => {
    try { await navigator.clipboard.writeText(command); button.textContent = "Copied"; }
    catch { button.textContent = "Select it"; }
  } }, "Copy");
  return el("div", { class: "copy" }, el("code", {}, command), button);
}
function slices(run) {
  const level = run.tree && run.tree.levels[run.tree.chosen_iteration - 1];
  const name = (leaf) => level && level.names[leaf] ? level.names[leaf] : `part ${leaf + 1}`;
  const worst = Math.min(...run.slices.map((one) => one[4]).filter((v) => v !== null));
  return card("Slices: accuracy in each part of the data that the method found",
    grid(["part", "validation images", "right (%)", "test images", "right (%)"],
      run.slices.map(([leaf, n, right, m, test]) => [name(leaf), number(n, 0), number(right),
        number(m, 0), test === worst ? el("strong", {}, number(test)) : number(test)])),
    el("p", { class: "notes" }, "Bold: the worst part on test. What each part is: ",
      el("code", {}, `python -m bench slices ${run.run_id}`)));
}
function metrics(run) {
  const { val, test } = run.metrics;
  const plain = Object.keys(test).filter((name) => typeof test[name] !== "object" ||
    test[name] === null);
  const digits = (name) => name.startsWith("auroc") ? 3 : 1;
  return card("Metrics", grid(["metric", "validation", "test"], plain.map((name) =>
    [name, number(val[name], digits(name)), number(test[name], digits(name))])));
}
function byGroup(run) {
  const { val, test } = run.metrics;
  const counted = new Map((run.confusion ? run.confusion.test : []).map(([group, truth, counts]) =>
    [group, counts.map((n, c) => c === truth ? el("strong", {}, number(n, 0)) : number(n, 0))]));
  const width = Math.max(0, ...[...counted.values()].map((cells) => cells.length));
  const heads = Array.from({ length: width }, (_, c) => `as ${run.classes[c] || `class ${c}`}`);
  const lowest = Math.min(...Object.values(test.group_accuracy).filter((v) => v !== null));
  const mark = (value) => value === lowest ? el("strong", {}, number(value)) : number(value);
  const rows = Object.keys(test.group_accuracy).map((group) => [group,
    number(val.group_accuracy[group]), mark(test.group_accuracy[group]),
    number(test.group_count[group], 0), ...(counted.get(group) || heads.map(() => "-"))]);
  return card("Groups: accuracy and confusion",
    grid(["true group", "validation (%)", "test (%)", "test images", ...heads], rows),
    el("p", { class: "notes" }, "The last columns count the group's test images by predicted " +
      "class; bold there is the true one. Bold accuracy: the worst group."));
}

// Curves
function chart(title, curve, names) {
  const W = 320, H = 150, left = 38, bottom = 18, top = 6;
  const series = names.filter(([key]) => curve.series[key]);
  if (!series.length) return null;
  const values = series.flatMap(([key]) => curve.series[key]).filter((v) => v !== null);
  let low = Math.min(...values), high = Math.max(...values);
  if (low === high) { low -= 1; high += 1; }
  const last = curve.epochs[curve.epochs.length - 1];
  const x = (epoch) => left + (last > 1 ? (epoch - 1) / (last - 1) : 0.5) * (W - left - 6);
  const y = (value) => top + (1 - (value - low) / (high - low)) * (H - top - bottom);
  const marks = [low, (low + high) / 2, high].map((value) => [
    svg("line", { x1: left, x2: W - 6, y1: y(value), y2: y(value), class: "axis" }),
    svg("text", { x: left - 4, y: y(value) + 3, "text-anchor": "end" },
      Number(value.toPrecision(3)).toString())]);
  const stages = curve.stages.slice(1).map(([place, name]) =>
    svg("line", { x1: x(place + 0.5), x2: x(place + 0.5), y1: top, y2: H - bottom, class: "axis",
      "stroke-dasharray": "2 2" }, svg("title", {}, name)));
  const dashes = ["", "5 3", "1 3"];
  const lines = series.map(([key], place) => svg("polyline", { fill: "none", "stroke-width": 1.6,
    stroke: colour(place), "stroke-dasharray": dashes[place],
    points: curve.epochs.map((epoch, i) => [epoch, curve.series[key][i]])
      .filter(([, v]) => v !== null).map(([e, v]) => `${x(e)},${y(v)}`).join(" ") }));
  const dots = series.flatMap(([key], place) => curve.epochs.map((epoch, i) =>
    curve.series[key][i] === null ? null : svg("circle", { cx: x(epoch), cy: y(curve.series[key][i]),
      r: curve.epochs.length > 12 ? 1.4 : 2.6, fill: colour(place) }, svg("title", {},
      `epoch ${epoch}: ${curve.series[key][i]}`))));
  return el("div", {}, el("strong", {}, title),
    svg("svg", { viewBox: `0 0 ${W} ${H}`, class: "chart", role: "img", "aria-label": title },
      marks.flat(), stages, lines, dots.filter(Boolean),
      svg("text", { x: W - 6, y: H - 5, "text-anchor": "end" }, `epoch ${last}`)),
    series.length > 1 ? el("div", { class: "legend" }, series.map(([, name], place) =>
      el("span", {}, el("i", { style: `background:${colour(place)}` }), name))) : null);
}
function curves(run) {
  return card("History", el("div", { class: "pair" },
    chart("training loss", run.curves, [["loss", "loss"]]),
    chart("what the method selects by", run.curves, [["selection", "selection"]]),
    chart("true worst group (%), seen by the audit alone", run.curves,
      [["audit_val_wga", "validation"], ["audit_test_wga", "test"]])),
  el("p", { class: "notes" }, "Epochs of all stages in order, thinned; dotted lines part stages: " +
    run.curves.stages.map(([, name]) => name).join(", ") + "."));
}

// The tree
function tree(run) {
  const t = run.tree;
  const families = [...new Set(t.families)];
  const look = (group) => colour(families.indexOf(t.families[group]));
  const detail = el("div", { id: "node", "aria-live": "polite" });
  const buttons = [];
  const leaves = t.levels[t.levels.length - 1].names.length;
  const show = (depth, j, button) => {
    buttons.forEach((b) => b.setAttribute("aria-pressed", String(b === button)));
    detail.replaceChildren(...node(run, depth, j));
  };
  const rows = t.levels.map((level, depth) => el("div", { class: "level",
    style: `grid-template-columns:repeat(${level.names.length},1fr);min-width:${leaves * 4.1}rem` },
  level.names.map((name, j) => {
    const count = level.counts[j];
    const hard = depth > 0 && j % 2 === 1;
    const button = el("button", { type: "button", "aria-pressed": "false",
      class: `node${count ? "" : " off"}${hard ? " hard" : ""}`,
      onclick: () => show(depth, j, button) },
    el("b", {}, name), el("br"), count ? number(count, 0)
      : level.merged.includes(j) ? "merged" : "empty",
    el("div", { class: "stack" }, level.makeup[j].map(([group, n]) =>
      el("span", { style: `flex:${n};background:${look(group)}` }))));
    buttons.push(button);
    return button;
  })));
  const labels = t.levels.map((level, depth) => {
    const chosen = depth + 1 === t.chosen_iteration ? " (chosen)" : "";
    const proxy = level.pwga2 === null ? "" : `, pWGA2 ${number(100 * level.pwga2)}`;
    return el("p", { class: "notes" }, `Iteration ${depth + 1}${chosen}: test worst group ` +
      `${number(level.wga)}, average ${number(level.avg)}${proxy}`);
  });
  return card("Tree", el("p", { class: "notes" }, `Training samples in each node; bars show their ` +
    `true groups, which routing never sees. ${sentence(t.stop_reason)}`),
  el("div", { class: "legend" }, families.map((name, place) =>
    el("span", {}, el("i", { style: `background:${colour(place)}` }), name))),
  el("div", { class: "tree" }, rows.map((row, depth) => [labels[depth], row]).flat()), detail);
}
function node(run, depth, j) {
  const t = run.tree, level = t.levels[depth];
  const total = level.counts[j];
  const siblings = depth ? t.levels[depth - 1].counts[j >> 1] : null;
  const [logit, spread] = level.logit[j], [margin, width] = level.margin[j];
  const held = new Map(level.captured[j]);
  const own = new Map(level.makeup[j]);
  const groups = [...new Set([...own.keys(), ...held.keys()])].sort((a, b) => a - b);
  return [el("h3", {}, `Node ${level.names[j]}`),
    facts([["training samples", number(total, 0)],
      ["share of its parent", siblings ? `${number(100 * total / siblings)} %` : null],
      ["test logit", logit === null ? null : `${number(logit, 2)} ± ${number(spread, 2)}`],
      ["test margin where chosen", margin === null ? null
        : `${number(margin, 2)} ± ${number(width, 2)}`]]),
    groups.length ? grid(["group", "training samples", "share of node (%)",
      "captured here (% of its test images)"], groups.map((g) => [t.groups[g], number(own.get(g) || 0, 0),
      total ? number(100 * (own.get(g) || 0) / total) : "-", number(held.get(g) || 0)])) : null,
    samples(run, depth, j)].filter(Boolean);
}
function samples(run, depth, j) {
  const t = run.tree, deepest = t.chosen_iteration - 1;
  if (!run.samples || depth > deepest) return el("p", { class: "notes" }, run.samples
    ? "This iteration was not chosen; images are of the chosen tree."
    : "No images: the data is not on disk, or other runs of this dataset already show theirs.");
  const span = 2 ** (deepest - depth);
  const below = Array.from({ length: span }, (_, k) => run.samples[j * span + k] || []);
  const each = Math.max(...below.map((own) => own.length));
  const images = Array.from({ length: each }, (_, k) => below.map((own) => own[k])).flat()
    .filter(Boolean);
  if (!images.length) return el("p", { class: "notes" }, "No test image ends here.");
  return el("div", {}, el("strong", {}, "Test images that end here, in the chosen tree"),
    el("div", { class: "samples" }, images.slice(0, 12).map(([address, id, group]) =>
      el("figure", {}, el("img", { src: address, alt: `test image ${id}`, title: `${id}: ${group}` }),
        group))));
}
followHash();
