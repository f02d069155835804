/* Live updates, confirmation dialogs and the theme switch. Every page also works without this script:
   forms post, links navigate, and a reload shows the current state.

   - A stream of server-sent events reports changes. The page is then fetched again and merged into the shown one with
     idiomorph. Focus, scroll positions, typed text, open <details> and charts are kept.
   - When the stream breaks, the page shows the time of its data and reconnects with increasing delays.
   - A form that changes something asks for confirmation in a dialog, and shows the result in a toast. */
"use strict";

(() => {
  const root = document.documentElement;
  const main = document.getElementById("main");

  // -------------------------------------------------------------------------------------------------------------- ages

  // Ages are relative to the server's clock, which may differ from the browser's.
  let serverOffsetMs = Date.parse(main.dataset.now) - Date.now();

  // The same format as duration() in filters.py.
  function duration(seconds) {
    const s = Math.max(0, seconds);
    if (s < 60) return `${Math.floor(s)} s`;
    if (s < 3600) return `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
    if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
    return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
  }

  function updateAges() {
    if (document.hidden) return;
    const now = Date.now() + serverOffsetMs;
    for (const element of document.querySelectorAll("time[data-age]")) {
      const age = (now - Date.parse(element.dateTime)) / 1000;
      const text = duration(element.dataset.age === "left" ? -age : age);
      if (element.textContent !== text) element.textContent = text;
    }
  }

  // ----------------------------------------------------------------------------------------------------------- refresh

  // Minimum time between two refreshes. Expensive pages set a longer one.
  const REFRESH_EVERY_MS = Number(root.dataset.refreshMs ?? 600);
  const REQUEST_TIMEOUT_MS = 15000;
  const RETRY_PAGE_MS = 2000;
  // Interval between refreshes of a page that shows output of something that runs.
  const TAIL_EVERY_MS = 2000;
  let refreshedAt = 0;
  let isRefreshing = false;
  let refreshTimer = null;
  // A change arrived during a refresh or while the tab was hidden, or the last refresh failed.
  let isStale = false;

  function refreshSoon() {
    if (refreshTimer !== null || isRefreshing || document.hidden) {
      isStale = isStale || isRefreshing || document.hidden;
      return;
    }
    const delay = Math.max(20, refreshedAt + REFRESH_EVERY_MS - performance.now());
    refreshTimer = setTimeout(() => { refreshTimer = null; refresh(); }, delay);
  }

  async function refresh() {
    isRefreshing = true;
    isStale = false;
    try {
      const response = await fetch(location.href, {
        headers: { Accept: "text/html" }, signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
      });
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      if (response.status >= 500 || page.getElementById("main") === null) {
        showConnection("offline", "server error");
        isStale = true;
      } else {
        update(page);
        showConnection("live");
      }
    } catch {
      isStale = true;
    } finally {
      refreshedAt = performance.now();
      isRefreshing = false;
    }
    if (isStale && stream !== null) setTimeout(refreshSoon, connection === "live" ? 0 : RETRY_PAGE_MS);
  }

  // Attributes that belong to the reader: an open <details>, typed text, a chosen option.
  const READER_ATTRIBUTES = { DETAILS: ["open"], INPUT: ["value", "checked"], OPTION: ["selected"] };
  const MORPH_CALLBACKS = {
    beforeAttributeUpdated: (name, element) =>
      element.type === "hidden" || !READER_ATTRIBUTES[element.nodeName]?.includes(name),
    // A drawn chart keeps its canvas and gets new data.
    beforeNodeMorphed(shown, fresh) {
      if (!charts.has(shown.id)) return true;
      shown.dataset.series = fresh.dataset.series;
      shown.setAttribute("aria-label", fresh.getAttribute("aria-label"));
      return false;
    },
    // The style sheet highlights new rows.
    afterNodeAdded(node) { if (node.id) node.classList.add("changed"); },
  };

  function update(page) {
    const focusedId = document.activeElement?.id;
    const before = announcementKeys();
    const atEnd = [...main.querySelectorAll("[data-tail]")]
      .filter((log) => log.scrollTop + log.clientHeight >= log.scrollHeight - 4);
    Idiomorph.morph(main, page.getElementById("main"), { callbacks: MORPH_CALLBACKS });
    for (const log of atEnd) log.scrollTop = log.scrollHeight;
    document.title = page.title;
    serverOffsetMs = Date.parse(main.dataset.now) - Date.now();
    if (focusedId && document.activeElement?.id !== focusedId) document.getElementById(focusedId)?.focus({ preventScroll: true });
    charts.draw();
    updateAges();
    const changed = [...announcementKeys()].filter(([id, key]) => before.get(id) !== key);
    if (changed.length) announce(changed.map(([id]) => document.getElementById(id).dataset.announceText).join(" "));
  }

  // Screen readers announce an element's `data-announce-text` when it appears or its `data-announce-key` changes, not
  // each number that changes. Each announcement is a new line: the previous one may still be read out.
  const ANNOUNCEMENT_MS = 60000;

  function announcementKeys() {
    return new Map([...main.querySelectorAll("[data-announce-key]")].map((element) => [element.id, element.dataset.announceKey]));
  }

  function announce(text) {
    const line = document.createElement("p");
    line.textContent = text;
    document.getElementById("announcements").append(line);
    setTimeout(() => line.remove(), ANNOUNCEMENT_MS);
  }

  // -------------------------------------------------------------------------------------------------------- connection

  const MIN_RETRY_MS = 500;
  const MAX_RETRY_MS = 10000;
  // The server sends an overview every second, less often under load. A stream that is silent for this long is broken.
  const SILENCE_MS = 40000;
  let connection = "connecting";
  let retryMs = MIN_RETRY_MS;
  let stream = null;
  let silenceTimer = null;
  let retryTimer = null;

  function showConnection(state, reason) {
    connection = state;
    root.dataset.connection = state;
    const indicator = document.getElementById("connection");
    indicator.dataset.state = state;
    setText(indicator, state);
    const since = charts.clock(Date.parse(main.dataset.now) / 1000, true);
    const lost = `Connection lost${reason ? ` (${reason})` : ""}, showing data from ${since} UTC. Reconnecting.`;
    setText(document.getElementById("offline"), state === "offline" ? lost : "");
  }

  // Screen readers announce a text again whenever it is set.
  function setText(element, text) {
    if (element.textContent !== text) element.textContent = text;
  }

  // Hidden tabs do not connect: a browser has six connections per server for all its tabs.
  function connect() {
    if (document.hidden || stream !== null) return;
    stream = new EventSource(root.dataset.stream);
    stream.onopen = () => {
      retryMs = MIN_RETRY_MS;
      restartSilenceTimer();
      refresh();
    };
    stream.onerror = reconnect;
    stream.addEventListener("event", () => { restartSilenceTimer(); refreshSoon(); });
    stream.addEventListener("overview", (message) => { restartSilenceTimer(); receiveOverview(message.data); });
    stream.addEventListener("unavailable", () => {
      restartSilenceTimer();
      showConnection("offline", "database unavailable");
      isDatabaseLost = true;
    });
    restartSilenceTimer();
  }

  // The server sends the overview every second. A change other than growing ages is a reason to refresh. Progress and
  // heartbeats are not in the overview, so the page is refreshed after this time in any case.
  const MAX_PAGE_AGE_MS = 4000;
  const AGES = /"(at|seen_at|decided_at|planned_at|oldest_queued_age_s|expires_in_s|last_event_id)":[^,}]*/g;
  let lastOverview = "";
  let isDatabaseLost = false;

  function receiveOverview(json) {
    const overview = json.replace(AGES, "");
    if (overview !== lastOverview || isDatabaseLost || performance.now() > refreshedAt + MAX_PAGE_AGE_MS) refreshSoon();
    lastOverview = overview;
    isDatabaseLost = false;
  }

  function restartSilenceTimer() {
    clearTimeout(silenceTimer);
    silenceTimer = setTimeout(reconnect, SILENCE_MS);
  }

  function disconnect() {
    stream?.close();
    stream = null;
    clearTimeout(silenceTimer);
    clearTimeout(retryTimer);
  }

  function reconnect() {
    disconnect();
    showConnection("offline");
    retryTimer = setTimeout(connect, retryMs * (0.5 + Math.random() / 2));
    retryMs = Math.min(retryMs * 2, MAX_RETRY_MS);
  }

  // The tab is visible again. Connecting refreshes the page.
  function resume() {
    if (stream !== null) return;
    clearTimeout(retryTimer);
    retryMs = MIN_RETRY_MS;
    if (connection === "live") showConnection("connecting");
    connect();
  }

  // ------------------------------------------------------------------------------------------------------ confirmation

  const dialog = document.getElementById("confirm");
  const problem = dialog.querySelector(".problem");
  let pending = null;

  document.addEventListener("submit", (event) => {
    const form = event.target;
    if (form.dataset.confirm === undefined) return;
    event.preventDefault();
    // Copied now: a refresh may change the form before the reader confirms.
    const fields = new FormData(form, event.submitter);
    const url = event.submitter?.hasAttribute("formaction") ? event.submitter.formAction : form.action;
    pending = { url, body: new URLSearchParams(fields), opener: event.submitter };
    pending.body.set("is_confirmed", "yes");
    dialog.querySelector("h2").textContent = fields.get("question");
    dialog.querySelector("#confirm-text").textContent = fields.get("explanation");
    problem.hidden = true;
    const button = dialog.querySelector("[value=confirm]");
    button.textContent = fields.get("button");
    button.classList.toggle("danger", form.dataset.level === "danger");
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
      const response = await fetch(pending.url, {
        method: "POST", body: pending.body, headers: { Accept: "application/json" }, signal: AbortSignal.timeout(REQUEST_TIMEOUT_MS),
      });
      const result = await response.json().catch(() => ({}));
      if (!response.ok) throw new Error(result.detail ?? `HTTP status ${response.status}.`);
      dialog.close();
      for (const box of main.querySelectorAll("input[type=checkbox]")) box.checked = false;
      showToast(result.message);
      await refresh();
    } catch (error) {
      problem.textContent = `Failed: ${error.name === "TypeError" ? "server unreachable." : error.message}`;
      problem.hidden = false;
    } finally {
      button.disabled = false;
    }
  });

  dialog.addEventListener("close", () => {
    const opener = pending?.opener;
    if (opener?.isConnected) opener.focus();
    else main.focus();
  });

  let toastTimer = null;
  function showToast(text) {
    const toast = document.getElementById("toast");
    toast.textContent = text;
    toast.hidden = false;
    announce(text);
    clearTimeout(toastTimer);
    toastTimer = setTimeout(() => { toast.hidden = true; }, 6000);
  }

  // ------------------------------------------------------------------------------------------------------------- theme

  const YEAR_S = 31536000;
  const systemTheme = matchMedia("(prefers-color-scheme: dark)");
  document.getElementById("theme").addEventListener("click", () => {
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : systemTheme.matches;
    root.dataset.theme = isDark ? "light" : "dark";
    // In a cookie, so that the server renders the next page in this theme.
    document.cookie = `windlass_theme=${root.dataset.theme}; path=/; max-age=${YEAR_S}; SameSite=Strict`;
    charts.redraw();
  });
  systemTheme.addEventListener("change", charts.redraw);

  // ------------------------------------------------------------------------------------------------------------- start

  for (const log of main.querySelectorAll("[data-tail]")) log.scrollTop = log.scrollHeight;
  // On phones the cost chart is wider than the screen. Its end is today.
  for (const { parentElement } of main.querySelectorAll(".bars")) parentElement.scrollLeft = parentElement.scrollWidth;
  // So are the filters. The chosen one is shown.
  for (const chosen of main.querySelectorAll(".tabs a[aria-current]")) {
    const tabs = chosen.parentElement;
    tabs.scrollLeft = chosen.offsetLeft - tabs.offsetLeft - (tabs.clientWidth - chosen.offsetWidth) / 2;
  }
  for (const select of document.querySelectorAll("select[data-submit-on-change]")) {
    select.addEventListener("change", () => select.form.requestSubmit());
  }
  charts.draw();
  setInterval(updateAges, 1000);
  // Output arrives without a change of any state.
  setInterval(() => { if (main.querySelector("[data-live]")) refreshSoon(); }, TAIL_EVERY_MS);
  // A page restored by the back button is outdated.
  addEventListener("pageshow", (event) => { if (event.persisted) refreshSoon(); });
  if (root.dataset.stream) {
    document.addEventListener("visibilitychange", () => (document.hidden ? disconnect() : resume()));
    connect();
  }
})();
