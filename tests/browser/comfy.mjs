// One page of ComfyUI's real frontend in Chromium, and what every script here does with it.
import { chromium } from "playwright-core";

export const URL_OF_SERVER = process.env.COMFYUI_URL;
const CHROMIUM = process.env.CHROMIUM || "/usr/bin/chromium";
// A server without network answers external pictures and optional files with the first of these; the last is what
// frontend 1.49 says of itself at every start.
const HARMLESS = new RegExp(
  "ERR_NAME_NOT_RESOLVED|ERR_INTERNET_DISCONNECTED|ERR_BLOCKED_BY|status of 404|Content Security Policy|" +
    "graph accessed before initialization",
);

/**
 * A page with the frontend loaded and no dialog open; `errors` collects what the page threw, `heard` its warnings and
 * errors, without numbers; `ready` is how many milliseconds it took until its nodes were there.
 * `url` is of another server, `pack` false of one without this pack; `minimap` shows core's.
 */
export async function openPage({ width = 1600, height = 900, nodes2 = false, locale = "en", args = ["--disable-gpu"], bypassCSP = false, url = URL_OF_SERVER, pack = true, minimap = false } = {}) {
  const settings = {
    "Comfy.TutorialCompleted": true, // or the template browser opens by itself
    "Comfy.VueNodes.Enabled": nodes2,
    "Comfy.Locale": locale,
    "Comfy.Minimap.Visible": minimap,
    "Comfy.Graph.CanvasInfo": false,
    "Comfy.RightSidePanel.IsOpen": false, // an earlier look at an error leaves it open
  };
  if (!url) throw new Error("COMFYUI_URL is not set: run this through tests/browser/drive.py");
  const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", ...args] });
  const page = await browser.newPage({ viewport: { width, height }, bypassCSP });
  page.setDefaultTimeout(120000); // everything draws on the CPU here, beside the models
  const errors = [];
  const heard = [];
  page.on("console", (message) => {
    if (["error", "warning"].includes(message.type())) heard.push(message.text().replace(/\d+/g, "#"));
  });
  page.on("pageerror", (error) => errors.push(`pageerror: ${error.message}`));
  page.on("console", (message) => {
    if (message.type() !== "error" || HARMLESS.test(message.text())) return;
    errors.push(`console: ${message.text()} ${message.location().url}`);
  });
  await fetch(`${url}/api/settings`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(settings),
  });
  const started = Date.now();
  await page.goto(url);
  await page.waitForFunction(() => window.app?.extensionManager && window.app.canvas?.graph && window.LiteGraph, null, {
    timeout: 90000,
  });
  await page.waitForFunction((name) => window.LiteGraph.registered_node_types[name], pack ? "AnyGPUSample" : "KSampler", { timeout: 60000 });
  const ready = Date.now() - started;
  await page.waitForTimeout(1500);
  await page.keyboard.press("Escape");
  return { browser, page, errors, heard, ready };
}

/** Wait until what is drawn has kept its place for half a second: the view, each node and its pictures and texts. */
export function settled(page) {
  return page.evaluate(async () => {
    const { ds, graph } = window.app.canvas;
    const drawn = () => {
      const parts = document.querySelectorAll("[data-node-id], .dom-widget, video, img");
      const boxes = [...parts].map((part) => [part.getBoundingClientRect().toJSON(), part.scrollHeight, part.readyState ?? part.complete]);
      return JSON.stringify([ds.scale, [...ds.offset], graph._nodes.map(({ pos, size }) => [...pos, ...size]), boxes]);
    };
    for (let before = drawn(), kept = 0, left = 300; kept < 5 && left; left--, before = drawn()) {
      await new Promise((next) => setTimeout(next, 100));
      kept = drawn() === before ? kept + 1 : 0;
    }
  });
}

/** Load a workflow's JSON text the way dropping its file does. */
export async function loadWorkflow(page, text, name) {
  await page.evaluate(
    async ([json, title]) => {
      await window.app.loadGraphData(JSON.parse(json), true, true, title);
    },
    [text, name],
  );
  await settled(page);
}

/** What the frontend would post to /prompt for the graph that is open. */
export function apiPrompt(page) {
  return page.evaluate(async () => (await window.app.graphToPrompt()).output);
}

/** Move and scale the canvas so that every node is visible. */
export async function showAll(page, margin = 40) {
  await page.evaluate((edge) => {
    const canvas = window.app.canvas;
    let [left, top, right, bottom] = [Infinity, Infinity, -Infinity, -Infinity];
    for (const item of [...window.app.graph._nodes, ...window.app.graph._groups]) {
      const [x, y, width, height] = item.boundingRect ?? item.getBounding?.() ?? item._bounding;
      left = Math.min(left, x);
      top = Math.min(top, y);
      right = Math.max(right, x + width);
      bottom = Math.max(bottom, y + height);
    }
    const shown = canvas.canvas.getBoundingClientRect();
    // The side bar covers the left edge, the top bar the upper one.
    const [sideBar, topBar] = [64, 110];
    const scale = Math.min(
      (shown.width - sideBar - 2 * edge) / (right - left),
      (shown.height - topBar - 2 * edge) / (bottom - top),
      1,
    );
    canvas.ds.scale = scale;
    canvas.ds.offset[0] = (sideBar + edge) / scale - left;
    canvas.ds.offset[1] = (topBar + edge) / scale - top;
    canvas.setDirty(true, true);
  }, margin);
  await settled(page);
}

/** Where the lowest node ends, in pixels of the page. */
export function graphBottom(page) {
  return page.evaluate(() => {
    const { canvas, ds } = window.app.canvas;
    const lowest = Math.max(...window.app.graph._nodes.map((node) => node.pos[1] + node.size[1]));
    return canvas.getBoundingClientRect().top + (lowest + ds.offset[1]) * ds.scale;
  });
}
