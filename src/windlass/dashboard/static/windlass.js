/* What makes the pages live. Each of them works without it: forms post, links lead on, a reload shows the newest.

   - A stream of server-sent events says that something changed; then the page is fetched again and what differs is put
     into the one that is shown. Focus, scrolling, what was typed and what is unfolded stay.
   - When the stream breaks the page says so, and since when it shows what was known; it comes back by itself.
   - Forms that change something ask in a dialog first, and tell what became of it. */
"use strict";

(() => {
  const root = document.documentElement;
  const main = document.getElementById("main");

  // ------------------------------------------------------------------------------------------------------ the clock

  // Ages are counted by the server's clock, as it was when the page was made.
  let aheadMs = Date.parse(main.dataset.now) - Date.now();
  let knownAt = Date.now();

  // The same words as the server's: see words.py.
  function duration(seconds) {
    const s = Math.max(0, seconds);
    if (s < 60) return `${Math.floor(s)} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  function tick() {
    if (document.hidden) return;
    const now = Date.now() + aheadMs;
    for (const element of document.querySelectorAll("time[data-age]")) {
      const age = (now - Date.parse(element.dateTime)) / 1000;
      const words = element.dataset.age === "left" ? duration(-age) : duration(age);
      if (element.textContent !== words) element.textContent = words;
    }
  }

  // ------------------------------------------------------------------------------- putting a new page into the old one

  // What the reader has done to an element is not the server's to undo.
  const READERS = { DETAILS: ["open"], INPUT: ["value"], OPTION: ["selected"] };

  function morph(from, to) {
    if (from.nodeType === Node.TEXT_NODE) {
      if (from.data !== to.data) from.data = to.data;
      return;
    }
    const kept = from.type === "hidden" ? [] : READERS[from.nodeName] ?? [];
    for (const { name } of [...from.attributes]) {
      if (!to.hasAttribute(name) && !kept.includes(name) && name !== "data-drawn") from.removeAttribute(name);
    }
    for (const { name, value } of to.attributes) {
      if (!kept.includes(name) && from.getAttribute(name) !== value) from.setAttribute(name, value);
    }
    if (from.dataset.keep !== undefined) return;
    const wasAtEnd = from.dataset.tail !== undefined && from.scrollTop + from.clientHeight >= from.scrollHeight - 4;
    morphChildren(from, to);
    if (wasAtEnd) from.scrollTop = from.scrollHeight;
  }

  function morphChildren(from, to) {
    const known = new Map();
    for (const child of from.children) if (child.id) known.set(child.id, child);
    let place = from.firstChild;
    for (const wanted of [...to.childNodes]) {
      const same = wanted.id ? known.get(wanted.id) : isLike(place, wanted) ? place : null;
      if (same && same.nodeName === wanted.nodeName) {
        if (same === place) place = place.nextSibling;
        else from.insertBefore(same, place);
        morph(same, wanted);
      } else {
        const added = document.importNode(wanted, true);
        if (added.id && added.nodeType === Node.ELEMENT_NODE) added.classList.add("changed");
        from.insertBefore(added, place);
      }
    }
    while (place) {
      const next = place.nextSibling;
      place.remove();
      place = next;
    }
  }

  function isLike(node, wanted) {
    return node !== null && node.nodeType === wanted.nodeType && node.nodeName === wanted.nodeName && !node.id;
  }

  // --------------------------------------------------------------------------------------------------------- refreshing

  // A burst of changes is one refresh; under a steady stream of them there is one in this time.
  // A page may want less.
  const REFRESH_EVERY_MS = Number(root.dataset.refreshMs ?? 600);
  const REFRESH_TIMEOUT_MS = 15000;
  // A page that could not be had is asked for again after this time.
  const RETRY_PAGE_MS = 2000;
  let refreshedAt = 0;
  let isRefreshing = false;
  let timer = null;
  // Something changed and has not been looked at.
  let missed = false;

  function refreshSoon() {
    if (timer !== null || isRefreshing || document.hidden) {
      missed = missed || isRefreshing || document.hidden;
      return;
    }
    const wait = Math.max(20, refreshedAt + REFRESH_EVERY_MS - performance.now());
    timer = setTimeout(() => { timer = null; refresh(); }, wait);
  }

  async function refresh() {
    isRefreshing = true;
    missed = false;
    try {
      const answer = await fetch(location.href, {
        headers: { Accept: "text/html" }, signal: AbortSignal.timeout(REFRESH_TIMEOUT_MS),
      });
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      const fresh = page.getElementById("main");
      if (answer.status >= 500 || fresh === null) {
        tell("away", "the server answers, but not with this page");
        missed = true;
      } else {
        show(page, fresh);
        tell("live");
      }
    } catch {
      missed = true;
    } finally {
      refreshedAt = performance.now();
      isRefreshing = false;
    }
    if (missed && stream !== null) setTimeout(refreshSoon, link === "live" ? 0 : RETRY_PAGE_MS);
  }

  function show(page, fresh) {
    const focused = document.activeElement?.id;
    const said = spoken();
    morph(main, fresh);
    for (const part of page.querySelectorAll("[data-part]")) {
      const shown = document.getElementById(part.id);
      if (shown) morph(shown, part);
    }
    document.title = page.title;
    aheadMs = Date.parse(main.dataset.now) - Date.now();
    knownAt = Date.now();
    if (focused && document.activeElement?.id !== focused) document.getElementById(focused)?.focus({ preventScroll: true });
    draw();
    tick();
    announce(said);
  }

  // Screen readers hear of what is new and of what became something else, not of each number and age that moves:
  // `data-announce` names what an element is, `data-say` what is said when that changes. Each page's news is a line of
  // its own: what came a moment before is still being read out and must not be written over.
  const NEWS_LASTS_MS = 60000;

  function spoken() {
    return new Map([...main.querySelectorAll("[data-announce]")].map((one) => [one.id, one.dataset.announce]));
  }

  function announce(before) {
    const news = [];
    for (const [id, kind] of spoken()) if (before.get(id) !== kind) news.push(document.getElementById(id).dataset.say);
    if (news.length) say(news.join(" "));
  }

  function say(words) {
    const line = document.createElement("p");
    line.textContent = words;
    document.getElementById("news").append(line);
    setTimeout(() => line.remove(), NEWS_LASTS_MS);
  }

  // --------------------------------------------------------------------------------------------------------- the stream

  const FIRST_RETRY_MS = 500;
  const LAST_RETRY_MS = 10000;
  // The server is heard from at least this often, or the line is dead.
  const SILENCE_MS = 40000;
  let link = "joining";
  let retryMs = FIRST_RETRY_MS;
  let stream = null;
  let silence = null;
  let retry = null;

  function tell(state, why) {
    link = state;
    root.dataset.link = state;
    const element = document.getElementById("link");
    element.dataset.state = state;
    const at = clock(knownAt / 1000);
    const words = state === "live" ? "live" : state === "away" ? "disconnected" : "connecting";
    if (element.textContent !== words) element.textContent = words;
    const banner = document.getElementById("away");
    const sentence = state === "away" ? `Disconnected${why ? ` (${why})` : ""}, showing what was known at ${at}. Trying again by itself.` : "";
    if (banner.textContent !== sentence) banner.textContent = sentence;
  }

  // Only while somebody looks: a browser has six connections to a server, for all its tabs together.
  function listen() {
    if (document.hidden || stream !== null) return;
    stream = new EventSource(root.dataset.stream);
    stream.onopen = () => {
      retryMs = FIRST_RETRY_MS;
      heard();
      refresh();
    };
    stream.onerror = lose;
    stream.addEventListener("event", () => { heard(); refreshSoon(); });
    stream.addEventListener("overview", (message) => { heard(); consider(message.data); });
    stream.addEventListener("unavailable", () => { heard(); tell("away", "the database does not answer"); isTroubled = true; });
    heard();
  }

  // How everything stands comes every second. What only grows older is counted on here; the rest is a reason to look, and
  // so is time: progress and heartbeats are in no such message.
  const LOOK_ANYWAY_MS = 4000;
  const AGES = /"(at|seen_at|decided_at|planned_at|oldest_queued_age_s|expires_in_s|last_event_id)":[^,}]*/g;
  let standing = "";
  let isTroubled = false;

  function consider(overview) {
    const now = overview.replace(AGES, "");
    if (now !== standing || isTroubled || performance.now() > refreshedAt + LOOK_ANYWAY_MS) refreshSoon();
    standing = now;
    isTroubled = false;
  }

  function heard() {
    clearTimeout(silence);
    silence = setTimeout(lose, SILENCE_MS);
  }

  function lose() {
    stream?.close();
    stream = null;
    clearTimeout(silence);
    tell("away");
    clearTimeout(retry);
    retry = setTimeout(listen, retryMs * (0.5 + Math.random() / 2));
    retryMs = Math.min(retryMs * 2, LAST_RETRY_MS);
  }

  function rest() {
    stream?.close();
    stream = null;
    clearTimeout(silence);
    clearTimeout(retry);
  }

  // What was missed is seen by the refresh that comes with the stream.
  function wake() {
    if (stream !== null) return;
    clearTimeout(retry);
    retryMs = FIRST_RETRY_MS;
    if (link === "live") tell("joining");
    listen();
  }

  // --------------------------------------------------------------------------------------------------------- doing things

  const dialog = document.getElementById("confirm");
  let asked = null;

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.dataset.asks === undefined) return;
    event.preventDefault();
    // As it is now: a refresh may make another form of it before the reader has answered.
    asked = { address: form.action, body: new URLSearchParams(new FormData(form)), opener: event.submitter };
    asked.body.set("is_confirmed", "yes");
    dialog.querySelector("h2").textContent = form.elements.ask.value;
    dialog.querySelector("[data-words]").textContent = form.elements.words.value;
    dialog.querySelector(".problem").hidden = true;
    const confirm = dialog.querySelector("[value=confirm]");
    confirm.textContent = form.elements.verb.value;
    confirm.classList.toggle("danger", form.dataset.weight === "danger");
    dialog.showModal();
  });

  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });

  dialog.querySelector("form").addEventListener("submit", async (event) => {
    event.preventDefault();
    if (event.submitter?.value !== "confirm") {
      dialog.close();
      return;
    }
    const button = event.submitter;
    button.disabled = true;
    try {
      const answer = await fetch(asked.address, {
        method: "POST", body: asked.body, headers: { Accept: "application/json" }, signal: AbortSignal.timeout(REFRESH_TIMEOUT_MS),
      });
      const told = await answer.json().catch(() => ({}));
      if (!answer.ok) throw new Error(told.detail ?? `the server answered ${answer.status}.`);
      dialog.close();
      toast(told.message);
      await refresh();
    } catch (error) {
      const problem = dialog.querySelector(".problem");
      problem.textContent = `Not done: ${error.name === "TypeError" ? "the server cannot be reached." : error.message}`;
      problem.hidden = false;
    } finally {
      button.disabled = false;
    }
  });

  dialog.addEventListener("close", () => {
    const opener = asked?.opener;
    if (opener?.isConnected) opener.focus();
    else main.focus();
  });

  let toastTimer = null;
  function toast(words) {
    const element = document.getElementById("toast");
    element.textContent = words;
    element.hidden = false;
    say(words);
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => { element.hidden = true; }, 6000);
  }

  // -------------------------------------------------------------------------------------------------------------- theme

  const YEAR_S = 31536000;
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
    // In a cookie, so that the server paints the next page right from its first pixel.
    document.cookie = `windlass_theme=${root.dataset.theme}; path=/; max-age=${YEAR_S}; SameSite=Strict`;
    draw({ isAnew: true });
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => draw({ isAnew: true }));

  // ------------------------------------------------------------------------------------------------------------- charts

  const HEIGHT = 132;
  const plots = new Map();

  function colour(name) {
    const probe = document.createElement("i");
    probe.style.color = `var(${name})`;
    main.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  function draw({ isAnew = false } = {}) {
    if (typeof uPlot === "undefined") return;
    for (const [id, plot] of plots) {
      if (isAnew || !plot.box.isConnected) {
        plot.chart.destroy();
        plots.delete(id);
      }
    }
    for (const box of main.querySelectorAll(".chart[data-series]")) {
      const told = JSON.parse(box.dataset.series);
      const plot = plots.get(box.id);
      if (plot && names(plot.told) !== names(told)) {
        plot.chart.destroy();
        begin(box, told);
      } else if (plot) {
        plot.told = told;
        plot.chart.setData(columns(told));
      } else {
        begin(box, told);
      }
    }
  }

  function names({ series }) {
    return series.map((one) => one.label).join();
  }

  // Stacked series are drawn as sums, the tallest first, so that each covers the lower part of the one before.
  function columns({ at, series, isStacked }) {
    if (!isStacked) return [at, ...series.map((one) => one.values)];
    const sums = [];
    series.forEach((one, index) => {
      sums.push(one.values.map((value, point) => (value ?? 0) + (index ? sums[index - 1][point] : 0)));
    });
    return [at, ...sums.reverse()];
  }

  function begin(box, told) {
    const shown = told.isStacked ? [...told.series].reverse() : told.series;
    const ink = colour("--ink-soft");
    const line = colour("--line");
    const readout = document.createElement("div");
    readout.className = "readout";
    readout.hidden = true;
    const font = `11px ${getComputedStyle(document.body).fontFamily}`;
    const chart = new uPlot({
      width: Math.max(box.clientWidth, 120),
      height: HEIGHT,
      padding: [8, 26, 2, 0],
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { show: !told.isStacked, size: 7 } },
      scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.08, told.least ?? 1)] } },
      axes: [
        { stroke: ink, font, size: 24, gap: 4, space: 64, grid: { show: false }, ticks: { show: false },
          values: (_, marks) => marks.map((mark) => clock(mark, marks.length > 1 && marks[1] - marks[0] < 60)) },
        { stroke: ink, font, size: told.unit ? 50 : 34, gap: 4, space: 24, grid: { stroke: line, width: 1 }, ticks: { show: false },
          incrs: told.isWhole ? [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000] : undefined,
          values: (_, marks) => marks.map((mark) => short(mark)) },
      ],
      series: [{}, ...shown.map((one) => ({
        label: one.label,
        stroke: colour(one.colour),
        width: told.isStacked ? 0.5 : 1.75,
        fill: told.isStacked ? colour(one.colour) : faint(colour(one.colour)),
        points: { show: false },
        paths: told.isStacked || told.isStepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
        spanGaps: false,
      }))],
      hooks: { setCursor: [(plot) => read(plot, box, readout)] },
    }, columns(told), box);
    box.dataset.drawn = "";
    chart.over.append(readout);
    plots.set(box.id, { chart, box, told });
  }

  function faint(rgb) {
    return rgb.replace("rgb(", "rgba(").replace(")", ", 0.10)");
  }

  function clock(seconds, isFine) {
    const parts = { hour: "2-digit", minute: "2-digit", ...(isFine ? { second: "2-digit" } : {}) };
    return new Date(seconds * 1000).toLocaleTimeString([], { ...parts, hourCycle: "h23", timeZone: "UTC" });
  }

  function short(number) {
    if (number >= 1e6) return `${+(number / 1e6).toFixed(1)}M`;
    if (number >= 1e4) return `${+(number / 1e3).toFixed(1)}k`;
    return `${+number.toFixed(4)}`;
  }

  function read(plot, box, readout) {
    const { idx, left } = plot.cursor;
    if (idx === null || idx === undefined || left < 0) {
      readout.hidden = true;
      return;
    }
    const { told } = plots.get(box.id) ?? {};
    if (!told) return;
    const title = document.createElement("b");
    title.textContent = clock(told.at[idx], true);
    const lines = told.series.map((one) => {
      const value = one.values[idx];
      const row = document.createElement("span");
      const number = document.createElement("span");
      number.textContent = value === null ? "–" : `${told.unit ? `${told.unit} ` : ""}${+value.toFixed(told.unit ? 4 : 1)}`;
      row.append(one.label, number);
      return row;
    });
    readout.replaceChildren(title, ...lines);
    readout.hidden = false;
    const width = readout.offsetWidth;
    const x = left > plot.over.clientWidth / 2 ? left - width - 10 : left + 10;
    readout.style.transform = `translate(${Math.max(0, Math.min(x, plot.over.clientWidth - width))}px, 4px)`;
  }

  new ResizeObserver(() => {
    for (const { chart, box } of plots.values()) {
      const width = Math.max(box.clientWidth, 120);
      if (width !== chart.width) chart.setSize({ width, height: HEIGHT });
    }
  }).observe(main);

  // ------------------------------------------------------------------------------------------------------------- begin

  for (const log of main.querySelectorAll("[data-tail]")) log.scrollTop = log.scrollHeight;
  for (const select of document.querySelectorAll("select[data-go]")) {
    select.addEventListener("change", () => select.form.requestSubmit());
  }
  draw();
  setInterval(tick, 1000);
  // The browser must not show a page of yesterday when one comes back to it.
  addEventListener("pageshow", (event) => { if (event.persisted) refreshSoon(); });
  if (root.dataset.stream) {
    document.addEventListener("visibilitychange", () => (document.hidden ? rest() : wake()));
    listen();
  }
})();
